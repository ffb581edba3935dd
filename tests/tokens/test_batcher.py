from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gte_vectorize.batch import Layout, Passages, Shard, Task, TokenBatch, Window
from gte_vectorize.tokens.batcher import halves, token_batches

LAYOUTS: tuple[Layout, ...] = ("packed", "padded")
LENGTHS = st.lists(st.integers(0, 40), max_size=60)


def passages_of(lengths: list[int]) -> Passages:
    """Ids count upwards through the window, so each says where it came from."""
    rows = len(lengths)
    return Passages(
        window=Window(Task(0, Shard("shard.parquet", 1, 0, (rows,)), 0, rows), 0, rows),
        ids=np.arange(sum(lengths), dtype=np.int32),
        lengths=np.array(lengths, np.int32),
        status=np.zeros(rows, np.uint8),
        truncated=np.zeros(rows, np.bool_),
        text_hash=np.zeros((rows, 16), np.uint8),
        row=np.arange(rows, dtype=np.int32),
    )


def cost(batch: TokenBatch, layout: Layout) -> int:
    return len(batch.lengths) * int(batch.lengths[0]) if layout == "padded" else len(batch.ids)


@given(windows=st.lists(LENGTHS, max_size=4), layout=st.sampled_from(LAYOUTS), budget=st.integers(1, 200))
def test_every_passage_comes_once_with_its_own_ids(windows: list[list[int]], layout: Layout, budget: int) -> None:
    sources = [passages_of(lengths) for lengths in windows]
    batches = list(token_batches(sources, layout=layout, budget=budget, max_rows=lambda longest: 7))
    for source in sources:
        own = [batch for batch in batches if batch.passages is source]
        rows = np.concatenate([batch.rows for batch in own])
        assert sorted(rows.tolist()) == np.flatnonzero(source.lengths).tolist()
        starts = np.cumsum(source.lengths) - source.lengths
        for batch in own:
            assert batch.lengths.tolist() == source.lengths[batch.rows].tolist()
            expected = [np.arange(starts[row], starts[row] + source.lengths[row]) for row in batch.rows]
            assert batch.ids.tolist() == np.concatenate([batch.ids[:0], *expected]).tolist()
            assert (batch.ids.dtype, batch.lengths.dtype, batch.rows.dtype) == (np.int32, np.int32, np.int32)
    assert [batch.passages for batch in batches if batch.last] == sources


@given(lengths=LENGTHS, layout=st.sampled_from(LAYOUTS), budget=st.integers(1, 200), most=st.integers(1, 9))
def test_batches_are_as_large_as_the_budget_allows(lengths: list[int], layout: Layout, budget: int, most: int) -> None:
    def max_rows(longest: int) -> int:
        return most + longest % 3

    batches = list(token_batches([passages_of(lengths)], layout=layout, budget=budget, max_rows=max_rows))
    for batch in batches:
        assert len(batch.rows) <= max_rows(int(batch.lengths.max(initial=0)))
        assert len(batch.rows) <= 1 or cost(batch, layout) <= budget
    for batch, following in pairwise(batches):
        added = int(batch.lengths[0]) if layout == "padded" else int(following.lengths[0])
        assert len(batch.rows) == max_rows(int(batch.lengths[0])) or cost(batch, layout) + added > budget


@given(lengths=LENGTHS)
def test_longest_come_first_and_equal_lengths_in_row_order(lengths: list[int]) -> None:
    batches = list(token_batches([passages_of(lengths)], layout="packed", budget=64, max_rows=lambda longest: 5))
    order = [(-length, row) for batch in batches for length, row in zip(batch.lengths, batch.rows, strict=True)]
    assert order == sorted(order)


@pytest.mark.parametrize("lengths", [[], [0, 0, 0]])
def test_window_without_usable_rows_is_one_batch_of_none(lengths: list[int]) -> None:
    (batch,) = token_batches([passages_of(lengths)], layout="packed", budget=64, max_rows=lambda longest: 5)
    assert (len(batch.ids), len(batch.lengths), len(batch.rows), batch.last) == (0, 0, 0, True)


def test_halves_are_the_batch() -> None:
    for lengths in ([3, 3], [9, 5, 4], [7, 6, 6, 2, 1]):
        ids = np.arange(sum(lengths), dtype=np.int32)
        batch = TokenBatch(None, ids, np.array(lengths, np.int32), np.arange(len(lengths), dtype=np.int32), True)  # type: ignore[arg-type]
        first, second = halves(batch)
        assert abs(len(first.rows) - len(second.rows)) <= 1
        assert (first.last, second.last) == (False, True)
        for part in ("ids", "lengths", "rows"):
            assert np.array_equal(np.concatenate([getattr(first, part), getattr(second, part)]), getattr(batch, part))
        assert first.lengths.sum() == len(first.ids)

"""The mean of a document's windows: weighted by tokens, and the same bits however the windows are spread."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gte_vectorize.batch import EncodedWindow, Float32, Passages, Shard, Status, Task, Window
from gte_vectorize.encoder.mean import averaged
from gte_vectorize.tokens.pieces import gathered

DIM = 24


def task_of(counts: list[int], *, index: int = 0, seed: int = 0) -> tuple[Passages, Float32]:
    """A task of documents of so many windows each, 0 for one without a usable text; and the windows' vectors."""
    rng = np.random.default_rng(seed)
    task = Task(index, Shard("a", 1, 0, (1000,)), 0, len(counts))
    windows = np.maximum(1, np.array(counts, np.int64))
    total = int(windows.sum())
    empty = np.repeat(np.array(counts, np.int64) == 0, windows)
    vectors = rng.standard_normal((total, DIM), np.float32)
    vectors /= np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    passages = Passages(
        window=Window(task, 0, len(counts)),
        ids=np.zeros(0, np.int32),
        lengths=(rng.integers(3, 512, total) * ~empty).astype(np.int32),
        status=np.where(empty, Status.EMPTY, Status.OK).astype(np.uint8),
        truncated=np.zeros(total, np.bool_),
        text_hash=np.repeat(rng.integers(0, 256, (len(counts), 16), np.uint8), windows, axis=0),
        row=np.repeat(Window(task, 0, len(counts)).rows, windows),
        chunk=np.array([(place, 0, 0) for count in windows for place in range(count)], np.int32).reshape(-1, 3),
    )
    return passages, vectors * ~empty[:, None]


def spread(passages: Passages, vectors: Float32, most: int, status: dict[int, Status] | None = None) -> EncodedWindow:
    """The documents, of windows of at most `most` passages."""
    outcome = passages.status.copy()
    for place, code in (status or {}).items():
        outcome[place], vectors[place] = code, 0
    windows = [
        EncodedWindow(
            some,
            vectors[some.first : some.first + len(some.lengths)].copy(),
            outcome[some.first : some.first + len(some.lengths)],
        )
        for some in gathered([passages], most)
    ]
    found = list(averaged(iter(windows)))
    assert [window for window, _ in found] == windows
    for window, documents in found:
        # One passage for each row that ends in the window, and nothing else.
        assert len(documents.passages.lengths) == window.passages.window.num_rows
        assert documents.passages.window == window.passages.window
        assert documents.passages.row.tolist() == window.passages.window.rows.tolist()
        assert (documents.vectors.dtype, documents.vectors.shape[1]) == (np.float32, DIM)
        assert np.array_equal(documents.status, documents.passages.status)
    joined = [documents for _, documents in found]
    together = {
        name: np.concatenate([getattr(some.passages, name) for some in joined])
        for name in ("lengths", "status", "truncated", "text_hash", "row")
    }
    documents = Passages(window=passages.window, ids=passages.ids, **together)
    return EncodedWindow(documents, np.concatenate([some.vectors for some in joined]), documents.status)


def mean_of(vectors: Float32, lengths: list[int]) -> list[float]:
    """By the definition, each sum exactly rounded."""
    columns = vectors.astype(np.float64).T.tolist()
    total = [math.fsum(value * tokens for value, tokens in zip(column, lengths, strict=True)) for column in columns]
    length = math.sqrt(math.fsum(value * value for value in total))
    return [value / length for value in total]


COUNTS = st.lists(st.integers(0, 7), max_size=12)


@settings(deadline=None)
@given(counts=COUNTS, most=st.integers(1, 20))
def test_the_mean_is_weighted_by_tokens_whatever_the_windows_are(counts: list[int], most: int) -> None:
    passages, vectors = task_of(counts)
    found = spread(passages, vectors, most)
    assert found.passages.row.tolist() == list(range(len(counts)))
    assert not found.passages.truncated.any()
    assert found.status.tolist() == [Status.OK if count else Status.EMPTY for count in counts]
    for row, count in enumerate(counts):
        places = np.flatnonzero(passages.row == row)
        lengths = passages.lengths[places].tolist()
        assert found.passages.lengths[row] == sum(lengths)
        assert np.array_equal(found.passages.text_hash[row], passages.text_hash[places[0]])
        if count < 2:
            assert found.vectors[row].tobytes() == vectors[places[0]].tobytes()
        else:
            expected = mean_of(vectors[places], lengths)
            assert np.allclose(found.vectors[row], expected, rtol=2**-23, atol=0)
            assert np.square(found.vectors[row].astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)
    assert found.vectors.tobytes() == spread(passages, vectors, 1000).vectors.tobytes()


def test_weights_are_tokens_not_windows() -> None:
    passages, vectors = task_of([2])
    passages.lengths[:] = [300, 100]
    vectors[:] = np.eye(2, DIM, dtype=np.float32)
    found = spread(passages, vectors, 2)
    assert found.vectors[0, :3].tolist() == pytest.approx([3 / math.sqrt(10), 1 / math.sqrt(10), 0])
    assert found.passages.lengths.tolist() == [400]


@pytest.mark.parametrize("most", [1, 2, 100])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_one_window_without_a_vector_leaves_its_document_without_one(place: int, most: int) -> None:
    passages, vectors = task_of([1, 3, 2])
    found = spread(passages, vectors.copy(), most, {place: Status.NONFINITE})
    assert found.status.tolist() == [Status.OK, Status.NONFINITE, Status.OK]
    assert not found.vectors[1].any()
    plain = spread(passages, vectors, most)
    assert found.vectors[[0, 2]].tobytes() == plain.vectors[[0, 2]].tobytes()


def test_the_first_reason_is_the_documents() -> None:
    passages, vectors = task_of([3])
    found = spread(passages, vectors, 1, {1: Status.ZERO, 2: Status.NONFINITE})
    assert found.status.tolist() == [Status.ZERO]


def test_a_lone_window_without_a_vector_keeps_its_status() -> None:
    passages, vectors = task_of([1, 2])
    found = spread(passages, vectors, 1, {0: Status.NONFINITE})
    assert found.status.tolist() == [Status.NONFINITE, Status.OK]
    assert not found.vectors[0].any()


def test_windows_that_cancel_each_other_out_have_no_mean() -> None:
    passages, vectors = task_of([2, 2])
    passages.lengths[:] = 100
    vectors[1] = -vectors[0]
    found = spread(passages, vectors, 100)
    assert found.status.tolist() == [Status.ZERO, Status.OK]
    assert not found.vectors[0].any()


def test_tasks_do_not_know_of_each_others_rows() -> None:
    some, others = task_of([1, 3]), task_of([2, 1], index=1, seed=1)
    pieces = [some[0], others[0]]
    vectors = {0: some[1], 1: others[1]}
    windows = [
        EncodedWindow(
            each,
            vectors[each.window.task.index][each.first : each.first + len(each.lengths)],
            each.status,
        )
        for each in gathered(pieces, 2)
    ]
    found = [documents for _, documents in averaged(windows)]
    assert [row for documents in found for row in documents.passages.row.tolist()] == [0, 1, 0, 1]
    together = np.concatenate([documents.vectors for documents in found])
    alone = [spread(passages, of, 100).vectors for passages, of in (some, others)]
    assert together.tobytes() == np.concatenate(alone).tobytes()

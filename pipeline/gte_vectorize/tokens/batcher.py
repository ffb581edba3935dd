"""Passages → token batches: sorted by length, longest first, cut under a token budget. Pure.

Sorting puts like lengths beside each other, so an attention kernel's tiles fit and a padded batch pads little; longest
first makes the largest shape come first and the remaining time predictable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from gte_vectorize.batch import Int32, Layout, Passages, TokenBatch


def token_batches(
    windows: Iterable[Passages], *, layout: Layout, budget: int, max_rows: Callable[[int], int]
) -> Iterator[TokenBatch]:
    """Every passage to encode of every window exactly once, window by window, in batches of at most `budget` tokens.

    The cost of a batch is its tokens when packed and rows × its longest passage when padded; a passage longer than the
    budget is a batch of its own. `max_rows` says how many passages a batch may have, given its longest.
    """
    for passages in windows:
        rows = np.flatnonzero(passages.encoded).astype(np.int32)
        order = rows[np.argsort(-passages.lengths[rows], kind="stable")]
        starts = [0, *np.cumsum(passages.lengths, dtype=np.int64).tolist()]
        cuts = _cuts(passages.lengths[order], layout, budget, max_rows)
        for first, end in pairwise(cuts):
            batch_rows = order[first:end]
            yield TokenBatch(
                passages=passages,
                ids=_gather(passages.ids, starts, batch_rows),
                lengths=passages.lengths[batch_rows],
                rows=batch_rows,
                last=end == cuts[-1],
            )


def halves(batch: TokenBatch) -> tuple[TokenBatch, TokenBatch]:
    """A batch of at least two passages as two of half as many."""
    middle = len(batch.rows) // 2
    token = int(batch.lengths[:middle].sum())
    first = replace(batch, ids=batch.ids[:token], lengths=batch.lengths[:middle], rows=batch.rows[:middle], last=False)
    return first, replace(batch, ids=batch.ids[token:], lengths=batch.lengths[middle:], rows=batch.rows[middle:])


def _gather(ids: Int32, starts: list[int], rows: Int32) -> Int32:
    return np.concatenate([ids[starts[row] : starts[row + 1]] for row in rows.tolist()]) if len(rows) else ids[:0]


def _cuts(lengths: Int32, layout: Layout, budget: int, max_rows: Callable[[int], int]) -> list[int]:
    """Where batches begin, and the end: `[0, …, len(lengths)]`; `[0, 0]` when there is nothing."""
    cuts, cost, longest, most = [0], 0, 0, 0
    for position, length in enumerate(lengths.tolist()):
        count = position - cuts[-1]
        cost = (count + 1) * longest if layout == "padded" else cost + length
        if not count or cost > budget or count == most:
            cost, longest, most = length, length, max_rows(length)
            if count:
                cuts.append(position)
    return [*cuts, len(lengths)]

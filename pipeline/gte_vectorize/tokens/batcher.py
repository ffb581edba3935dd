"""Passages → token batches: their contexts sorted by length, longest first, cut under a token budget. Pure.

Sorting puts like lengths beside each other, so an attention kernel's tiles fit and a padded batch pads little; longest
first makes the largest shape come first and the remaining time predictable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gte_vectorize.batch import Int32, Layout, Passages, TokenBatch

Places = npt.NDArray[np.intp]


def token_batches(
    windows: Iterable[Passages], *, layout: Layout, budget: int, max_rows: Callable[[int], int]
) -> Iterator[TokenBatch]:
    """Every passage to encode of every window exactly once, window by window, in batches of at most `budget` tokens.

    The cost of a batch is its tokens when packed and rows × its longest context when padded; a context longer than the
    budget is a batch of its own. `max_rows` says how many contexts a batch may have, given its longest. A context is
    encoded as a whole or not at all.
    """
    for passages in windows:
        places, tokens = passages.contexts
        chosen = np.flatnonzero(passages.encoded[places])
        order = chosen[np.argsort(-tokens[chosen], kind="stable")]
        starts = [0, *np.cumsum(tokens, dtype=np.int64).tolist()]
        places = np.append(places, len(passages.lengths))
        cuts = _cuts(tokens[order], layout, budget, max_rows)
        for first, end in pairwise(cuts):
            these = order[first:end]
            whole = passages.continues is None
            rows = (these if whole else _ranges(places[these], places[these + 1])).astype(np.int32)
            yield TokenBatch(
                passages=passages,
                ids=_gather(passages.ids, starts, these.tolist()),
                lengths=passages.lengths[rows],
                rows=rows,
                last=end == cuts[-1],
                contexts=None if whole else tokens[these],
            )


def halves(batch: TokenBatch) -> tuple[TokenBatch, TokenBatch]:
    """A batch of at least two contexts as two of half as many."""
    middle = len(batch.spans) // 2
    token = int(batch.spans[:middle].sum())
    row = int(np.searchsorted(np.cumsum(batch.lengths), token, side="right"))
    return _part(batch, slice(0, token), slice(0, row), slice(0, middle), last=False), _part(
        batch, slice(token, None), slice(row, None), slice(middle, None), last=batch.last
    )


def _part(batch: TokenBatch, tokens: slice, rows: slice, contexts: slice, *, last: bool) -> TokenBatch:
    return replace(
        batch,
        ids=batch.ids[tokens],
        lengths=batch.lengths[rows],
        rows=batch.rows[rows],
        last=last,
        contexts=None if batch.contexts is None else batch.contexts[contexts],
    )


def _gather(ids: Int32, starts: list[int], contexts: list[int]) -> Int32:
    return np.concatenate([ids[starts[one] : starts[one + 1]] for one in contexts]) if contexts else ids[:0]


def _ranges(firsts: Places, ends: Places) -> Places:
    """All numbers of all ranges, one range after the other."""
    counts = ends - firsts
    return np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())


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

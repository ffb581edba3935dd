"""Equal passages of a task, found before they are encoded and given one vector afterwards.

A vector depends on the token ids of its context alone, so the second context with the same ids, cut into the same
passages, has the first one's vectors. A hash only says which contexts to compare; ids and cuts decide. Memory: the ids
and vectors of LOOK_BACK passages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from gte_vectorize.batch import EncodedWindow, Int32, Passages

LOOK_BACK = 65536
"""Passages among which equal ones are found: those of a task, unless it has more."""

_MULTIPLIERS = np.random.default_rng(0).integers(1, 1 << 63, 1 << 16, dtype=np.uint64) | np.uint64(1)


def marked(windows: Iterable[Passages]) -> Iterator[Passages]:
    """The windows, with `same_as` filled in: the first passage with the same ids in an equal context, where there was
    one.
    """
    for _, of_task in groupby(windows, key=_reach):
        seen: dict[int, list[tuple[int, Int32, Int32]]] = {}
        for passages in of_task:
            same_as = np.full(len(passages.lengths), -1, np.int32)
            firsts, tokens = passages.contexts
            starts = [0, *np.cumsum(tokens, dtype=np.int64).tolist()]
            edges = [*firsts.tolist(), len(passages.lengths)]
            encoded = np.flatnonzero(tokens)
            for context, key in zip(encoded.tolist(), _keys(passages)[encoded].tolist(), strict=True):
                first, end = edges[context], edges[context + 1]
                ids, cuts = passages.ids[starts[context] : starts[context + 1]], passages.lengths[first:end]
                alike = seen.setdefault(key, [])
                for place, their_ids, their_cuts in alike:
                    if np.array_equal(their_ids, ids) and np.array_equal(their_cuts, cuts):
                        same_as[first:end] = np.arange(place, place + end - first)
                        break
                else:
                    alike.append((passages.first + first, ids, cuts))
            yield replace(passages, same_as=same_as)


def fanned_out(windows: Iterable[EncodedWindow]) -> Iterator[EncodedWindow]:
    """The windows, with its equal's vector and status in each row that is the same as an earlier one."""
    for _, of_task in groupby(windows, key=lambda window: _reach(window.passages)):
        held: list[EncodedWindow] = []
        starts: list[int] = []
        for window in of_task:
            held.append(window)
            starts.append(window.passages.first)
            if window.passages.same_as is not None:
                _fan_out(window, window.passages.same_as, held, starts)
            yield window


def _fan_out(window: EncodedWindow, same_as: Int32, held: list[EncodedWindow], starts: list[int]) -> None:
    rows = np.flatnonzero(same_as >= 0)
    owners = np.searchsorted(starts, same_as[rows], side="right") - 1
    for owner in np.unique(owners).tolist():
        ours = rows[owners == owner]
        theirs = same_as[ours] - starts[owner]
        window.vectors[ours] = held[owner].vectors[theirs]
        window.status[ours] = held[owner].status[theirs]


def _reach(passages: Passages) -> tuple[int, int]:
    """Windows with the same reach know of each other's passages."""
    return passages.window.task.index, passages.first // LOOK_BACK


def _keys(passages: Passages) -> npt.NDArray[np.uint64]:
    """A hash of each context's ids, uint64[contexts]; of one without ids, any."""
    lengths = passages.contexts[1].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    place = np.arange(len(passages.ids)) - np.repeat(starts, lengths)
    products = (passages.ids.astype(np.uint64) + np.uint64(1)) * _MULTIPLIERS[place % len(_MULTIPLIERS)]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(products)])
    keys: npt.NDArray[np.uint64] = sums[starts + lengths] - sums[starts]
    return keys

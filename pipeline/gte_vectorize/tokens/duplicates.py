"""Equal passages of a task, found before they are encoded and given one vector afterwards.

A vector depends on its token ids alone, so the second passage with the same ids has the first one's. A hash only says
which passages to compare; the ids decide. Memory: the ids and vectors of LOOK_BACK rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from gte_vectorize.batch import EncodedWindow, Int32, Passages, Window

LOOK_BACK = 65536
"""Rows among which equal passages are found: those of a task, unless tasks were made larger than by default."""

_MULTIPLIERS = np.random.default_rng(0).integers(1, 1 << 63, 1 << 16, dtype=np.uint64) | np.uint64(1)


def marked(windows: Iterable[Passages]) -> Iterator[Passages]:
    """The windows, with `same_as` filled in: the first passage with the same ids, where there was one."""
    for _, of_task in groupby(windows, key=lambda passages: _reach(passages.window)):
        seen: dict[int, list[tuple[int, Int32]]] = {}
        for passages in of_task:
            first = passages.window.first_row - passages.window.task.first_row
            same_as = np.full(len(passages.lengths), -1, np.int32)
            ends = np.cumsum(passages.lengths, dtype=np.int64)
            encoded = np.flatnonzero(passages.lengths)
            for row, key in zip(encoded.tolist(), _keys(passages)[encoded].tolist(), strict=True):
                ids = passages.ids[ends[row] - passages.lengths[row] : ends[row]]
                alike = seen.setdefault(key, [])
                found = next((other for other, theirs in alike if np.array_equal(theirs, ids)), None)
                if found is None:
                    alike.append((first + row, ids))
                else:
                    same_as[row] = found
            yield replace(passages, same_as=same_as)


def fanned_out(windows: Iterable[EncodedWindow]) -> Iterator[EncodedWindow]:
    """The windows, with its equal's vector and status in each row that is the same as an earlier one."""
    for _, of_task in groupby(windows, key=lambda window: _reach(window.passages.window)):
        held: list[EncodedWindow] = []
        starts: list[int] = []
        for window in of_task:
            span = window.passages.window
            held.append(window)
            starts.append(span.first_row - span.task.first_row)
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


def _reach(window: Window) -> tuple[int, int]:
    """Windows with the same reach know of each other's passages."""
    return window.task.index, (window.first_row - window.task.first_row) // LOOK_BACK


def _keys(passages: Passages) -> npt.NDArray[np.uint64]:
    """A hash of each passage's ids, uint64[rows]; of one without ids, any."""
    lengths = passages.lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    place = np.arange(len(passages.ids)) - np.repeat(starts, lengths)
    products = (passages.ids.astype(np.uint64) + np.uint64(1)) * _MULTIPLIERS[place % len(_MULTIPLIERS)]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(products)])
    keys: npt.NDArray[np.uint64] = sums[starts + lengths] - sums[starts]
    return keys

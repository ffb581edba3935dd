"""Passages of some rows, put together to those of a window, or cut into more than one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gte_vectorize.batch import LEAST_WINDOW_ROWS, Passages, Status, Task, Window

HASH_BYTES = 16

PIECE_ROWS = 4096
"""Of what a worker tokenizes at a time. Several make a window, so that the first one is there soon."""

WHOLE_PIECE_ROWS = 512
"""The same where documents are not cut off: the bytes of a file that compresses well tell little of their tokens."""


def pieces_of(tasks: Iterable[Task], window_rows: int, *, whole: bool = False) -> Iterator[Window]:
    """The tasks in pieces, in order, none larger than an encoder's window of `window_rows` rows.

    `whole`: documents are not cut off at the limit, so a piece of long ones has as few rows as it takes.
    """
    most, least = (WHOLE_PIECE_ROWS, 1) if whole else (PIECE_ROWS, LEAST_WINDOW_ROWS)
    return (piece for task in tasks for piece in task.windows(min(most, window_rows), least))


def join(window: Window, pieces: Sequence[Passages]) -> Passages:
    """The passages of `window` from those of its pieces, in their order."""
    if len(pieces) == 1:
        return replace(pieces[0], window=window)
    joined: dict[str, Any] = {}
    for name in ("ids", "lengths", "status", "truncated", "text_hash", "row", "chunk", "continues", "reused"):
        arrays = [getattr(piece, name) for piece in pieces]
        joined[name] = None if any(array is None for array in arrays) else np.concatenate(arrays)
    return Passages(window=window, cut_tokens=sum(piece.cut_tokens for piece in pieces), **joined)


def cut(passages: Passages, first: int, end: int) -> Passages:
    """Its passages `first` to `end - 1`, as a window of the rows that end there. Estimates stay with the first."""
    span = passages.window
    base = span.first_row - span.task.first_row

    def ended(place: int) -> int:
        """Rows of the window that have ended before this passage."""
        return int(passages.row[place]) - base if place < len(passages.row) else span.num_rows

    token = int(passages.lengths[:first].sum())
    sliced: dict[str, Any] = {}
    for name in ("lengths", "status", "truncated", "text_hash", "row", "chunk", "continues", "reused"):
        array = getattr(passages, name)
        sliced[name] = None if array is None else array[first:end]
    return Passages(
        window=replace(span, first_row=span.first_row + ended(first), num_rows=ended(end) - ended(first)),
        ids=passages.ids[token : token + int(passages.lengths[first:end].sum())],
        cut_tokens=0 if first else passages.cut_tokens,
        **sliced,
    )


def gathered(pieces: Iterable[Passages], most: int) -> Iterator[Passages]:
    """The pieces of each task, in order, as windows of at most `most` passages: joined where small, cut where large.

    Small pieces keep all workers busy from the start, and large windows sort well. A document of many passages may be
    spread over windows; a context may not, so one of more passages makes a larger window.
    """
    held: list[Passages] = []
    count = first = 0
    for piece in pieces:
        for some in _cut_up(piece, most):
            if held and count + len(some.lengths) > most:
                yield _together(held, first)
                held, count, first = [], 0, first + count
            held.append(some)
            count += len(some.lengths)
            if count >= most or some.window.ends_task:
                yield _together(held, first)
                held, count, first = [], 0, 0 if some.window.ends_task else first + count


def _cut_up(piece: Passages, most: int) -> Iterator[Passages]:
    count = len(piece.lengths)
    if count <= most:
        yield piece
        return
    edges = np.append(piece.contexts[0], count)
    first = 0
    while first < count:
        fitting, least = np.searchsorted(edges, [first + most, first], side="right")
        end = int(edges[max(fitting - 1, least)])
        yield cut(piece, first, end)
        first = end


def _together(held: Sequence[Passages], first: int) -> Passages:
    span = held[0].window
    window = Window(span.task, span.first_row, sum(piece.window.num_rows for piece in held))
    return replace(join(window, held), first=first)


def crashed(window: Window) -> Passages:
    """Of rows whose texts cannot be tokenized, nor hashed, because nothing survives them."""
    rows = window.num_rows
    return Passages(
        window=window,
        ids=np.zeros(0, np.int32),
        lengths=np.zeros(rows, np.int32),
        status=np.full(rows, Status.CRASH, np.uint8),
        truncated=np.zeros(rows, np.bool_),
        text_hash=np.zeros((rows, HASH_BYTES), np.uint8),
        row=window.rows,
        chunk=np.zeros((rows, 3), np.int32),
        continues=np.zeros(rows, np.bool_),
        reused=np.full(rows, -1, np.int64),
    )

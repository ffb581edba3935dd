"""Passages of some rows, put together to those of a window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from gte_vectorize.batch import Passages, Status, Task, Window

HASH_BYTES = 16

PIECE_ROWS = 4096
"""Of what a worker tokenizes at a time. Several make a window, so that the first one is there soon."""


def pieces_of(tasks: Iterable[Task], window_rows: int) -> Iterator[Window]:
    """The tasks in pieces, in order, none larger than an encoder's window of `window_rows` rows."""
    return (piece for task in tasks for piece in task.windows(min(PIECE_ROWS, window_rows)))


def join(window: Window, pieces: Sequence[Passages]) -> Passages:
    """The passages of `window` from those of its pieces, in their order."""
    if len(pieces) == 1:
        return replace(pieces[0], window=window)
    return Passages(
        window=window,
        ids=np.concatenate([piece.ids for piece in pieces]),
        lengths=np.concatenate([piece.lengths for piece in pieces]),
        status=np.concatenate([piece.status for piece in pieces]),
        truncated=np.concatenate([piece.truncated for piece in pieces]),
        text_hash=np.concatenate([piece.text_hash for piece in pieces]),
    )


def gathered(pieces: Iterable[Passages], most_rows: int) -> Iterator[Passages]:
    """Consecutive pieces of each task as windows of at most `most_rows` rows, or of one piece that has more.

    Small pieces keep all workers busy from the start, and large windows sort well. A task's pieces are equally long,
    but for a shorter last one.
    """
    held: list[Passages] = []
    rows = 0
    for piece in pieces:
        held.append(piece)
        rows += piece.window.num_rows
        if piece.window.ends_task or rows + piece.window.num_rows > most_rows:
            yield join(replace(held[0].window, num_rows=rows), held)
            held, rows = [], 0


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
    )

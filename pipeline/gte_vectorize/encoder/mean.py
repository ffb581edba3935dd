"""Vectors of a document's windows → one vector: their mean, weighted by tokens, brought back to length 1.

Sums run over a document's windows in their order, in fp64, so that the result does not depend on how its windows were
spread. A document of one passage keeps that one's bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gte_vectorize.batch import EncodedWindow, Float32, Passages, Status, UInt8


@dataclass(slots=True)
class _Document:
    """As far as its windows are there. `row` counts from the task's first, `first` is the first window's vector."""

    row: int
    first: Float32
    text_hash: UInt8
    total: npt.NDArray[np.float64] | None = None
    tokens: int = 0
    status: int = Status.OK

    def add(self, vector: Float32, tokens: int, status: int) -> None:
        if self.tokens:
            if self.total is None:
                self.total = self.first.astype(np.float64) * self.tokens
            self.total += vector.astype(np.float64) * tokens
        self.tokens += tokens
        self.status = self.status or status

    def vector(self) -> Float32:
        """float32[dim]; zeros where a window has none, or they cancel each other out."""
        if self.total is None:
            return self.first
        length = float(np.sqrt(np.square(self.total).sum()))
        if not length:
            self.status = self.status or Status.ZERO
        mean: Float32 = (self.total / length if self.status == Status.OK else 0 * self.total).astype(np.float32)
        return mean


def averaged(windows: Iterable[EncodedWindow]) -> Iterator[tuple[EncodedWindow, EncodedWindow]]:
    """Each window, and beside it the documents that end in it as one passage each.

    The status of a document is OK only where that of all its windows is.
    """
    held: dict[int, _Document] = {}  # of this task, by row; those that have not ended
    for window in windows:
        passages = window.passages
        for place, row in enumerate(passages.row.tolist()):
            if row not in held:
                held[row] = _Document(row, window.vectors[place], passages.text_hash[place])
            held[row].add(window.vectors[place], int(passages.lengths[place]), int(window.status[place]))
        ended = [held.pop(row) for row in sorted(held)[: passages.window.num_rows]]
        yield window, _together(passages, ended, window.vectors.shape[1])


def _together(passages: Passages, documents: list[_Document], dim: int) -> EncodedWindow:
    vectors = np.array([document.vector() for document in documents], np.float32).reshape(-1, dim)
    status = np.array([document.status for document in documents], np.uint8)
    hashes = np.array([document.text_hash for document in documents], np.uint8)
    return EncodedWindow(
        Passages(
            window=passages.window,
            ids=np.zeros(0, np.int32),
            lengths=np.array([document.tokens for document in documents], np.int32),
            status=status,
            truncated=np.zeros(len(documents), np.bool_),
            text_hash=hashes.reshape(-1, passages.text_hash.shape[1]),
            row=np.array([document.row for document in documents], np.int32),
        ),
        vectors,
        status,
    )

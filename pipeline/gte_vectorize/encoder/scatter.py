"""Vectors of sorted batches → whole windows in row order, on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from gte_vectorize.batch import EncodedWindow, Float32, Status, TokenBatch


def encoded_windows(encoded: Iterable[tuple[TokenBatch, Float32]], dim: int) -> Iterator[EncodedWindow]:
    """Each window once its last batch is there. A vector that is zero or not finite is dropped, and its row marked."""
    window = None
    for batch, vectors in encoded:
        passages, rows = batch.passages, batch.rows
        if window is None:
            window = EncodedWindow(passages, np.zeros((len(passages.lengths), dim), np.float32), passages.status.copy())
        if len(vectors) != len(rows):
            raise RuntimeError(f"the encoder returned {len(vectors)} vectors for a batch of {len(rows)} passages")
        window.vectors[rows] = vectors
        # A zero vector has no direction: it comes of a module like ReLU after the pooling, and no store can rank it.
        window.status[rows[~vectors.any(axis=1)]] = Status.ZERO
        window.status[rows[~np.isfinite(vectors).all(axis=1)]] = Status.NONFINITE
        if batch.last:
            window.vectors[window.status != Status.OK] = 0
            yield window
            window = None

"""Vectors of sorted batches → whole windows in row order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from gte_vectorize.batch import EncodedWindow, Status, VectorBatch


def encoded_windows(encoded: Iterable[VectorBatch], dim: int) -> Iterator[EncodedWindow]:
    """Each window once its last batch is there. A vector that is zero or not finite is dropped, and its row marked."""
    vectors = None
    for item in encoded:
        passages, rows = item.batch.passages, item.batch.rows
        if vectors is None:
            vectors = np.zeros((len(passages.lengths), dim), np.float32)
            status = passages.status.copy()
        if len(item.vectors) != len(rows):
            raise RuntimeError(f"the encoder returned {len(item.vectors)} vectors for a batch of {len(rows)} passages")
        vectors[rows] = item.vectors
        # A zero vector has no direction: it comes of a module like ReLU after the pooling, and no store can rank it.
        status[rows[~item.vectors.any(axis=1)]] = Status.ZERO
        status[rows[~np.isfinite(item.vectors).all(axis=1)]] = Status.NONFINITE
        if item.batch.last:
            vectors[status != Status.OK] = 0
            yield EncodedWindow(passages, vectors, status)
            vectors = None

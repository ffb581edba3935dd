"""Vectors of sorted batches → whole windows in row order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from gte_vectorize.batch import Bool, EncodedWindow, Status, VectorBatch


def encoded_windows(encoded: Iterable[VectorBatch], dim: int) -> Iterator[EncodedWindow]:
    """Each window once its last batch is there. A vector that is not finite is dropped and its row marked."""
    vectors = None
    for item in encoded:
        passages, rows = item.batch.passages, item.batch.rows
        if vectors is None:
            vectors = np.zeros((len(passages.lengths), dim), np.float32)
            status = passages.status.copy()
        finite: Bool = np.isfinite(item.vectors).all(axis=1)  # type: ignore[assignment]
        if len(finite) != len(rows):
            raise RuntimeError(f"the encoder returned {len(finite)} vectors for a batch of {len(rows)} passages")
        vectors[rows[finite]] = item.vectors[finite]
        status[rows[~finite]] = Status.NONFINITE
        if item.batch.last:
            yield EncodedWindow(passages, vectors, status)
            vectors = None

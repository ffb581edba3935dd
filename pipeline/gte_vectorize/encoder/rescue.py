"""Rows whose vector was not finite, tried again alone: once more as they were, then in fp32.

A healthy GPU gives the same bits again, so the first attempt tells a passing fault from an overflow of half precision,
which the second one mends. What is not finite in fp32 either keeps its status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from gte_vectorize.batch import EncodedWindow, Float32, Passages, Status, TokenBatch

Attempt = Callable[[TokenBatch], Float32]

log = logging.getLogger(__name__)


def rescued(windows: Iterable[EncodedWindow], attempts: Sequence[Attempt]) -> Iterator[EncodedWindow]:
    """The windows, with the vector of the first attempt that is finite in each row that was not."""
    for window in windows:
        rows = np.flatnonzero(window.status == Status.NONFINITE).tolist()
        if rows:
            starts = np.cumsum(window.passages.lengths, dtype=np.int64) - window.passages.lengths
            saved = sum(_save(window, row, int(starts[row]), attempts) for row in rows)
            log.warning(
                "vectors that were not finite: %d, of which %d are now; where there are many, --dtype bf16 is faster",
                len(rows),
                saved,
            )
        yield window


def _save(window: EncodedWindow, row: int, start: int, attempts: Sequence[Attempt]) -> bool:
    batch = _alone(window.passages, row, start)
    for attempt in attempts:
        vector = attempt(batch)[0]
        if np.isfinite(vector).all() and vector.any():
            window.vectors[row], window.status[row] = vector, Status.OK
            return True
    return False


def _alone(passages: Passages, row: int, start: int) -> TokenBatch:
    lengths = passages.lengths[row : row + 1]
    return TokenBatch(
        passages, passages.ids[start : start + int(lengths[0])], lengths, np.array([row], np.int32), last=True
    )

"""Rows whose vector was not finite, tried again, their context alone: once more as they were, then in fp32.

A healthy GPU gives the same bits again, so the first attempt tells a passing fault from an overflow of half precision,
which the second one mends. What is not finite in fp32 either keeps its status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gte_vectorize.batch import EncodedWindow, Float32, Passages, Status, TokenBatch

Attempt = Callable[[TokenBatch], Float32]

log = logging.getLogger(__name__)


def rescued(windows: Iterable[EncodedWindow], attempts: Sequence[Attempt]) -> Iterator[EncodedWindow]:
    """The windows, with the vector of the first attempt that is finite in each row that was not."""
    for window in windows:
        bad = np.flatnonzero(window.status == Status.NONFINITE)
        if len(bad):
            for batch in _contexts(window.passages, bad):
                _save(window, batch, attempts)
            log.warning(
                "vectors that were not finite: %d, of which %d are now; where there are many, --dtype bf16 is faster",
                len(bad),
                np.count_nonzero(window.status[bad] == Status.OK),
            )
        yield window


def _save(window: EncodedWindow, batch: TokenBatch, attempts: Sequence[Attempt]) -> None:
    for attempt in attempts:
        vectors = attempt(batch)
        good = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
        good &= window.status[batch.rows] == Status.NONFINITE
        window.vectors[batch.rows[good]], window.status[batch.rows[good]] = vectors[good], Status.OK
        if not (window.status[batch.rows] == Status.NONFINITE).any():
            return


def _contexts(passages: Passages, rows: npt.NDArray[np.intp]) -> Iterator[TokenBatch]:
    """The context of each of the rows, by itself."""
    firsts, tokens = passages.contexts
    starts, edges = np.cumsum(tokens, dtype=np.int64) - tokens, np.append(firsts, len(passages.lengths))
    for context in np.unique(np.searchsorted(firsts, rows, side="right") - 1).tolist():
        start, chunks = int(starts[context]), np.arange(edges[context], edges[context + 1], dtype=np.int32)
        yield TokenBatch(
            passages,
            ids=passages.ids[start : start + int(tokens[context])],
            lengths=passages.lengths[chunks],
            rows=chunks,
            last=True,
            contexts=None if passages.continues is None else tokens[context : context + 1],
        )

"""Token batches → vectors on a CPU: one batch per lane, one thread per lane.

Lanes beat one batch on all cores: no thread waits for another at the end of every small product. And a product on one
thread gives a row the same bits whatever the other rows are, which the same product split over threads does not
(seen with MKL on AVX-512: the split follows the number of rows).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from gte_vectorize.batch import EncodedWindow, Float32, Layout, TokenBatch
from gte_vectorize.encoder.forward import Forward, encode, weights_sum
from gte_vectorize.encoder.scatter import encoded_windows

BATCH_TOKENS = 1024
"""Activations of this many tokens stay in a core's cache."""

_THREADS = torch.get_num_threads()
"""Before any lane set its own to one, which shows in threads that are started later."""

WINDOW_ROWS = 512
"""Some seconds of work, so that progress shows. Lanes run on from one window into the next."""


class CpuEncoder:
    """The CPU's encoder. Closing it gives torch its threads back."""

    def __init__(self, forward: Forward, *, dim: int, budget: int | None, lanes: int | None):
        self._forward = forward
        self.layout: Layout = forward.layout
        self.dim = dim
        self.budget = budget or BATCH_TOKENS
        self.window_rows = WINDOW_ROWS
        self._lanes = lanes or _THREADS
        self._pool = ThreadPoolExecutor(self._lanes, "lane", initializer=torch.set_num_threads, initargs=(1,))

    def max_rows(self, longest: int) -> int:
        """How many contexts a batch may have; here, the budget decides alone."""
        return self.budget

    def stream(self, batches: Iterable[TokenBatch]) -> Iterator[EncodedWindow]:
        """Every window with its vectors in row order, once its last batch is through."""
        return encoded_windows(self._encoded(batches), self.dim)

    def weights_sum(self) -> int:
        with torch.inference_mode():
            return weights_sum(self._forward)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(_THREADS)

    def _encoded(self, batches: Iterable[TokenBatch]) -> Iterator[tuple[TokenBatch, Float32]]:
        """The batches in their order, at most two per lane in flight."""
        in_flight: deque[tuple[TokenBatch, Future[Float32]]] = deque()
        for batch in batches:
            in_flight.append((batch, self._pool.submit(self.encode, batch)))
            if len(in_flight) > 2 * self._lanes:
                done, vectors = in_flight.popleft()
                yield done, vectors.result()
        for done, vectors in in_flight:
            yield done, vectors.result()

    def encode(self, batch: TokenBatch) -> Float32:
        """The vectors of one batch, float32[n, dim], in the batch's order."""
        if not len(batch.rows):
            return np.empty((0, self.dim), np.float32)
        return encode(self._forward, batch, torch.device("cpu"))

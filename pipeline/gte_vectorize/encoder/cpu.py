"""Token batches → vectors on a CPU: one batch per lane, one thread per lane.

Lanes beat one batch on all cores: no thread waits for another at the end of every small product. And a product on one
thread gives a row the same bits whatever the other rows are, which the same product split over threads does not
(seen with MKL on AVX-512: the split follows the number of rows).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gte_vectorize.batch import Layout, TokenBatch, VectorBatch
from gte_vectorize.encoder.bucket import exact_bucket, exact_rows
from gte_vectorize.encoder.forward import Forward

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
        """How many passages a batch may have; here, the budget decides alone."""
        return self.budget

    def stream(self, batches: Iterable[TokenBatch]) -> Iterator[VectorBatch]:
        """The vectors of every batch, in the order of the batches, at most two batches per lane in flight."""
        in_flight: deque[Future[VectorBatch]] = deque()
        for batch in batches:
            in_flight.append(self._pool.submit(self._encode, batch))
            if len(in_flight) > 2 * self._lanes:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(_THREADS)

    def _encode(self, batch: TokenBatch) -> VectorBatch:
        if not len(batch.rows):
            return VectorBatch(batch, torch.empty(0, self.dim).numpy())
        bucket = exact_bucket(batch) if self.layout == "packed" else exact_rows(batch)
        with torch.inference_mode():
            inputs = torch.from_numpy(self._forward.lay_out(batch.ids, batch.lengths, bucket))
            vectors = self._forward(inputs, bucket)[: len(batch.rows)]
        return VectorBatch(batch, vectors.numpy())

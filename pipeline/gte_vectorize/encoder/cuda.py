"""Token batches → vectors on a GPU: a ring of staging slots, three streams, one captured graph per bucket.

While batch n computes, n + 1 is copied in and n − 1 copied out. Order comes from events alone; the host waits only for
the copy-out of the batch it hands on, never for the device.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gte_vectorize.batch import Int32, Layout, TokenBatch, VectorBatch
from gte_vectorize.encoder.bucket import SMALLEST_PACKED, Bucket, choose, max_rows, packed_buckets, padded_buckets
from gte_vectorize.encoder.forward import Forward
from gte_vectorize.errors import ConfigError

BATCH_TOKENS = 32768
WINDOW_ROWS = 16384

WINDOW_TOKENS = 1 << 23
"""At most in a window, so that a window's ids stay within 32 MiB whatever the model's limit."""

MOST_TOKENS = 1 << 18
"""A launch has at most 65,535 groups, and a bucket a slot for every eighth token or so."""

DEPTH = 3
"""Batches in flight: one copied in, one computing, one copied out."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagingSlot:
    """Pinned and device buffers of one batch in flight; taken again only when its copy-out is done."""

    host_inputs: torch.Tensor
    inputs: torch.Tensor
    vectors: torch.Tensor
    host_vectors: torch.Tensor
    copied_in: torch.cuda.Event
    computed: torch.cuda.Event
    copied_out: torch.cuda.Event


class CudaEncoder:
    """The GPU's encoder: all device memory is claimed, and every bucket captured, when it is made."""

    def __init__(
        self, forward: Forward, *, dim: int, budget: int | None, max_length: int, device: torch.device, graphs: bool
    ):
        self._forward, self._device, self.dim = forward, device, dim
        self.layout: Layout = forward.layout
        packed = self.layout == "packed"
        self.budget = max(budget or BATCH_TOKENS, max_length, SMALLEST_PACKED if packed else 1)
        if packed and self.budget > MOST_TOKENS:
            raise ConfigError(f"--batch-tokens {self.budget}: at most {MOST_TOKENS} on a GPU")
        self._buckets = (packed_buckets if packed else padded_buckets)(self.budget, max_length)
        self.window_rows = max(1, min(WINDOW_ROWS, WINDOW_TOKENS // max_length))
        self._copy_in, self._compute, self._copy_out = (torch.cuda.Stream(device) for _ in range(3))
        self._widths = {bucket: len(self._blank(bucket)) for bucket in self._buckets}
        width = max(self._widths.values())
        slots = max(bucket.slots for bucket in self._buckets)
        self._inputs = torch.zeros(width, dtype=torch.int32, device=device)
        self._vectors = torch.zeros(slots, dim, device=device)
        self._ring = deque(_staging_slot(width, slots, dim, device) for _ in range(DEPTH))
        # Weights and buffers were filled on the default stream, which our streams do not wait for.
        torch.cuda.synchronize(device)
        self._graphs = self._capture() if graphs else {}

    def max_rows(self, longest: int) -> int:
        """How many passages a batch may have whose longest passage is `longest` tokens."""
        return max_rows(self._buckets, longest)

    def stream(self, batches: Iterable[TokenBatch]) -> Iterator[VectorBatch]:
        """The vectors of every batch, in the order of the batches."""
        in_flight: deque[tuple[TokenBatch, StagingSlot | None]] = deque()
        for batch in batches:
            if len(in_flight) == DEPTH:
                yield self._finish(*in_flight.popleft())
            in_flight.append((batch, self._start(batch) if len(batch.rows) else None))
        while in_flight:
            yield self._finish(*in_flight.popleft())

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._graphs.clear()

    def _start(self, batch: TokenBatch) -> StagingSlot:
        slot = self._ring.popleft()
        bucket, count = choose(self._buckets, batch), len(batch.rows)
        laid_out = self._forward.lay_out(batch.ids, batch.lengths, bucket)
        size = len(laid_out)
        slot.host_inputs.numpy()[:size] = laid_out
        with torch.cuda.stream(self._copy_in):
            slot.inputs[:size].copy_(slot.host_inputs[:size], non_blocking=True)
            slot.copied_in.record()
        with torch.cuda.stream(self._compute):
            self._compute.wait_event(slot.copied_in)
            self._inputs[:size].copy_(slot.inputs[:size])
            self._run(bucket)
            slot.vectors[:count].copy_(self._vectors[:count])
            slot.computed.record()
        with torch.cuda.stream(self._copy_out):
            self._copy_out.wait_event(slot.computed)
            slot.host_vectors[:count].copy_(slot.vectors[:count], non_blocking=True)
            slot.copied_out.record()
        return slot

    def _finish(self, batch: TokenBatch, slot: StagingSlot | None) -> VectorBatch:
        if slot is None:
            return VectorBatch(batch, np.empty((0, self.dim), np.float32))
        slot.copied_out.synchronize()
        # Copied: the slot's pinned memory is taken again by the next batch.
        vectors = slot.host_vectors[: len(batch.rows)].numpy().copy()
        self._ring.append(slot)
        return VectorBatch(batch, vectors)

    def _run(self, bucket: Bucket) -> None:
        graph = self._graphs.get(bucket)
        if graph is not None:
            graph.replay()
        else:
            self._eager(bucket)

    def _eager(self, bucket: Bucket) -> None:
        """static inputs → static vectors, in the current stream."""
        with torch.inference_mode():
            inputs = self._inputs[: self._widths[bucket]]
            self._vectors[: bucket.slots].copy_(self._forward(inputs, bucket))

    def _capture(self) -> dict[Bucket, torch.cuda.CUDAGraph]:
        """One graph per bucket, largest first, so that all share the first one's memory."""
        graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        for bucket in self._buckets:
            blank = torch.from_numpy(self._blank(bucket))
            with torch.cuda.stream(self._compute):
                self._inputs[: len(blank)].copy_(blank)
                self._eager(bucket)
            self._compute.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=self._compute):
                    self._eager(bucket)
            except RuntimeError as error:
                log.warning("%s could not be captured and runs without a graph: %s", bucket, error)
                continue
            graphs[bucket] = graph
        return graphs

    def _blank(self, bucket: Bucket) -> Int32:
        """Inputs of a bucket that holds fillers only."""
        nothing = np.empty(0, np.int32)
        return self._forward.lay_out(nothing, nothing, bucket)


def _staging_slot(width: int, slots: int, dim: int, device: torch.device) -> StagingSlot:
    return StagingSlot(
        host_inputs=torch.zeros(width, dtype=torch.int32, pin_memory=True),
        inputs=torch.zeros(width, dtype=torch.int32, device=device),
        vectors=torch.zeros(slots, dim, device=device),
        host_vectors=torch.zeros(slots, dim, pin_memory=True),
        copied_in=torch.cuda.Event(),
        computed=torch.cuda.Event(),
        copied_out=torch.cuda.Event(),
    )

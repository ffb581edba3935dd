"""Token batches → windows of vectors on a GPU: staging slots, three streams, one captured graph per bucket.

While batch n computes, n + 1 is copied in; its vectors go to their rows in the window on the GPU, and a whole window is
checked there and copied out while the next one computes. Order comes from events alone; the host waits for a slot it is
about to take again and for the window it hands on, never for the device.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gte_vectorize.batch import EncodedWindow, Float32, Int32, Layout, Passages, Status, TokenBatch
from gte_vectorize.encoder.bucket import (
    SMALLEST_PACKED,
    Bucket,
    choose,
    max_rows,
    most_chunks,
    packed_buckets,
    padded_buckets,
)
from gte_vectorize.encoder.forward import Forward, weights_sum
from gte_vectorize.encoder.rescue import rescued
from gte_vectorize.errors import ConfigError, DeviceError, TemporaryError
from gte_vectorize.tokens.batcher import halves

WINDOW_ROWS = 16384

WINDOW_TOKENS = 1 << 23
"""At most in a window, so that a window's ids stay within 32 MiB whatever the model's limit."""

MOST_TOKENS = 1 << 18
"""A launch has at most 65,535 groups, and a bucket a slot for every eighth token or so."""

DEPTH = 3
"""Batches in flight: one being filled, one copied in, one computing."""

PATIENCE = 120.0
"""Seconds for a batch, of which the largest take a tenth of one; after that the GPU hangs."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagingSlot:
    """Pinned and device inputs of one batch in flight; taken again when that batch is computed.

    Behind the inputs of the bucket stand the rows of the window that the vectors belong to.
    """

    host_inputs: torch.Tensor
    inputs: torch.Tensor
    copied_in: torch.cuda.Event
    computed: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class WindowSlot:
    """The vectors of a window's rows and their status on the GPU; taken again when they are copied out."""

    vectors: torch.Tensor
    status: torch.Tensor
    computed: torch.cuda.Event
    copied_out: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class Landing:
    """A window on its way to the host. Its pinned memory goes with it; PyTorch takes it again once that is dropped."""

    passages: Passages
    slot: WindowSlot
    vectors: torch.Tensor
    status: torch.Tensor


class CudaEncoder:
    """The GPU's encoder: its buffers are claimed, and every bucket captured, when it is made.

    `exact` computes a batch in fp32, for rows that are not finite otherwise. `late`: passages may be chunks of
    contexts.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        dim: int,
        budget: int,
        max_length: int,
        device: torch.device,
        graphs: bool,
        late: bool,
        exact: Callable[[TokenBatch], Float32],
    ):
        self._forward, self._device, self._exact, self.dim = forward, device, exact, dim
        self._hangs = False
        self.layout: Layout = forward.layout
        packed = self.layout == "packed"
        budget = max(budget, max_length, SMALLEST_PACKED if packed else 1)
        if packed and budget > MOST_TOKENS:
            raise ConfigError(f"--batch-tokens {budget}: at most {MOST_TOKENS} on a GPU")
        self._buckets = packed_buckets(budget, max_length, late=late) if packed else padded_buckets(budget, max_length)
        self.window_rows = max(most_chunks(max_length) if late else 1, min(WINDOW_ROWS, WINDOW_TOKENS // max_length))
        self._copy_in, self._compute, self._copy_out = (torch.cuda.Stream(device) for _ in range(3))
        self._widths = {bucket: len(self._blank(bucket)) for bucket in self._buckets}
        width, most = max(self._widths.values()), max(bucket.vectors for bucket in self._buckets)
        self._inputs = torch.zeros(width, dtype=torch.int32, device=device)
        self._vectors = torch.zeros(most, dim, device=device)
        self._staging = deque(_staging_slot(width + most, device) for _ in range(DEPTH))
        self._windows = [_window_slot(self.window_rows, dim, device) for _ in range(2)]
        # Weights and buffers were filled on the default stream, which our streams do not wait for.
        torch.cuda.synchronize(device)
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        if graphs:
            self._capture()

    @property
    def budget(self) -> int:
        """Tokens of the largest bucket; it shrinks when memory runs out."""
        return max(bucket.tokens for bucket in self._buckets)

    def max_rows(self, longest: int) -> int:
        """How many contexts a batch may have whose longest context is `longest` tokens."""
        return max_rows(self._buckets, longest)

    def stream(self, batches: Iterable[TokenBatch]) -> Iterator[EncodedWindow]:
        """Every window with its vectors in row order, once its last batch is through.

        DeviceError: the GPU hangs. TemporaryError: its memory does not suffice even for a passage alone.
        """
        return rescued(self._encoded(batches), (self.encode, self._exact))

    def encode(self, batch: TokenBatch) -> Float32:
        """The vectors of one batch, float32[n, dim], by itself and at once, in the batch's order."""
        count = len(batch.rows)
        vectors = torch.empty(count, self.dim, device=self._device)
        self._add(replace(batch, rows=np.arange(count, dtype=np.int32)), vectors)
        with torch.cuda.stream(self._compute):
            result: Float32 = vectors.cpu().numpy()
        return result

    def weights_sum(self) -> int:
        """Behind the batches that are on their way."""
        with torch.cuda.stream(self._compute), torch.inference_mode():
            return weights_sum(self._forward)

    def close(self) -> None:
        """Let go of the graphs, once nothing uses the buffers any more; a GPU that hangs is not waited for."""
        if not self._hangs:
            for stream in (self._compute, self._copy_out):
                self._wait(stream.record_event())
        self._graphs.clear()

    def _encoded(self, batches: Iterable[TokenBatch]) -> Iterator[EncodedWindow]:
        free, landing = deque(self._windows), deque[Landing]()
        slot: WindowSlot | None = None
        for batch in batches:
            if slot is None:
                if not free:
                    free.append(landing[0].slot)
                    yield self._land(landing.popleft())
                slot = self._begin(free.popleft(), batch.passages)
            if len(batch.rows):
                self._add(batch, slot.vectors)
            if batch.last:
                landing.append(self._send(batch.passages, slot))
                slot = None
            while landing and landing[0].slot.copied_out.query():
                free.append(landing[0].slot)
                yield self._land(landing.popleft())
        while landing:
            yield self._land(landing.popleft())

    def _begin(self, slot: WindowSlot, passages: Passages) -> WindowSlot:
        if len(passages.lengths) > self.window_rows:
            raise ValueError(f"a window of {len(passages.lengths)} rows; at most {self.window_rows} fit")
        with torch.cuda.stream(self._compute):
            slot.vectors[: len(passages.lengths)].zero_()
        return slot

    def _send(self, passages: Passages, slot: WindowSlot) -> Landing:
        """Check a window's vectors, drop those that no store can use, and start the copy to the host."""
        count = len(passages.lengths)
        vectors, status = slot.vectors[:count], slot.status[:count]
        with torch.cuda.stream(self._compute):
            norms = torch.linalg.vector_norm(vectors, dim=1)
            status.fill_(Status.OK).masked_fill_(norms == 0, Status.ZERO)
            status.masked_fill_(~norms.isfinite(), Status.NONFINITE)
            vectors.masked_fill_((status != Status.OK).unsqueeze(1), 0)
            slot.computed.record()
        landing = Landing(
            passages,
            slot,
            vectors=torch.empty(count, self.dim, pin_memory=True),
            status=torch.empty(count, dtype=torch.uint8, pin_memory=True),
        )
        with torch.cuda.stream(self._copy_out):
            self._copy_out.wait_event(slot.computed)
            landing.vectors.copy_(vectors, non_blocking=True)
            landing.status.copy_(status, non_blocking=True)
            slot.copied_out.record()
        return landing

    def _land(self, landing: Landing) -> EncodedWindow:
        self._wait(landing.slot.copied_out)
        status = landing.passages.status.copy()
        encoded = landing.passages.encoded
        status[encoded] = landing.status.numpy()[encoded]
        return EncodedWindow(landing.passages, landing.vectors.numpy(), status)

    def _add(self, batch: TokenBatch, vectors: torch.Tensor) -> None:
        """The batch's vectors into their rows of `vectors`; in pieces once its bucket does not fit into the memory."""
        pieces = deque([batch])
        while pieces:
            piece = pieces.popleft()
            bucket = choose(self._buckets, piece)
            if bucket is not None:
                if self._start(piece, bucket, vectors):
                    continue
                self._give_up(bucket)
            if len(piece.spans) == 1:
                raise TemporaryError(
                    f"the GPU's memory does not suffice for a passage of {len(piece.ids)} tokens: "
                    "end what else uses it, or lower --max-length, then run again"
                )
            pieces.extendleft(reversed(halves(piece)))

    def _start(self, batch: TokenBatch, bucket: Bucket, vectors: torch.Tensor) -> bool:
        """Whether the batch is on its way; not, where memory ran out."""
        slot = self._staging[0]
        self._staging.rotate(-1)
        self._wait(slot.computed)
        laid_out = self._forward.lay_out(batch.ids, batch.lengths, bucket, batch.contexts)
        size, count = len(laid_out), len(batch.rows)
        staged = slot.host_inputs.numpy()
        staged[:size], staged[size : size + count] = laid_out, batch.rows
        with torch.cuda.stream(self._copy_in):
            slot.inputs[: size + count].copy_(slot.host_inputs[: size + count], non_blocking=True)
            slot.copied_in.record()
        with torch.cuda.stream(self._compute):
            self._compute.wait_event(slot.copied_in)
            self._inputs[:size].copy_(slot.inputs[:size])
            try:
                self._run(bucket)
                vectors.index_copy_(0, slot.inputs[size : size + count].long(), self._vectors[:count])
            except torch.OutOfMemoryError:
                return False  # dealt with outside: the error's traceback holds on to tensors
            finally:
                slot.computed.record()
        return True

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
            self._vectors[: bucket.vectors].copy_(self._forward(inputs, bucket))

    def _give_up(self, bucket: Bucket) -> None:
        """Memory does not suffice for the bucket, nor for larger ones that are not captured."""
        smaller = [other for other in self._buckets if other.tokens < bucket.tokens or other in self._graphs]
        torch.cuda.empty_cache()
        if not smaller:
            raise TemporaryError(
                f"the GPU's memory does not suffice for batches of {bucket.tokens} tokens, the smallest there are: "
                "end what else uses it, then run again"
            )
        self._buckets = smaller
        log.warning("the GPU's memory ran out: batches of %d tokens from now on, not %d", self.budget, bucket.tokens)

    def _capture(self) -> None:
        """One graph per bucket, largest first, so that all share the first one's memory."""
        pool = torch.cuda.graph_pool_handle()
        for bucket in list(self._buckets):
            if bucket not in self._buckets:
                continue
            graph, full = torch.cuda.CUDAGraph(), False
            try:
                self._capture_one(graph, bucket, pool)
            except torch.OutOfMemoryError:
                full = True
            except torch.AcceleratorError:
                raise
            except RuntimeError as error:
                log.warning("%s could not be captured and runs without a graph: %s", bucket, error)
            else:
                self._graphs[bucket] = graph
            if full:
                self._give_up(bucket)

    def _capture_one(self, graph: torch.cuda.CUDAGraph, bucket: Bucket, pool: Any) -> None:
        blank = torch.from_numpy(self._blank(bucket))
        with torch.cuda.stream(self._compute):
            self._inputs[: len(blank)].copy_(blank)
            self._eager(bucket)
        self._compute.synchronize()
        with torch.cuda.graph(graph, pool=pool, stream=self._compute):
            self._eager(bucket)

    def _blank(self, bucket: Bucket) -> Int32:
        """Inputs of a bucket that holds fillers only."""
        nothing = np.empty(0, np.int32)
        return self._forward.lay_out(nothing, nothing, bucket)

    def _wait(self, event: torch.cuda.Event) -> None:
        """Until the event has happened. DeviceError: it does not, so the GPU hangs."""
        started = time.monotonic()
        while not event.query():
            if time.monotonic() - started > PATIENCE:
                self._hangs = True
                raise DeviceError(f"the GPU has not answered for {PATIENCE:g} s; what was published is kept")
            time.sleep(1e-4)


def _staging_slot(width: int, device: torch.device) -> StagingSlot:
    return StagingSlot(
        host_inputs=torch.zeros(width, dtype=torch.int32, pin_memory=True),
        inputs=torch.zeros(width, dtype=torch.int32, device=device),
        copied_in=torch.cuda.Event(),
        computed=torch.cuda.Event(),
    )


def _window_slot(rows: int, dim: int, device: torch.device) -> WindowSlot:
    return WindowSlot(
        vectors=torch.zeros(rows, dim, device=device),
        status=torch.zeros(rows, dtype=torch.uint8, device=device),
        computed=torch.cuda.Event(),
        copied_out=torch.cuda.Event(),
    )

"""The card as an instrument: sustained rates, latencies, energy, memory, and the ceiling of the matrix products."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from gte_vectorize.bench.shape import Shape

CEILING_TOKENS = 32768
COPIES = 32
FEWEST_REPEATS, MOST_REPEATS = 50, 200


@dataclass(frozen=True, slots=True)
class Timed:
    """Work done: tokens, seconds, and the joules the card drew, None where nothing counts them."""

    tokens: int
    seconds: float
    joules: float | None = None

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def joules_per_million(self) -> float | None:
        """Joules per million tokens."""
        return None if self.joules is None else 1e6 * self.joules / self.tokens


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one call, in milliseconds, over `repeats` calls."""

    p50_ms: float
    p99_ms: float
    repeats: int


class Card:
    """The device that is measured, `cpu` or `cuda`. Opening it opens the energy counter of an NVIDIA GPU.

    `energy_note` says why there is no counter; it is empty where there is one.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.energy_note = "needs a GPU"
        self._nvml: Any = None
        self._handle: Any = None

    def __enter__(self) -> Self:
        if self.on_gpu:
            self.energy_note = self._open_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()

    def joules(self) -> float | None:
        """Drawn by the GPU since the driver was loaded."""
        return None if self.energy_note else self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3

    def fresh(self) -> None:
        """Free what is no longer used, and measure the peak of memory from here on."""
        gc.collect()
        if self.on_gpu:
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """Most GPU memory that tensors held at once since `fresh`."""
        if not self.on_gpu:
            return None
        import torch

        return torch.cuda.max_memory_allocated() / 2**30

    def _open_counter(self) -> str:
        import torch

        try:
            import pynvml
        except ImportError:
            return "nvidia-ml-py is not installed"
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except pynvml.NVMLError as error:
            return f"the driver counts no energy ({error})"
        return ""


def sustained(work: Callable[[], int], seconds: float, card: Card) -> Timed:
    """Call `work`, which returns the tokens it did, for `seconds`, once half of that has warmed the card up.

    A card that draws its full power slows down, so the first seconds are not what it sustains.
    """
    _spend(work, seconds / 2, card)
    return _spend(work, seconds, card)


def _spend(work: Callable[[], int], seconds: float, card: Card) -> Timed:
    card.wait()
    joules, started, tokens, elapsed = card.joules(), time.monotonic(), 0, 0.0
    while elapsed < seconds or not elapsed:
        tokens += work()
        card.wait()
        elapsed = time.monotonic() - started
    return Timed(tokens, elapsed, drawn(joules, card.joules()))


def growing(work: Callable[[int], int], rows: int, seconds: float, card: Card) -> Timed:
    """`work(n)` does the first n of `rows` rows and returns their tokens: the n that takes about `seconds`, or all.

    For callers that take whole lists and sort them. The smaller lists before are the warm-up.
    """
    count, timed = min(rows, 32), False
    while True:
        card.wait()
        started = time.monotonic()
        tokens = work(count)
        card.wait()
        elapsed = time.monotonic() - started
        if timed and (count == rows or elapsed >= 0.7 * seconds):
            return Timed(tokens, elapsed)
        count, timed = min(rows, max(2 * count, int(count * seconds / elapsed))), True


def drawn(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def latency(call: Callable[[], object], seconds: float) -> Latency:
    """Of `call`, which returns when its result is in host memory.

    200 repeats, or as many as `seconds` allow but at least 50, or as many as 4 × `seconds` allow.
    """
    call()
    times: list[float] = []
    spent = 0.0
    while len(times) < MOST_REPEATS and spent < (seconds if len(times) >= FEWEST_REPEATS else 4 * seconds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
        spent += times[-1]
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return Latency(float(p50), float(p99), len(times))


def ceiling(shape: Shape, seconds: float, card: Card) -> Timed:
    """If nothing ran but the layers' matrix products in fp16, biases included, on 32,768 tokens at once."""
    import torch

    operands = [
        tuple(torch.randn(*size, device="cuda").half() * 0.03 for size in ((CEILING_TOKENS, k), (n, k), (n,)))
        for k, n in shape.products
    ]

    def layers() -> int:
        with torch.inference_mode():
            for _ in range(shape.layers):
                for states, weight, bias in operands:
                    torch.nn.functional.linear(states, weight, bias)
        return CEILING_TOKENS

    return sustained(layers, seconds, card)


def copy_rate(num_bytes: int, tokens: int, seconds: float, card: Card, *, to_gpu: bool) -> Timed:
    """Copies of `num_bytes`, which is what `tokens` tokens need, between pinned host memory and the GPU."""
    import torch

    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target, source = (device, host) if to_gpu else (host, device)

    def copy() -> int:
        for _ in range(COPIES):
            target.copy_(source, non_blocking=True)
        return COPIES * tokens

    return sustained(copy, seconds, card)

"""Weights + forward + pooling + normalisation behind one seam: token batches in, vectors out, in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch

from gte_vectorize.batch import EncodedWindow, Float32, Layout, Passages, TokenBatch
from gte_vectorize.encoder.budget import choose_budget
from gte_vectorize.encoder.cpu import CpuEncoder
from gte_vectorize.encoder.cuda import CudaEncoder
from gte_vectorize.encoder.forward import Forward, PackedForward, PaddedForward, encode
from gte_vectorize.encoder.packed import load_packed
from gte_vectorize.encoder.padded import load_padded
from gte_vectorize.encoder.pooling import load_head
from gte_vectorize.encoder.weights import read_tensors
from gte_vectorize.errors import ConfigError, DeviceError, ModelError, TemporaryError
from gte_vectorize.model.spec import ModelSpec
from gte_vectorize.tokens.batcher import token_batches

PADDED_TOKENS = 32768
"""Of a padded batch on a GPU. It decides bits there, so it is not measured."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

log = logging.getLogger(__name__)


class Encoder(Protocol):
    """What the flow sees of an encoder; `layout` to `max_rows` say how to cut its token batches."""

    layout: Layout
    window_rows: int
    dim: int

    @property
    def budget(self) -> int: ...

    def max_rows(self, longest: int) -> int: ...

    def stream(self, batches: Iterable[TokenBatch]) -> Iterator[EncodedWindow]: ...

    def weights_sum(self) -> int: ...

    def close(self) -> None: ...


def batches_for(encoder: Encoder, windows: Iterable[Passages]) -> Iterator[TokenBatch]:
    """The token batches of the windows, cut as the encoder wants them."""
    return token_batches(windows, layout=encoder.layout, budget=encoder.budget, max_rows=encoder.max_rows)


def resolve_device(device: str) -> str:
    """`auto` → `cuda` where there is a GPU, else `cpu`. Raises ConfigError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if available else "cpu"
    if device == "cuda" and not available:
        raise ConfigError("--device cuda: PyTorch sees no NVIDIA GPU here; check the driver, or use --device cpu")
    return device


def describe_device(device: str) -> str:
    """The kind of device, as far as it decides a vector's bits: `cuda` and the GPU's name, or `cpu` and what it can do.

    Sums run in another order on AVX-512 than on AVX2.
    """
    kind = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    return f"{device} ({kind})"


def resolve_dtype(dtype: str, device: str) -> str:
    """`auto` → fp16 on a GPU and fp32 on a CPU. A CPU always runs fp32, with a warning if something else was asked."""
    if device == "cuda":
        return "fp16" if dtype == "auto" else dtype
    if dtype not in ("auto", "fp32"):
        log.warning("a CPU runs in fp32: --dtype %s is for a GPU", dtype)
    return "fp32"


@contextmanager
def open_encoder(
    spec: ModelSpec,
    *,
    device: str,
    dtype: str,
    graphs: bool = True,
    late: bool = False,
    batch_tokens: int | None = None,
    lanes: int | None = None,
) -> Iterator[Encoder]:
    """The model on a device (`cpu`, `cuda`) in a dtype (`fp32`, `fp16`, `bf16`), ready to run.

    `late`: passages may be chunks of contexts. `batch_tokens` is the token budget of a batch, `lanes` the number of CPU
    threads; both default to what suits the device. Raises ModelError for a model that cannot be run faithfully.
    """
    with _gpu_errors():
        encoder = _make(spec, device, dtype, graphs, late, batch_tokens, lanes)
        try:
            yield encoder
        finally:
            encoder.close()


@contextmanager
def _gpu_errors() -> Iterator[None]:
    """A GPU that is full → TemporaryError, a lost one → DeviceError: neither is a bug, and running again may help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TemporaryError(
            "the GPU's memory does not suffice: end what else uses it, or lower --batch-tokens, then run again"
        ) from error
    except torch.AcceleratorError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DeviceError(
            f"the GPU failed ({reason}); what was published is kept: run the same command again"
        ) from error


def _make(
    spec: ModelSpec, device: str, dtype: str, graphs: bool, late: bool, batch_tokens: int | None, lanes: int | None
) -> Encoder:
    target = torch.device(device)
    forward = _forward(spec, DTYPES[dtype], target)
    if late and forward.layout != "packed":
        raise ModelError(
            f"{spec.name!r} runs in padded batches here, which hold no contexts: --long late needs one of the packed "
            "families, on a CPU or a GPU of compute capability 8.0 or newer"
        )
    if device == "cpu":
        return CpuEncoder(forward, dim=spec.dim, budget=batch_tokens, lanes=lanes)
    if batch_tokens is None and isinstance(forward, PackedForward):
        batch_tokens = choose_budget(forward, spec, target, DTYPES[dtype])
    return CudaEncoder(
        forward,
        dim=spec.dim,
        budget=batch_tokens or PADDED_TOKENS,
        max_length=spec.tokenizer.max_length,
        device=target,
        # Grouped attention depends on the lengths of a batch, so it has no fixed shape to capture.
        graphs=graphs and (forward.layout == "padded" or dtype != "fp32"),
        late=late,
        exact=in_fp32(spec, target),
    )


def in_fp32(spec: ModelSpec, device: torch.device) -> Callable[[TokenBatch], Float32]:
    """The model's vectors of a batch in fp32, without fused kernels. Its weights are loaded when they are needed."""

    @cache
    def forward() -> Forward:
        return _forward(spec, torch.float32, device)

    return lambda batch: encode(forward(), batch, device)


def _forward(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Forward:
    head = load_head(spec, device)
    if spec.layout == "packed" and (device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)):
        bert = load_packed(spec, read_tensors(spec.weights), dtype=dtype, device=device)
        return PackedForward(bert, spec.pooling, head)
    pad_id = int(spec.config.get("pad_token_id") or 0)
    return PaddedForward(load_padded(spec, dtype=dtype, device=device), spec.pooling, head, pad_id)

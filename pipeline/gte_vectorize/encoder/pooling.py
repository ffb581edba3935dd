"""Hidden states → vectors: pooling, the model's modules after it, normalisation. Always in fp32.

The pooling modes and their formulas are those of sentence-transformers' Pooling module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gte_vectorize.encoder.bucket import FEWEST_TOKENS
from gte_vectorize.encoder.weights import read_tensors
from gte_vectorize.errors import ModelError
from gte_vectorize.model.spec import Dense, ModelSpec

Head = Callable[[torch.Tensor], torch.Tensor]
"""Pooled states, fp32[passages, pooled size] → normalised vectors, fp32[passages, dim]."""

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
}


def fewest_rows(device: torch.device) -> int:
    """Matrix products of fewer rows may take another kernel and round differently; so there never are fewer.

    Seen on AVX2 and AVX-512 with 16 rows, and on an H200 with some hundred (products split along the inner dimension).
    """
    return FEWEST_TOKENS if device.type == "cpu" else 512


def at_least(count: int, rows: torch.Tensor) -> torch.Tensor:
    """The rows, filled up with zeros to `count` of them."""
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, max(0, count - len(rows))))


def pool(hidden: torch.Tensor, bounds: torch.Tensor, modes: Sequence[str]) -> torch.Tensor:
    """Pool each passage's hidden states [tokens, hidden] between `bounds`, int[passages + 1] → fp32[passages, pooled].

    Sums run over a passage's tokens in their order, so that the result does not depend on the passage's neighbours.
    A passage of no tokens (an unused slot of a bucket) gives an arbitrary row.
    """
    first, lengths = bounds[:-1], bounds.diff()
    last_token = len(hidden) - 1

    def reduce(states: torch.Tensor, how: str) -> torch.Tensor:
        return torch.segment_reduce(
            states, how, offsets=bounds, axis=0, unsafe=True, initial=0 if how == "sum" else None
        )

    def one(mode: str) -> torch.Tensor:
        if mode == "cls":
            return hidden[first.clamp(max=last_token)].float()
        if mode == "lasttoken":
            return hidden[(bounds[1:] - 1).clamp(min=0)].float()
        states = hidden.float()
        if mode == "max":
            return reduce(states, "max")
        counts = lengths.clamp(min=1).unsqueeze(1).float()
        if mode == "mean":
            return reduce(states, "sum") / counts
        if mode == "mean_sqrt_len_tokens":
            return reduce(states, "sum") / counts.sqrt()
        if mode == "weightedmean":
            # A token's weight is its position counted from 1; they add up to n (n + 1) / 2.
            index = torch.arange(len(hidden), device=hidden.device)
            passage = torch.searchsorted(bounds[1:].contiguous(), index, right=True, out_int32=True)
            weights = (index - first[passage.clamp(max=len(first) - 1)] + 1).unsqueeze(1)
            return reduce(states * weights, "sum") / (counts * (counts + 1) / 2)
        raise ModelError(f"unknown pooling mode {mode!r}")

    return torch.cat([one(mode) for mode in modes], dim=1)


@dataclass(frozen=True, slots=True)
class Steps:
    """Modules one after the other."""

    steps: tuple[Head, ...]

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            pooled = step(pooled)
        return pooled


@dataclass(frozen=True, slots=True)
class DenseStep:
    """A product in fp32, never of fewer rows than round alike, and its activation."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        rows = at_least(fewest_rows(pooled.device), pooled)
        return ACTIVATIONS[self.activation](F.linear(rows, self.weight, self.bias))[: len(pooled)]


def load_head(spec: ModelSpec, device: torch.device) -> Steps:
    """The modules after pooling, in the model's order, and a last normalisation to length 1."""
    steps = [_dense(module, device) if isinstance(module, Dense) else _normalize for module in spec.head]
    if not spec.head or isinstance(spec.head[-1], Dense):
        steps.append(_normalize)
    return Steps(tuple(steps))


def _normalize(vectors: torch.Tensor) -> torch.Tensor:
    return F.normalize(vectors, dim=1)


def _dense(module: Dense, device: torch.device) -> Head:
    tensors = read_tensors([module.weights])
    weight = tensors["linear.weight"].to(device, torch.float32)
    bias = tensors["linear.bias"].to(device, torch.float32) if module.bias else None
    return DenseStep(weight, bias, module.activation)

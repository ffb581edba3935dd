"""The steps of the packed forward that a device does its own way: attention, residual + norm, activated product.

Plain, they are PyTorch's, and on a CPU bit-exact by construction. Fused (fused.py), they are our own on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from gte_vectorize.errors import ModelError

Attention = Callable[[torch.Tensor, int], torch.Tensor]
"""Queries, keys and values of all tokens [tokens, 3 × hidden] and the number of heads → context [tokens, hidden]."""

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Kernels:
    """
    attend    bounds of the passages, int32[passages + 1], and the longest they may be → the attention for them
    add_norm  hidden states and what to add to them, each [tokens, hidden], and a norm → the norm of their sum
    up        hidden states [tokens, hidden] and a product → its activated result [tokens, inner]
    """

    attend: Callable[[torch.Tensor, int], Attention]
    add_norm: Callable[[torch.Tensor, torch.Tensor, LayerNorm], torch.Tensor]
    up: Callable[[torch.Tensor, Linear], torch.Tensor]


def choose_kernels(activation: str, *, head_size: int, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Fused on a GPU in fp16 or bf16, where Triton runs; plain elsewhere. ModelError: an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ModelError(f"hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if device.type == "cpu" or dtype == torch.float32:
        return plain_kernels(activation, grouped_attention)
    try:
        from gte_vectorize.encoder import fused

        return fused.fused_kernels(activation, head_size=head_size, device=device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # a missing compiler or header, and Triton's own errors, have no common base
        log.warning("slower kernels are used; Triton needs a C compiler and Python's headers, and says: %s", error)
        return plain_kernels(activation, varlen_attention)


def plain_kernels(activation: str, attend: Callable[[torch.Tensor, int], Attention]) -> Kernels:
    activate = ACTIVATIONS[activation]
    return Kernels(
        attend=attend,
        add_norm=lambda hidden, residual, norm: norm(hidden + residual),
        up=lambda hidden, linear: activate(linear(hidden)),
    )


def grouped_attention(bounds: torch.Tensor, max_length: int) -> Attention:
    """Unmasked SDPA on each group of passages of equal length, which must stand beside each other to be one group.

    There is no mask because a masked kernel rounds differently when the padded length changes. The lengths are read on
    the host, so this cannot be captured.
    """
    lengths = bounds.diff().cpu().numpy()
    lengths = lengths[lengths > 0]
    edges = np.flatnonzero(np.diff(lengths, prepend=0, append=0))
    groups = [(int(end - start), int(lengths[start])) for start, end in pairwise(edges)]

    def attend(qkv: torch.Tensor, heads: int) -> torch.Tensor:
        context = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
        first = 0
        for count, length in groups:
            rows = slice(first, first + count * length)
            query, key, value = qkv[rows].view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(query, key, value)
            context[rows] = attended.transpose(1, 2).reshape(count * length, -1)
            first = rows.stop
        return context

    return attend


def varlen_attention(bounds: torch.Tensor, max_length: int) -> Attention:
    """PyTorch's FlashAttention for variable lengths: fp16 and bf16 on compute capability 8.0 or newer."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(qkv: torch.Tensor, heads: int) -> torch.Tensor:
        query, key, value = qkv.view(len(qkv), 3, heads, -1).unbind(1)
        context: torch.Tensor = varlen_attn(  # type: ignore[assignment] # a tuple only if asked for
            query, key, value, bounds, bounds, max_length, max_length
        )
        return context.flatten(1)

    return attend

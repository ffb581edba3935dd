"""Attention over packed passages, each passage on its own: grouped for a CPU, variable-length for a GPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from gte_vectorize.batch import Int32
from gte_vectorize.encoder.packed import Attention


def grouped_attention(lengths: Int32) -> Attention:
    """Attention for passages of the given lengths, back to back: unmasked SDPA on each group of equal length.

    Equal lengths must stand beside each other for the groups to be large. There is no mask because a masked kernel
    rounds differently when the padded length changes, and a vector must not depend on its neighbours.
    """
    bounds = np.flatnonzero(np.diff(lengths, prepend=0, append=0))
    groups = [(int(end - start), int(lengths[start])) for start, end in pairwise(bounds)]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        context = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        first = 0
        for count, length in groups:
            rows = slice(first, first + count * length)
            batched = (part[rows].unflatten(0, (count, length)).transpose(1, 2) for part in (query, key, value))
            context[rows] = F.scaled_dot_product_attention(*batched).transpose(1, 2).flatten(0, 1)
            first = rows.stop
        return context

    return attend


def varlen_attention(cumulative: torch.Tensor, max_length: int) -> Attention:
    """FlashAttention over passages between the bounds `cumulative`, int32[passages + 1], none above `max_length`.

    For fp16 and bf16 on a GPU of compute capability 8.0 or newer.
    """
    from torch.nn.attention.varlen import varlen_attn

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        context = varlen_attn(query, key, value, cumulative, cumulative, max_length, max_length)
        assert isinstance(context, torch.Tensor)
        return context

    return attend

"""Our own GPU kernels against fp64, on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gte_vectorize.encoder.fused import add_norm, attention
from gte_vectorize.encoder.kernels import LayerNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = {
    16: [1, 16, 7, 0, 15, 2, 16],
    32: [32, 1, 17, 16, 0, 31],
    64: [64, 1, 33, 63, 32],
    200: [200, 130, 64, 65, 1, 0, 128],
    512: [300, 512, 1],
}


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=DEVICE)


def states(tokens: int, width: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, width, generator=generator).to(DEVICE, dtype)


def reference(qkv: torch.Tensor, lengths: list[int], heads: int) -> torch.Tensor:
    context = []
    for part in qkv.double().split([length for length in lengths if length]):
        query, key, value = part.unflatten(1, (3, heads, -1)).permute(1, 2, 0, 3)
        context.append(F.scaled_dot_product_attention(query, key, value).transpose(0, 1).flatten(1))
    return torch.cat(context)


@pytest.mark.parametrize("max_length", LENGTHS)
@pytest.mark.parametrize(("heads", "size"), [(2, 32), (1, 64), (1, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_attention_matches_fp64(max_length: int, heads: int, size: int, dtype: torch.dtype) -> None:
    lengths = LENGTHS[max_length]
    qkv = states(sum(lengths), 3 * heads * size, dtype)
    context = attention(qkv, bounds_of(lengths), heads, max_length).double()
    tolerance = 2e-3 if dtype == torch.float16 else 1.6e-2
    assert (context - reference(qkv, lengths, heads)).abs().max() < tolerance


@pytest.mark.parametrize("length", [1, 7, 16, 17, 32, 33, 64, 65, 200])
def test_attention_of_a_passage_has_the_same_bits_in_every_bucket_and_company(length: int) -> None:
    """Alone, behind others, in each place of a shared tile, and under any longer bucket."""
    heads, width = 1, 3 * 64
    own = states(length, width)
    buckets = [bucket for bucket in (16, 32, 64, 512) if bucket >= length]
    alone = attention(own, bounds_of([length]), heads, buckets[0])
    for bucket in buckets:
        for before in ([], [3], [1, bucket, 3]):
            lengths = [*before, length, 6]
            others = states(sum(lengths) - length, width)
            start = sum(before)
            qkv = torch.cat([others[:start], own, others[start:]])
            context = attention(qkv, bounds_of(lengths), heads, bucket)
            assert torch.equal(context[start : start + length], alone)


@pytest.mark.parametrize("size", [64, 384, 1024])
def test_add_norm_matches_fp64(size: int) -> None:
    hidden, residual, (weight, bias) = states(5, size), states(7, size)[:5], states(2, size)
    normed = add_norm(hidden, residual, LayerNorm(weight, bias, 1e-12))
    expected = F.layer_norm(hidden.double() + residual.double(), (size,), weight.double(), bias.double(), 1e-12)
    assert (normed.double() - expected).abs().max() < 4e-3

"""GPU kernels of our own for packed passages: attention, and residual + LayerNorm. Written in Triton.

Attention is bidirectional, over each passage by itself. A program owns one passage, one head and a tile of queries,
and walks the passage's keys from its start in steps of 64; so the order of every sum depends on the passage's own
length, never on its neighbours, its place in the batch or the bucket. Queries, keys and values are read where the
fused product left them. Online softmax: Milakov and Gimelshein (2018); the tiling: Dao, FlashAttention-2 (2023), whose
128-row tiles waste most of their work on short passages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KEYS = 64
"""Keys per step, for every bucket: another step would round differently."""

LOG2_E = 1.4426950408889634


@triton.jit
def _attention_kernel(
    qkv,
    context,
    bounds,
    scale,
    hidden: tl.constexpr,
    size: tl.constexpr,
    queries: tl.constexpr,
    keys: tl.constexpr,
    steps: tl.constexpr,
):
    head, tile, passage = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(bounds + passage)
    length = tl.load(bounds + passage + 1) - start
    if tile * queries >= length:
        return
    rows = tile * queries + tl.arange(0, queries)
    columns = tl.arange(0, size)
    base = qkv + start.to(tl.int64) * (3 * hidden) + head * size
    query = tl.load(base + rows[:, None] * (3 * hidden) + columns[None, :], mask=rows[:, None] < length, other=0.0)
    best = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    summed = tl.zeros([queries, size], tl.float32)
    for step in range(0, length if steps > 1 else 1, keys):
        at = step + tl.arange(0, keys)
        key = tl.load(base + hidden + at[None, :] * (3 * hidden) + columns[:, None], mask=at[None, :] < length, other=0.0)
        value = tl.load(base + 2 * hidden + at[:, None] * (3 * hidden) + columns[None, :], mask=at[:, None] < length, other=0.0)
        scores = tl.where(at[None, :] < length, tl.dot(query, key) * scale, float("-inf"))
        now = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
        shrink = tl.exp2(best - now)
        total = total * shrink + tl.sum(weights, 1)
        summed = tl.dot(weights.to(value.dtype), value, summed * shrink[:, None])
        best = now
    out = context + (start + rows[:, None]).to(tl.int64) * hidden + head * size + columns[None, :]
    tl.store(out, (summed / total[:, None]).to(query.dtype), mask=rows[:, None] < length)


def attention(qkv: torch.Tensor, bounds: torch.Tensor, heads: int, max_length: int) -> torch.Tensor:
    """Bidirectional attention of each passage between `bounds`, int32[passages + 1], none above `max_length`.

    qkv [tokens, 3 × hidden], fp16 or bf16, contiguous: queries, keys and values, each heads × size with size 32, 64 or
    128 → context [tokens, hidden].
    """
    tokens, hidden = len(qkv), qkv.shape[1] // 3
    size = hidden // heads
    queries, warps, stages = tile(max_length)
    context = torch.empty(tokens, hidden, dtype=qkv.dtype, device=qkv.device)
    grid = (heads, triton.cdiv(max_length, queries), len(bounds) - 1)
    _attention_kernel[grid](
        qkv,
        context,
        bounds,
        LOG2_E / size**0.5,
        hidden,
        size,
        queries,
        KEYS if max_length > 32 else 32,
        triton.cdiv(max_length, KEYS),
        num_warps=warps,
        num_stages=stages,
    )
    return context


def tile(max_length: int) -> tuple[int, int, int]:
    """Rows of a query tile, warps and pipeline stages by the bucket's maximal length; measured, see jobs/bench."""
    if max_length <= 32:
        return 32, 4, 1
    if max_length <= 64:
        return 64, 4, 1
    if max_length <= 256:
        return 64, 4, 2
    return 128, 8, 3


@triton.jit
def _add_norm_kernel(hidden, residual, weight, bias, out, eps, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < size
    state = tl.load(hidden + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    state += tl.load(residual + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(state, 0) / size
    centred = tl.where(inside, state - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / size + eps)
    normed = centred * scale * tl.load(weight + columns, mask=inside) + tl.load(bias + columns, mask=inside)
    tl.store(out + row * size + columns, normed.to(out.dtype.element_ty), mask=inside)


def add_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """LayerNorm(hidden + residual), each [tokens, size], contiguous; summed and normalised in fp32, read once."""
    out = torch.empty_like(hidden)
    size = hidden.shape[1]
    block = triton.next_power_of_2(size)
    _add_norm_kernel[(len(hidden),)](
        hidden, residual, weight, bias, out, eps, size, block, num_warps=min(8, max(1, block // 256))
    )
    return out

"""The packed forward's own GPU kernels: attention, and residual + LayerNorm, in Triton; activation in the product.

Attention is bidirectional, over each passage by itself. A program owns one head and a tile of 64 queries of one
passage, and walks the passage's keys from its start in steps of 64; or, where passages have at most 16 or 32 tokens, it
owns four or two whole passages, each at its own quarter or half of the tile. So the order of every sum depends on the
passage's own length, never on its neighbours, its place in the batch or the bucket. Queries, keys and values are read
where the fused product left them.

Sources: online softmax, Milakov and Gimelshein (2018); tiling, Dao, FlashAttention-2 (2023), whose 128-row tiles waste
most of their work on short passages.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gte_vectorize.encoder.kernels import Attention, Kernels, LayerNorm, plain_kernels

TILE = 64
"""Queries and keys of a tile, for every bucket: with others the tensor cores would round differently."""

HEAD_SIZES = (32, 64, 128)

LOG2_E = 1.4426950408889634


def fused_kernels(activation: str, *, head_size: int, device: torch.device) -> Kernels:
    """Kernels for fp16 and bf16 on a GPU. RuntimeError: they do not compile or run here, or do not fit the model."""
    if head_size not in HEAD_SIZES:
        raise RuntimeError(f"attention heads of {head_size} are not among {HEAD_SIZES}")
    states = torch.ones(16, 3 * head_size, dtype=torch.float16, device=device)
    for max_length in (16, TILE, 2 * TILE):  # one of each kind, so that what does not compile shows here
        attention(states, torch.tensor([0, 16], dtype=torch.int32, device=device), 1, max_length)
    return Kernels(attend=tiled_attention, add_norm=add_norm, up=_activated(activation))


def tiled_attention(bounds: torch.Tensor, max_length: int) -> Attention:
    return lambda qkv, heads: attention(qkv, bounds, heads, max_length)


def _activated(activation: str) -> Any:
    """The activation in the product's epilogue: ReLU, and GELU in its tanh form, also for a model that says erf.

    On real weights in fp16, against float64 with erf, the lowest cosine is 0.999996; it is 0.9999993 with erf.
    """
    if activation == "silu":
        return plain_kernels(activation, tiled_attention).up
    gelu = activation != "relu"
    return lambda hidden, linear: torch._addmm_activation(linear.bias, hidden, linear.weight.t(), use_gelu=gelu)


@triton.jit
def _weights(scores, best, scale):  # type: ignore[no-untyped-def]
    """exp2((scores − best) × scale), rounded once, by name: else a mask before it decides whether the two are fused."""
    return tl.exp2(tl.fma(scores, scale, -(best * scale)[:, None]))


@triton.jit
def _attend(scores, value, best, total, summed, scale):  # type: ignore[no-untyped-def]
    """One step of the online softmax over a tile of keys."""
    now = tl.maximum(best, tl.max(scores, 1))
    weights = _weights(scores, now, scale)
    shrink = tl.exp2((best - now) * scale)
    return now, total * shrink + tl.sum(weights, 1), tl.dot(weights.to(value.dtype), value, summed * shrink[:, None])


@triton.jit
def _attention_kernel(  # type: ignore[no-untyped-def]
    qkv, context, bounds, scale, hidden: tl.constexpr, size: tl.constexpr, tile: tl.constexpr
):
    head, part, passage = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(bounds + passage)
    length = tl.load(bounds + passage + 1) - start
    if part * tile >= length:
        return
    rows = part * tile + tl.arange(0, tile)
    columns = tl.arange(0, size)
    base = qkv + start.to(tl.int64) * (3 * hidden) + head * size
    query = tl.load(base + rows[:, None] * (3 * hidden) + columns[None, :], mask=rows[:, None] < length, other=0.0)
    best = tl.full([tile], float("-inf"), tl.float32)
    total = tl.zeros([tile], tl.float32)
    summed = tl.zeros([tile, size], tl.float32)
    # Whole tiles need no mask, which at 512 keys is a tenth of the time.
    whole = length // tile * tile
    for step in range(0, whole, tile):
        at = step + tl.arange(0, tile)
        key = tl.load(base + hidden + at[None, :] * (3 * hidden) + columns[:, None])
        value = tl.load(base + 2 * hidden + at[:, None] * (3 * hidden) + columns[None, :])
        best, total, summed = _attend(tl.dot(query, key), value, best, total, summed, scale)
    if whole < length:
        at = whole + tl.arange(0, tile)
        inside = at < length
        key = tl.load(base + hidden + at[None, :] * (3 * hidden) + columns[:, None], mask=inside[None, :], other=0.0)
        value = tl.load(
            base + 2 * hidden + at[:, None] * (3 * hidden) + columns[None, :], mask=inside[:, None], other=0.0
        )
        scores = tl.where(inside[None, :], tl.dot(query, key), float("-inf"))
        best, total, summed = _attend(scores, value, best, total, summed, scale)
    out = context + (start + rows[:, None]).to(tl.int64) * hidden + head * size + columns[None, :]
    tl.store(out, (summed / total[:, None]).to(query.dtype), mask=rows[:, None] < length)


@triton.jit
def _short_attention_kernel(  # type: ignore[no-untyped-def]
    qkv,
    context,
    bounds,
    passages,
    scale,
    hidden: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
    slot: tl.constexpr,
):
    """The same sums for passages of at most `slot` tokens, tile / slot of them side by side."""
    head, group = tl.program_id(0), tl.program_id(1)
    first = group * (tile // slot)
    if tl.load(bounds + first) == tl.load(bounds + tl.minimum(first + tile // slot, passages)):
        return
    rows = tl.arange(0, tile)
    columns = tl.arange(0, size)
    owner = rows // slot
    passage = first + owner
    start = tl.load(bounds + passage, mask=passage < passages, other=0)
    length = tl.load(bounds + passage + 1, mask=passage < passages, other=0) - start
    inside = rows % slot < length
    at = (start + rows % slot).to(tl.int64)
    base = qkv + head * size
    query = tl.load(base + at[:, None] * (3 * hidden) + columns[None, :], mask=inside[:, None], other=0.0)
    key = tl.load(base + hidden + at[None, :] * (3 * hidden) + columns[:, None], mask=inside[None, :], other=0.0)
    value = tl.load(base + 2 * hidden + at[:, None] * (3 * hidden) + columns[None, :], mask=inside[:, None], other=0.0)
    own = (owner[:, None] == owner[None, :]) & inside[None, :]
    scores = tl.where(own, tl.dot(query, key), float("-inf"))
    weights = _weights(scores, tl.where(inside, tl.max(scores, 1), 0.0), scale)
    total = tl.where(inside, tl.sum(weights, 1), 1.0)
    summed = tl.dot(weights.to(value.dtype), value)
    out = context + at[:, None] * hidden + head * size + columns[None, :]
    tl.store(out, (summed / total[:, None]).to(query.dtype), mask=inside[:, None])


def attention(qkv: torch.Tensor, bounds: torch.Tensor, heads: int, max_length: int) -> torch.Tensor:
    """Bidirectional attention of each passage between `bounds`, int32[passages + 1], none above `max_length`.

    qkv [tokens, 3 × hidden], fp16 or bf16, contiguous: queries, keys and values, each heads × size with a size of
    HEAD_SIZES → context [tokens, hidden]. Tokens outside every passage are left undefined.
    """
    hidden, passages = qkv.shape[1] // 3, len(bounds) - 1
    size = hidden // heads
    scale = LOG2_E / size**0.5
    context = torch.empty(len(qkv), hidden, dtype=qkv.dtype, device=qkv.device)
    if max_length <= TILE // 2:
        slot = 16 if max_length <= 16 else 32
        groups = triton.cdiv(passages * slot, TILE)
        _short_attention_kernel[(heads, groups)](
            qkv, context, bounds, passages, scale, hidden, size, TILE, slot, num_warps=4
        )
    else:
        steps = triton.cdiv(max_length, TILE)
        stages = 2 if steps == 1 else 3
        _attention_kernel[(heads, steps, passages)](
            qkv, context, bounds, scale, hidden, size, TILE, num_warps=4, num_stages=stages
        )
    return context


@triton.jit
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    hidden, residual, weight, bias, out, eps, size: tl.constexpr, block: tl.constexpr
):
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


def add_norm(hidden: torch.Tensor, residual: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
    """norm(hidden + residual), each [tokens, size], contiguous; in fp32 inside, read and written once."""
    out = torch.empty_like(hidden)
    size = hidden.shape[1]
    block = triton.next_power_of_2(size)
    warps = min(8, max(1, block // 256))
    _add_norm_kernel[(len(hidden),)](
        hidden, residual, norm.weight, norm.bias, out, norm.eps, size, block, num_warps=warps
    )
    return out

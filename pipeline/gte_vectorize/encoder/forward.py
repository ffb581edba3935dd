"""The two layouts of a token batch: how a batch is laid out in a bucket, and what the model computes from it.

Both turn a batch's token ids and lengths into one int32 array of a size that depends on the bucket alone, and that
array, on the encoder's device, into vectors fp32[vectors of the bucket, dim], of which the first len(lengths) count.
Nothing in between depends on the batch's values on the host, so a GPU can capture it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch

from gte_vectorize.batch import Float32, Int32, Layout, TokenBatch
from gte_vectorize.encoder.bucket import Bucket, exact_bucket, exact_rows
from gte_vectorize.encoder.packed import PackedBert
from gte_vectorize.encoder.pooling import Head, at_least, fewest_rows, pool


class Forward(Protocol):
    """A layout of token batches together with the model's computation on it."""

    @property
    def layout(self) -> Layout: ...

    def lay_out(self, token_ids: Int32, lengths: Int32, bucket: Bucket, contexts: Int32 | None = None) -> Int32: ...

    def __call__(self, inputs: torch.Tensor, bucket: Bucket) -> torch.Tensor: ...


def encode(forward: Forward, batch: TokenBatch, device: torch.device) -> Float32:
    """The vectors of a batch, float32[n, dim], in a bucket of its own size on the forward's device."""
    bucket = exact_bucket(batch) if forward.layout == "packed" else exact_rows(batch)
    with torch.inference_mode():
        inputs = torch.from_numpy(forward.lay_out(batch.ids, batch.lengths, bucket, batch.contexts)).to(device)
        vectors: Float32 = forward(inputs, bucket)[: len(batch.rows)].cpu().numpy()
    return vectors


def weights_sum(forward: Forward) -> int:
    """The sum of all weights' bits, taken as integers: one flipped bit changes it."""
    return int(torch.stack([_bits_sum(tensor) for tensor in _tensors(forward)]).sum())


def _bits_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Eight bytes at a time, which need no conversion, and what is left over."""
    data = tensor.reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:  # a part of a larger tensor
        data = data.clone()
    whole = len(data) // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64)


def _tensors(held: object) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, torch.nn.Module):
        yield from (*held.parameters(), *held.buffers())
    elif isinstance(held, tuple):
        yield from chain.from_iterable(map(_tensors, held))
    elif is_dataclass(held):
        yield from _tensors(tuple(getattr(held, field.name) for field in fields(held)))


@dataclass(frozen=True, slots=True)
class PackedForward:
    """Inputs: token ids [tokens], positions [tokens], bounds of the contexts [slots + 1], and in a bucket of chunks
    theirs [chunks + 1].
    """

    bert: PackedBert
    pooling: tuple[str, ...]
    head: Head
    layout: Layout = "packed"

    def lay_out(self, token_ids: Int32, lengths: Int32, bucket: Bucket, contexts: Int32 | None = None) -> Int32:
        if contexts is not None and not bucket.chunks:
            raise ValueError(f"{bucket} has no places for chunks")
        sizes = _sizes(bucket)
        inputs = np.zeros(sum(sizes), np.int32)
        ids, positions, bounds, *chunks = np.split(inputs, np.cumsum(sizes)[:-1])
        spans = lengths if contexts is None else contexts
        used, count = len(token_ids), len(spans)
        ends = np.cumsum(spans, dtype=np.int32)
        ids[:used] = token_ids
        positions[:used] = np.arange(used, dtype=np.int32) - np.repeat(ends - spans, spans)
        # What is left over becomes filler passages of at most max_length tokens; slots beyond them are empty.
        bounds[1 : count + 1] = ends
        fillers = used + bucket.max_length * np.arange(1, bucket.slots - count + 1)
        bounds[count + 1 :] = np.minimum(fillers, bucket.tokens)
        for chunk_bounds in chunks:
            chunk_bounds[1 : len(lengths) + 1] = np.cumsum(lengths)
            chunk_bounds[len(lengths) + 1 :] = used  # of no tokens
        return inputs

    def __call__(self, inputs: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        ids, positions, bounds, *chunks = inputs.split(_sizes(bucket))
        if self.pooling == ("cls",):
            first = at_least(fewest_rows(inputs.device), bounds[:-1].clamp(max=bucket.tokens - 1))
            return self.head(self.bert(ids, positions, bounds, bucket.max_length, first)[: bucket.slots].float())
        hidden = self.bert(ids, positions, bounds, bucket.max_length)
        return self.head(pool(hidden, chunks[0] if chunks else bounds, self.pooling))


def _sizes(bucket: Bucket) -> list[int]:
    """Of the packed inputs."""
    return [bucket.tokens, bucket.tokens, bucket.slots + 1, *([bucket.chunks + 1] if bucket.chunks else [])]


@dataclass(frozen=True, slots=True)
class PaddedForward:
    """Inputs: token ids [slots × max_length], lengths of the rows [slots]. For any encoder of transformers."""

    model: Any
    pooling: tuple[str, ...]
    head: Head
    pad_id: int
    layout: Layout = "padded"

    def lay_out(self, token_ids: Int32, lengths: Int32, bucket: Bucket, contexts: Int32 | None = None) -> Int32:
        if contexts is not None:
            raise ValueError("a padded row is one passage")
        inputs = np.full(bucket.tokens + bucket.slots, self.pad_id, np.int32)
        ids, visible = np.split(inputs, [bucket.tokens])
        # A filler row keeps one visible token: a row that is masked as a whole gives NaN in some kernels.
        visible[:] = 1
        visible[: len(lengths)] = lengths
        column = np.arange(bucket.max_length)
        ids.reshape(bucket.slots, -1)[: len(lengths)][column < lengths[:, None]] = token_ids
        return inputs

    def __call__(self, inputs: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        ids, lengths = inputs.split([bucket.tokens, bucket.slots])
        ids = ids.view(bucket.slots, bucket.max_length)
        mask = torch.arange(bucket.max_length, device=ids.device) < lengths.unsqueeze(1)
        hidden = self.model(input_ids=ids.long(), attention_mask=mask.long(), **self._extra(ids)).last_hidden_state
        # Each row is two passages for pooling, its tokens and its padding; the second is dropped.
        starts = bucket.max_length * torch.arange(bucket.slots, device=ids.device)
        bounds = torch.stack([starts, starts + lengths], dim=1).flatten()
        bounds = torch.cat([bounds, bounds.new_full((1,), bucket.tokens)])
        return self.head(pool(hidden.flatten(0, 1), bounds, self.pooling)[::2])

    def _extra(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Only the inputs this model's forward accepts."""
        accepted = inspect.signature(self.model.forward).parameters
        return {"token_type_ids": torch.zeros_like(ids).long()} if "token_type_ids" in accepted else {}

"""Padded batches through a transformers model, one after the other: what a careful script does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gte_vectorize.batch import Float32, Int32, Passages
from gte_vectorize.encoder.bucket import Bucket
from gte_vectorize.encoder.encoder import DTYPES
from gte_vectorize.encoder.forward import PaddedForward
from gte_vectorize.encoder.padded import load_padded
from gte_vectorize.encoder.pooling import load_head
from gte_vectorize.model.spec import ModelSpec
from gte_vectorize.tokens.batcher import token_batches


class Rows(NamedTuple):
    """Token ids back to back, int32[sum of lengths], lengths int32[rows], and the width they are padded to."""

    ids: Int32
    lengths: Int32
    width: int


def open_padded(spec: ModelSpec, *, attention: str, dtype: str, device: str) -> PaddedForward:
    """The model with attention `eager` or `sdpa`. Raises ValueError where it has no such attention, or ModelError."""
    import torch

    target = torch.device(device)
    model = load_padded(spec, dtype=DTYPES[dtype], device=target)
    model.set_attn_implementation(attention)
    return PaddedForward(model, spec.pooling, load_head(spec, target), int(spec.config.get("pad_token_id") or 0))


def encode_rows(forward: PaddedForward, rows: Rows, device: str) -> Float32:
    """From host memory to vectors in host memory, float32[rows, dim]."""
    import torch

    count = len(rows.lengths)
    bucket = Bucket(count * rows.width, rows.width, count, count)
    inputs = torch.from_numpy(forward.lay_out(rows.ids, rows.lengths, bucket))
    with torch.inference_mode():
        vectors: Float32 = forward(inputs.to(device), bucket).cpu().numpy()
    return vectors


def in_order(windows: Sequence[Passages], rows: int, width: int | None) -> Iterator[Rows]:
    """Batches of `rows` as they come, padded to `width`, or to the longest of the batch."""
    for passages in windows:
        lengths = passages.lengths[passages.lengths > 0]
        ends = np.cumsum(lengths, dtype=np.int64)
        for first, end in pairwise([*range(0, len(lengths), rows), len(lengths)]):
            start = int(ends[first] - lengths[first])
            own = lengths[first:end]
            yield Rows(passages.ids[start : int(ends[end - 1])], own, width or int(own.max()))


def by_length(windows: Sequence[Passages], budget: int) -> list[Rows]:
    """Sorted by length within each window, at most `budget` padded tokens a batch; the batches in shuffled order.

    Shuffled, so that the first of them are like all.
    """
    batches = [
        Rows(batch.ids, batch.lengths, int(batch.lengths[0]))
        for batch in token_batches(windows, layout="padded", budget=budget, max_rows=lambda _: budget)
        if len(batch.rows)
    ]
    return [batches[index] for index in np.random.default_rng(0).permutation(len(batches))]

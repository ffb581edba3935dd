"""Known answers: a few passages whose vectors are known, asked when a run begins and after every task.

At the start the answer is compared with the model's in fp32 on the CPU, which shares neither kernels nor arithmetic
with the GPU's; later ones must equal the first bit for bit, whatever ran in between, and so must the weights. A task is
published when the window behind its last one is asked for, which the canary's answer precedes: what a device computed
that computes wrongly is not published.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gte_vectorize.batch import EncodedWindow, Float32, Passages, Shard, Task, TokenBatch, Window
from gte_vectorize.encoder.encoder import Encoder, batches_for, in_fp32
from gte_vectorize.errors import DeviceError
from gte_vectorize.model.spec import ModelSpec

LENGTHS = (3, 16, 17, 33, 65, 130)
"""One for each way that attention has of cutting a passage into tiles."""

ALIKE = {"fp32": 0.99999, "fp16": 0.999, "bf16": 0.99}
"""Lowest cosine that passes, by dtype. A healthy device is far above, a broken kernel or compiler far below."""


@dataclass(frozen=True, slots=True)
class Canary:
    """The passages, their vectors on the device that runs, float32[len(LENGTHS), dim], and the sum of its weights."""

    passages: Passages
    vectors: Float32
    weights: int

    @property
    def digest(self) -> str:
        """SHA-256 of the vectors' bits, in hex."""
        return hashlib.sha256(self.vectors.tobytes()).hexdigest()


def ask(encoder: Encoder, spec: ModelSpec, *, device: str, dtype: str) -> Canary:
    """The device's own answer. DeviceError: it is not the model's. A CPU has nobody else to ask."""
    passages = _passages(spec)
    (answer,) = encoder.stream(batches_for(encoder, [passages]))
    if device != "cpu":
        rows = np.arange(len(passages.lengths), dtype=np.int32)
        expected = in_fp32(spec, torch.device("cpu"))(TokenBatch(passages, passages.ids, passages.lengths, rows, True))
        # Of two vectors of length 1, or two zeros.
        cosine = 1 - np.square(answer.vectors - expected).sum(axis=1) / 2
        if not (cosine >= ALIKE[dtype]).all():
            raise DeviceError(
                f"the GPU does not compute what the model says: cosine {cosine.min():.6f} with the same texts in fp32 "
                "on the CPU; try --dtype fp32, another driver or another GPU"
            )
    return Canary(passages, answer.vectors, encoder.weights_sum())


def after_every_task(windows: Iterable[Passages], canary: Canary) -> Iterator[Passages]:
    """The windows, and the canary's behind the last one of each task."""
    for passages in windows:
        yield passages
        if passages.window.ends_task:
            yield canary.passages


def checked(windows: Iterable[EncodedWindow], encoder: Encoder, canary: Canary) -> Iterator[EncodedWindow]:
    """The windows without the canary's. DeviceError: it was answered differently, or the weights are not the same."""
    for window in windows:
        if window.passages is not canary.passages:
            yield window
        elif not _same(window.vectors, canary.vectors, encoder) or encoder.weights_sum() != canary.weights:
            raise DeviceError(
                "the device gave another answer to a question it was asked before: it computes wrongly. What it "
                "computed since is thrown away; run the same command again, on another device if this comes back"
            )


def _same(vectors: Float32, expected: Float32, encoder: Encoder) -> bool:
    """Padded, a vector's last bits may follow the size of its batch, which shrinks when memory runs out."""
    if encoder.layout == "packed":
        return np.array_equal(vectors, expected)
    return bool((np.square(vectors - expected).sum(axis=1) / 2 < 1e-4).all())


def _passages(spec: ModelSpec) -> Passages:
    lengths = np.minimum(LENGTHS, spec.tokenizer.max_length).astype(np.int32)
    count, vocabulary = len(lengths), int(spec.config["vocab_size"])
    # The special tokens, padding among them, come first in every vocabulary.
    ids = np.random.default_rng(0).integers(vocabulary // 2, vocabulary, int(lengths.sum()), dtype=np.int32)
    window = Window(Task(0, Shard("canary", 0, 0, (count,)), 0, count), 0, count)
    nothing = np.zeros(count, np.uint8)
    no_hash = np.zeros((count, 16), np.uint8)
    return Passages(window, ids, lengths, nothing, nothing.astype(np.bool_), no_hash, window.rows)

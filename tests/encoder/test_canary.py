"""A device that changes its mind publishes nothing it computed since it was last right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import as_passages, random_passages

from gte_vectorize.batch import EncodedWindow, Passages, Shard, Task, Window
from gte_vectorize.encoder.canary import LENGTHS, after_every_task, ask, checked
from gte_vectorize.encoder.cpu import CpuEncoder
from gte_vectorize.encoder.encoder import open_encoder
from gte_vectorize.encoder.forward import PackedForward, _bits_sum
from gte_vectorize.errors import DeviceError
from gte_vectorize.model.spec import load_model


def in_task(passages: Passages, task: Task, first_row: int) -> Passages:
    rows = len(passages.lengths)
    return Passages(
        Window(task, first_row, rows),
        passages.ids,
        passages.lengths,
        passages.status,
        passages.truncated,
        passages.text_hash,
        Window(task, first_row, rows).rows,
    )


def test_the_canary_comes_behind_the_last_window_of_each_task(tiny_model: Callable[..., Path]) -> None:
    spec = load_model(str(tiny_model("bert")))
    with open_encoder(spec, device="cpu", dtype="fp32") as encoder:
        canary = ask(encoder, spec, device="cpu", dtype="fp32")
    shard = Shard("a", 1, 0, (5,))
    tasks = [Task(0, shard, 0, 4), Task(1, shard, 4, 1), Task(2, shard, 5, 0)]
    two, one, none = (as_passages(random_passages([5] * count)) for count in (2, 1, 0))
    windows = [
        in_task(two, tasks[0], 0),
        in_task(two, tasks[0], 2),
        in_task(one, tasks[1], 4),
        in_task(none, tasks[2], 5),
    ]
    seen = [passages is canary.passages for passages in after_every_task(windows, canary)]
    assert seen == [False, False, True, False, True, False, True]
    assert len(canary.vectors) == len(LENGTHS)
    assert np.allclose(np.linalg.norm(canary.vectors, axis=1), 1)


@pytest.mark.parametrize("what", ["answer", "weights"])
def test_a_flipped_bit_is_a_device_error_before_the_next_window(tiny_model: Callable[..., Path], what: str) -> None:
    spec = load_model(str(tiny_model("bert")))
    with open_encoder(spec, device="cpu", dtype="fp32") as encoder:
        canary = ask(encoder, spec, device="cpu", dtype="fp32")
    nothing = as_passages(random_passages([5]))
    window = EncodedWindow(nothing, np.ones((1, 64), np.float32), np.zeros(1, np.uint8))
    right = EncodedWindow(canary.passages, canary.vectors.copy(), np.zeros(len(LENGTHS), np.uint8))
    wrong = EncodedWindow(canary.passages, canary.vectors.copy(), np.zeros(len(LENGTHS), np.uint8))
    passed = checked([window, right, window, wrong, window], encoder, canary)
    assert [next(passed), next(passed)] == [window, window]
    if what == "answer":
        wrong.vectors.view(np.uint32)[3, 17] ^= 1  # the last bit of one number
    else:
        assert isinstance(encoder, CpuEncoder)
        assert isinstance(encoder._forward, PackedForward)
        words = encoder._forward.bert.words
        words.view(torch.int32)[7, 11] ^= 1  # of a word that no canary holds
    with pytest.raises(DeviceError, match="computes wrongly"):
        next(passed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_any_bit_of_any_tensor_counts(dtype: torch.dtype) -> None:
    for tensor in (torch.ones(11), torch.ones(2, 3, 5), torch.ones(9)[1:], torch.ones(4, 6).t(), torch.ones(())):
        weights = tensor.to(dtype) if dtype != torch.float32 else tensor
        before = int(_bits_sum(weights))
        changed = weights.clone(memory_format=torch.contiguous_format)
        changed.reshape(-1).view(torch.uint8)[-1] ^= 1
        assert int(_bits_sum(weights)) == before
        assert int(_bits_sum(changed)) != before

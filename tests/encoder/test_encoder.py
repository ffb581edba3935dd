"""What is not the encoder's fault is said as such: a full or lost GPU, a machine without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gte_vectorize
from gte_vectorize.encoder import fused
from gte_vectorize.encoder.encoder import open_encoder, resolve_device, resolve_dtype
from gte_vectorize.encoder.kernels import choose_kernels, varlen_attention
from gte_vectorize.errors import ConfigError, ModelError, TemporaryError
from gte_vectorize.model.spec import load_model


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "--batch-tokens"),
        (torch.AcceleratorError("ECC", 1), "GPU failed"),
    ],
)
def test_a_full_or_lost_gpu_is_worth_another_run(tiny_model: Callable[..., Path], error: Exception, said: str) -> None:
    spec = load_model(str(tiny_model("bert")))
    with pytest.raises(TemporaryError, match=said), open_encoder(spec, device="cpu", dtype="fp32"):
        raise error


@pytest.mark.parametrize("error", [subprocess.CalledProcessError(1, "gcc"), ImportError("triton"), ValueError("ptxas")])
def test_without_triton_slower_kernels_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(fused, "fused_kernels", fail)
    kernels = choose_kernels("gelu", head_size=64, device=torch.device("cuda"), dtype=torch.float16)
    assert kernels.attend is varlen_attention
    assert "slower kernels are used" in caplog.text


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="hidden_act 'mish'"):
        choose_kernels("mish", head_size=64, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        resolve_device("cuda")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_cpu_runs_fp32_and_says_so(caplog: pytest.LogCaptureFixture, dtype: str) -> None:
    assert resolve_dtype("auto", "cpu") == "fp32"
    assert not caplog.records
    assert resolve_dtype(dtype, "cpu") == "fp32"
    assert dtype in caplog.text


def test_what_a_cpu_can_do_is_part_of_its_kind() -> None:
    """Its bits follow from it, so a run that was begun on another kind is not gone on with."""
    program = "from gte_vectorize.encoder.encoder import describe_device; print(describe_device('cpu'))"
    environment = {**os.environ, "PYTHONPATH": str(Path(gte_vectorize.__file__).parents[1])}
    kinds = {
        subprocess.check_output([sys.executable, "-c", program], env=environment | more, text=True)
        for more in ({}, {"ATEN_CPU_CAPABILITY": "default"})
    }
    assert "cpu (DEFAULT)\n" in kinds
    assert len(kinds) == 1 + (torch.backends.cpu.get_cpu_capability() != "DEFAULT")

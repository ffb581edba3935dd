"""Tiny models for the tests of the encoder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_tiny

# Read when a kernel is defined, so before the first import of the package's kernels.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(family, pooling="mean", **config)` → its folder; made once per session."""
    made: dict[str, Path] = {}

    def make(family: str, pooling: str = "mean", **overrides: Any) -> Path:
        key = json.dumps([family, pooling, overrides])
        if key not in made:
            made[key] = save_tiny(tmp_path_factory.mktemp(family), family, pooling, **overrides)
        return made[key]

    return make

"""The import law: what each part of the package may load. Each import is made in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gte_vectorize

ROOT = Path(gte_vectorize.__file__).parents[1]
HEAVY = {"torch", "transformers", "datasets", "pandas", "huggingface_hub", "ray"}
ARROW = {"pyarrow"}


def loaded_by(module: str) -> set[str]:
    """Top-level names of what an import loads."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in result.stdout.split()}


def modules(room: str) -> list[str]:
    names = sorted(path.stem for path in (ROOT / "gte_vectorize" / room).glob("*.py"))
    return [f"gte_vectorize.{room}.{name}" for name in names if name != "__init__"]


@pytest.mark.parametrize("room", ["model", "reader", "tokens", "writer", "store", "reuse"])
def test_no_room_but_the_encoder_loads_torch(room: str) -> None:
    assert modules(room)
    assert loaded_by(", ".join(modules(room))) & HEAVY == set()


@pytest.mark.parametrize(
    "module",
    ["gte_vectorize", "gte_vectorize.batch", "gte_vectorize.errors", "gte_vectorize.tokens.batcher"],
)
def test_the_shared_words_load_next_to_nothing(module: str) -> None:
    assert loaded_by(module) & (HEAVY | ARROW | {"tokenizers"}) == set()


def test_the_parent_of_the_workers_does_not_load_what_they_do() -> None:
    assert loaded_by("gte_vectorize.tokens.workers") & (HEAVY | ARROW) == set()

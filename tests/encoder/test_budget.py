"""The token budget: what fits, what is about as fast as the fastest, and a cache that can be anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gte_vectorize.encoder import budget
from gte_vectorize.model.spec import ModelSpec, load_model

CURVE = {8192: 720.0, 16384: 890.0, 24576: 960.0, 32768: 990.0, 49152: 1000.0}


GIB = 1 << 30


@pytest.fixture
def spec(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """Of a model, on a card that is measured as CURVE says, once."""
    monkeypatch.setattr(budget, "_cache_file", lambda: tmp_path / "budgets.json")
    monkeypatch.setattr(budget, "_key", lambda *_: "card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    measured: list[int] = []

    def rate(forward: object, spec: object, tokens: int, device: object) -> float:
        if tokens in measured:
            raise AssertionError(f"{tokens} tokens are measured twice")
        measured.append(tokens)
        return CURVE[tokens]

    monkeypatch.setattr(budget, "_rate", rate)
    return load_model(str(tiny_model("bert")))


def chosen(spec: ModelSpec, free: int, total: int, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    return budget.choose_budget(None, spec, torch.device("cuda"), torch.float16)  # type: ignore[arg-type]


def test_a_big_card_is_not_measured(spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(spec, 80 * GIB, 80 * GIB, monkeypatch) == budget.BIG_BUDGET
    assert list(tmp_path.glob("budgets.json")) == []


def test_a_smaller_card_takes_the_fastest_that_fits(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(spec, 20 * GIB, 24 * GIB, monkeypatch) == 49152
    room = budget.RESERVE + budget.activation_bytes(spec, 16384, 2)
    assert chosen(spec, room, 24 * GIB, monkeypatch) == 16384
    assert chosen(spec, room - 1, 24 * GIB, monkeypatch) == 8192
    assert chosen(spec, 0, 80 * GIB, monkeypatch) == 8192


def test_a_budget_for_which_memory_is_gone_is_not_taken(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = budget._rate

    def cramped(forward: object, spec: ModelSpec, tokens: int, device: torch.device) -> float:
        if tokens > 24576:
            raise torch.OutOfMemoryError("no more")
        return rate(None, spec, tokens, device)  # type: ignore[arg-type]

    monkeypatch.setattr(budget, "_rate", cramped)
    assert chosen(spec, 20 * GIB, 24 * GIB, monkeypatch) == 24576


def test_measured_curves_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "budgets.json"
    assert budget._read(path) == {}
    budget._write(path, {"card": CURVE})
    assert budget._read(path) == {"card": CURVE}
    assert [file.name for file in path.parent.iterdir()] == ["budgets.json"]


@pytest.mark.parametrize(
    "found", ["", "[]", "7", '{"card": 3}', '{"card": {"x": 1}}', '{"card": {"8192": null}}', "\udcff"]
)
def test_a_cache_that_is_not_ours_is_measured_again(tmp_path: Path, found: str) -> None:
    path = tmp_path / "budgets.json"
    path.write_bytes(found.encode(errors="surrogateescape"))
    assert budget._read(path) == {}


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    budget._write(tmp_path / "file" / "budgets.json", {"card": CURVE})


def test_a_user_without_a_home_has_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    budget._write(budget._cache_file(), {"card": CURVE})
    assert budget._read(budget._cache_file()) == {}
    assert list(tmp_path.iterdir()) == []

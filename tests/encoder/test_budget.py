"""The token budget: what fits, what is about as fast as the fastest, and a cache that can be anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from gte_vectorize.encoder import budget

CURVE = {8192: 720.0, 16384: 890.0, 24576: 960.0, 32768: 990.0, 49152: 1000.0}


def test_the_smallest_budget_that_is_about_the_fastest_is_taken() -> None:
    assert budget.fastest(CURVE, list(CURVE)) == 32768
    assert budget.fastest(CURVE, [8192, 16384]) == 16384
    assert budget.fastest(dict.fromkeys(CURVE, 5.0), list(CURVE)) == 8192


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

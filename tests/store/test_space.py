"""A disk that is full when a part is to begin: the run waits for room, and not for ever."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_run import run

from gte_vectorize.errors import TemporaryError
from gte_vectorize.store import space


class Disk:
    """Has room at the start, then none for `looks` looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks, self.seen = looks, 0

    def usage(self, path: object) -> SimpleNamespace:
        self.seen += 1
        return SimpleNamespace(free=0 if 2 <= self.seen < 2 + self.looks else 1 << 40)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(space.time, "sleep", slept.append)
    return slept


def test_room_that_is_made_lets_the_run_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, naps: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = run(tmp_path / "undisturbed")
    monkeypatch.setattr(shutil, "disk_usage", Disk(looks=7).usage)
    assert run(tmp_path / "out") == undisturbed
    assert len(naps) == 7
    assert caplog.text.count("is full: waiting for 64 MiB of room") == 1
    for part in (tmp_path / "undisturbed").glob("part-*"):
        assert (tmp_path / "out" / part.name).read_bytes() == part.read_bytes()


def test_nobody_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, naps: list[float]) -> None:
    run(tmp_path / "out", tasks=1)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    monkeypatch.setattr(shutil, "disk_usage", Disk(looks=1 << 30).usage)
    with pytest.raises(TemporaryError, match=r"no room for the next part: 0 MiB are free at .* it takes 64 MiB"):
        run(tmp_path / "out")
    assert sum(naps) == space.PATIENCE
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before

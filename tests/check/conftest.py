from __future__ import annotations

from pathlib import Path

import pytest
from small_output import OUTPUTS, copy_outputs, embed, unit_windows
from store import small_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both kinds of output, by a real model."""
    folder = tmp_path_factory.mktemp("whole")
    for output in OUTPUTS:
        embed(folder, output)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of them to damage."""
    return copy_outputs(whole, tmp_path)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`small_run.run` makes vectors of norm 1, as every run does."""
    monkeypatch.setattr(small_run, "windows", unit_windows)

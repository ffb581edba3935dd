from __future__ import annotations

import pytest
from small_output import unit_windows
from store import small_run


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`small_run.run` makes vectors of norm 1, as every run does."""
    monkeypatch.setattr(small_run, "windows", unit_windows)

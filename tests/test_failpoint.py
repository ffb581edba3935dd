"""Failpoints: none unless asked for, each at its hit, and a slip of the pen refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gte_vectorize import ConfigError, failpoint

PACKAGE = Path(failpoint.__file__).parent


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch):
    def ask(text: str) -> None:
        monkeypatch.setenv(failpoint.VARIABLE, text)
        failpoint._asked.cache_clear()
        failpoint._hits.clear()

    yield ask
    failpoint._asked.cache_clear()


def test_every_point_is_somewhere_and_has_a_name():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    assert {name for source in sources for name in re.findall(r'failpoint\("([^"]+)"\)', source)} == set(
        failpoint.POINTS
    )


def test_nothing_happens_unasked(asked):
    asked("")
    for point in failpoint.POINTS:
        failpoint.failpoint(point)


def test_an_action_happens_at_its_hit_alone(asked):
    asked("publish.sync=eio@2,publish.link=raise@1,lock=sleep:0.05@1")
    failpoint.failpoint("publish.sync")
    with pytest.raises(OSError, match="Input/output error"):
        failpoint.failpoint("publish.sync")
    failpoint.failpoint("publish.sync")
    with pytest.raises(RuntimeError):
        failpoint.failpoint("publish.link")
    started = time.monotonic()
    failpoint.failpoint("lock")
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("publish.lnik=kill@1", "no point is called 'publish.lnik'; did you mean 'publish.link'?"),
        ("publish.link=kil@1", "no action is called 'kil'; did you mean 'kill'?"),
        ("publish.link=zzz@1", "no action is called 'zzz'; there are eio"),
        ("publish.link=kill", "is not POINT=ACTION@N"),
        ("publish.link=kill@0", "is not POINT=ACTION@N"),
        ("publish.link=sleep@1", "is not POINT=ACTION@N"),
        ("publish.link=eio:3@1", "is not POINT=ACTION@N"),
        ("publish.link=kill@1,", "is not POINT=ACTION@N"),
        (" ", "is not POINT=ACTION@N"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        failpoint.parse(text)


def test_the_command_refuses_a_slip_before_any_work(tmp_path):
    command = [sys.executable, "-m", "gte_vectorize", "corpus.parquet", "-o", "out"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), failpoint.VARIABLE: "publish.lnik=kill@1"}
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "did you mean 'publish.link'?" in ended.stderr
    assert list(tmp_path.iterdir()) == []

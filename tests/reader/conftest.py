"""Parquet files in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a Parquet file below the test's folder → its path. Columns by name, or a table."""

    def write_parquet(name: str, columns: dict[str, Any] | pa.Table | None = None, **options: Any) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": ["a", "b"]} if columns is None else columns), path, **options)
        return str(path)

    return write_parquet

"""An S3 server on this machine, and Parquet files in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

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


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket named `corpora`, which credentials in the environment open."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket = boto3.resource("s3", endpoint_url=s3_server, region_name="us-east-1").create_bucket(Bucket="corpora")
    yield bucket
    bucket.objects.delete()
    bucket.delete()

"""What stands in a bucket or a folder, to compare the two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ["out", "out.parquet"]


@contextmanager
def another_machine(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
        yield


def objects(bucket: Any) -> dict[str, bytes]:
    """All but the lease, which like a local lock is not part of the output."""
    keys = [found.key for found in bucket.objects.all()]
    return {key: bucket.Object(key).get()["Body"].read() for key in keys if not key.endswith("/lease.json")}


def visible(bucket: Any) -> dict[str, bytes]:
    """What stands under final names, or in the state of a directory."""
    found = objects(bucket).items()
    return {key: data for key, data in found if key.startswith("out")}


def states(bucket: Any) -> dict[str, tuple[str, Any]]:
    return {found.key: (found.e_tag, found.last_modified) for found in bucket.objects.all()}


def uploads(bucket: Any) -> set[str]:
    return {upload.id for upload in bucket.multipart_uploads.all()}


def local_files(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}

"""The one way a file gets its final name: written aside, read back, synced, then linked where nothing stood before.

A reader sees a whole file or none, at any instant and after any crash. A second run that publishes the same bytes
adopts what is there; other bytes are never replaced unasked.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gte_vectorize.errors import OutputError, TemporaryError, VectorizeError
from gte_vectorize.failpoint import failpoint
from gte_vectorize.store.files import Damaged
from gte_vectorize.writer.part import create_file, storage_errors
from gte_vectorize.writer.schema import count_documents


@dataclass(frozen=True, slots=True)
class Content:
    """What a Parquet file of ours holds, read back from its bytes. `status` maps each status that occurs to rows."""

    bytes: int
    sha256: str
    rows: int
    tokens: int
    truncated: int
    status: dict[str, int]


def make_folder(path: Path) -> None:
    """A folder that only its owner can read, with those above it where they are missing, and their names synced."""
    if not path.is_dir():
        make_folder(path.parent)
        failpoint("folder.make")
        path.mkdir(mode=0o700, exist_ok=True)
        _sync(path.parent)


@contextmanager
def scratch(tmp: Path) -> Iterator[Path]:
    """A private folder under `tmp`, gone with all it holds on leaving."""
    folder = tmp / uuid.uuid4().hex
    with storage_errors(tmp):
        make_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(temp: Path, final: Path, *, replace: bool = False) -> None:
    """Sync `temp` and give it its final name, atomically and for good.

    A file that stands there already is adopted if its bytes are the same, replaced if `replace`, and else an
    OutputError. TemporaryError: the storage failed.
    """
    with storage_errors(final):
        failpoint("publish.sync")
        _sync(temp)
        failpoint("publish.link")
        if replace:
            temp.replace(final)
        else:
            try:
                os.link(temp, final, follow_symlinks=False)
            except FileExistsError:
                if file_size(final) is None or sha256(final) != sha256(temp):
                    raise in_the_way(final) from None
        failpoint("publish.syncdir")
        _sync(final.parent)


def in_the_way(final: Path) -> OutputError:
    return OutputError(
        f"{str(final)!r} exists and holds something else than this run makes; move it away, or choose another output"
    )


def settle(folder: Path) -> None:
    """Sync the names in a folder, which may be missing."""
    if folder.is_dir():
        _sync(folder)


def publish_bytes(data: bytes, final: Path, tmp: Path, publish: Callable[[Path, Path], None] = publish) -> None:
    """Publish a small file: the plan, a record, the manifest."""
    with scratch(tmp) as folder:
        temp = folder / final.name
        with storage_errors(final), create_file(temp) as file:
            failpoint("publish.write")
            file.write(data)
        publish(temp, final)


def read_back(path: Path, schema: pa.Schema, num_rows: int) -> Content:
    """Read a whole Parquet file and check it: page checksums, columns, rows, and a usable vector in each ok row.

    Damaged: the bytes are not what was written. VectorizeError: what was written is wrong.
    """
    status: Counter[str] = Counter()
    rows = documents = tokens = truncated = 0
    failpoint("part.readback")
    for table in read_tables(path):
        if not table.schema.equals(schema, check_metadata=True):
            raise _wrong(path, "its columns or metadata are not those of this run")
        _check_vectors(path, table)
        rows += table.num_rows
        documents += count_documents(table)
        tokens += pc.sum(table["n_tokens"]).as_py() or 0
        truncated += pc.sum(table["truncated"]).as_py() or 0
        for count in pc.value_counts(table["status"]).to_pylist():
            status[count["values"]] += count["counts"]
    if documents != num_rows:
        raise _wrong(path, f"it holds {documents} rows instead of {num_rows}")
    return Content(path.stat().st_size, sha256(path), rows, tokens, truncated, dict(status))


def read_tables(path: Path) -> Iterator[pa.Table]:
    """A table without rows, for its schema, then one for each row group.

    Damaged: the file is no whole Parquet file. TemporaryError: memory ran out. OSError: the storage failed.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file.schema_arrow.empty_table()
            for group in range(file.num_row_groups):
                yield file.read_row_group(group)
    except Exception as error:  # A damaged footer takes pyarrow to no end of places.
        if getattr(error, "errno", None) is not None:
            raise
        if isinstance(error, MemoryError):
            raise TemporaryError(f"{path.name!r} cannot be read: memory ran out; run the same command again") from error
        raise Damaged(
            f"{path.name!r} cannot be read back as it was written; it is discarded: "
            "check disk and memory, then run the same command again"
        ) from error


def file_size(path: Path) -> int | None:
    """Bytes of a regular file; None for anything else or nothing."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_vectors(path: Path, table: pa.Table) -> None:
    embedding = table["embedding"].combine_chunks()
    if not embedding.is_valid().equals(pc.equal(table["status"], "ok").combine_chunks()):
        raise _wrong(path, "a row is ok without a vector, or has a vector without being ok")
    vectors = embedding.flatten().to_numpy().reshape(-1, embedding.type.list_size)
    squares = np.einsum("ij,ij->i", vectors, vectors)
    if not (np.isfinite(squares) & (squares > 0)).all():
        raise _wrong(path, "an ok row has a zero vector, or one that is not finite")


def _wrong(path: Path, what: str) -> VectorizeError:
    return VectorizeError(f"{path.name!r} is discarded: {what}. This is a bug: please report it")


def _sync(path: Path) -> None:
    """Once: after a failed fsync the kernel may have dropped the data, and a second one would call that a success."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

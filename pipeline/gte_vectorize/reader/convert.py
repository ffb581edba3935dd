"""JSON Lines, CSV, TSV and plain text → Parquet, so that everything behind sees only Parquet.

The `datasets` library streams the lines, with nothing left in its caches. What a line means is decided here: its own
JSON loader turns text that looks like a date into timestamps and mixed columns into quoted JSON, and its CSV loader
turns "NA" into null and 007 into 7; a corpus must come through unchanged.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from gte_vectorize.errors import InputError, TemporaryError
from gte_vectorize.reader.storage import is_remote, open_store, reading
from gte_vectorize.store.publish import make_folder, publish

_ENDING = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|txt)(\.gz|\.zst)?$", re.I)
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_SOURCE = b"gte_vectorize.source"
_PREFIX = "tmp"

# Lines that are Python objects at once; few, because a line may be a book.
_LINES = 64
_GROUP_ROWS, _GROUP_BYTES = 65536, 64 << 20
_MAX_FIELD = 256 << 20


def is_convertible(uri: str) -> bool:
    """Whether the name says JSON Lines, CSV, TSV or plain text, possibly compressed."""
    return _ENDING.search(uri) is not None


def to_parquet(uri: str, spool: Path) -> Path:
    """Convert the file into the folder `spool`, or find it there, converted before from the same size and time.

    Rows keep their order. Text files have one row a line, in the column `text`; CSV columns are all strings; line ends
    become \\n. The result carries the source's modification time, so that converting again makes the same shard.
    Raises InputError with the line at which the file cannot be read, TemporaryError if it changes meanwhile or another
    run is converting into `spool`.
    """
    source = _describe(uri)
    # Errors about its rows and columns name this file, so its name must tell the source.
    target = spool / f"{Path(uri).name[:40]}-{hashlib.blake2b(uri.encode(), digest_size=8).hexdigest()}.parquet"
    remove_leftovers(spool)
    if _is_made_from(target, source):
        return target
    with reading(str(spool), "making the folder"):
        make_folder(spool)
    with reading(uri, "converting to Parquet"), _alone(spool), TemporaryDirectory(dir=spool, prefix=_PREFIX) as scratch:
        made = Path(scratch, "made.parquet")
        _write(_tables(uri, Path(scratch)), made, {_SOURCE: source})
        if _describe(uri) != source:
            raise TemporaryError(f"{uri!r} changed while it was converted; run the same command again")
        os.utime(made, ns=(json.loads(source)["modified_ns"],) * 2)
        publish(made, target, replace=True)
    return target


def converted_from(target: str) -> str | None:
    """What a file of the spool was made of; None if it is gone or cannot be read."""
    with suppress(OSError, pa.ArrowException, KeyError, TypeError, ValueError):
        return str(json.loads(pq.read_schema(target).metadata[_SOURCE])["uri"])
    return None


def remove_leftovers(spool: Path) -> None:
    """Remove what conversions that were killed left in `spool`: texts. One that is running stays."""
    if left := [path for path in spool.glob(f"{_PREFIX}*") if path.is_dir()]:
        with suppress(TemporaryError), _alone(spool):
            for folder in left:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _alone(spool: Path) -> Iterator[None]:
    """One conversion at a time, so that whoever holds the lock knows every unfinished one for dead."""
    try:
        held = FileLock(spool / "lock", timeout=0, mode=0o600).acquire()
    except Timeout:
        raise TemporaryError(
            f"another run is converting its inputs in {str(spool)!r}; when it has ended, run the same command again"
        ) from None
    with held:
        yield


def _describe(uri: str) -> bytes:
    store, path = open_store(uri)
    with reading(uri):
        info = store.get_file_info(path)
    return json.dumps({"uri": uri, "size": info.size, "modified_ns": info.mtime_ns or 0}).encode()


def _is_made_from(target: Path, source: bytes) -> bool:
    try:
        metadata = pq.read_schema(target).metadata or {}
    except (OSError, pa.ArrowException):
        return False
    return bool(metadata.get(_SOURCE) == source)


def _write(tables: Iterator[pa.Table], made: Path, metadata: dict[bytes, bytes]) -> None:
    first = next(tables)
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    schema = first.schema.with_metadata(metadata)
    with os.fdopen(descriptor, "wb") as file, pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        group, rows, size = [first], first.num_rows, first.nbytes
        for table in tables:
            if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
                writer.write_table(pa.concat_tables(group).replace_schema_metadata(metadata))
                group, rows, size = [], 0, 0
            group.append(table)
            rows, size = rows + table.num_rows, size + table.nbytes
        writer.write_table(pa.concat_tables(group).replace_schema_metadata(metadata))


def _tables(uri: str, scratch: Path) -> Iterator[pa.Table]:
    """The file as tables of one schema: at least one, which may be empty."""
    ending = _ENDING.search(uri)
    kind = ending[1].lower() if ending else "txt"
    read_lines = partial(_lines, uri, _plain_copy(uri, scratch), scratch)
    if kind in ("csv", "tsv"):
        return _csv_tables(uri, chain.from_iterable(read_lines()), "," if kind == "csv" else "\t")
    return _text_tables(read_lines()) if kind == "txt" else _json_tables(uri, read_lines)


def _plain_copy(uri: str, scratch: Path) -> Path:
    """A local, plain file of a harmless name: a link where the source is such a file, else a passing copy."""
    store, path = open_store(uri)
    compression = next((name for ending, name in _COMPRESSION.items() if path.lower().endswith(ending)), None)
    copy = scratch / "lines.txt"
    if compression is None and not is_remote(uri):
        copy.symlink_to(path)
        return copy
    descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with store.open_input_stream(path, compression=compression) as source, os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    return copy


def _lines(uri: str, path: Path, scratch: Path) -> Iterator[list[str]]:
    """The lines with their ends, some at a time."""
    from datasets import Dataset

    stream = Dataset.from_text(
        glob.escape(str(path)), streaming=True, cache_dir=str(scratch), encoding="utf-8-sig", keep_linebreaks=True
    )
    try:
        for batch in stream.with_format("arrow").iter(batch_size=_LINES):
            yield batch["text"].to_pylist()
    except UnicodeDecodeError:
        raise InputError(f"{uri!r} is not valid UTF-8 text; convert it, for instance with iconv -t UTF-8") from None


def _text_tables(batches: Iterable[list[str]]) -> Iterator[pa.Table]:
    yield pa.table({"text": pa.array([], pa.string())})
    for lines in batches:
        yield pa.table({"text": pa.array([line.removesuffix("\n") for line in lines], pa.string())})


def _csv_tables(uri: str, lines: Iterator[str], delimiter: str) -> Iterator[pa.Table]:
    csv.field_size_limit(max(csv.field_size_limit(), _MAX_FIELD))
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next((row for row in rows if row), [])
        if not header or len(set(header)) < len(header):
            raise InputError(f"{uri!r}: the first line must name the columns, each by a name of its own")
        whole = (row for row in rows if row and _has_length(uri, rows.line_num, row, len(header)))
        schema = pa.schema([(name, pa.string()) for name in header])
        yield schema.empty_table()
        while batch := list(islice(whole, _LINES)):
            yield pa.table([pa.array(column, pa.string()) for column in zip(*batch, strict=True)], schema=schema)
    except csv.Error as error:
        raise InputError(f"{uri!r}, line {rows.line_num}: not CSV: {error}") from None


def _has_length(uri: str, line: int, row: list[str], columns: int) -> bool:
    if len(row) != columns:
        raise InputError(f"{uri!r}, line {line}: {len(row)} values where the first line names {columns} columns")
    return True


def _json_tables(uri: str, read_lines: Callable[[], Iterator[list[str]]]) -> Iterator[pa.Table]:
    """Two passes: a column may be null, or whole numbers only, for as long as it likes before its type shows."""
    schema = pa.schema([])
    for rows in _json_rows(uri, read_lines()):
        names = dict.fromkeys(chain.from_iterable(rows))
        for name in names:
            column = [row.get(name) for row in rows]
            with _one_type(uri, name):
                found = pa.schema([(name, pa.infer_type(column))])
                schema = pa.unify_schemas([schema, found], promote_options="permissive")
    if not schema.names:
        raise InputError(f"{uri!r} holds no rows, so its columns are unknown; leave it out")
    for rows in _json_rows(uri, read_lines()):
        arrays = []
        for field in schema:
            with _one_type(uri, field.name):
                arrays.append(_json_column([row.get(field.name) for row in rows], field.type))
        yield pa.table(arrays, schema=schema)


def _json_rows(uri: str, batches: Iterable[list[str]]) -> Iterator[list[dict[str, Any]]]:
    number = 0
    for lines in batches:
        rows = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise InputError(
                    f"{uri!r}, line {number}: not a JSON object; each line must be (jq -c '.[]' makes lines of a list)"
                )
            rows.append(row)
        if rows:
            yield rows


def _json_column(values: list[Any], type_: pa.DataType) -> pa.Array:
    if pa.types.is_floating(type_) and any(isinstance(value, bool) for value in values):
        raise pa.ArrowTypeError("a truth value among numbers")
    try:
        return pa.array(values, type_)
    except UnicodeEncodeError:
        if type_ != pa.string():
            raise
    # Half of a surrogate pair is legal JSON but no Unicode. Its bytes travel on, and the row gets the status utf8.
    raw = pa.array([None if value is None else value.encode("utf-8", "surrogatepass") for value in values], pa.binary())
    return pa.Array.from_buffers(type_, len(raw), raw.buffers(), raw.null_count)


@contextmanager
def _one_type(uri: str, name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        # The library's own message may quote the value.
        raise InputError(
            f"{uri!r}, column {name!r}: values of different types, or one that its type cannot hold; give the column "
            f"one type, or delete it, and start again"
        ) from None

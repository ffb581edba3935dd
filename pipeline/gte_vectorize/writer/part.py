"""A task's windows → one Parquet file whose bytes depend on the rows alone, not on how they arrived.

A row group closes after `group_rows(dim)` rows, or with the row that brings its pass-through columns to 64 MiB; both
are counted from the task's first row, so the windows' sizes leave no trace. The file is written under a temporary
name; whoever owns that name publishes it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gte_vectorize.batch import EncodedWindow, Passages, Status, Task
from gte_vectorize.errors import OutputError, TemporaryError, VectorizeError
from gte_vectorize.failpoint import failpoint
from gte_vectorize.writer.schema import added_columns, is_chunked

GROUP_BYTES = 64 << 20
_MAX_GROUP_ROWS = 1 << 17
_TEMPORARY = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ENOLCK, errno.EMFILE, errno.ENFILE),
    errno.ENOENT,  # another run, which the lock did not keep out, has cleared the working folder
}
_REFUSED = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EMLINK, errno.EXDEV),
    *(errno.ENOTSUP, errno.ENOSYS),
}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """OSError → TemporaryError (full or failing storage) or OutputError (not allowed, or a path that cannot be)."""
    try:
        yield
    except OSError as error:
        if error.errno in _TEMPORARY:
            raise TemporaryError(
                f"cannot write {str(path)!r}: {error.strerror}; what was published is kept: "
                "make room or repair the storage, then run the same command again"
            ) from error
        if error.errno in _REFUSED:
            raise OutputError(
                f"cannot write {str(path)!r}: {error.strerror}; "
                "choose an output on a local file system that this user may write to"
            ) from error
        raise


def create_file(path: Path) -> BinaryIO:
    """A new file that only its owner can read. Fails if anything, a dangling link included, has the name."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")


def group_rows(dim: int) -> int:
    """Rows of a row group: the power of two whose vectors fill 32 to 64 MiB, and at most 131,072."""
    return min(1 << ((GROUP_BYTES // (4 * dim)).bit_length() - 1), _MAX_GROUP_ROWS)


def parquet_writer(file: BinaryIO, schema: pa.Schema) -> pq.ParquetWriter:
    """The one set of Parquet settings: page checksums, no dictionary, statistics or compression on vectors."""
    sample = pa.BufferOutputStream()
    pq.write_metadata(schema, sample)
    columns = pq.ParquetFile(sample.getvalue()).schema
    leaves = [columns.column(index).path for index in range(len(columns))]
    flat = [field for field in schema if not pa.types.is_nested(field.type) and field.name != "text_hash"]
    strings = [field.name for field in flat if _is_binary(field.type)]
    vectors = [leaf for leaf in leaves if leaf.startswith("embedding.")]
    others = [leaf for leaf in leaves if leaf not in vectors]
    return pq.ParquetWriter(
        file,
        schema,
        compression=dict.fromkeys(others, "zstd") | dict.fromkeys(vectors, "none"),
        compression_level=dict.fromkeys(others, 1),
        use_dictionary=strings,
        # Minimum and maximum of long texts and of vectors serve no query and have broken readers.
        write_statistics=[field.name for field in flat if field.name not in strings] + ["status"],
        write_page_checksum=True,
        store_schema=True,
    )


class PartWriter:
    """A task's part under the temporary name `path`, which must be free.

    Where rows are windows of documents, the column `text`, if it is copied, holds the window's text alone. Leaving by
    an exception removes the file before the Parquet writer could end it as a valid, shorter one.
    Memory: about four row groups (the rows gathered, their contiguous copy, levels and encoded pages) and a window.
    """

    def __init__(self, path: Path, schema: pa.Schema, task: Task, text: str | None = None) -> None:
        self._path = path
        self._schema = schema
        self._task = task
        added = added_columns(schema)
        self._copied = [field for field in schema if field.name not in added]
        self._chunked = is_chunked(schema)
        self._text = next((at for at, field in enumerate(self._copied) if self._chunked and field.name == text), None)
        self._last: list[pa.Array] = []  # the copied columns of the last row, whose document may go on
        self._dim: int = schema.field("embedding").type.list_size
        self._group: list[pa.RecordBatch] = []
        self._group_rows = 0
        self._group_bytes = 0
        self._rows = 0  # that have begun
        self._ended = 0

    def __enter__(self) -> Self:
        with storage_errors(self._path):
            failpoint("part.create")
            self._file = create_file(self._path)
        self._writer = parquet_writer(self._file, self._schema)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return self._discard()
        try:
            self._close()
        except BaseException:
            self._discard()
            raise

    def write(self, window: EncodedWindow, columns: Iterable[pa.RecordBatch] | None = None) -> None:
        """The next passages of the task, with the pass-through columns of the rows that begin with one of them (None if
        the output has none).

        Raises VectorizeError where rows are missing, too many or out of order, TemporaryError or OutputError where
        the storage fails.
        """
        passages = window.passages
        count, (first, rows) = len(passages.lengths), passages.begun
        if rows and first != self._rows:
            raise self._mismatch(f"a window begins with row {first}")
        added = _added(window, self._schema)
        if {len(column) for column in added} != {count} or window.vectors.shape[1] != self._dim:
            raise self._mismatch(f"a window of {count} passages holds {window.vectors.shape} vectors")
        begun, done = self._rows, 0
        for source in self._rows_of(columns, rows):
            if self._rows - begun > rows:
                break
            # Of the last row that was read, or of the next ones.
            end = int(np.searchsorted(passages.row, self._rows))
            if done < end:
                self._write_passages(passages, added, slice(done, end), source)
            done = end
        if done != count or self._rows - begun != rows:
            raise self._mismatch(f"a window of {rows} rows has {self._rows - begun} rows of pass-through columns")
        self._ended += passages.window.num_rows

    def _rows_of(self, columns: Iterable[pa.RecordBatch] | None, rows: int) -> Iterator[_Source]:
        """The copied columns of the rows, first of the one whose document goes on; `_rows` counts them."""
        if self._rows:
            yield _Source(self._rows - 1, self._last)
        if not self._copied:
            self._rows += rows
            yield _Source(self._rows - rows, [])
            return
        for batch in columns or ():
            arrays = [batch.column(field.name).cast(field.type) for field in self._copied]
            if batch.num_rows:
                self._rows += batch.num_rows
                yield _Source(self._rows - batch.num_rows, arrays)
                self._last = [array.slice(len(array) - 1) for array in arrays]

    def _write_passages(self, passages: Passages, added: list[pa.Array], span: slice, source: _Source) -> None:
        """A row group's worth at a time: a document's columns are repeated for each of its windows."""
        rows = passages.row[span] - source.first
        if not self._chunked:
            self._append([*source.arrays, *(column[span] for column in added)], source.arrays)
            return
        repeated = [array for at, array in enumerate(source.arrays) if at != self._text]
        ends = np.cumsum(_row_bytes(repeated, int(rows[-1]) + 1)[rows])
        first = 0
        while first < len(rows):
            before = int(ends[first - 1]) if first else 0
            end = max(first + 1, int(np.searchsorted(ends, before + GROUP_BYTES)))
            here = slice(span.start + first, span.start + end)
            arrays = [
                _windows_of(array, passages, here, source.first) if at == self._text else array.take(rows[first:end])
                for at, array in enumerate(source.arrays)
            ]
            self._append([*arrays, *(column[here] for column in added)], arrays)
            first = end

    def _append(self, columns: list[pa.Array], copied: list[pa.Array]) -> None:
        batch = pa.record_batch(columns, schema=self._schema)
        ends = np.concatenate(([0], np.cumsum(_row_bytes(copied, batch.num_rows))))
        first = 0
        while first < batch.num_rows:
            full = int(np.searchsorted(ends[1:], ends[first] + GROUP_BYTES - self._group_bytes)) + 1
            end = min(batch.num_rows, first + group_rows(self._dim) - self._group_rows, full)
            self._group.append(batch.slice(first, end - first))
            self._group_rows += end - first
            self._group_bytes += int(ends[end] - ends[first])
            if self._group_rows == group_rows(self._dim) or self._group_bytes >= GROUP_BYTES:
                self._flush()
            first = end

    def _flush(self) -> None:
        # Pages are cut where chunks end: one chunk per column, or the windows would show in the bytes.
        table = pa.Table.from_batches(self._group, self._schema).combine_chunks()
        self._group, self._group_rows, self._group_bytes = [], 0, 0
        with storage_errors(self._path):
            failpoint("part.write")
            self._writer.write_table(table, row_group_size=table.num_rows)

    def _close(self) -> None:
        if not self._ended == self._rows == self._task.num_rows:
            raise self._mismatch(f"{self._ended} rows are complete")
        if self._group:
            self._flush()
        with storage_errors(self._path):
            failpoint("part.close")
            self._writer.close()
            self._file.close()

    def _discard(self) -> None:
        self._path.unlink(missing_ok=True)
        with suppress(Exception):
            self._writer.close()
        with suppress(Exception):
            self._file.close()

    def _mismatch(self, what: str) -> VectorizeError:
        task = self._task
        return VectorizeError(
            f"{task.shard.uri!r}, rows {task.first_row} to {task.first_row + task.num_rows}: {what} after {self._rows} "
            "rows were written; the part is discarded. This is a bug: please report it"
        )


class _Source(NamedTuple):
    """Copied columns of some rows; `first` is the first of these, counted from the task's first."""

    first: int
    arrays: list[pa.Array]


def _windows_of(texts: pa.Array, passages: Passages, span: slice, first_row: int) -> pa.Array:
    """Of each document's text the part that the passage stands for; all of a text that has no tokens."""
    if passages.chunk is None or pa.types.is_null(texts.type):
        return texts.take(passages.row[span] - first_row)
    kind = pa.large_binary() if texts.type in (pa.large_string(), pa.large_binary()) else pa.binary()
    values = texts.cast(kind)
    found: list[bytes | None] = []
    row, text, value = -1, "", None
    places = zip(passages.row[span].tolist(), passages.chunk[span].tolist(), passages.lengths[span], strict=True)
    for of, (_, start, end), length in places:
        if of != row:
            row, value = of, values[of - first_row].as_py()
            text = value.decode() if length else ""
        found.append(text[start:end].encode() if length else value)
    return pa.array(found, kind).view(texts.type)


def _added(window: EncodedWindow, schema: pa.Schema) -> list[pa.Array]:
    """The added columns, in the schema's order."""
    passages = window.passages
    values = pa.array(np.ascontiguousarray(window.vectors, dtype=np.float32).reshape(-1))
    names = pa.array([status.name.lower() for status in Status])
    digests = np.frombuffer(passages.text_hash.tobytes().hex().encode(), dtype="S32")
    added = [
        pa.FixedSizeListArray.from_arrays(
            values, type=schema.field("embedding").type, mask=pa.array(window.status != Status.OK)
        ),
        pa.array(passages.lengths, pa.int32()),
        pa.array(passages.truncated),
        names.take(pa.array(window.status)),
        pa.array(digests, mask=np.isin(window.status, (Status.NULL, Status.CRASH))).cast(pa.string()),
    ]
    if not is_chunked(schema) or passages.chunk is None:
        return added
    index, start, end = passages.chunk.T
    empty = passages.lengths == 0
    return [*added, pa.array(index), pa.array(start, mask=empty), pa.array(end, mask=empty)]


def _row_bytes(arrays: Sequence[pa.Array], rows: int) -> npt.NDArray[np.int64]:
    """About how many bytes each row takes, from its values alone: int64[rows]."""
    return sum(map(_value_bytes, arrays), np.zeros(rows, np.int64))


def _value_bytes(array: pa.Array) -> npt.NDArray[np.int64]:
    if isinstance(array, pa.ExtensionArray):
        return _value_bytes(array.storage)
    if _is_binary(array.type):
        return _int64(pc.binary_length(array))
    if pa.types.is_struct(array.type):
        return _row_bytes(array.flatten(), len(array))
    if pa.types.is_map(array.type):
        entry = pa.struct([array.type.key_field, array.type.item_field])
        return _value_bytes(array.cast(pa.list_(entry)))
    if pa.types.is_nested(array.type):
        items = np.concatenate(([0], np.cumsum(_value_bytes(array.flatten()))))
        ends = np.concatenate(([0], np.cumsum(_int64(pc.list_value_length(array)))))
        return items[ends[1:]] - items[ends[:-1]]
    return np.full(len(array), 8, np.int64)


def _int64(array: pa.Array) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return values


def _is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return any(test(kind) for test in (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary))

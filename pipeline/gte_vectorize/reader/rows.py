"""Rows of one shard, read forward in small batches, whatever the sizes of its row groups and values are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gte_vectorize.errors import DamagedInput, InputError
from gte_vectorize.reader.storage import listed_before, open_store, reading, retrying

# Neither the footer's sizes nor the file's can be trusted: a kilobyte may decode to gigabytes. So few rows are decoded
# at a time, which costs no speed, and fewer still where the footer owns up to large values.
_MAX_ROWS = 64
_BATCH_BYTES = 16 << 20
# Compressed bytes of a column chunk in memory at once; without it the whole chunk is.
_BUFFER_BYTES = 4 << 20


class RowCursor:
    """A place in a shard that moves forward: a read that begins where the last one ended decodes nothing again.

    Reading elsewhere opens the row group anew: forward or back, whole row groups are skipped unread. `columns` names
    top-level columns; batches hold them in that order, with the types the file gives them.

    The shard was listed before and found sound: TemporaryError if it is gone by now, or lacks columns or rows.
    """

    def __init__(self, uri: str, columns: Sequence[str]) -> None:
        self._uri = uri
        self._columns = list(columns)
        with listed_before():
            self._source, self._file = retrying(lambda _: self._open())
        self._starts = _first_rows(self._file)
        self._batch_rows = self._rows_at_once()
        self._rest: Iterator[pa.RecordBatch] = iter(())
        self._group = len(self._starts) - 2  # the row group that `_rest` is of
        self._next = self._starts[-1]  # the row that `_rest` begins with
        self._held: pa.RecordBatch | None = None  # rows before that, decoded but not yet asked for

    def read(self, first_row: int, num_rows: int) -> Iterator[pa.RecordBatch]:
        """Exactly the rows `first_row` to `first_row + num_rows - 1`, in order.

        Raises DamagedInput, naming the rows, where the file is damaged or shorter than its footer says, twice over;
        TemporaryError where its store keeps failing for a minute or two.
        """
        what = f"reading rows {first_row} to {first_row + num_rows - 1}"
        end = first_row + num_rows
        with listed_before():
            if not 0 <= first_row <= end <= self._starts[-1]:
                raise InputError(f"{self._uri!r} has {self._starts[-1]} rows, not those from {first_row} to {end - 1}")
        while first_row < end:
            with listed_before():
                batch = retrying(partial(self._attempt, first_row, end - first_row, what))
            first_row += batch.num_rows
            yield batch

    def close(self) -> None:
        """Close the file; harmless if closed."""
        self._rest = iter(())
        self._held = None
        self._next = self._starts[-1]
        with suppress(OSError):  # nothing was written
            self._file.close()
            self._source.close()

    def __enter__(self) -> RowCursor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> tuple[Any, pq.ParquetFile]:
        with reading(self._uri, "opening"):
            store, path = open_store(self._uri)
            source = store.open_input_file(path)
            try:
                file = pq.ParquetFile(
                    source,
                    buffer_size=_BUFFER_BYTES,
                    pre_buffer=False,
                    page_checksum_verification=True,
                    arrow_extensions_enabled=False,
                )
                _check_columns(self._uri, self._columns, file.schema_arrow.names)
            except BaseException:
                source.close()
                raise
        return source, file

    def _attempt(self, row: int, limit: int, what: str, tried: int) -> pa.RecordBatch:
        """`_take`, after the first time with the file opened anew."""
        if tried:
            self.close()
            self._source, self._file = self._open()
            if _first_rows(self._file) != self._starts:
                raise InputError(f"{self._uri!r} has other row groups than before")
        with reading(self._uri, what, DamagedInput):
            return self._take(row, limit)

    def _take(self, row: int, limit: int) -> pa.RecordBatch:
        """At least one and at most `limit` rows, from `row` on."""
        position = self._next - (self._held.num_rows if self._held else 0)
        group = bisect_right(self._starts, row) - 1
        if row < position or position < self._starts[group]:
            position = self._starts[group]
            self._seek(group)
        while True:
            batch = self._held or self._decode()
            self._held = None
            if row < position + batch.num_rows:
                break
            position += batch.num_rows
        batch = batch.slice(row - position)
        if limit < batch.num_rows:
            self._held = batch.slice(limit)
        return batch.slice(0, limit)

    def _seek(self, group: int) -> None:
        self._held = None
        self._group, self._next = group, self._starts[group]
        self._rest = self._file.iter_batches(
            self._batch_rows, row_groups=[group], columns=self._columns, use_threads=False
        )

    def _decode(self) -> pa.RecordBatch:
        # Group by group: where a read ends early, pyarrow takes the column for done, and would go on with other rows.
        while (batch := next(self._rest, None)) is None and self._next == self._starts[self._group + 1]:
            self._seek(self._group + 1)
        rows = batch.num_rows if batch is not None else 0
        end = self._starts[self._group + 1]
        if batch is None or self._next + rows > end:
            raise DamagedInput(
                f"{self._uri!r}: row group {self._group} ends at row {self._next + rows}, though its footer says {end}"
            )
        self._next += rows
        # A struct with a child of that name comes along when a column has a dot in its name.
        return batch.select(self._columns)

    def _rows_at_once(self) -> int:
        metadata = self._file.metadata
        wanted = [
            index
            for index in range(metadata.num_columns)
            if any(_is_part(metadata.schema.column(index).path, column) for column in self._columns)
        ]
        largest = 1
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            size = sum(group.column(index).total_uncompressed_size for index in wanted)
            largest = max(largest, size // max(1, group.num_rows))
        return max(1, min(_MAX_ROWS, _BATCH_BYTES // largest))


def _is_part(path: str, column: str) -> bool:
    return path == column or path.startswith(f"{column}.")


def _check_columns(uri: str, columns: Sequence[str], names: Sequence[str]) -> None:
    for column in columns:
        if names.count(column) != 1:
            raise InputError(f"{uri!r} has {names.count(column)} columns named {column!r}, not one")


def _first_rows(file: pq.ParquetFile) -> list[int]:
    """The first row of each row group, and the end."""
    counts = (file.metadata.row_group(index).num_rows for index in range(file.metadata.num_row_groups))
    return [0, *accumulate(counts)]

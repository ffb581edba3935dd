"""Rows of one shard, read forward in small batches, whatever the sizes of its row groups and values are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from gte_vectorize.errors import DamagedInput, InputError
from gte_vectorize.reader.storage import listed_before, open_store, reading

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
        with listed_before(), reading(uri, "opening"):
            store, path = open_store(uri)
            self._source = store.open_input_file(path)
            try:
                self._file = pq.ParquetFile(
                    self._source,
                    buffer_size=_BUFFER_BYTES,
                    pre_buffer=False,
                    page_checksum_verification=True,
                    arrow_extensions_enabled=False,
                )
                self._check_columns()
            except BaseException:
                self._source.close()
                raise
        metadata = self._file.metadata
        counts = (metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
        self._starts = [0, *accumulate(counts)]  # first row of each row group, and the end
        self._batch_rows = self._rows_at_once()
        self._rest: Iterator[pa.RecordBatch] = iter(())
        self._next = self._starts[-1]  # the row that `_rest` begins with
        self._held: pa.RecordBatch | None = None  # rows before that, decoded but not yet asked for

    def read(self, first_row: int, num_rows: int) -> Iterator[pa.RecordBatch]:
        """Exactly the rows `first_row` to `first_row + num_rows - 1`, in order.

        Raises DamagedInput, naming the rows, where the file is damaged or shorter than its footer says; TemporaryError
        where its store fails.
        """
        what = f"reading rows {first_row} to {first_row + num_rows - 1}"
        end = first_row + num_rows
        with listed_before():
            if not 0 <= first_row <= end <= self._starts[-1]:
                raise InputError(f"{self._uri!r} has {self._starts[-1]} rows, not those from {first_row} to {end - 1}")
        while first_row < end:
            with reading(self._uri, what, DamagedInput):
                batch = self._take(first_row, end - first_row)
            first_row += batch.num_rows
            yield batch

    def close(self) -> None:
        """Close the file; harmless if closed."""
        self._rest = iter(())
        self._held = None
        self._file.close()
        self._source.close()

    def __enter__(self) -> RowCursor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        self._next = self._starts[group]
        self._rest = self._file.iter_batches(
            self._batch_rows,
            row_groups=range(group, len(self._starts) - 1),
            columns=self._columns,
            use_threads=False,
        )

    def _decode(self) -> pa.RecordBatch:
        batch = next(self._rest, None)
        if batch is None:
            raise DamagedInput(
                f"{self._uri!r} ends at row {self._next}, though its footer names {self._starts[-1]} rows"
            )
        self._next += batch.num_rows
        # A struct with a child of that name comes along when a column has a dot in its name.
        return batch.select(self._columns)

    def _check_columns(self) -> None:
        names = self._file.schema_arrow.names
        for column in self._columns:
            if names.count(column) != 1:
                raise InputError(f"{self._uri!r} has {names.count(column)} columns named {column!r}, not one")

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

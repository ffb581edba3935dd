"""The files of an earlier output, read row group by row group; rows and row groups count through the whole output."""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gte_vectorize.batch import Int64, UInt8
from gte_vectorize.errors import DamagedInput, InputError
from gte_vectorize.reader.storage import open_store, reading, retrying
from gte_vectorize.tokens.pieces import HASH_BYTES
from gte_vectorize.writer.schema import ADDED_COLUMNS, is_chunked

ADVICE = "see gte-vectorize verify and gte-vectorize repair, or run without --reuse"


class Footer(NamedTuple):
    """What a file's footer says: the `embeddings` key, the columns that are reused, the rows of each row group.

    And when the file was written, for no footer tells which device computed the vectors.
    """

    description: bytes
    dim: int
    chunked: bool
    groups: tuple[int, ...]
    modified_ns: int | None


@dataclass(frozen=True)
class Previous:
    """An earlier, finished output whose vectors this run would compute again.

    output   as the user named it
    canary   what the device that made it answered to known texts, if that was written down
    uris     its files, in row order
    footers  theirs, at least one; all but the row groups and times are alike
    """

    output: str
    canary: str | None
    uris: tuple[str, ...]
    footers: tuple[Footer, ...]

    @property
    def dim(self) -> int:
        return self.footers[0].dim

    @property
    def chunked(self) -> bool:
        """Whether a document may have several rows, which follow one another."""
        return self.footers[0].chunked

    @cached_property
    def starts(self) -> Int64:
        """The first row of each row group, and the end: int64[groups + 1]."""
        return _starts([rows for footer in self.footers for rows in footer.groups])

    @cached_property
    def first_groups(self) -> Int64:
        """The first row group of each file, and the end: int64[files + 1]."""
        return _starts([len(footer.groups) for footer in self.footers])

    @property
    def rows(self) -> int:
        return int(self.starts[-1])


class RowGroup(NamedTuple):
    """A row group: uint8[rows, 16], zeros for a null; and the columns that were asked for."""

    text_hash: UInt8
    columns: pa.Table


class PartReader:
    """Row groups of an earlier output, with `columns` beside the hashes; one file is open at a time."""

    def __init__(self, previous: Previous, columns: Sequence[str]) -> None:
        self._previous = previous
        self._columns = list(columns)
        self._opened = -1
        self._source: Any = None
        self._file: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._opened = -1
        for file in (self._file, self._source):
            if file is not None:
                with suppress(OSError):  # nothing was written
                    file.close()

    def read(self, group: int) -> RowGroup:
        """Row group `group`, read forward without opening a file twice.

        DamagedInput: twice over, it could not be read, or the file is gone or another one by now. TemporaryError: its
        store keeps failing.
        """
        return retrying(partial(self._attempt, group))

    def _attempt(self, group: int, tried: int) -> RowGroup:
        first_groups = self._previous.first_groups
        index = int(np.searchsorted(first_groups, group, side="right")) - 1
        uri, place = self._previous.uris[index], group - int(first_groups[index])
        with reading_previous(uri, f"reading row group {place}", DamagedInput):
            if tried or index != self._opened:
                self._open(index, uri)
            return self._read(place, uri)

    def _open(self, index: int, uri: str) -> None:
        self.close()
        self._source, self._file, modified_ns = open_part(uri)
        self._opened = index
        if footer_of(uri, self._file, modified_ns) != self._previous.footers[index]:
            raise DamagedInput(f"{uri!r} is another file than when this run began")

    def _read(self, group: int, uri: str) -> RowGroup:
        table = self._file.read_row_group(group, columns=["text_hash", *self._columns])
        # pyarrow goes on with the next row group where a damaged column ends early.
        if table.num_rows != self._file.metadata.row_group(group).num_rows:
            raise DamagedInput(f"{uri!r}: row group {group} has {table.num_rows} rows, not those of its footer")
        # A column with a dot in its name comes along with the one of the name before the dot.
        return RowGroup(_hashes(table["text_hash"], uri), table.select(self._columns))


@contextmanager
def reading_previous(uri: str, what: str, refusal: type[InputError]) -> Iterator[None]:
    """`reading`, but whatever is wrong with the file is a `refusal` that says what can be done about it."""
    try:
        with reading(uri, what):
            yield
    except InputError as error:
        raise refusal(f"{error}. It is of the output that is to be reused: {ADVICE}") from error


def open_part(uri: str) -> tuple[Any, pq.ParquetFile, int | None]:
    """The file, and the Parquet file in it, both to be closed; and when it was written, in ns, if the store says."""
    store, path = open_store(uri)
    source = store.open_input_file(path)
    try:
        file = pq.ParquetFile(source, page_checksum_verification=True, arrow_extensions_enabled=False)
        return source, file, store.get_file_info(path).mtime_ns
    except BaseException:
        source.close()
        raise


def footer_of(uri: str, file: pq.ParquetFile, modified_ns: int | None) -> Footer:
    """InputError: the file has not the columns that are reused, or keeps its vectors in another way."""
    schema, metadata = file.schema_arrow, file.metadata
    if not set(ADDED_COLUMNS) <= set(schema.names):
        raise InputError(f"{uri!r} lacks columns: {', '.join(sorted(set(ADDED_COLUMNS) - set(schema.names)))}")
    vector = schema.field("embedding").type
    if not pa.types.is_fixed_size_list(vector) or vector.value_type != pa.float32():
        raise InputError(f"{uri!r} keeps its vectors as {vector}, and only float32 of a fixed size can be reused")
    return Footer(
        description=(schema.metadata or {}).get(b"embeddings", b""),
        dim=vector.list_size,
        chunked=is_chunked(schema),
        groups=tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)),
        modified_ns=modified_ns,
    )


def _hashes(column: pa.ChunkedArray, uri: str) -> UInt8:
    hashes = np.zeros((len(column), HASH_BYTES), np.uint8)
    try:
        digits = column.drop_null().combine_chunks().cast(pa.binary(2 * HASH_BYTES))
        found = np.frombuffer(binascii.unhexlify(digits.buffers()[1]), np.uint8)
    except ValueError as error:
        raise DamagedInput(f"{uri!r}: a text_hash is not {2 * HASH_BYTES} hexadecimal digits") from error
    hashes[column.is_valid().to_numpy()] = found.reshape(-1, HASH_BYTES)
    return hashes


def _starts(counts: Sequence[int]) -> Int64:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])

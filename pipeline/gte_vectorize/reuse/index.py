"""The texts of an earlier output, sorted by hash on disk: which of its rows hold the vectors of a text.

Sorted by the first eight bytes of the hash, of which a text is told by all sixteen. Building it takes memory for one
partition, whatever the number of texts; asking it takes none but the page cache, which all processes share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from gte_vectorize.batch import Int32, Int64, UInt8
from gte_vectorize.reuse.part import PartReader, Previous
from gte_vectorize.writer.part import create_file, storage_errors

PARTITION_BYTES = 64 << 20
RUN_ROWS = 1 << 19
"""Rows that are gathered before they are dealt out to the partitions."""

Records = npt.NDArray[np.void]

_VALUE = np.dtype([("rest", np.uint64), ("row", np.int64), ("count", np.int32)])
_ENTRY = np.dtype([("key", np.uint64), ("value", _VALUE)])
_ROW = np.dtype([("entry", _ENTRY), ("ok", np.bool_), ("begins", np.bool_)])


class TextIndex:
    """An index that `build_index` has written; `find` may be called by any process, as often as it likes."""

    def __init__(self, path: Path) -> None:
        self._keys = _mapped(path / "keys", np.dtype(np.uint64))
        self._values = _mapped(path / "values", _VALUE)

    def find(self, hashes: UInt8) -> tuple[Int64, Int32]:
        """Hashes of texts, uint8[n, 16] → the first row of each in the earlier output, int64[n], and the number of its
        rows, int32[n]; -1 and 0 where it is not there, and for the hash of no text, which is all zeros.
        """
        rows, counts = np.full(len(hashes), -1, np.int64), np.zeros(len(hashes), np.int32)
        if len(self._keys):
            keys, rest = _halves(hashes)
            # In their order, searches that follow one another touch the same pages.
            order = np.argsort(keys)
            places = np.empty(len(keys), np.int64)
            places[order] = np.searchsorted(self._keys, keys[order])
            places = np.minimum(places, len(self._keys) - 1)
            values = self._values[places]
            found = (self._keys[places] == keys) & (values["rest"] == rest) & hashes.any(axis=1)
            rows[found], counts[found] = values["row"][found], values["count"][found]
        return rows, counts


def build_index(previous: Previous, folder: Path) -> Path:
    """Index the documents of `previous` whose rows all have a vector, in the existing `folder` → the index's path.

    Of equal texts, and of two whose hashes begin alike, the first one is there. On disk: 28 bytes for each, and while
    it is built as many again for those that are not sorted yet. DamagedInput: the output cannot be read any more.
    TemporaryError: its storage or the disk failed.
    """
    index = folder / "index"
    with storage_errors(index):
        index.mkdir(mode=0o700)
        partitions = _deal_out(_documents(previous), index, bits=_partition_bits(previous.rows))
        with create_file(index / "keys") as keys, create_file(index / "values") as values:
            for entries in partitions:
                keys.write(entries["key"].tobytes())
                values.write(entries["value"].tobytes())
    return index


def _documents(previous: Previous) -> Iterator[Records]:
    """The entries of all documents, those of some RUN_ROWS rows at a time."""
    columns = ["status", "chunk_index"] if previous.chunked else ["status"]
    held = [np.empty(0, _ROW)]
    with PartReader(previous, columns) as reader:
        for group in range(len(previous.starts) - 1):
            held.append(_rows(reader, group, int(previous.starts[group])))
            if sum(map(len, held)) >= RUN_ROWS:
                rows = np.concatenate(held)
                last = len(rows) - 1 - int(np.argmax(rows["begins"][::-1]))  # it may go on in the next row group
                held = [rows[last:]]
                yield _whole(rows[:last])
    yield _whole(np.concatenate(held))


def _rows(reader: PartReader, group: int, first_row: int) -> Records:
    text_hash, columns = reader.read(group)
    rows = np.empty(len(text_hash), _ROW)
    value = rows["entry"]["value"]
    rows["entry"]["key"], value["rest"] = _halves(text_hash)
    value["row"] = np.arange(first_row, first_row + len(rows))
    rows["ok"] = pc.equal(columns["status"], "ok").to_numpy() & text_hash.any(axis=1)
    rows["begins"] = pc.equal(columns["chunk_index"], 0).to_numpy() if "chunk_index" in columns.schema.names else True
    return rows


def _whole(rows: Records) -> Records:
    """The entries of the documents that begin in `rows`, and end there."""
    begins = np.flatnonzero(rows["begins"])
    entries = rows["entry"][begins]
    entries["value"]["count"] = np.diff(begins, append=len(rows))
    return entries[np.logical_and.reduceat(rows["ok"], begins)] if len(begins) else entries


def _deal_out(runs: Iterable[Records], folder: Path, bits: int) -> Iterator[Records]:
    """Entries in any order → all of them in order, one partition of the keys, by their first `bits`, at a time."""
    bounds = np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
    paths = [folder / f"partition-{number}" for number in range(1 << bits)]
    for path in paths:
        create_file(path).close()
    for run in runs:
        # Also here, or a text that is in every other row would swell its partition.
        entries = _first_of_each(run)
        for path, piece in zip(paths, np.split(entries, np.searchsorted(entries["key"], bounds)), strict=True):
            if len(piece):
                with path.open("ab") as file:
                    file.write(piece.tobytes())
    for path in paths:
        data = path.read_bytes()
        path.unlink()
        yield _first_of_each(np.frombuffer(data, _ENTRY))


def _first_of_each(entries: Records) -> Records:
    """Sorted by key; of entries with the same key the one that came first."""
    _, firsts = np.unique(entries["key"], return_index=True)
    return entries[firsts]


def _partition_bits(rows: int) -> int:
    return max(0, -(-rows * _ENTRY.itemsize // PARTITION_BYTES) - 1).bit_length()


def _halves(hashes: UInt8) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The first and the last eight bytes of each hash, as numbers that sort as the bytes do."""
    halves = np.ascontiguousarray(hashes).view(">u8").astype(np.uint64)
    return halves[:, 0], halves[:, 1]


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An empty file cannot be mapped."""
    return np.asarray(np.memmap(path, dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)

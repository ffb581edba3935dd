"""The vectors of an earlier output by row, in whatever order they are asked for.

Rows that come about in order take each row group once, and it stays decoded for the rows that follow. In a corpus whose
rows have moved far, every window asks for rows of nearly all row groups: then a row group is decoded a second time, and
copied to the disk in a form that gives single rows.
"""

from __future__ import annotations

import logging
import shutil
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from gte_vectorize.batch import EncodedWindow, Int64, UInt8
from gte_vectorize.errors import DamagedInput, OutputError
from gte_vectorize.reuse.index import build_index
from gte_vectorize.reuse.part import ADVICE, PartReader, Previous
from gte_vectorize.store.publish import scratch
from gte_vectorize.tokens.pieces import HASH_BYTES
from gte_vectorize.writer.part import create_file, storage_errors
from gte_vectorize.writer.schema import CHUNK_COLUMNS

CACHE_BYTES = 256 << 20
"""Of decoded row groups; the one that was read last stays in any case."""

Stored = npt.NDArray[np.void]
"""Rows of an earlier output:

vector     float32[dim]   zeros where there is none
text_hash  uint8[16]      zeros where there is no vector
n_tokens   int32
chunk      int32[3]       chunk_index, char_start and char_end; only where documents are cut into windows
truncated  bool
"""

log = logging.getLogger(__name__)


@contextmanager
def open_previous(previous: Previous | None, folder: Path) -> Iterator[PreviousVectors | None]:
    """The vectors of `previous`, once its texts are indexed; None: of nothing. What that takes on the disk lies in
    `folder` until the context is left.

    DamagedInput: the output cannot be read any more. TemporaryError: its storage or the disk failed.
    """
    if previous is None:
        yield None
        return
    with scratch(folder) as own, PreviousVectors(previous, build_index(previous, own), own) as vectors:
        yield vectors


class PreviousVectors:
    """The rows of `previous`, and the `index` of its texts; what has to be copied lies in the existing `folder`, as a
    sparse file. For one thread.
    """

    def __init__(self, previous: Previous, index: Path, folder: Path) -> None:
        self.index = index
        self._previous = previous
        self._path = folder / "vectors"
        self._dtype = _dtype(previous)
        columns = ["embedding", "n_tokens", "truncated", *(CHUNK_COLUMNS if previous.chunked else ())]
        self._reader = PartReader(previous, columns)
        self._decoded: OrderedDict[int, Stored] = OrderedDict()
        groups = len(previous.starts) - 1
        self._was_decoded = np.zeros(groups, np.bool_)
        self._is_copied = np.zeros(groups, np.bool_)
        self._copy: Stored | None = None
        self._may_copy: bool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._decoded.clear()
        self._copy = None

    @property
    def chunked(self) -> bool:
        """Whether a document may have several rows."""
        return self._previous.chunked

    def recognise(self, answer: str) -> None:
        """Hold a device's answer to known texts against that of the device that made the output.

        OutputError: the answer differs.
        """
        if self._previous.canary not in (None, answer):
            raise OutputError(
                f"this machine computes other bits than the one that made {self._previous.output!r}, which would mix "
                "two kinds of vectors: go on there (a warning above may say what is missing here), or run without "
                "--reuse"
            )

    def take(self, rows: Int64, text_hash: UInt8) -> Stored:
        """The rows, int64[k], in their order; `text_hash`, uint8[k, 16], is of the text that each is of.

        DamagedInput: the output cannot be read any more, or holds others by now. TemporaryError: its storage or the
        disk failed.
        """
        taken = np.empty(len(rows), self._dtype)
        groups = np.searchsorted(self._previous.starts, rows, side="right") - 1
        copied = self._is_copied[groups]
        if self._copy is not None:
            taken[copied] = self._copy[rows[copied]]
        others = np.flatnonzero(~copied)
        others = others[np.argsort(groups[others], kind="stable")]
        for places in np.split(others, np.flatnonzero(np.diff(groups[others])) + 1):
            if len(places):
                group = int(groups[places[0]])
                taken[places] = self._group(group)[rows[places] - self._previous.starts[group]]
        if not np.array_equal(taken["text_hash"], text_hash):
            raise DamagedInput(f"{self._previous.output!r} holds other rows than when this run began: {ADVICE}")
        return taken

    def _group(self, group: int) -> Stored:
        if group in self._decoded:
            self._decoded.move_to_end(group)
            return self._decoded[group]
        rows = self._decode(group)
        if self._was_decoded[group] and self._has_room():
            self._write(group, rows)
            return rows
        self._was_decoded[group] = True
        self._decoded[group] = rows
        while len(self._decoded) > 1 and sum(rows.nbytes for rows in self._decoded.values()) > CACHE_BYTES:
            self._decoded.popitem(last=False)
        return rows

    def _decode(self, group: int) -> Stored:
        text_hash, columns = self._reader.read(group)
        rows = np.zeros(len(text_hash), self._dtype)
        column = columns["embedding"].combine_chunks()
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        rows["vector"][valid] = column.drop_null().flatten().to_numpy().reshape(-1, self._previous.dim)
        rows["text_hash"][valid] = text_hash[valid]
        rows["n_tokens"] = columns["n_tokens"].to_numpy()
        rows["truncated"] = columns["truncated"].to_numpy()
        for place, name in enumerate(CHUNK_COLUMNS if self._previous.chunked else ()):
            rows["chunk"][:, place] = columns[name].fill_null(0).to_numpy()
        return rows

    def _has_room(self) -> bool:
        """Whether the whole output may be copied here, and as much again written by this run. Asked once."""
        if self._may_copy is None:
            need = 2 * self._dtype.itemsize * self._previous.rows
            with storage_errors(self._path):
                self._may_copy = shutil.disk_usage(self._path.parent).free > need
            if not self._may_copy:
                log.warning(
                    "rows come in another order than in %r, which is slow to reuse where the disk of %r has not %d MiB "
                    "of room",
                    self._previous.output,
                    str(self._path.parent),
                    need >> 20,
                )
        return self._may_copy

    def _write(self, group: int, rows: Stored) -> None:
        with storage_errors(self._path):
            if self._copy is None:
                with create_file(self._path) as file:
                    file.truncate(self._dtype.itemsize * self._previous.rows)
                self._copy = np.asarray(np.memmap(self._path, self._dtype, mode="r"))
            # Not through the map: on a full disk, that would end the process.
            with self._path.open("r+b") as file:
                file.seek(self._dtype.itemsize * int(self._previous.starts[group]))
                file.write(rows.data)
        self._is_copied[group] = True


def refilled(windows: Iterable[EncodedWindow], vectors: PreviousVectors | None) -> Iterator[EncodedWindow]:
    """The windows, with all that an earlier output says of the passages that are reused.

    Their vectors are put in place; their lengths, whether they were cut off and which part of the document they are
    come with new passages. None: nothing is reused. DamagedInput, TemporaryError: as `PreviousVectors.take`.
    """
    for window in windows:
        reused = window.passages.reused
        yield window if vectors is None or reused is None else _refilled(window, reused, vectors)


def _refilled(window: EncodedWindow, reused: Int64, vectors: PreviousVectors) -> EncodedWindow:
    passages = window.passages
    places = np.flatnonzero(reused >= 0)
    stored = vectors.take(reused[places], passages.text_hash[places])
    window.vectors[places] = stored["vector"]
    lengths, truncated, chunk = passages.lengths.copy(), passages.truncated.copy(), passages.chunk
    lengths[places], truncated[places] = stored["n_tokens"], stored["truncated"]
    if chunk is not None and vectors.chunked:
        chunk = chunk.copy()
        chunk[places] = stored["chunk"]
    return replace(window, passages=replace(passages, lengths=lengths, truncated=truncated, chunk=chunk))


def _dtype(previous: Previous) -> np.dtype[np.void]:
    fields: list[tuple[str, object, tuple[int, ...]]] = [
        ("vector", np.float32, (previous.dim,)),
        ("text_hash", np.uint8, (HASH_BYTES,)),
        ("n_tokens", np.int32, ()),
    ]
    if previous.chunked:
        fields.append(("chunk", np.int32, (3,)))
    return np.dtype([*fields, ("truncated", np.bool_, ())], align=True)

"""What flows between the stages: windows of rows, their passages, token batches and vectors.

Standard library and numpy only: the worker processes import this module and must never see torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]

WINDOW_BYTES = 4 << 20
"""Of the shard's file, compressed: usually some 16 MiB of text, a second of tokenizing."""

LEAST_WINDOW_ROWS = 256

LEAST_CHUNK_TOKENS = 16
"""That may be asked for. Chunks of one context are cut so that they have half of what is asked for on average."""

Layout = Literal["packed", "padded"]
"""How an encoder lays a token batch out: one flat token row, or rows × the longest length."""


class Status(IntEnum):
    """Why a row has a vector, or has none. Stored by name, in lower case, in the column `status`.

    CRASH: the text ended every worker process that was given it, by a crash, by running out of memory or without end.
    """

    OK = 0
    NULL = 1
    EMPTY = 2
    UTF8 = 3
    TOO_LARGE = 4
    NONFINITE = 5
    ZERO = 6
    CRASH = 7

    @property
    def failed(self) -> bool:
        """Whether the row counts against the limit on bad rows; null and empty texts are only counted."""
        return self not in (Status.OK, Status.NULL, Status.EMPTY)


@dataclass(frozen=True, slots=True)
class Shard:
    """One input Parquet file, as it was listed when the run was planned.

    `uri` is a local path or an object-store URI, `modified_ns` the modification time in nanoseconds since 1970 (0 where
    the store does not say), `row_groups` the number of rows of each row group.
    """

    uri: str
    size: int
    modified_ns: int
    row_groups: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.row_groups)


@dataclass(frozen=True, slots=True)
class Task:
    """A run of rows of one shard: the unit of work, resume and publication. One task makes one part."""

    index: int
    shard: Shard
    first_row: int
    num_rows: int

    def windows(self, most_rows: int, least_rows: int = LEAST_WINDOW_ROWS) -> Iterator[Window]:
        """The task in windows of at most `most_rows` rows, in order; a task without rows is one window of none.

        Where documents are long (going by the shard's bytes per row), windows have fewer rows, down to `least_rows`, so
        that a few of them keep all workers busy and the first one is ready soon.
        """
        row_bytes = self.shard.size / max(1, self.shard.num_rows)
        rows = min(most_rows, max(least_rows, int(WINDOW_BYTES / max(1.0, row_bytes))))
        for start in range(0, max(1, self.num_rows), rows):
            yield Window(self, self.first_row + start, min(rows, self.num_rows - start))


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of a task that are tokenized, sorted by length and encoded together; `first_row` counts within the shard.

    Where a document's passages are spread over windows, its row is of the one with the last passage.
    """

    task: Task
    first_row: int
    num_rows: int

    @property
    def ends_task(self) -> bool:
        return self.first_row + self.num_rows == self.task.first_row + self.task.num_rows

    @property
    def rows(self) -> Int32:
        """Its rows, counted from the task's first."""
        first = self.first_row - self.task.first_row
        return np.arange(first, first + self.num_rows, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Passages:
    """The passages of a window: in the order of its rows, and within a document in the order of the text.

    ids        int32[sum of lengths]   token ids of all passages back to back, special tokens and prompt included
    lengths    int32[n]                tokens of each passage; 0 for one without a usable text
    status     uint8[n]                a Status
    truncated  bool[n]                 whether the model's length limit cut the text
    text_hash  uint8[n, 16]            BLAKE2b-128 of the document's UTF-8 bytes; zeros for a null and a crash
    row        int32[n]                the row of its document, counted from the task's first; not decreasing
    chunk      int32[n, 3]             chunk_index, char_start, char_end: which of its document's passages it is and
                                       the characters it stands for, 0 and 0 without a usable text; None: documents are
                                       one passage each
    continues  bool[n]                 whether it and the passage before it are chunks of one context, in which every
                                       token attends to all others; None: each passage is a context of its own
    cut_tokens                         tokens behind the limit in all of them together, estimated
    first                              the task's passages before these
    same_as    int32[n]                an earlier passage of the task with the same ids, or -1; None: nobody has looked
    reused     int64[n]                the row of an earlier output that has its vector, or -1; None: there is no such
                                       output. Its length is 0 until its vector is fetched.
    """

    window: Window
    ids: Int32
    lengths: Int32
    status: UInt8
    truncated: Bool
    text_hash: UInt8
    row: Int32
    chunk: Int32 | None = None
    continues: Bool | None = None
    cut_tokens: int = 0
    first: int = 0
    same_as: Int32 | None = None
    reused: Int64 | None = None

    @property
    def encoded(self) -> Bool:
        """Which passages are encoded themselves, bool[n]: those with tokens that take no other's vector."""
        own = self.lengths > 0
        for other in (self.same_as, self.reused):
            if other is not None:
                own &= other < 0
        return own

    @property
    def contexts(self) -> tuple[npt.NDArray[np.intp], Int32]:
        """The first passage of each context, and the tokens of all its passages."""
        if self.continues is None:
            return np.arange(len(self.lengths)), self.lengths
        first = np.flatnonzero(~self.continues)
        return first, np.add.reduceat(self.lengths, first, dtype=np.int32)

    @property
    def begun(self) -> tuple[int, int]:
        """The first row whose first passage is here, counted from the task's first, and how many rows begin here."""
        if not len(self.row):
            return 0, 0
        first = int(self.row[0]) + (self.chunk is not None and int(self.chunk[0, 0]) > 0)
        return first, int(self.row[-1]) + 1 - first


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Passages that run together, longest context first. A window without anything to encode is one batch of none.

    ids       int32[sum of lengths]   token ids back to back
    lengths   int32[n]                tokens of each passage
    rows      int32[n]                the place of each passage, and so of its vector, in the window
    last      whether this is the window's last batch
    contexts  int32[m]                tokens of each context; None: each passage is a context of its own
    """

    passages: Passages
    ids: Int32
    lengths: Int32
    rows: Int32
    last: bool
    contexts: Int32 | None = None

    @property
    def spans(self) -> Int32:
        """Tokens of each context, not increasing."""
        return self.lengths if self.contexts is None else self.contexts


@dataclass(frozen=True, slots=True)
class EncodedWindow:
    """A window with its vectors back in the order of its passages: float32[n, dim]; zeros where there is none.

    `status` is the passages' status with those marked whose vector was zero or not finite.
    """

    passages: Passages
    vectors: Float32
    status: UInt8

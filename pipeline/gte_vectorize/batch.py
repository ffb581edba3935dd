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
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]

WINDOW_BYTES = 4 << 20
"""Of the shard's file, compressed: usually some 16 MiB of text, a second of tokenizing."""

LEAST_WINDOW_ROWS = 256

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

    def windows(self, most_rows: int) -> Iterator[Window]:
        """The task in windows of at most `most_rows` rows, in order; a task without rows is one window of none.

        Where documents are long (going by the shard's bytes per row), windows have fewer rows, so that a few of them
        keep all workers busy and the first one is ready soon.
        """
        row_bytes = self.shard.size / max(1, self.shard.num_rows)
        rows = min(most_rows, max(LEAST_WINDOW_ROWS, int(WINDOW_BYTES / max(1.0, row_bytes))))
        for start in range(0, max(1, self.num_rows), rows):
            yield Window(self, self.first_row + start, min(rows, self.num_rows - start))


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of a task that are tokenized, sorted by length and encoded together; `first_row` counts within the shard."""

    task: Task
    first_row: int
    num_rows: int

    @property
    def ends_task(self) -> bool:
        return self.first_row + self.num_rows == self.task.first_row + self.task.num_rows


@dataclass(frozen=True, slots=True)
class Passages:
    """The tokenized rows of a window, in row order.

    ids        int32[sum of lengths]   token ids of all rows back to back, special tokens and prompt included
    lengths    int32[rows]             tokens of each row; 0 for a row without a usable text
    status     uint8[rows]             a Status
    truncated  bool[rows]              whether the model's length limit cut the text
    text_hash  uint8[rows, 16]         BLAKE2b-128 of the text's UTF-8 bytes; zeros for a null and a crash
    same_as    int32[rows]             an earlier row of the task with the same ids, or -1; None: nobody has looked
    """

    window: Window
    ids: Int32
    lengths: Int32
    status: UInt8
    truncated: Bool
    text_hash: UInt8
    same_as: Int32 | None = None

    @property
    def encoded(self) -> Bool:
        """Which rows are encoded themselves, bool[rows]: those with tokens that are not the same as another."""
        has_tokens = self.lengths > 0
        return has_tokens if self.same_as is None else has_tokens & (self.same_as < 0)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Passages that run together, longest first. A window without usable rows is one batch of none.

    ids      int32[sum of lengths]   token ids back to back
    lengths  int32[n]                tokens of each passage, not increasing
    rows     int32[n]                the row of the window each passage belongs to
    last     whether this is the window's last batch
    """

    passages: Passages
    ids: Int32
    lengths: Int32
    rows: Int32
    last: bool


@dataclass(frozen=True, slots=True)
class EncodedWindow:
    """A window with its vectors back in row order: float32[rows, dim]; a row without a vector holds zeros.

    `status` is the passages' status with the rows marked whose vector was zero or not finite.
    """

    passages: Passages
    vectors: Float32
    status: UInt8

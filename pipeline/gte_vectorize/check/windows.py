"""Rows of an output that are windows of documents: of which row of the input each is, and whether it can follow on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gte_vectorize.batch import Bool, Int64
from gte_vectorize.writer.schema import CHUNK_COLUMNS, is_chunked


class WindowRow(NamedTuple):
    """What the row behind it is held against."""

    chunk_index: int
    char_start: int
    char_end: int
    text_hash: str | None


_NO_ROW = WindowRow(-1, -1, -1, None)


def input_rows(batch: pa.RecordBatch, first: int) -> Int64:
    """The row of the input that each row is of, int64[rows]. `first`: how many have begun before this batch."""
    if not is_chunked(batch.schema):
        return first + np.arange(batch.num_rows)
    return first - 1 + np.cumsum(_int(batch["chunk_index"]) == 0, dtype=np.int64)


def window_problems(batch: pa.RecordBatch, before: WindowRow | None) -> Iterator[tuple[Bool, str]]:
    """Masks of the rows that cannot stand where they do, with what is wrong; `before` is the last row before these."""
    index, start, end, text_hash = columns = _columns(batch)
    row = before or _NO_ROW
    index_before, start_before, end_before, hash_before = (
        np.concatenate([[value], column[:-1]]) for value, column in zip(row, columns, strict=True)
    )
    begins, goes_on = index == 0, index > 0
    yield ~(begins | (goes_on & (index == index_before + 1))), "has a chunk_index that does not follow the one before"
    has_tokens = _int(batch["n_tokens"]) > 0
    has_place = _bool(pc.or_(batch["char_start"].is_valid(), batch["char_end"].is_valid()))
    yield (
        np.where(has_tokens, (start < 0) | (start >= end), has_place),
        "is of no characters, or of some without tokens",
    )
    # Every character is in a window, so there is nothing between them.
    follows = has_tokens & (start >= start_before) & (start <= end_before) & (end >= end_before)
    yield (begins & has_tokens & (start > 0)) | (goes_on & ~follows), "is of characters that do not follow on"
    yield goes_on & (text_hash != hash_before), "has another text_hash than the window before"


def last_row(batch: pa.RecordBatch) -> WindowRow:
    """Of a batch that has rows."""
    return WindowRow(*(column[0] for column in _columns(batch.slice(batch.num_rows - 1))))


def _columns(batch: pa.RecordBatch) -> list[Any]:
    """Those of a WindowRow, [rows] each; -1 for a number that is null."""
    return [*(_int(batch[name]) for name in CHUNK_COLUMNS), batch["text_hash"].to_numpy(zero_copy_only=False)]


def _int(column: pa.Array) -> Int64:
    values: Int64 = pc.fill_null(column, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return values


def _bool(column: pa.Array) -> Bool:
    values: Bool = column.to_numpy(zero_copy_only=False)
    return values

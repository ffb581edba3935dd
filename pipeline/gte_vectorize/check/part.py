"""A published Parquet file, read whole: what it holds, and every row that is not as it should be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gte_vectorize.batch import Bool, Int64, Status, Task
from gte_vectorize.check.difference import Difference, Ranges, of_tasks
from gte_vectorize.check.windows import input_rows, last_row, window_problems
from gte_vectorize.reader.storage import reading
from gte_vectorize.store.publish import Content, file_size, sha256
from gte_vectorize.writer.schema import count_documents, is_chunked, schema_fingerprint

NORM_TOLERANCE = 1e-3
BATCH_ROWS = 4096

_Found = dict[tuple[int, str], Ranges]  # by task, and what is wrong with its rows


@dataclass(slots=True)
class CheckedFile:
    """`bytes` is -1 for a file that is missing; the counts are of the rows that could be read, `unread` if not all."""

    bytes: int = -1
    sha256: str = ""
    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    unread: bool = False
    status: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    def content(self) -> Content:
        return Content(self.bytes, self.sha256, self.rows, self.tokens, self.truncated, dict(self.status))


def check_file(path: Path, name: str, tasks: Sequence[Task], schema: str) -> CheckedFile:
    """Read the file of the tasks, which follow one another in it; `schema` is the fingerprint that it must have.

    `name` stands for it in differences. Memory: a row group's pages. TemporaryError or InputError: the storage
    fails.
    """
    checked = CheckedFile()
    size = file_size(path)
    if size is None:
        checked.differences.append(of_tasks(name, "is missing, or no regular file", tasks))
        return checked
    with reading(str(path), "hashing"):
        checked.bytes, checked.sha256 = size, sha256(path)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_groups(file, name, tasks, schema, checked)
    except Exception as error:  # A damaged footer takes pyarrow to no end of places.
        checked.unread = True
        checked.differences.append(of_tasks(name, f"cannot be read ({type(error).__name__})", tasks))
    return checked


def _check_groups(file: Any, name: str, tasks: Sequence[Task], schema: str, checked: CheckedFile) -> None:
    if schema_fingerprint(file.schema_arrow) != schema:
        checked.differences.append(Difference(name, "has other columns, types or metadata than the plan says"))
        return
    counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    planned = sum(task.num_rows for task in tasks)
    chunked = is_chunked(file.schema_arrow)
    if not chunked and sum(counts) != planned:
        checked.differences.append(of_tasks(name, f"holds {sum(counts)} rows, and {planned} were planned", tasks))
        return
    found: _Found = defaultdict(Ranges)
    starts = np.cumsum([0, *(task.num_rows for task in tasks)])
    first, before = 0, None  # rows of the input that have begun, and the row of the output before
    for group, count in enumerate(counts):
        done, unread = 0, "cannot be read: its row group is short"
        try:
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group]):
                rows = input_rows(batch, first)
                _note(found, starts, _problems(batch), rows)
                if chunked:
                    _note(found, starts, window_problems(batch, before), rows)
                    before = last_row(batch)
                _count(batch, checked)
                done, first = done + batch.num_rows, first + count_documents(batch)
        except Exception as error:  # as above
            unread = f"cannot be read ({type(error).__name__})"
        if done != count:
            checked.unread = True
            if chunked:  # of how many rows of the input these are windows, nobody knows
                checked.differences.append(of_tasks(name, unread, tasks))
                break
            _note(found, starts, [(np.ones(count - done, np.bool_), unread)], first + np.arange(count - done))
            first += count - done
    if first != planned and not checked.unread:
        what = f"is of {first} rows of the input, and {planned} were planned"
        checked.differences.append(of_tasks(name, what, tasks))
    for (owner, what), ranges in found.items():
        checked.differences += ranges.differences(name, what, tasks[owner])


def _note(found: _Found, starts: Int64, problems: Iterable[tuple[Bool, str]], rows: Int64) -> None:
    """Add the rows with problems to what is `found`; `rows` and `starts`, of each task, count within the file's input.

    Where windows are damaged, there may seem to be more rows than were planned, or one before the first.
    """
    rows = np.clip(rows, 0, max(0, starts[-1] - 1))
    for wrong, what in problems:
        bad = rows[wrong]
        owners = np.searchsorted(starts[:-1], bad, side="right") - 1
        for owner in np.unique(owners).tolist():
            found[owner, what].add(bad[owners == owner] - starts[owner])


def _problems(batch: pa.RecordBatch) -> Iterator[tuple[Bool, str]]:
    """Masks of the rows that have a problem, with its name."""
    embedding = batch["embedding"]
    has_vector = _bool(embedding.is_valid())
    ok = _bool(pc.equal(batch["status"], "ok"))
    known = pa.array([status.name.lower() for status in Status])
    yield ~_bool(pc.is_in(batch["status"], known)), "has a status that does not exist"
    yield ok != has_vector, "is ok without a vector, or has a vector without being ok"
    yield ok & ~_bool(pc.equal(pc.binary_length(batch["text_hash"]), 32)), "is ok without a text_hash"
    vectors = embedding.flatten().to_numpy(zero_copy_only=False).reshape(-1, embedding.type.list_size)
    norms, finite = np.zeros(batch.num_rows), np.ones(batch.num_rows, np.bool_)
    with np.errstate(all="ignore"):
        norms[has_vector] = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    finite[has_vector] = np.isfinite(vectors).all(axis=1)
    yield ~finite, "has a vector that is not finite"
    # Written so that a norm that is no number is off, too.
    yield has_vector & finite & ~(np.abs(norms - 1) <= NORM_TOLERANCE), "has a vector whose norm is not 1"


def _count(batch: pa.RecordBatch, checked: CheckedFile) -> None:
    checked.rows += batch.num_rows
    checked.tokens += pc.sum(batch["n_tokens"]).as_py() or 0
    checked.truncated += pc.sum(batch["truncated"]).as_py() or 0
    for count in pc.value_counts(batch["status"]).to_pylist():
        checked.status[count["values"]] += count["counts"]


def _bool(column: pa.Array) -> Bool:
    values: Bool = pc.fill_null(column, False).to_numpy(zero_copy_only=False)
    return values

"""Documents drawn from an output: what it holds of each, and its text, read and tokenized anew."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import groupby, pairwise
from math import ceil
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gte_vectorize.batch import Bool, Int64, Passages, Task, Window
from gte_vectorize.check.windows import input_rows
from gte_vectorize.reader.rows import RowCursor
from gte_vectorize.tokens.passages import read_passages
from gte_vectorize.tokens.pieces import gathered
from gte_vectorize.tokens.tokenizer import TextTokenizer
from gte_vectorize.tokens.windowing import Windowing
from gte_vectorize.writer.schema import added_columns, count_documents

BATCH_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Drawn:
    """A document, or some of its passages.

    task, row  its task, and its row of the input within that
    stored     the added columns of its rows, as the output holds them: one row for each passage; or for a mean one
               alone, which goes with the last passage
    passages   its text's; their `row` counts the documents that are drawn
    """

    task: int
    row: int
    stored: pa.Table
    passages: Passages

    def pieces(self, most: int) -> Iterator[Drawn]:
        """In pieces of at most `most` passages, but for a context of more."""
        is_mean = len(self.stored) != len(self.passages.lengths)
        for some in gathered([self.passages], most):
            rows = slice(some.window.num_rows) if is_mean else slice(some.first, some.first + len(some.lengths))
            yield replace(self, stored=self.stored[rows], passages=some)


def draw(
    files: Iterable[tuple[Path, Sequence[Task]]],
    rate: Fraction,
    *,
    seed: int,
    gone: Container[str],
    column: str,
    tokenizer: TextTokenizer,
    windowing: Windowing,
) -> Iterator[Drawn]:
    """A share of the input's rows, at least one and always the same ones, in order. `column` holds the texts.

    Left out are inputs that are `gone`, and documents that no process can be trusted with. Memory: some thousand rows
    of the output, and a document with all its windows.
    """
    number = 0
    with ExitStack() as open_shard:
        cursor, uri = None, None
        for path, tasks, counts in _counted(files, rate, gone):
            for task, row, stored in _stored(path, tasks, counts, seed):
                if stored["status"][0].as_py() == "crash":  # it has killed the processes that tokenized it
                    continue
                if cursor is None or uri != task.shard.uri:
                    open_shard.close()
                    uri, cursor = task.shard.uri, open_shard.enter_context(RowCursor(task.shard.uri, [column]))
                place = task.first_row + row
                passages = read_passages(Window(task, place, 1), cursor.read(place, 1), tokenizer, windowing)
                # As if those drawn so far, whatever their tasks are, were one.
                window = Window(Task(0, task.shard, 0, number + 1), number, 1)
                rows = np.full(len(passages.row), number, np.int32)
                yield Drawn(task.index, row, stored, replace(passages, window=window, row=rows))
                number += 1


def _counted(
    files: Iterable[tuple[Path, Sequence[Task]]], rate: Fraction, gone: Container[str]
) -> Iterator[tuple[Path, Sequence[Task], list[int]]]:
    """Each file, its tasks, and how many rows to draw from each of these."""
    left = Fraction(0)  # of a row: what was drawn more than the rate asks for
    for path, tasks in files:
        counts = []
        for task in tasks:
            rows = 0 if task.shard.uri in gone else task.num_rows
            counts.append(max(0, ceil(rows * rate - left)))
            left += counts[-1] - rows * rate
        yield path, tasks, counts


def _stored(
    path: Path, tasks: Sequence[Task], counts: Sequence[int], seed: int
) -> Iterator[tuple[Task, int, pa.Table]]:
    """The added columns of the documents drawn from a file, each with its task and its row within that."""
    starts = np.cumsum([0, *(task.num_rows for task in tasks[:-1])])

    @lru_cache(1)  # rows come in order
    def drawn(owner: int) -> Int64:
        rng = np.random.default_rng([seed, tasks[owner].index])
        return rng.choice(tasks[owner].num_rows, counts[owner], replace=False)

    def is_drawn(rows: Int64) -> Bool:
        owners = np.searchsorted(starts, rows, side="right") - 1
        chosen = np.zeros(len(rows), np.bool_)
        for owner in np.unique(owners).tolist():
            here = owners == owner
            chosen[here] = np.isin(rows[here] - starts[owner], drawn(owner))
        return chosen

    for row, runs in groupby(_runs(path, is_drawn), key=itemgetter(0)):
        owner = int(np.searchsorted(starts, row, side="right")) - 1
        yield tasks[owner], row - int(starts[owner]), pa.Table.from_batches([batch for _, batch in runs])


def _runs(path: Path, is_drawn: Callable[[Int64], Bool]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Rows of one document that follow one another in a file, with its row of the file's input."""
    first = 0
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        for batch in file.iter_batches(BATCH_ROWS, columns=added_columns(file.schema_arrow)):
            rows = input_rows(batch, first)
            first += count_documents(batch)
            chosen = np.flatnonzero(is_drawn(rows))
            rows, found = rows[chosen], batch.take(pa.array(chosen))
            for begin, end in pairwise([*np.flatnonzero(np.diff(rows, prepend=-1)).tolist(), len(rows)]):
                yield int(rows[begin]), found.slice(begin, end - begin)

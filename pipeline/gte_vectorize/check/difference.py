"""One thing that is not as it should be, and the rows it concerns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gte_vectorize.batch import Task

RANGES_NAMED = 20
"""Of one kind in one file; the rows of the others are counted."""


@dataclass(frozen=True, slots=True)
class Difference:
    """`file` is relative to the output; `first_row` and `num_rows` count within the `input` of the `task`."""

    file: str
    what: str
    task: int | None = None
    input: str | None = None
    first_row: int | None = None
    num_rows: int | None = None

    @classmethod
    def of_task(cls, file: str, what: str, task: Task, first: int = 0, rows: int | None = None) -> Difference:
        """Of `rows` rows of a task, all of them if None, from its row `first` on."""
        rows = task.num_rows - first if rows is None else rows
        return cls(file, what, task.index, task.shard.uri, task.first_row + first, rows)

    def line(self) -> str:
        if self.input is None or self.first_row is None or self.num_rows is None:
            return f"{self.file!r} {self.what}"
        last = self.first_row + max(0, self.num_rows - 1)
        return f"{self.file!r} {self.what}: task {self.task}, {self.input!r} rows {self.first_row} to {last}"

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def of_tasks(file: str, what: str, tasks: Sequence[Task]) -> Difference:
    """Of a whole file, with its rows where they are one task's."""
    return Difference.of_task(file, what, tasks[0]) if len(tasks) == 1 else Difference(file, what)


@dataclass(slots=True)
class Ranges:
    """Rows of a task that have one thing wrong with them, added in ascending order; those added again count once."""

    named: list[tuple[int, int]] = field(default_factory=list)
    more: int = 0
    end: int = 0  # behind the last row

    def add(self, rows: npt.NDArray[np.int64]) -> None:
        rows = np.unique(rows[rows >= self.end])
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            if not len(run):
                continue
            if self.named and not self.more and self.end == run[0]:
                self.named[-1] = (self.named[-1][0], self.named[-1][1] + len(run))
            elif len(self.named) < RANGES_NAMED:
                self.named.append((int(run[0]), len(run)))
            else:
                self.more += len(run)
            self.end = int(run[-1]) + 1

    def differences(self, file: str, what: str, task: Task) -> Iterator[Difference]:
        for first, count in self.named:
            yield Difference.of_task(file, what, task, first, count)
        if self.more:
            yield Difference(file, f"{what}: {self.more} more rows", task.index, task.shard.uri)

"""What a worker is given at a time: a window, or a piece of one that ended workers, down to a single row.

A text may end the process that tokenizes it: by a crash in native code, for want of memory, or by never coming to an
end. It is found by splitting its window; it gets the status `crash`, and every other row what it would have had.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from gte_vectorize.batch import Passages, Window
from gte_vectorize.errors import WorkerError
from gte_vectorize.tokens.pieces import crashed, join

PIECES = 32
"""Of a share that is split: more than two, since each level may cost the time after which silence is noticed."""
MOST_CRASHES = 16
"""Rows of one window that may end workers. It is not the texts where there are more."""

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Pending:
    """A window that is not answered in full, the `number`-th of its stream."""

    number: int
    window: Window
    found: list[Passages] = field(default_factory=list)
    crashes: int = 0

    def add(self, passages: Passages) -> Passages | None:
        """Take in those of some rows → those of the window, once all its rows are there."""
        self.found.append(passages)
        if sum(some.window.num_rows for some in self.found) < self.window.num_rows:
            return None
        return join(self.window, sorted(self.found, key=lambda some: some.window.first_row))


@dataclass(eq=False, slots=True)
class Share:
    """Rows of a pending window that are given to one worker; `strikes` counts the workers that ended over them.

    The first may have ended over another share that it held. After that, a share is alone in its worker.
    """

    of: Pending
    window: Window
    strikes: int = 0

    @property
    def last_try(self) -> bool:
        """Whether one more strike decides: two, or for a single row two in a worker that it had for itself."""
        return self.strikes + 1 >= (2 if self.window.num_rows > 1 else 3)

    def crash(self, cause: str) -> Passages | None:
        """Settle on a row's status after its last try → what `Pending.add` says.

        Raises WorkerError where so many rows of one window are crashes that it cannot be the texts.
        """
        self.of.crashes += 1
        if self.of.crashes > MOST_CRASHES or not self.window.num_rows:
            raise WorkerError(
                f"{place(self.of.window)}: worker processes ended over {self.of.crashes} of these, each given alone, "
                f"and the last {cause}; that is no odd text: see whether the file is damaged, memory is short (use "
                "fewer workers) or the machine is at fault"
            )
        log.warning("%s: its text ends worker processes, the last one %s; status 'crash'", place(self.window), cause)
        return self.of.add(crashed(self.window))

    def pieces(self) -> list[Share]:
        """The same rows in some shares, in order."""
        first, end = self.window.first_row, self.window.first_row + self.window.num_rows
        step = -(-self.window.num_rows // PIECES)
        windows = (
            replace(self.window, first_row=row, num_rows=min(step, end - row)) for row in range(first, end, step)
        )
        return [Share(self.of, window, strikes=1) for window in windows]


def place(window: Window) -> str:
    """The file and the rows, for messages."""
    last = window.first_row + window.num_rows - 1
    rows = f"row {last}" if window.num_rows == 1 else f"rows {window.first_row} to {last}"
    return f"{window.task.shard.uri!r}, {rows}"

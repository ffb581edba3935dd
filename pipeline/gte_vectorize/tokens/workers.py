"""Windows → passages, by worker processes that read and tokenize side by side; the order of the windows is kept."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Self

from gte_vectorize.batch import Passages, Window
from gte_vectorize.errors import TemporaryError, VectorizeError, WorkerError
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.tokens.process import TOKENIZING, Fault, Setup, WorkerProcess
from gte_vectorize.tokens.share import Pending, Share, place
from gte_vectorize.tokens.windowing import TRUNCATE, Windowing

SILENCE = 30.0
"""Seconds without progress after which a worker that tokenizes is replaced; a healthy one tells of some every second,
and of a text that is as hard as they come every five."""
STORAGE_SILENCE = 600.0
"""The same for one that waits for a file: it starts, or reads. What can give up and try again does so before that."""
CALM = 15.0
"""Seconds before a row is tried for the last time: what is not its text's fault, a lack of memory say, may pass."""
# Seconds after which a wait looks up.
_SLICE = 1.0
# Windows a worker holds: one in work, one that waits to be sent or to be begun.
_DEPTH = 2
# Workers in a row, for each that there shall be, that end before they are ready.
_FALSE_STARTS = 2

log = logging.getLogger(__name__)


class TokenWorkers:
    """`count` worker processes; a context manager that leaves none behind.

    One stream at a time, and one thread at a time: the pipes have one owner.
    """

    def __init__(
        self,
        count: int,
        spec: TokenizerSpec,
        text_column: str,
        windowing: Windowing = TRUNCATE,
        known: Path | None = None,
    ):
        self._count = count
        self._setup = Setup(spec, text_column, windowing, known)
        self._workers: list[WorkerProcess] = []
        self._pending: dict[int, Pending] = {}
        self._retries: deque[Share] = deque()
        self._done: dict[int, Passages] = {}
        self._false_starts = 0
        self._leaving = threading.Event()

    def __enter__(self) -> Self:
        try:
            for _ in range(self._count):
                self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all workers at once."""
        while self._workers:
            self._workers.pop().stop()

    def stream(self, windows: Iterable[Window], leaving: threading.Event | None = None) -> Iterator[Passages]:
        """The passages of each window, in the order of `windows`.

        A row whose text ends workers has the status CRASH. At most two windows per worker are under way or waiting for
        their turn, beside the one that was handed out. Once `leaving` is set the stream ends, whatever the workers do.
        Raises what a worker raised on purpose, as soon as it is known; TemporaryError when a store gave nothing for
        STORAGE_SILENCE seconds, twice over; WorkerError when workers do not start, or end over too many rows.
        """
        self._leaving = leaving = leaving or threading.Event()
        self._begin()
        source = enumerate(windows)
        turn = 0
        try:
            while not leaving.is_set() and (self._feed(source) or self._done):
                self._collect(wait=turn not in self._done)
                if turn in self._done:
                    passages = self._done.pop(turn)
                    self._feed(source)
                    yield passages
                    turn += 1
        finally:
            self._abandon()

    def _begin(self) -> None:
        if self._pending:
            raise RuntimeError("these workers are busy with another stream: finish or close that one first")
        self._false_starts = 0
        # Linux ends a worker together with the thread that started it, which may have been an earlier stream's.
        for worker in [worker for worker in self._workers if not worker.is_alive()]:
            self._remove(worker)

    def _abandon(self) -> None:
        """What a worker still has in hand belongs to no later stream."""
        for worker in [worker for worker in self._workers if worker.shares]:
            self._remove(worker)
        self._pending.clear()
        self._retries.clear()
        self._done.clear()

    def _feed(self, source: Iterator[tuple[int, Window]]) -> bool:
        """Give out windows while there is room; whether any is under way."""
        while True:
            if self._retries:
                # Alone in its worker: if that one ends too, there is no doubt over which rows.
                if (worker := self._idlest(below=1)) is None:
                    break
                share = self._retries.popleft()
                if share.window.num_rows <= 1 and share.last_try:
                    self._leaving.wait(CALM)
                    if worker.used:
                        # What it tokenized before may have harmed it. A row is a crash only in a worker of its own.
                        self._remove(worker)
                        worker = self._start()
                self._give(worker, share)
            else:
                room = len(self._pending) + len(self._done) < _DEPTH * self._count
                if not room or (worker := self._idlest(below=_DEPTH)) is None or (item := next(source, None)) is None:
                    break
                number, window = item
                pending = self._pending[number] = Pending(number, window)
                self._give(worker, Share(pending, window))
        return bool(self._pending)

    def _idlest(self, *, below: int) -> WorkerProcess | None:
        """The worker with the fewest shares, if they are fewer than `below`; one that died is replaced here."""
        while len(self._workers) < self._count:
            self._start()
        free = [worker for worker in self._workers if not any(share.strikes for share in worker.shares)]
        worker = min(free, key=lambda worker: len(worker.shares), default=None)
        return worker if worker is not None and len(worker.shares) < below else None

    def _give(self, worker: WorkerProcess, share: Share) -> None:
        try:
            worker.give(share)
        except OSError:
            self._bury(worker)

    def _collect(self, *, wait: bool) -> None:
        """Take what the workers have ready; with `wait`, an answer or an end is waited for, but for one slice only."""
        busy = [worker for worker in self._workers if worker.shares]
        readable = connection.wait([worker.pipe for worker in busy], timeout=_SLICE if wait else 0)
        for worker in busy:
            if worker.listen() or worker.pipe in readable:
                worker.silent = 0
            elif wait and not readable:
                # Slices are counted, not the clock: whoever stops this process must not make its workers look silent.
                worker.silent += _SLICE
            limit = SILENCE if worker.state == TOKENIZING else STORAGE_SILENCE
            if worker.pipe in readable:
                self._receive(worker)
            elif worker.silent >= limit:
                self._bury(worker, f"made no progress for {limit:g} s", stuck=worker.state != TOKENIZING)

    def _receive(self, worker: WorkerProcess) -> None:
        try:
            answer = worker.pipe.recv()
        except BlockingIOError:
            self._bury(worker, "stopped in the middle of an answer")
        except (EOFError, OSError):
            self._bury(worker)
        else:
            if isinstance(answer, VectorizeError):
                raise answer
            if isinstance(answer, Fault):
                self._bury(worker, f"raised {answer.what}")
                return
            worker.used, self._false_starts = True, 0
            share = worker.shares.popleft()
            self._finish(share.of, share.of.add(answer))

    def _finish(self, pending: Pending, passages: Passages | None) -> None:
        if passages is not None:
            del self._pending[pending.number]
            self._done[pending.number] = passages

    def _bury(self, worker: WorkerProcess, cause: str = "", *, stuck: bool = False) -> None:
        """Replace a worker that ended, or is of no use for the `cause` that is given, and requeue what it held.

        `stuck`: the cause is that a file it waits for does not come.
        """
        worker.listen()
        if not cause:
            worker.wait(5)
        ended = self._remove(worker)
        cause = cause or ended
        log.info("a worker process %s; it is replaced", cause)
        if not worker.state:
            self._false_starts += 1
            if self._false_starts >= _FALSE_STARTS * self._count:
                raise WorkerError(
                    f"{self._false_starts} worker processes ended before they were ready, the last one {cause}; "
                    "see whether memory is short (use fewer workers) or the installation is damaged"
                )
            self._retries.extendleft(reversed(worker.shares))
            return
        for share in reversed(worker.shares):
            self._retries.extendleft(reversed(self._strike(share, cause, stuck=stuck)))

    def _strike(self, share: Share, cause: str, *, stuck: bool) -> list[Share]:
        """What to try next, if anything, after a worker ended over the share."""
        if not share.last_try:
            share.strikes += 1
            return [share]
        if stuck:
            raise TemporaryError(
                f"{place(share.window)}: reading {cause}, twice; see whether the storage answers, and run the same "
                "command again"
            )
        if share.window.num_rows > 1:
            if share.window is share.of.window:
                log.warning(
                    "%s: two worker processes ended over these, the last one %s; looking for the text that does it",
                    place(share.window),
                    cause,
                )
            return share.pieces()
        self._finish(share.of, share.crash(cause))
        return []

    def _start(self) -> WorkerProcess:
        self._workers.append(WorkerProcess(self._setup))
        return self._workers[-1]

    def _remove(self, worker: WorkerProcess) -> str:
        self._workers.remove(worker)
        return worker.stop()

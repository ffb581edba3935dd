"""Windows → passages, by worker processes that read and tokenize side by side; the order of the windows is kept.

A worker is a fresh interpreter, started like a program. Nothing is forked, so no CUDA context and no thread's lock is
copied; the caller's main module is not imported again, so a script needs no main guard.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gte_vectorize.batch import Passages, Window
from gte_vectorize.errors import VectorizeError, WorkerError
from gte_vectorize.model.tokenizer import TokenizerSpec

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
# The package is found first, so that the worker runs this very version; it then goes behind the libraries, whose folder
# it may share with anything. -P keeps the current folder out.
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import gte_vectorize
sys.path.append(sys.path.pop(0))
from gte_vectorize.tokens.worker import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""
# One thread each, as there are as many workers as cores; no GPU. Set whatever the user's environment says.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
SILENCE = 600.0
"""Seconds without an answer after which a worker is replaced. Tokenizing a window takes some, a slow store minutes."""
# Seconds for a message that has begun to go on; its sender has it whole in memory.
_STALL = 10
# Seconds after which a wait looks up.
_SLICE = 1.0
# Windows a worker holds: one in work, one that waits to be sent or to be begun.
_DEPTH = 2


@dataclass(eq=False, slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: connection.Connection[Any, Any]
    windows: deque[int] = field(default_factory=deque)
    """Numbers of the windows it has not answered yet; it answers in this order."""
    silent: float = 0
    """Seconds it was waited for since its last answer."""

    def stop(self) -> int:
        """End the process, which has nothing to lose, and return its exit code."""
        self.pipe.close()
        self.process.kill()
        return self.process.wait()


class TokenWorkers:
    """`count` worker processes; a context manager that leaves none behind.

    One stream at a time, and one thread at a time: the pipes have one owner.
    """

    def __init__(self, count: int, spec: TokenizerSpec, text_column: str):
        self._count = count
        self._setup = (spec, text_column)
        self._workers: list[_Worker] = []
        self._sent: dict[int, Window] = {}
        self._retries: deque[int] = deque()
        self._suspects: set[int] = set()

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

        At most two windows per worker are under way or waiting for their turn, beside the one that was handed out. Once
        `leaving` is set the stream ends, whatever the workers do. Raises what a worker raised, as soon as it is known,
        or WorkerError when workers died, or gave no answer for SILENCE seconds, twice over one window.
        """
        leaving = leaving or threading.Event()
        self._begin()
        source = enumerate(windows)
        done: dict[int, Passages] = {}
        turn = 0
        try:
            while not leaving.is_set() and (self._feed(source, waiting=len(done)) or done):
                done.update(self._collect(wait=turn not in done))
                if turn in done:
                    passages = done.pop(turn)
                    self._feed(source, waiting=len(done))
                    yield passages
                    turn += 1
        finally:
            self._abandon()

    def _begin(self) -> None:
        if self._sent:
            raise RuntimeError("these workers are busy with another stream: finish or close that one first")
        self._retries.clear()
        self._suspects.clear()
        # Linux ends a worker together with the thread that started it, which may have been an earlier stream's.
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._remove(worker)

    def _abandon(self) -> None:
        """What a worker still has in hand belongs to no later stream."""
        for worker in [worker for worker in self._workers if worker.windows]:
            self._remove(worker)
        self._sent.clear()

    def _feed(self, source: Iterator[tuple[int, Window]], *, waiting: int) -> bool:
        """Give out windows while there is room; whether any is under way."""
        while True:
            if self._retries:
                # Alone in its worker: if that one dies too, there is no doubt over which window.
                if (worker := self._idlest(below=1)) is None:
                    break
                self._send(worker, self._retries.popleft())
            else:
                room = len(self._sent) + waiting < _DEPTH * self._count
                if not room or (worker := self._idlest(below=_DEPTH)) is None or (item := next(source, None)) is None:
                    break
                number, self._sent[number] = item
                self._send(worker, number)
        return bool(self._sent)

    def _idlest(self, *, below: int) -> _Worker | None:
        """The worker with the fewest windows, if they are fewer than `below`; one that died is replaced here."""
        while len(self._workers) < self._count:
            self._start()
        free = [worker for worker in self._workers if self._suspects.isdisjoint(worker.windows)]
        worker = min(free, key=lambda worker: len(worker.windows), default=None)
        return worker if worker is not None and len(worker.windows) < below else None

    def _send(self, worker: _Worker, number: int) -> None:
        worker.windows.append(number)
        window = self._sent[number]
        # Without the row groups, of which a shard may have any number: what fits into the socket never waits.
        task = replace(window.task, shard=replace(window.task.shard, row_groups=()))
        try:
            worker.pipe.send(replace(window, task=task))
        except OSError:
            self._bury(worker)

    def _collect(self, *, wait: bool) -> dict[int, Passages]:
        """What the workers have ready; with `wait`, an answer or a death is waited for, but no longer than a slice."""
        ready: dict[int, Passages] = {}
        busy = [worker for worker in self._workers if worker.windows]
        readable = connection.wait([worker.pipe for worker in busy], timeout=_SLICE if wait else 0)
        for worker in busy:
            if worker.pipe not in readable:
                # Slices are counted, not the clock: whoever stops this process must not make its workers look silent.
                worker.silent += _SLICE if wait and not readable else 0
                if worker.silent >= SILENCE:
                    self._bury(worker, silence=SILENCE)
                continue
            worker.silent = 0
            try:
                answer = worker.pipe.recv()
            except BlockingIOError:
                self._bury(worker, silence=_STALL)
                continue
            except (EOFError, OSError):
                self._bury(worker)
                continue
            if isinstance(answer, VectorizeError):
                raise answer
            number = worker.windows.popleft()
            ready[number] = replace(answer, window=self._sent.pop(number))
        return ready

    def _bury(self, worker: _Worker, *, silence: float = 0) -> None:
        """Requeue the windows of a worker that died; the second death over a window is an error.

        After `silence`, in seconds, it is alive, and killed here.
        """
        if not silence:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=5)
        code = self._remove(worker)
        for number in worker.windows:
            if number in self._suspects:
                raise WorkerError(_describe(self._sent[number], code, silence))
            self._suspects.add(number)
        self._retries.extend(worker.windows)

    def _remove(self, worker: _Worker) -> int:
        self._workers.remove(worker)
        return worker.stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(True)  # whatever the caller's socket.setdefaulttimeout says
        # A read that gets nowhere raises BlockingIOError: a worker may be stopped in the middle of an answer.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STALL, 0))
        pipe: connection.Connection[Any, Any] = connection.Connection(ours.detach())
        with theirs:
            descriptor = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(_PACKAGE_ROOT), str(descriptor), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
                pass_fds=[descriptor],
                process_group=0,  # Ctrl-C reaches the caller alone
            )
        self._workers.append(_Worker(process, pipe))
        with suppress(OSError):  # died already; that shows when it is given a window
            pipe.send(self._setup)


def _describe(window: Window, code: int, silence: float) -> str:
    rows = f"{window.task.shard.uri!r}, rows {window.first_row} to {window.first_row + window.num_rows - 1}"
    if silence:
        how = f"the last one gave no answer for {silence:g} s"
        return f"{rows}: two worker processes stuck at these rows, {how}; see whether the storage hangs"
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    advice = "; memory ran out, probably: use fewer workers" if code == -signal.SIGKILL else ""
    return f"{rows}: two worker processes died over these rows ({how}){advice}"

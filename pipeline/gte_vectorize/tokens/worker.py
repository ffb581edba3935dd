"""The worker process: windows in, passages out, over one pipe. Never loads torch and never touches a GPU.

It is told its Setup once, then windows, and answers each in turn with its passages, with the
error that ends the run, or with a Fault that ends only the worker. On a second pipe it tells of progress: a byte that
says what it begins to do now. It is the main thread that tells, so that silence means that it is stuck. Nothing goes to
the terminal: the last words of a native library may quote the text it choked on.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

from gte_vectorize.batch import Passages, Window
from gte_vectorize.errors import VectorizeError, WorkerError
from gte_vectorize.failpoint import failpoint
from gte_vectorize.reader.rows import RowCursor
from gte_vectorize.reuse.index import TextIndex
from gte_vectorize.tokens.passages import read_passages
from gte_vectorize.tokens.process import READING, TOKENIZING, Fault, Setup
from gte_vectorize.tokens.tokenizer import TextTokenizer

_PR_SET_PDEATHSIG = 1


Answer = Passages | VectorizeError | Fault


def main(descriptor: int, progress: int, parent: int) -> None:
    """Work for the process `parent`, which holds the other ends of the two pipes, until it closes them."""
    _live_and_die_with(parent)
    os.set_blocking(progress, False)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sent: Future[None] | None = None

    def send(answer: Answer) -> None:
        # The parent reads when it needs passages; a thread sends them, so that the next window can begin meanwhile.
        nonlocal sent
        if sent is not None:
            sent.result()
        sent = outbox.submit(pipe.send, answer)

    def tell(state: bytes) -> None:
        with suppress(OSError):  # who listens has gone
            os.write(progress, state)

    # An error of the pipe means that the parent has gone, or wants no more.
    with Connection(descriptor) as pipe, suppress(EOFError, OSError), ThreadPoolExecutor(1) as outbox:
        _work(pipe, send, tell)


def _live_and_die_with(parent: int) -> None:
    """Only the parent ends a worker: a signal to the whole group must not look like a crash. None outlives it.

    Nor does it leave a core dump, which would hold the text that it choked on.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)


def _work(pipe: Connection[Any, Any], send: Callable[[Answer], None], tell: Callable[[bytes], None]) -> None:
    setup: Setup = pipe.recv()
    ready = False
    try:
        known = TextIndex(setup.known) if setup.known else None
        tokenizer = TextTokenizer(setup.tokenizer, on_progress=lambda: tell(TOKENIZING))
        tell(TOKENIZING)
        ready = True
        for uri, windows in groupby(_windows(pipe), key=lambda window: window.task.shard.uri):
            tell(READING)
            with RowCursor(uri, [setup.text_column]) as rows:
                for window in windows:
                    failpoint("worker.window")
                    batches = _told(rows.read(window.first_row, window.num_rows), tell)
                    send(read_passages(window, batches, tokenizer, setup.windowing, known))
    except VectorizeError as error:
        send(error)
    except BaseException as error:  # a panic in Rust is no Exception
        fault = Fault.of(error)
        send(fault if ready else WorkerError(f"a worker process could not start: {fault.what}"))


def _windows(pipe: Connection[Any, Any]) -> Iterator[Window]:
    with suppress(EOFError, OSError):
        while True:
            yield pipe.recv()


def _told(batches: Iterator[pa.RecordBatch], tell: Callable[[bytes], None]) -> Iterator[pa.RecordBatch]:
    """The same batches, each announced before it is read and once it is there."""
    while True:
        tell(READING)
        batch = next(batches, None)
        tell(TOKENIZING)
        if batch is None:
            return
        yield batch

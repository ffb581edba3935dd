"""The worker process: windows in, passages out, over one pipe. Never loads torch and never touches a GPU.

It is told the tokenizer and the text column once, then windows, and answers each in turn with its passages or with the
error that ends the run. What it has to say goes through the pipe and nothing to the terminal: the last words of a
native library may quote the text it choked on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gte_vectorize.batch import Passages, Window
from gte_vectorize.errors import VectorizeError, WorkerError
from gte_vectorize.reader.rows import RowCursor
from gte_vectorize.tokens.passages import read_passages
from gte_vectorize.tokens.tokenizer import TextTokenizer

Answer = Passages | VectorizeError

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Work for the process `parent`, which holds the other end of the pipe `descriptor`, until it closes that end."""
    _live_and_die_with(parent)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sent: Future[None] | None = None

    def send(answer: Answer) -> None:
        # The parent reads when it needs passages; a thread sends them, so that the next window can begin meanwhile.
        nonlocal sent
        if sent is not None:
            sent.result()
        sent = outbox.submit(pipe.send, answer)

    # An error of the pipe means that the parent has gone, or wants no more.
    with Connection(descriptor) as pipe, suppress(EOFError, OSError), ThreadPoolExecutor(1) as outbox:
        _work(pipe, send)


def _live_and_die_with(parent: int) -> None:
    """Only the parent ends a worker: a signal to the whole group must not look like a crash. None outlives it."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)


def _work(pipe: Connection[Any, Any], send: Callable[[Answer], None]) -> None:
    spec, text_column = pipe.recv()
    window: Window | None = None
    try:
        tokenizer = TextTokenizer(spec)
        for uri, windows in groupby(_windows(pipe), key=lambda window: window.task.shard.uri):
            with RowCursor(uri, [text_column]) as rows:
                for window in windows:
                    send(read_passages(window, rows.read(window.first_row, window.num_rows), tokenizer))
    except VectorizeError as error:
        send(error)
    except BaseException as error:  # a panic in Rust is no Exception
        send(WorkerError(_describe(error, window)))


def _windows(pipe: Connection[Any, Any]) -> Iterator[Window]:
    with suppress(EOFError, OSError):
        while True:
            yield pipe.recv()


def _describe(error: BaseException, window: Window | None) -> str:
    """What happened and where, without the error's own words: they may quote a document."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    raised = f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}"
    if window is None:
        return f"a worker process could not start: {raised}"
    return (
        f"{window.task.shard.uri!r}, rows {window.first_row} to {window.first_row + window.num_rows - 1}: "
        f"the worker raised {raised}"
    )

"""One worker process as its owner has it: windows go in, answers and signs of progress come out.

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
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from gte_vectorize.batch import Window
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.tokens.share import Share
from gte_vectorize.tokens.windowing import TRUNCATE, Windowing

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
# The package is found first, so that the worker runs this very version; it then goes behind the libraries, whose folder
# it may share with anything. -P keeps the current folder out.
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import gte_vectorize
sys.path.append(sys.path.pop(0))
from gte_vectorize.tokens.worker import main
main(*map(int, sys.argv[2:]))
"""
# One thread each, as there are as many workers as cores; no GPU. Set whatever the user's environment says.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
# What a worker tells of its progress: that it begins to read, or goes on to tokenize (or to wait for a window).
READING = b"r"
TOKENIZING = b"t"
STALL = 10
"""Seconds for a message that has begun to go on; its sender has it whole in memory."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is told once. `known`: a TextIndex of an earlier output, whose texts are not tokenized."""

    tokenizer: TokenizerSpec
    text_column: str
    windowing: Windowing = TRUNCATE
    known: Path | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """A worker's answer after an unforeseen error: its kind and place, and not its words, which may quote a text."""

    what: str

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return cls(f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}")


class WorkerProcess:
    """A worker, its pipe and what it holds; `stop` ends it.

    pipe    answers, in the order of the windows; reading one that stalls raises BlockingIOError
    shares  what it was given and has not answered
    state   what it told last of its progress, nothing while it starts
    silent  seconds it was waited for since it last told or answered anything
    used    whether it ever answered
    """

    def __init__(self, setup: Setup):
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(True)  # whatever the caller's socket.setdefaulttimeout says
        # A worker may be stopped in the middle of an answer.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", STALL, 0))
        self.pipe: connection.Connection[Any, Any] = connection.Connection(ours.detach())
        self._progress, told = os.pipe()
        os.set_blocking(self._progress, False)
        try:
            with theirs:
                ends = (theirs.fileno(), told)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, str(_PACKAGE_ROOT), *map(str, (*ends, os.getpid()))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, **_ENVIRONMENT},
                    pass_fds=ends,
                    process_group=0,  # Ctrl-C reaches the caller alone
                )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(told)
        self.shares: deque[Share] = deque()
        self.state = b""
        self.silent = 0.0
        self.used = False
        with suppress(OSError):  # died already; that shows when it is given a window
            self.pipe.send(setup)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def give(self, share: Share) -> None:
        """Send it the share's window. Raises OSError if it has died."""
        self.shares.append(share)
        window: Window = share.window
        # Without the row groups, of which a shard may have any number: what fits into the socket never waits.
        task = replace(window.task, shard=replace(window.task.shard, row_groups=()))
        self.pipe.send(replace(window, task=task))

    def listen(self) -> bool:
        """Whether it has told of progress since the last time; brings `state` up to date."""
        told = b""
        with suppress(BlockingIOError):
            told = os.read(self._progress, 1 << 16)
        self.state = told[-1:] or self.state
        return bool(told)

    def wait(self, seconds: float) -> None:
        """Give a process that is about to end the time to do so by itself, for the sake of its exit code."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)

    def stop(self) -> str:
        """End the process, which has nothing to lose → how it had ended, if it had by itself."""
        self._close()
        self._process.kill()
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "died of SIGKILL, probably because memory ran out"
        return f"ended with exit code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"

    def _close(self) -> None:
        self.pipe.close()
        os.close(self._progress)

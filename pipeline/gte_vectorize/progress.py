"""What a person or a log sees of a run: a bar on a terminal, a plain line every 30 seconds elsewhere, on stderr."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

LINE_SECONDS = 30.0

log = logging.getLogger("gte_vectorize")


@dataclass(frozen=True, slots=True)
class Progress:
    """Rows of the plan, those already published or written, and what this run has computed so far."""

    total_rows: int
    done_rows: int
    tokens: int
    seconds: float


class ProgressDisplay:
    """Shows Progress; opened for the length of a run. JSON logs have no bar, wherever they go."""

    def __init__(self, *, quiet: bool, log_format: str = "text"):
        self._terminal = sys.stderr.isatty() and not quiet and log_format == "text"
        self._bar: Any = None
        self._next_line = time.monotonic() + LINE_SECONDS
        self._stack = ExitStack()

    def __enter__(self) -> ProgressDisplay:
        if self._terminal:
            self._stack.enter_context(logging_redirect_tqdm([log]))  # a record moves the bar down instead of into it
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        self._stack.close()

    def update(self, progress: Progress) -> None:
        rate = progress.tokens / progress.seconds if progress.seconds else 0.0
        if self._terminal:
            if self._bar is None:
                self._bar = tqdm(total=progress.total_rows, initial=progress.done_rows, unit=" rows", smoothing=0.05)
            self._bar.update(progress.done_rows - self._bar.n)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            share = progress.done_rows / progress.total_rows if progress.total_rows else 1.0
            log.info(
                "%d of %d rows (%.1f %%), %.0f tokens/s", progress.done_rows, progress.total_rows, 100 * share, rate
            )


class _JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII: time in UTC, level, logger, message."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        entry = {"ts": stamp, "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def set_up_logging(log_format: str, *, quiet: bool = False, verbose: bool = False) -> None:
    """Logs of this package to stderr, as text or as JSON lines. What libraries say and warn of, only if `verbose`."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if log_format == "json" else logging.Formatter("%(levelname)s: %(message)s"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    logging.getLogger().handlers[:] = [handler if verbose and not quiet else logging.NullHandler()]
    logging.captureWarnings(True)

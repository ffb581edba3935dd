from __future__ import annotations

import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest

from gte_vectorize import progress
from gte_vectorize.progress import Progress, ProgressDisplay, set_up_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("gte_vectorize")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    logging.captureWarnings(False)
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> Iterator[Callable[..., io.StringIO]]:
    """`stderr()` is a log file in the place of stderr, `stderr(terminal=True)` a terminal."""
    before = sys.stderr  # pytest puts its own back between a test's set-up and its body

    def become(terminal: bool = False) -> io.StringIO:
        sys.stderr = Terminal() if terminal else io.StringIO()
        return sys.stderr

    yield become
    sys.stderr = before


def show(clock: list[float], *, seconds: int, **options: object) -> None:
    """A run of 1000 rows, a fifth of them there before it, that reports once a second."""
    with ProgressDisplay(**options) as display:  # type: ignore[arg-type]
        for second in range(1, seconds + 1):
            clock[0] += 1
            display.update(Progress(1000, 200 + second * 800 // seconds, second * 5000, float(second)))


def test_a_log_gets_a_plain_line_every_half_minute(stderr, clock):
    stream = stderr()
    set_up_logging("text")
    show(clock, seconds=100, quiet=False)
    assert stream.getvalue().splitlines() == [
        "INFO: 440 of 1000 rows (44.0 %), 5000 tokens/s",
        "INFO: 680 of 1000 rows (68.0 %), 5000 tokens/s",
        "INFO: 920 of 1000 rows (92.0 %), 5000 tokens/s",
    ]


@pytest.mark.parametrize("no_color", ["", "1"])
def test_neither_a_log_nor_a_bar_has_escape_sequences(stderr, clock, monkeypatch, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    log, terminal = stderr(), stderr(terminal=True)
    for stream in (log, terminal):
        sys.stderr = stream
        set_up_logging("text")
        show(clock, seconds=100, quiet=False)
    assert "rows" in log.getvalue()
    assert log.getvalue().replace("\n", "").isprintable()
    assert "rows" in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_says_nothing_but_warnings(stderr, clock, terminal):
    stream = stderr(terminal=terminal)
    set_up_logging("text", quiet=True)
    show(clock, seconds=100, quiet=True)
    progress.log.info("all is well")
    progress.log.warning("careful")
    assert stream.getvalue() == "WARNING: careful\n"


def test_a_terminal_gets_a_bar(stderr, clock):
    stream = stderr(terminal=True)
    set_up_logging("text")
    show(clock, seconds=100, quiet=False)
    assert "1000/1000" in stream.getvalue()
    assert "5,000 tokens/s" in stream.getvalue()
    assert "INFO" not in stream.getvalue()


def test_a_record_leaves_the_bar_alone(stderr, clock):
    stream = stderr(terminal=True)
    set_up_logging("text")
    with ProgressDisplay(quiet=False) as display:
        clock[0] += 1
        display.update(Progress(1000, 10, 1, 1.0))
        progress.log.warning("one shard is damaged")
        clock[0] += 1
        display.update(Progress(1000, 20, 1, 1.0))
    assert re.search(r"\r *\r?WARNING: one shard is damaged\n", stream.getvalue())
    progress.log.info("after the bar")
    assert stream.getvalue().endswith("\nINFO: after the bar\n")


def test_the_bar_is_closed_after_an_error(stderr, clock):
    stream = stderr(terminal=True)
    set_up_logging("text")

    def fail() -> None:
        with ProgressDisplay(quiet=False) as display:
            display.update(Progress(1000, 10, 1, 1.0))
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert stream.getvalue().endswith("\n")


def test_no_rows_and_no_time_are_no_division_by_zero(stderr, clock):
    stream = stderr()
    set_up_logging("text")
    with ProgressDisplay(quiet=False) as display:
        clock[0] += 31
        display.update(Progress(0, 0, 0, 0.0))
    assert stream.getvalue() == "INFO: 0 of 0 rows (100.0 %), 0 tokens/s\n"


def test_json_logs_are_one_object_a_line_on_a_terminal_too(stderr, clock):
    stream = stderr(terminal=True)
    set_up_logging("json")
    show(clock, seconds=100, quiet=False, log_format="json")
    try:
        raise ValueError("two\nlines \udc80 合同")
    except ValueError:
        progress.log.critical("unforeseen\nfailure", exc_info=True)
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [entry["level"] for entry in entries] == ["info"] * 3 + ["critical"]
    assert entries[0]["event"] == "440 of 1000 rows (44.0 %), 5000 tokens/s"
    assert entries[0]["ts"].endswith("Z")
    assert entries[-1]["event"] == "unforeseen\nfailure"
    assert entries[-1]["exception"].endswith("lines \udc80 合同")
    assert stream.getvalue().isascii()


def say_as_a_library() -> None:
    logging.getLogger("some.library").warning("advice")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", FutureWarning)


@pytest.mark.parametrize("quiet", [False, True])
def test_what_libraries_say_stays_with_them(stderr, quiet):
    stream = stderr()
    set_up_logging("text", quiet=quiet, verbose=quiet)
    say_as_a_library()
    assert stream.getvalue() == ""


def test_verbose_shows_what_libraries_say(stderr):
    stream = stderr()
    set_up_logging("json", verbose=True)
    progress.log.debug("detail")
    say_as_a_library()
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert events[:2] == ["detail", "advice"]
    assert "FutureWarning: old" in events[2]

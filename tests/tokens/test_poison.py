"""Texts that crash, hang or choke the worker that tokenizes them, and workers that do so without a text's fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import save_tiny

from gte_vectorize import vectorize
from gte_vectorize.batch import Passages, Shard, Status, Task, Window
from gte_vectorize.errors import TemporaryError, WorkerError
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.tokens import process
from gte_vectorize.tokens.passages import read_passages
from gte_vectorize.tokens.tokenizer import TextTokenizer
from gte_vectorize.tokens.workers import TokenWorkers

ROWS, STEP = 1200, 300
MISDEEDS = """
import ctypes, os, resource, signal, time
from pathlib import Path
from gte_vectorize.reader.rows import RowCursor
from gte_vectorize.tokens.tokenizer import TextTokenizer
from tokenizers import normalizers

def memory():
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, hard))
    try:
        bytearray(8 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

def pressure():
    # As if memory ran out for a while: whoever works then is killed.
    Path(STATE).exists() or Path(STATE).touch()
    if time.time() < Path(STATE).stat().st_mtime + 2:
        os.kill(os.getpid(), signal.SIGKILL)

def stop():
    if not Path(STATE).exists():
        Path(STATE).touch()
        os.kill(os.getpid(), signal.SIGSTOP)

misdeeds = {
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "panic": lambda: normalizers.Precompiled(bytes([4, 0, 0, 0]) + b"abcd").normalize_str("a"),
    "error": lambda: {}["KANARIE"],
    "memory": memory,
    "pressure": pressure,
    "hang": lambda: time.sleep(1000),
    "stop": stop,
}
tokenize, read = TextTokenizer._tokenize, RowCursor.read

def choke(self, texts):
    for text in texts:
        if text.startswith("KANARIE "):
            misdeeds[text.split()[1]]()
    return tokenize(self, texts)

def slow(self, first_row, num_rows):
    for batch in read(self, first_row, num_rows):
        time.sleep(PAUSE)
        yield batch

TextTokenizer._tokenize = choke
if PAUSE:
    RowCursor.read = slow
"""


@pytest.fixture(scope="module")
def spec(minilm_dir: str, spec_of: Callable[..., TokenizerSpec]) -> TokenizerSpec:
    return spec_of(minilm_dir, 32)


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Iterator[None]:
    yield
    assert psutil.Process().children() == []


@pytest.fixture(autouse=True)
def misdeeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Workers that do what a text says, and with `pause` wait so many seconds for every batch they read."""

    def set_up(pause: float = 0) -> None:
        told = f"STATE, PAUSE = {str(tmp_path / 'state')!r}, {pause}\n"
        program, start = original.rsplit("from gte_vectorize", 1)
        monkeypatch.setattr(process, "_PROGRAM", f"{program}{told}{MISDEEDS}from gte_vectorize{start}")

    original = process._PROGRAM
    monkeypatch.setattr("gte_vectorize.tokens.workers.CALM", 0)
    set_up()
    return set_up


def poisoned(tmp_path: Path, poison: dict[int, str]) -> list[Window]:
    """The windows of a corpus in which these rows ask for these misdeeds."""
    texts = [f"KANARIE {poison[row]}" if row in poison else f"row {row} of the corpus" for row in range(ROWS)]
    path = tmp_path / "shard.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    task = Task(0, Shard(str(path), path.stat().st_size, 0, (ROWS,)), 0, ROWS)
    return [Window(task, row, STEP) for row in range(0, ROWS, STEP)]


def assert_crashes(found: list[Passages], windows: list[Window], rows: set[int], spec: TokenizerSpec) -> None:
    """All is as if the texts of these rows were null, but for the status."""
    assert [passages.window for passages in found] == windows
    tokenizer = TextTokenizer(spec)
    for passages in found:
        first, end = passages.window.first_row, passages.window.first_row + passages.window.num_rows
        texts = pq.read_table(passages.window.task.shard.uri)["text"].to_pylist()[first:end]
        texts = [None if row in rows else text for row, text in enumerate(texts, first)]
        expected = read_passages(passages.window, [pa.record_batch({"text": pa.array(texts, pa.string())})], tokenizer)
        status = np.where(expected.status == Status.NULL, Status.CRASH, expected.status)
        assert np.array_equal(passages.status, status)
        for field in ("ids", "lengths", "truncated", "text_hash"):
            assert np.array_equal(getattr(passages, field), getattr(expected, field))


ENDINGS = {
    0: ("segfault", "died of SIGSEGV"),
    5: ("abort", "died of SIGABRT"),
    9: ("exit", "ended with exit code 3"),
    310: ("panic", "raised PanicException in "),
    311: ("error", "raised KeyError in "),
    319: ("memory", "raised MemoryError in "),
    1199: ("kill", "died of SIGKILL, probably because memory ran out"),
}


def test_just_the_rows_that_end_workers_are_crashes(
    spec: TokenizerSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    windows = poisoned(tmp_path, {row: misdeed for row, (misdeed, _) in ENDINGS.items()})
    with caplog.at_level(logging.INFO), TokenWorkers(1, spec, "text") as workers:
        assert_crashes(list(workers.stream(windows)), windows, set(ENDINGS), spec)
    lines = [record.getMessage() for record in caplog.records if "'crash'" in record.getMessage()]
    assert len(lines) == len(ENDINGS)
    for line, (row, (_, reason)) in zip(lines, ENDINGS.items(), strict=True):
        assert f"{windows[0].task.shard.uri!r}, row {row}: " in line
        assert reason in line
    assert "KANARIE" not in caplog.text


def test_windows_stay_in_order_while_others_are_searched(spec: TokenizerSpec, tmp_path: Path) -> None:
    windows = poisoned(tmp_path, {299: "abort", 300: "panic"})
    with TokenWorkers(3, spec, "text") as workers:
        assert_crashes(list(workers.stream(windows)), windows, {299, 300}, spec)
        assert_crashes(list(workers.stream(windows[2:])), windows[2:], set(), spec)
        assert len(psutil.Process().children()) == 3


def test_a_text_that_never_ends_is_a_crash(
    spec: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gte_vectorize.tokens.workers.SILENCE", 2)
    windows = [replace(poisoned(tmp_path, {1000: "hang"})[3], first_row=990, num_rows=30)]
    with TokenWorkers(2, spec, "text") as workers:
        assert_crashes(list(workers.stream(windows)), windows, {1000}, spec)
    assert "row 1000: its text ends worker processes, the last one made no progress for 2 s" in caplog.text


def test_a_worker_that_is_stopped_is_noticed_and_nothing_is_a_crash(
    spec: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gte_vectorize.tokens.workers.SILENCE", 2)
    windows = poisoned(tmp_path, {700: "stop"})
    with TokenWorkers(2, spec, "text") as workers:
        started = time.monotonic()
        assert_crashes(list(workers.stream(windows)), windows, set(), spec)
        assert time.monotonic() - started < 12
        assert len(psutil.Process().children()) == 2


def test_memory_that_is_short_for_a_while_makes_no_row_a_crash(
    spec: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gte_vectorize.tokens.workers.CALM", 3)
    windows = [replace(poisoned(tmp_path, {7: "pressure"})[0], first_row=7, num_rows=1)]
    with TokenWorkers(1, spec, "text") as workers:
        assert_crashes(list(workers.stream(windows)), windows, set(), spec)


def test_many_of_them_are_no_texts(spec: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gte_vectorize.tokens.share.MOST_CRASHES", 3)
    windows = poisoned(tmp_path, dict.fromkeys((310, 311, 312, 319), "abort"))
    with (
        TokenWorkers(2, spec, "text") as workers,
        pytest.raises(WorkerError, match=r"rows 300 to 599: .* over 4 of these, .* died of SIGABRT; .*memory"),
    ):
        list(workers.stream(windows))


def test_a_program_that_does_not_start_ends_the_stream(
    spec: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_PROGRAM", "raise SystemExit(5)")
    with (
        TokenWorkers(2, spec, "text") as workers,
        pytest.raises(WorkerError, match=r"4 worker processes ended before they were ready, .* exit code 5"),
    ):
        list(workers.stream(poisoned(tmp_path, {})))


def test_a_task_without_rows_that_ends_workers_ends_the_stream(
    spec: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GTE_VECTORIZE_FAILPOINTS", "worker.window=segfault@1")
    none = replace(poisoned(tmp_path, {})[0], num_rows=0)
    with TokenWorkers(1, spec, "text") as workers, pytest.raises(WorkerError, match=r"SIGSEGV"):
        list(workers.stream([none]))


def test_slow_storage_is_not_silence_of_a_worker(
    spec: TokenizerSpec, tmp_path: Path, misdeeds: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gte_vectorize.tokens.workers.SILENCE", 1)
    misdeeds(pause=2.5)
    windows = [replace(window, num_rows=10) for window in poisoned(tmp_path, {})][:2]
    with TokenWorkers(2, spec, "text") as workers:
        before = psutil.Process().children()
        assert_crashes(list(workers.stream(windows)), windows, set(), spec)
        assert psutil.Process().children() == before


@pytest.mark.slow
def test_storage_that_gives_nothing_is_a_temporary_error(
    spec: TokenizerSpec, tmp_path: Path, misdeeds: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gte_vectorize.tokens.workers.STORAGE_SILENCE", 3)
    misdeeds(pause=1000)
    with (
        TokenWorkers(1, spec, "text") as workers,
        pytest.raises(TemporaryError, match="rows 0 to 299: reading made no progress for 3 s, twice"),
    ):
        list(workers.stream(poisoned(tmp_path, {})))


def test_a_run_counts_a_crash_and_goes_on(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "bert")
    rows = [f"w{row} w{row + 1}" for row in range(40)]
    for name, row in (("with", "KANARIE abort"), ("without", None)):
        pq.write_table(pa.table({"id": range(41), "text": [*rows[:9], row, *rows[9:]]}), tmp_path / f"{name}.parquet")
    options = {"model": model, "device": "cpu", "workers": 1}
    report = vectorize(tmp_path / "with.parquet", max_bad_rows=1, **options)
    assert (report.status, report.failed, report.exit_code) == ({"ok": 40, "crash": 1}, 1, 3)
    vectorize(tmp_path / "without.parquet", **options)
    found, expected = (pq.read_table(tmp_path / f"{name}.embeddings.parquet") for name in ("with", "without"))
    assert found["status"][9].as_py() == "crash"
    assert found.drop_columns(["status", "text_hash"]).equals(expected.drop_columns(["status", "text_hash"]))

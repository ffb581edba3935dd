from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gte_vectorize
from gte_vectorize.batch import Passages, Shard, Task, Window
from gte_vectorize.errors import InputError, ModelError, TemporaryError, WorkerError
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.tokens.passages import read_passages
from gte_vectorize.tokens.tokenizer import TextTokenizer
from gte_vectorize.tokens.workers import TokenWorkers

ROWS = 10_000


@pytest.fixture(scope="module")
def spec(minilm_dir: str, spec_of: Callable[..., TokenizerSpec]) -> TokenizerSpec:
    return spec_of(minilm_dir, 64)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = random.Random(0)
    return [f"row {row} " + "word " * rng.choice([1, 3, 10, 100]) for row in range(ROWS)]


@pytest.fixture(scope="module")
def windows(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[Window]:
    path = tmp_path_factory.mktemp("corpus") / "shard.parquet"
    pq.write_table(pa.table({"id": range(ROWS), "text": texts}), path, row_group_size=3_000)
    return windows_of(path, ROWS, 250)


@pytest.fixture(scope="module")
def expected(texts: list[str], windows: list[Window], spec: TokenizerSpec) -> list[Passages]:
    tokenizer = TextTokenizer(spec)
    ends = ((window, window.first_row, window.first_row + window.num_rows) for window in windows)
    return [read_passages(window, [pa.record_batch({"text": texts[a:b]})], tokenizer) for window, a, b in ends]


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Iterator[None]:
    yield
    assert psutil.Process().children() == []


def windows_of(path: Path, rows: int, step: int) -> list[Window]:
    task = Task(0, Shard(str(path), path.stat().st_size, 0, (rows,)), 0, rows)
    return [Window(task, first, min(step, rows - first)) for first in range(0, rows, step)]


def assert_same(found: list[Passages], expected: list[Passages]) -> None:
    assert [passages.window for passages in found] == [passages.window for passages in expected]
    for one, other in zip(found, expected, strict=True):
        for field in ("ids", "lengths", "status", "truncated", "text_hash"):
            assert np.array_equal(getattr(one, field), getattr(other, field))


def test_windows_come_back_in_order(spec: TokenizerSpec, windows: list[Window], expected: list[Passages]) -> None:
    with TokenWorkers(3, spec, "text") as workers:
        assert_same(list(workers.stream(windows)), expected)
        assert list(workers.stream([])) == []
        assert_same(list(workers.stream(reversed(windows[:4]))), expected[3::-1])


def test_killed_workers_are_replaced(spec: TokenizerSpec, windows: list[Window], expected: list[Passages]) -> None:
    with TokenWorkers(2, spec, "text") as workers:
        found = []
        for passages in workers.stream(windows):
            found.append(passages)
            if len(found) in (1, 10, 11):
                psutil.Process().children()[0].kill()
        assert_same(found, expected)
        assert len(psutil.Process().children()) == 2


def test_workers_that_died_between_streams_are_replaced(
    spec: TokenizerSpec, windows: list[Window], expected: list[Passages]
) -> None:
    with TokenWorkers(2, spec, "text") as workers:
        for _ in range(2):
            for child in psutil.Process().children():
                child.kill()
                child.wait()
            assert_same(list(workers.stream(windows[:3])), expected[:3])


def test_workers_that_never_get_ready_end_the_stream(spec: TokenizerSpec, windows: list[Window]) -> None:
    over = threading.Event()

    def kill_every_child() -> None:
        while not over.is_set():
            for child in psutil.Process().children():
                child.kill()

    killer = threading.Thread(target=kill_every_child)
    with TokenWorkers(1, spec, "text") as workers:
        killer.start()
        try:
            with pytest.raises(WorkerError, match=r"ended before they were ready, the last one died of SIGKILL"):
                list(workers.stream(windows))
        finally:
            over.set()
            killer.join()


def test_a_worker_that_stops_within_an_answer_is_replaced(
    spec: TokenizerSpec, windows: list[Window], expected: list[Passages], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gte_vectorize.tokens.process.STALL", 1)
    large = windows_of(Path(windows[0].task.shard.uri), ROWS, ROWS // 2)  # more than a socket takes at once
    with TokenWorkers(1, spec, "text") as workers:
        stream = workers.stream(large)
        found = [next(stream)]
        assert workers._workers[0].pipe.poll(60)
        psutil.Process().children()[0].suspend()
        found += stream
    assert [passages.window for passages in found] == large
    assert np.array_equal(*(np.concatenate([passages.ids for passages in of]) for of in (found, expected)))


def test_a_stream_ends_when_its_caller_leaves_whatever_the_workers_do(
    spec: TokenizerSpec, windows: list[Window], expected: list[Passages]
) -> None:
    leaving = threading.Event()
    with TokenWorkers(2, spec, "text") as workers:
        stream = workers.stream(windows, leaving)
        next(stream)
        stopped = psutil.Process().children()
        for child in stopped:
            child.suspend()
        timer = threading.Timer(1.5, leaving.set)
        timer.start()
        started = time.monotonic()
        assert len(list(stream)) < len(windows) - 1
        assert 1 < time.monotonic() - started < 8
        timer.join()
        assert not any(child.is_running() for child in stopped)
        assert_same(list(workers.stream(windows[:3])), expected[:3])


def test_an_error_of_ours_keeps_its_class(spec: TokenizerSpec, windows: list[Window], tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.parquet"
    pq.write_table(pa.table({"text": [1, 2]}), numbers)
    with (
        TokenWorkers(2, spec, "text") as workers,
        pytest.raises(InputError, match=r"numbers\.parquet': the text column holds int64"),
    ):
        list(workers.stream([*windows[:3], *windows_of(numbers, 2, 2), *windows[3:]]))
    missing = windows_of(numbers, 2, 2)
    numbers.unlink()
    with TokenWorkers(1, spec, "text") as workers, pytest.raises(TemporaryError, match=r"numbers\.parquet"):
        list(workers.stream(missing))


def test_an_unforeseen_error_names_its_place_and_no_text(
    spec_of: Callable[..., TokenizerSpec], windows: list[Window], tmp_path: Path
) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text('{"secret": 1}')
    with TokenWorkers(1, spec_of(broken, 64), "text") as workers, pytest.raises(WorkerError) as caught:
        list(workers.stream(windows))
    assert "could not start: ValueError in tokenizer.py, line " in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_tokenizer_that_changed_is_refused(
    spec_of: Callable[..., TokenizerSpec], windows: list[Window], tmp_path: Path
) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_text("{}")
    spec = spec_of(copy, 64)
    copy.unlink()
    with TokenWorkers(1, spec, "text") as workers, pytest.raises(ModelError, match="cannot be read any more"):
        list(workers.stream(windows))


def test_no_more_windows_are_taken_than_the_bound(spec: TokenizerSpec, windows: list[Window]) -> None:
    taken = []

    def source() -> Iterator[Window]:
        for window in windows:
            taken.append(window)
            yield window

    with TokenWorkers(2, spec, "text") as workers:
        for given, _ in enumerate(workers.stream(source()), 1):
            assert len(taken) <= given + 4
            if given < 4:
                time.sleep(0.3)


def test_a_stream_that_is_left_early_leaves_nothing_behind(
    spec: TokenizerSpec, windows: list[Window], expected: list[Passages]
) -> None:
    def failing() -> Iterator[Window]:
        yield from windows[:3]
        raise ZeroDivisionError

    with TokenWorkers(2, spec, "text") as workers:
        stream = workers.stream(windows)
        next(stream)
        with pytest.raises(RuntimeError, match="busy with another stream"):
            next(workers.stream(windows))
        stream.close()
        with pytest.raises(ZeroDivisionError):
            list(workers.stream(failing()))
        assert_same(list(workers.stream(windows[5:9])), expected[5:9])


def test_no_child_outlives_an_error_of_the_caller(spec: TokenizerSpec, windows: list[Window]) -> None:
    def fail() -> None:
        with TokenWorkers(2, spec, "text") as workers:
            for _ in workers.stream(windows):
                raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert psutil.Process().children() == []


def test_workers_have_no_torch_no_gpu_no_core_dump_and_ignore_signals(
    spec: TokenizerSpec, windows: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    allowed = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (allowed[1], allowed[1]))
    with TokenWorkers(1, spec, "text") as workers:
        stream = workers.stream(windows)
        next(stream)
        (child,) = psutil.Process().children()
        loaded = {Path(region.path).name for region in child.memory_maps()}
        assert any("tokenizers" in name for name in loaded)
        assert not any("torch" in name or "cuda" in name for name in loaded)
        environment = child.environ()
        assert child.rlimit(psutil.RLIMIT_CORE)[0] == 0
        assert (environment["TOKENIZERS_PARALLELISM"], environment["CUDA_VISIBLE_DEVICES"]) == ("false", "")
        for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            child.send_signal(sent)
        assert len(list(stream)) == len(windows) - 1
        assert psutil.Process().children() == [child]
    resource.setrlimit(resource.RLIMIT_CORE, allowed)


SCRIPT = """
import sys
from pathlib import Path
from gte_vectorize.batch import Shard, Task, Window
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.tokens.workers import TokenWorkers

tokenizer, sha256, shard = sys.argv[1:]
spec = TokenizerSpec(path=Path(tokenizer), sha256=sha256, max_length=64, prompt="", lower_case=False, normalizer={})
task = Task(0, Shard(shard, 1, 0, (10_000,)), 0, 10_000)
print("top level", flush=True)
with TokenWorkers(2, spec, "text") as workers:
    for passages in workers.stream(Window(task, row, 100) for row in range(0, 1_000, 100)):
        print(passages.window.first_row, len(passages.lengths), flush=True)
    if sys.stdin.read() == "stay":
        import time
        time.sleep(60)
"""


@pytest.fixture
def script(tmp_path: Path, spec: TokenizerSpec, windows: list[Window]) -> Iterator[subprocess.Popen[str]]:
    """A script without a main guard, in a folder of its own, run in a folder that holds a trap."""
    (tmp_path / "script").mkdir()
    path = tmp_path / "script" / "embed.py"
    path.write_text(SCRIPT)
    (tmp_path / "tokenizers.py").write_text("raise SystemExit('the current folder was searched')")
    root = Path(gte_vectorize.__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, path, spec.path, spec.sha256, windows[0].task.shard.uri],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def test_a_script_needs_no_main_guard(script: subprocess.Popen[str]) -> None:
    output, errors = script.communicate("go")
    assert (script.returncode, errors) == (0, "")
    assert output.splitlines() == ["top level", *(f"{row} 100" for row in range(0, 1_000, 100))]


def test_workers_die_with_a_caller_that_is_killed(script: subprocess.Popen[str]) -> None:
    assert script.stdout is not None
    lines = [script.stdout.readline() for _ in range(4)]
    assert lines[-1] == "200 100\n"
    children = psutil.Process(script.pid).children()
    assert len(children) == 2
    script.kill()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []

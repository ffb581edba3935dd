"""The library call: it returns a report or raises, and leaves the caller's process as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import save_tiny

import gte_vectorize
from gte_vectorize import ConfigError, InputError, LimitExceeded, vectorize
from gte_vectorize.encoder.cpu import CpuEncoder
from gte_vectorize.progress import Progress

TEXTS = [f"w{row} w{row + 1} w{row * 3 % 190}" for row in range(40)]
SCRIPT = """
import logging, os, signal, sys

def process_state():
    loggers = [logging.getLogger(), logging.getLogger("gte_vectorize")]
    umask = os.umask(0)
    os.umask(umask)
    return (
        umask,
        [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers],
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        dict(os.environ),
    )

from gte_vectorize import vectorize
before = process_state()
report = vectorize("corpus.parquet", model=sys.argv[1], workers=2)
assert process_state() == before
print("once", report.rows, report.output)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "bert")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"id": list(range(len(TEXTS))), "text": TEXTS}), "corpus.parquet")
    return tmp_path / "corpus.parquet"


def test_inputs_are_a_text_a_path_or_a_list(corpus, model):
    seen = []
    report = vectorize("corpus.parquet", "a.parquet", model=str(model), on_progress=seen.append)
    assert (report.rows, report.exit_code, report.output) == (40, 0, "a.parquet")
    assert [(type(progress), progress.total_rows, progress.done_rows) for progress in seen] == [(Progress, 40, 40)]
    vectorize(corpus, output=corpus.with_name("b.parquet"), model=model)
    vectorize([corpus], output="c.parquet", model=model, workers=1, columns=None)
    assert Path("a.parquet").read_bytes() == Path("b.parquet").read_bytes() == Path("c.parquet").read_bytes()
    assert pq.read_table("a.parquet", columns=["id"]).column("id").to_pylist() == list(range(40))


def test_the_environment_is_not_consulted(corpus, model, monkeypatch):
    monkeypatch.setenv("GTE_VECTORIZE_TEXT_COLUMN", "missing")
    assert vectorize(corpus, model=model).rows == 40


def test_what_is_wrong_is_raised(corpus, model):
    with pytest.raises(ConfigError, match="unknown key 'text_colum' in the call; did you mean 'text_column'"):
        vectorize(corpus, text_colum="text")
    with pytest.raises(ConfigError, match="max_length in the call: a whole number"):
        vectorize(corpus, max_length=0)
    with pytest.raises(InputError, match=r"missing\.parquet"):
        vectorize("missing.parquet", output="out", model=model)
    with pytest.raises(InputError, match="body"):
        vectorize(corpus, output="out", model=model, text_column="body")
    assert not Path("out").exists()


def test_too_many_failed_rows_are_raised_and_nothing_is_published(corpus, model):
    pq.write_table(pa.table({"text": pa.array([b"w1", b"\xff", b"\xfe"]).view(pa.string())}), "bad.parquet")
    with pytest.raises(LimitExceeded, match=r"2 of 3 rows failed \(2 utf8\), and --max-bad-rows allows 0\.1%"):
        vectorize("bad.parquet", model=model)
    assert not Path("bad.embeddings.parquet").exists()
    report = vectorize("bad.parquet", model=model, max_bad_rows=2)
    assert (report.exit_code, report.failed, report.computed_tokens) == (3, 2, 0)


def test_a_script_needs_no_main_guard_and_its_process_stays_as_it_was(corpus, model):
    Path("script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(gte_vectorize.__file__).parents[1])}
    end = subprocess.run(
        [sys.executable, "script.py", model], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (end.returncode, end.stdout) == (0, "once 40 corpus.embeddings.parquet\n"), end.stderr


@pytest.mark.parametrize("where", ["encoder", "caller"])
def test_an_error_leaves_no_thread_and_no_process(corpus, model, monkeypatch, where):
    encode, calls = CpuEncoder.encode, []

    def fail(self, batch):
        calls.append(batch)
        if where == "encoder" and len(calls) == 15:
            raise RuntimeError("lost")
        return encode(self, batch)

    def on_progress(progress):
        if where == "caller":
            raise RuntimeError("lost")

    monkeypatch.setattr(CpuEncoder, "encode", fail)
    children = psutil.Process().children(recursive=True)
    with pytest.raises(RuntimeError, match="lost") as caught:
        vectorize(corpus, "out", model=model, task_rows=2, batch_tokens=1, on_progress=on_progress)
    # While `caught` is held, so are the frames of everything that was under way.
    assert caught.traceback
    assert [thread for thread in threading.enumerate() if thread.name.startswith(("stage", "lane"))] == []
    assert psutil.Process().children(recursive=True) == children
    assert vectorize(corpus, "out", model=model, task_rows=2, batch_tokens=1).rows == 40

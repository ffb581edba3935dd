"""The command as a user meets it: exit codes, streams, sources of values, signals."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import save_tiny
from filelock import FileLock

import gte_vectorize.run
from gte_vectorize import cli, errors
from gte_vectorize.config import OPTIONS

COMMAND = [sys.executable, "-m", "gte_vectorize"]
HEAVY = ("torch", "transformers", "pyarrow", "datasets", "numpy")
PROBE = f"""
import sys
from gte_vectorize.cli import main
try:
    main()
finally:
    print("heavy:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("model"), "bert"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a corpus that has a null text and an empty one."""
    monkeypatch.chdir(tmp_path)
    texts = ["w1 w2 w3", "w4", None, "w5 w6 w7 w8", "  ", "w9 w10"]
    pq.write_table(pa.table({"id": list(range(6)), "text": texts}), "corpus.parquet")
    return tmp_path


@pytest.fixture
def gte(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ended]]:
    """The command, run in this process: `main` without what it does to the process."""
    loggers = [logging.getLogger(), logging.getLogger("gte_vectorize")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["gte-vectorize", *map(str, arguments)])
        capfd.readouterr()
        cli.set_up_logging("text")
        code = cli._run_command()
        return Ended(code, *capfd.readouterr())

    yield run
    logging.captureWarnings(False)
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def start(*arguments: object, program: list[str] = COMMAND, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=120)
    return Ended(process.returncode, out, err)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "Exit codes: 0 done"),
        (["run", "--help"], 0, "--max-bad-rows"),
        (["corpus.parquet", "-h"], 0, "--max-bad-rows"),
        (["--version"], 0, "gte-vectorize, version"),
        ([], 2, "Usage"),
        (["plan", "out"], 2, "'plan' is not a command of this version"),
        (["run"], 2, "no input"),
        (["corpus.parquet", "--modle", "x"], 2, "Did you mean '--model'"),
        (["corpus.parquet", "--max-length", "-1"], 2, "--max-length: a whole number"),
        (["corpus.parquet", "--max-bad-rows", "nan%"], 2, "--max-bad-rows: a number of rows"),
        (["corpus.parquet", "--config", "missing.toml"], 2, "No such file"),
        (["corpus.parquet", "corpus.parquet"], 2, "--output is required"),
        (["search", "missing", "query"], 2, "does not exist"),
        (["search", "corpus.parquet"], 2, "Missing argument"),
        (["status"], 2, "Missing argument"),
        (["verify", "out", "--reembed", "0"], 2, "a share of the rows is expected"),
    ],
)
def test_help_and_usage_errors_answer_before_anything_heavy_is_loaded(folder, arguments, code, said):
    end = ended(start(*arguments, program=[sys.executable, "-c", PROBE]))
    assert end.code == code
    assert said in end.out + end.err
    assert "Traceback" not in end.err
    assert end.err.endswith("heavy:\n")
    assert bool(end.out) == (code == 0)


def test_an_unknown_variable_names_the_nearest(folder):
    end = ended(start("corpus.parquet", GTE_VECTORIZE_MODLE="x"))
    assert end == (
        2,
        "",
        "ERROR: unknown environment variable GTE_VECTORIZE_MODLE; did you mean 'GTE_VECTORIZE_MODEL'?\n",
    )


def test_the_package_alone_loads_nothing_heavy():
    program = f"import sys, gte_vectorize; print(*(name for name in {HEAVY} if name in sys.modules))"
    assert ended(start(program=[sys.executable, "-c", program])) == (0, "\n", "")


def test_a_run_keeps_stdout_for_what_is_asked(folder, gte, model):
    end = gte("corpus.parquet", "--model", model)
    assert (end.code, end.out) == (0, "")
    assert "corpus.embeddings.parquet: 6 rows" in end.err
    assert "rows without a vector: 1 null, 1 empty" in end.err
    assert end.err.replace("\n", "").isprintable()

    again = gte("run", "corpus.parquet", "--model", model, "--json", "--quiet")
    assert (again.code, again.err) == (0, "")
    report = json.loads(again.out)
    assert (report["rows"], report["status"]) == (6, {"ok": 4, "null": 1, "empty": 1})
    assert report["computed_tokens"] == 0


def test_failed_rows_end_in_3_or_4(folder, gte, model):
    text = pa.array([b"w1 w2", b"\xff", b"w3"]).view(pa.string())
    pq.write_table(pa.table({"text": text}), "bad.parquet")

    refused = gte("bad.parquet", "--model", model, "--max-bad-rows", "0", "--json")
    assert (refused.code, refused.out) == (4, "")
    assert "1 of 3 rows failed (1 utf8), and --max-bad-rows allows 0" in refused.err
    assert not Path("bad.embeddings.parquet").exists()

    allowed = gte("bad.parquet", "--model", model, "--json")
    assert allowed.code == 3
    assert json.loads(allowed.out)["computed_tokens"] == 0
    assert "WARNING: rows without a vector: 1 utf8" in allowed.err


@pytest.mark.parametrize("arguments", [["corpus.parquet", "--max-length", "0"], ["none.parquet", "-o", "out"]])
def test_json_logs_hold_the_error_too(folder, gte, model, arguments):
    end = gte(*arguments, "--model", model, "--log-format", "json", "-v")
    assert (end.code, end.out) == (2, "")
    entries = [json.loads(line) for line in end.err.splitlines()]
    assert [entry["level"] for entry in entries if entry["level"] != "debug"] == ["error"]


def test_json_logs_are_all_there_is_on_stderr(folder):
    """Of a model that transformers loads, with all it has to say about that."""
    model = save_tiny(folder / "model", "modernbert")
    end = ended(start("corpus.parquet", "--model", model, "--log-format", "json"))
    assert (end.code, end.out) == (0, "")
    assert all(set(json.loads(line)) == {"ts", "level", "logger", "event"} for line in end.err.splitlines())
    assert Path("corpus.embeddings.parquet").stat().st_mode & 0o077 == 0


def test_files_beside_the_corpus_are_left_out_and_said(folder, gte, model):
    (folder / "input").mkdir()
    (folder / "corpus.parquet").rename(folder / "input/corpus.parquet")
    (folder / "input/_SUCCESS").touch()
    end = gte("input", "-o", "out", "--model", model)
    assert end.code == 0
    assert "1 files beside the corpus are left out, first '" in end.err


def test_an_output_that_another_run_holds_ends_in_75(folder, gte, model):
    Path(".corpus.embeddings.parquet.state").mkdir()
    with FileLock(".corpus.embeddings.parquet.state/lock"):
        end = gte("corpus.parquet", "--model", model)
    assert end.code == 75
    assert end.err.count("\n") == 1
    assert "another run" in end.err
    assert gte("corpus.parquet", "--model", model).code == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError, 2),
        (errors.InputError, 2),
        (errors.ModelError, 2),
        (errors.OutputError, 2),
        (errors.LimitExceeded, 4),
        (errors.TemporaryError, 75),
        (errors.WorkerError, 1),
        (errors.VectorizeError, 1),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(folder, gte, monkeypatch, error, code):
    def fail(*_: object) -> None:
        raise error("what to do")

    monkeypatch.setattr(gte_vectorize.run, "run", fail)
    assert gte("corpus.parquet") == (code, "", "ERROR: what to do\n")


FAULTY = """
import sys
from pathlib import Path
from gte_vectorize.cli import main
from gte_vectorize.encoder.cpu import CpuEncoder

encode, asked, faults = CpuEncoder.encode, [], Path("faults")

def encode_wrongly(self, batch):
    vectors = encode(self, batch)
    if batch.passages.window.task.shard.uri == "canary":
        asked.append(batch)
        told = faults.read_text() if faults.exists() else ""
        if len(asked) == 3 and len(told) < limit:
            faults.write_text(told + "x")
            vectors[2, 5] += 1e-7
    return vectors

CpuEncoder.encode = encode_wrongly
limit = int(sys.argv.pop())
main()
"""


@pytest.mark.parametrize(("faults", "code", "fresh"), [(1, 0, 1), (2, 0, 2), (99, 75, 2)])
def test_a_device_that_computes_wrongly_is_left_for_a_fresh_process(folder, gte, model, faults, code, fresh):
    pq.write_table(pa.table({"text": [f"w{i} w{i % 7}" for i in range(12)]}), "corpus.parquet")
    options = ("--model", model, "--device", "cpu", "--task-rows", "2")
    assert gte("corpus.parquet", "-o", "right", *options).code == 0
    Path("faulty.py").write_text(FAULTY)
    # One lane, so that the canary is answered in the order it is asked.
    program, lanes = [sys.executable, "faulty.py"], {"OMP_NUM_THREADS": "1"}
    end = ended(start("corpus.parquet", "-o", "out", *options, faults, program=program, **lanes))
    assert (end.code, end.err.count("Going on in a fresh process")) == (code, fresh), end.err
    assert "computes wrongly" in end.err
    right = {path.name: path.read_bytes() for path in Path("right").glob("*.parquet")}
    made = {path.name: path.read_bytes() for path in Path("out").glob("*.parquet")}
    # Each process published the task that came before the fault, and nothing of what was computed with it.
    assert made == (right if not code else {name: right[name] for name in sorted(right)[:3]})


def test_a_bug_ends_in_1_and_keeps_its_traceback(folder, gte, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(gte_vectorize.run, "run", fail)
    end = gte("corpus.parquet")
    assert (end.code, end.out) == (1, "")
    assert end.err.startswith("CRITICAL: ")
    assert end.err.endswith("RuntimeError: bug\n")
    end = gte("corpus.parquet", "--log-format", "json")
    assert json.loads(end.err)["exception"].endswith("RuntimeError: bug")


def test_every_value_is_printed_with_its_source(folder, gte, model, monkeypatch):
    Path("job.toml").write_text('workers = 2\ntask_rows = 7\ncolumns = ["a,b"]\nmax_bad_rows = "0.50%"\n')
    monkeypatch.setenv("GTE_VECTORIZE_TASK_ROWS", "8")
    monkeypatch.setenv("GTE_VECTORIZE_MAX_LENGTH", "30")
    end = gte("corpus.parquet", "--config", "job.toml", "--model", model, "--max-length", "20", "--print-config")
    assert (end.code, end.err) == (0, "")
    lines = end.out.splitlines()
    for line in (
        'inputs = ["corpus.parquet"]  # command line',
        "# output is not set  # default",
        "workers = 2  # config file 'job.toml'",
        "task_rows = 8  # environment",
        "max_length = 20  # command line",
        "max_bad_rows = \"0.50%\"  # config file 'job.toml'",
        'dtype = "auto"  # default',
        '# the model\'s pooling = "mean"  # 1_Pooling/config.json',
    ):
        assert line in lines
    assert "# the model's max_length = 20  # " in end.out
    assert not any(Path().glob("*embeddings*"))


def test_what_is_printed_is_a_config_file(folder, gte, model):
    said = ["corpus.parquet", "--model", model, "--columns", "id", "--prompt", 'a "\\\t合同\x7f', "--no-graphs"]
    printed = gte(*said, "--max-bad-rows", "5", "--print-config").out
    values = tomllib.loads(printed)
    assert set(values) < set(OPTIONS)
    Path("job.toml").write_text(printed)
    again = gte("--config", "job.toml", "--print-config").out
    assert tomllib.loads(again) == values


def test_a_closed_stdout_is_no_traceback(folder, model):
    for arguments in (["--help"], ["corpus.parquet", "--model", model, "--print-config"]):
        process = start(*arguments)
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait(60) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_and_the_same_command_goes_on(folder, gte, model, number):
    rows = 6144
    texts = [" ".join(f"w{(row * 7 + word) % 190}" for word in range(3 + row % 40)) for row in range(rows)]
    pq.write_table(pa.table({"text": texts}), "many.parquet")
    # Small batches make the run last.
    arguments = ["many.parquet", "-o", "out", "--model", model, "--task-rows", "512", "--batch-tokens", "64"]

    process = start(*arguments)
    while not Path("out/part-000001.parquet").exists():  # by then the first one is on record
        assert process.poll() is None, ended(process).err
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    end = ended(process)
    assert end.code == 128 + number
    assert end.out == ""
    assert [line for line in end.err.splitlines() if not line.startswith("INFO: ")] == [
        f"ERROR: stopped by {number.name}; run the same command again to go on"
    ]
    assert children
    assert psutil.wait_procs(children, timeout=5)[1] == []
    before = {path: path.stat().st_ino for path in Path("out").glob("part-*")}
    assert 0 < len(before) < rows // 512
    assert not Path("out/_SUCCESS").exists()

    resumed = gte(*arguments, "--json")
    assert resumed.code == 0
    report = json.loads(resumed.out)
    assert (report["rows"], report["status"]) == (rows, {"ok": rows})
    assert 0 < report["computed_tokens"] < report["tokens"]
    assert {path: path.stat().st_ino for path in before} == before


@pytest.mark.parametrize("how", ["turned into an error", "swallowed"])
def test_a_stop_that_a_library_does_not_pass_on_is_a_stop(folder, gte, model, monkeypatch, how):
    open_encoder = gte_vectorize.run.open_encoder

    def interrupted(*arguments, **options):
        try:
            cli._stop(signal.SIGTERM, None)
        except cli.Stopped:
            if how != "swallowed":
                raise ValueError(how) from None
        return open_encoder(*arguments, **options)

    monkeypatch.setattr(cli, "_asked", [])
    monkeypatch.setattr(gte_vectorize.run, "open_encoder", interrupted)
    end = gte("corpus.parquet", "--model", model, "--quiet")
    assert end == (143, "", "ERROR: stopped by SIGTERM; run the same command again to go on\n")
    assert not Path("corpus.embeddings.parquet").exists()


def test_a_signal_ends_a_run_in_the_middle_of_a_window(folder, minilm_dir):
    """The first window alone is many seconds of work; the run leaves at the next batch of it."""
    pq.write_table(pa.table({"text": [f"{row} " + "many words " * 300 for row in range(3000)]}), "long.parquet")
    process = start("long.parquet", "--model", minilm_dir, "--workers", "1")
    for line in process.stderr:
        if "tasks to do" in line:
            break
    time.sleep(3)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 143
    assert time.monotonic() - asked < 8
    assert not Path("long.embeddings.parquet").exists()


FAILING = """
import os, sys
from types import SimpleNamespace
from gte_vectorize import cli, errors

def run(config, on_progress):
    print("in", os.getpid(), file=sys.stderr)
    raise errors.DeviceError("the GPU failed")

sys.modules["gte_vectorize.run"] = SimpleNamespace(run=run)
"""


def test_a_failed_device_is_left_to_a_fresh_process_twice(folder):
    process = start("corpus.parquet", program=[sys.executable, "-c", f"{FAILING}\ncli.main()"])
    end = ended(process)
    assert end.code == 75
    warning = "WARNING: the GPU failed. Going on in a fresh process"
    assert end.err.splitlines() == [*[f"in {process.pid}", warning] * 2, f"in {process.pid}", "ERROR: the GPU failed"]


def test_a_process_that_is_not_the_command_s_own_is_never_replaced(folder):
    call = "cli.cli.main(['corpus.parquet'], standalone_mode=False)"
    program = f"{FAILING}\ntry:\n    {call}\nexcept errors.DeviceError:\n    print('the caller goes on')"
    end = ended(start(program=[sys.executable, "-c", program]))
    assert (end.code, end.out, end.err.count("in ")) == (0, "the caller goes on\n", 1)


def test_a_gpu_that_failed_and_is_gone_is_not_replaced_by_the_cpu(folder, model):
    gone = {cli.FAILURES: "cuda 1.0", "CUDA_VISIBLE_DEVICES": ""}
    end = ended(start("corpus.parquet", "--model", model, **gone))
    assert end.code == 75
    assert "the GPU failed, and PyTorch does not find it any more" in end.err
    assert list(folder.iterdir()) == [folder / "corpus.parquet"]

"""The promises, end to end: the same bits, rows in order, nothing lost, nothing mixed, nothing told."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import VOCABULARY, save_tiny

import gte_vectorize
import gte_vectorize.run
from gte_vectorize import LimitExceeded, OutputError, vectorize
from gte_vectorize.encoder.forward import PackedForward
from gte_vectorize.progress import Progress
from gte_vectorize.store.layout import find_layout

POLL = 0.01  # seconds
WORDS = VOCABULARY - 4
LENGTHS = [int(length) for length in np.random.default_rng(0).integers(2, 60, 700)]


def distinct_texts(lengths: Sequence[int], seed: int = 0) -> list[str]:
    """Texts of these many words, each at least 2, no two alike."""
    words = np.random.default_rng(seed).integers(0, WORDS, (len(lengths), max(lengths)))
    words[:, :2] = np.stack(divmod(np.arange(len(lengths)), WORDS), axis=1)
    return [" ".join(f"w{word}" for word in row[:length]) for row, length in zip(words, lengths, strict=True)]


def write_corpus(path: Path, texts: Sequence[Any], row_groups: Sequence[int] = ()) -> Path:
    table = pa.table({"id": pa.array(range(len(texts))), "text": texts})
    with pq.ParquetWriter(path, table.schema) as writer:
        first = 0
        for rows in row_groups or [len(texts)]:
            writer.write_table(table.slice(first, rows))
            first += rows
    assert first == len(texts)
    return path


def vectors(output: Path) -> np.ndarray:
    """float32[rows, dim] of an output in which every row has a vector."""
    column = pq.read_table(output, columns=["embedding"])["embedding"].combine_chunks()
    assert column.null_count == 0
    return column.flatten().to_numpy().reshape(len(column), -1)


def embed(texts: Sequence[str], folder: Path, model: Path | str, **options: Any) -> np.ndarray:
    write_corpus(folder / "corpus.parquet", texts)
    options = {"model": model, "device": "cpu", "overwrite": True} | options
    vectorize(folder / "corpus.parquet", folder / "vectors.parquet", **options)
    return vectors(folder / "vectors.parquet")


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def times(folder: Path, pattern: str) -> dict[Path, tuple[int, int]]:
    found = [path for path in folder.glob(pattern) if path.name != "lock"]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """The command, at the head of a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "gte_vectorize", *map(str, arguments), "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": str(Path(gte_vectorize.__file__).parents[1]), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=120)
    return Ended(process.returncode, out, err)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("promises") / "model", "bert")


# A vector depends on its text alone.


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    found = embed(distinct_texts(LENGTHS), tmp_path_factory.mktemp("plain"), model)
    assert len(np.unique(found, axis=0)) == len(found)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_tokens": 64},
        {"batch_tokens": 5000},
        {"workers": 1},
        {"workers": 3},
        {"task_rows": 37},
        {"task_rows": 101, "workers": 2, "batch_tokens": 300},
    ],
)
def test_order_batches_workers_and_tasks_leave_every_bit(model, plain, tmp_path, options):
    order = np.random.default_rng(1).permutation(len(plain))
    texts = distinct_texts(LENGTHS)
    assert np.array_equal(embed([texts[row] for row in order], tmp_path, model, **options), plain[order])


def test_a_text_alone_or_repeated_has_the_same_bits(model, plain, tmp_path):
    texts = distinct_texts(LENGTHS)
    for row in (0, int(np.argmin(LENGTHS)), int(np.argmax(LENGTHS)), 350):
        assert np.array_equal(embed([texts[row]], tmp_path, model), plain[[row]])
        assert np.array_equal(embed([texts[row]] * 70, tmp_path, model), plain[[row] * 70])


def test_real_weights_and_texts_give_the_same_bits(minilm_dir, english_texts, tmp_path):
    texts = english_texts[:300]
    together = embed(texts, tmp_path, minilm_dir, max_length=128)
    order = np.random.default_rng(2).permutation(len(texts))
    shuffled = [texts[row] for row in order]
    again = embed(shuffled, tmp_path, minilm_dir, max_length=128, workers=3, batch_tokens=300, task_rows=70)
    assert np.array_equal(again, together[order])
    for row in (0, int(np.argmin([len(text) for text in texts])), 299):
        assert np.array_equal(embed([texts[row]], tmp_path, minilm_dir, max_length=128), together[[row]])


@pytest.mark.parametrize(("family", "dropout"), [("bert", "hidden_dropout_prob"), ("distilbert", "dropout")])
def test_dropout_is_off(tmp_path, family, dropout):
    texts = distinct_texts(LENGTHS[:60])
    trained = save_tiny(tmp_path / "trained", family, **{dropout: 0.5})
    first, second = (embed(texts, tmp_path, trained) for _ in range(2))
    assert np.array_equal(first, second)
    assert np.array_equal(first, embed(texts, tmp_path, save_tiny(tmp_path / "without", family, **{dropout: 0.0})))


# Row i of the output is row i of the input.


def test_ten_thousand_rows_stay_in_order(model, tmp_path):
    from sentence_transformers import SentenceTransformer

    lengths = [int(length) for length in np.random.default_rng(3).integers(2, 24, 10_000)]
    texts = distinct_texts(lengths)
    row_groups = [1, 2500, 7, 699, 3000, 0, 1293, 2500]
    corpus, output = write_corpus(tmp_path / "corpus.parquet", texts, row_groups), tmp_path / "out"
    report = vectorize(corpus, output, model=model, device="cpu", workers=3, task_rows=1100, batch_tokens=1500)
    assert report.status == {"ok": 10_000}
    assert len(list(output.glob("part-*"))) > 9

    rows = pq.read_table(output, columns=["id", "n_tokens", "text_hash"])
    assert rows["id"].to_pylist() == list(range(10_000))
    assert rows["n_tokens"].to_pylist() == [length + 2 for length in lengths]
    assert rows["text_hash"].to_pylist() == [hashlib.blake2b(t.encode(), digest_size=16).hexdigest() for t in texts]
    found, sample = vectors(output), slice(None, None, 7)
    reference = SentenceTransformer(str(model), device="cpu").encode(texts[sample], batch_size=250)
    assert np.array_equal((found[sample] @ reference.T).argmax(axis=1), np.arange(len(reference)))
    assert np.array_equal(embed(texts[::-1], tmp_path, model), found[::-1])


# Nothing is lost.

TASKS = 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = [2 + row % 44 for row in range(TASKS * 250)]
    return write_corpus(tmp_path_factory.mktemp("interrupted") / "corpus.parquet", distinct_texts(lengths))


def command(corpus: Path, output: Path, model: Path) -> subprocess.Popen[str]:
    """In eight tasks; small batches make it last."""
    return start(corpus, "-o", output, "--model", model, "--task-rows", "250", "--batch-tokens", "64")


def visible(output: Path) -> dict[str, bytes]:
    """What stands under final names."""
    if output.is_file():
        return {output.name: output.read_bytes()}
    return {path.name: path.read_bytes() for path in output.glob("*") if path.is_file()}


def watch(process: subprocess.Popen[str], output: Path, whole: dict[str, bytes], *, records: int, delay: float) -> None:
    """Kill the group a moment after so many parts are on record; what is visible at any time must be whole."""
    folder, due = find_layout(output, ()).records, float("inf")
    with process:
        while process.poll() is None and time.monotonic() < due:
            assert visible(output).items() <= whole.items()
            if due == float("inf") and len(list(folder.glob("*"))) >= records:
                due = time.monotonic() + delay
            time.sleep(POLL)
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert psutil.wait_procs(children, timeout=5)[1] == []
    assert visible(output).items() <= whole.items()


@pytest.mark.parametrize("name", ["out", "out.parquet"])
def test_killed_and_run_again_is_undisturbed(model, corpus, tmp_path, name):
    undisturbed, killed = tmp_path / "undisturbed" / name, tmp_path / "killed" / name
    vectorize(corpus, undisturbed, model=model, device="cpu", task_rows=250)
    whole, at, seeded = visible(undisturbed), find_layout(killed, ()), random.Random(name)
    published: dict[Path, tuple[int, int]] = {}
    for records in (0, 1, 4, TASKS, TASKS + 1):  # the last one is left alone
        process = command(corpus, killed, model)
        watch(process, killed, whole, records=records, delay=seeded.uniform(0, 0.1 if records else 4))
        if 0 < records < TASKS:
            assert process.returncode == -signal.SIGKILL  # and not just the end of a run
        before, published = published, times(at.parts, "part-*")
        assert before.items() <= published.items() or killed.is_file()
    assert process.returncode == 0
    assert tree(killed.parent) == tree(undisturbed.parent)


def test_a_killed_worker_leaves_no_trace(model, corpus, tmp_path):
    workers = []

    def kill_one(_: object) -> None:
        if not workers:
            workers.extend(psutil.Process().children())
            workers[0].kill()

    options = {"model": model, "device": "cpu", "workers": 2, "task_rows": 250}
    vectorize(corpus, tmp_path / "a.parquet", **options)
    vectorize(corpus, tmp_path / "b.parquet", on_progress=kill_one, **options)
    assert len(workers) == 2
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


@pytest.mark.parametrize("name", ["out", "out.parquet"])
def test_a_finished_run_again_starts_and_changes_nothing(model, corpus, tmp_path, monkeypatch, name):
    options = {"output": tmp_path / name, "model": model, "device": "cpu", "task_rows": 250}
    done = vectorize(corpus, **options)
    before = times(tmp_path, "**/*")
    for started in ("TokenWorkers", "open_encoder"):
        monkeypatch.setattr(gte_vectorize.run, started, None)
    again = vectorize(corpus, **options)
    assert (again.exit_code, again.computed_tokens) == (0, 0)
    assert (again.rows, again.tokens, again.status) == (done.rows, done.tokens, done.status)
    assert times(tmp_path, "**/*") == before


@pytest.mark.parametrize("ending", ["done", "failed", "stopped"])
def test_no_process_outlives_the_command(model, corpus, tmp_path, ending):
    source, output = tmp_path / "corpus.parquet", tmp_path / "out"
    shutil.copy2(corpus, source)
    if ending == "failed":  # the footer is whole, the last pages are not
        data = bytearray(source.read_bytes())
        data[len(data) // 2 : len(data) * 3 // 4] = bytes(len(data) * 3 // 4 - len(data) // 2)
        source.write_bytes(data)
    process = command(source, output, model)
    children: set[psutil.Process] = set()
    while process.poll() is None:
        time.sleep(POLL)
        children.update(psutil.Process(process.pid).children(recursive=True))
        if ending == "stopped" and children:
            process.send_signal(signal.SIGTERM)
            break
    end = ended(process)
    assert end.code == {"done": 0, "failed": 4, "stopped": 143}[ending]
    assert end.err.count("ERROR") == (ending != "done")
    assert "Traceback" not in end.err
    assert children
    assert psutil.wait_procs(children, timeout=5)[1] == []
    if ending == "stopped":
        assert vectorize(source, output, model=model, device="cpu", task_rows=250).rows == TASKS * 250


# Nothing is mixed.


@pytest.mark.parametrize("name", ["out", "out.parquet"])
def test_another_job_on_the_same_output_is_refused_by_name(model, corpus, tmp_path, name):
    output = tmp_path / "run" / name
    options = {"model": model, "device": "cpu", "task_rows": 250}

    def stop(progress: Progress) -> None:
        if progress.done_rows >= 750:
            raise InterruptedError

    def refused(differences: str, **changed: Any) -> None:
        before = times(output.parent, "**/*")
        with pytest.raises(OutputError, match=differences) as caught:
            vectorize(corpus, output, **options | changed)
        assert caught.value.exit_code == 2
        assert "belongs to another run" in str(caught.value)
        assert times(output.parent, "**/*") == before

    other = save_tiny(tmp_path / "other", "bert", std=0.3)
    with pytest.raises(InterruptedError):
        vectorize(corpus, output, on_progress=stop, **options)
    for done in (False, True):
        refused("model: was 'model', now 'other'(.|\n)*weights: was", model=other)
        refused("prompt: was '', now 'w1 '", prompt="w1 ")
        refused("max_length: was 48, now 20", max_length=20)
        if not done:
            vectorize(corpus, output, **options)


# What comes out.


def test_the_output_has_the_promised_schema_and_equal_bytes_wherever_it_is(model, tmp_path, monkeypatch):
    table = pa.table(
        {
            "id": pa.array([7, 8, 9, 10], pa.int64()),
            "text": ["w1 w2", None, " ", "w3 w4 w5"],
            "title": ["a", None, "c", "d"],
            "tags": pa.array([["x"], [], None, ["y", "z"]], pa.list_(pa.string())),
        }
    ).replace_schema_metadata({"pandas": "{}", "huggingface": "{}"})
    for place in (tmp_path / "here", tmp_path / "far" / "away"):
        shutil.copytree(model, place / "model")
        pq.write_table(table, place / "corpus.parquet")
        monkeypatch.chdir(place)
        for output in ("out", "out.parquet"):
            vectorize("corpus.parquet", output, model="model", device="cpu", task_rows=3)
        time.sleep(0.01)  # another time
    here, away = (visible(place / "out") for place in (tmp_path / "here", tmp_path / "far" / "away"))
    parts = sorted(name for name in here if name.startswith("part-"))
    assert parts == ["part-000000.parquet", "part-000001.parquet"]
    assert [here[part] for part in parts] == [away[part] for part in parts]
    assert visible(tmp_path / "here/out.parquet") == visible(tmp_path / "far/away/out.parquet")

    descriptions = set()
    for path in [*(tmp_path / "here/out").glob("part-*"), tmp_path / "here/out.parquet"]:
        schema = pq.read_schema(path)
        assert schema.remove_metadata() == pa.schema(
            [
                ("id", pa.int64()),
                ("title", pa.string()),
                ("tags", pa.list_(pa.string())),
                ("embedding", pa.list_(pa.field("element", pa.float32(), nullable=False), 64)),
                ("n_tokens", pa.int32()),
                ("truncated", pa.bool_()),
                ("status", pa.string()),
                ("text_hash", pa.string()),
            ]
        )
        assert set(schema.metadata) == {b"embeddings"}
        descriptions.add(schema.metadata[b"embeddings"].decode())
    (description,) = descriptions
    assert str(tmp_path) not in description
    assert platform.node() not in description
    said = json.loads(description)
    told = {"model", "revision", "weights_sha256", "dim", "metric", "pooling", "prompt", "max_tokens", "long_documents"}
    assert told | {"fingerprint", "tokenizer_sha256", "dtype", "computed_in", "normalized"} <= set(said)
    assert (said["model"], said["dim"], said["metric"], said["pooling"]) == ("model", 64, "cosine", ["mean"])


def test_a_vector_that_is_not_finite_becomes_a_null_and_a_count(model, plain, tmp_path, monkeypatch):
    poison = VOCABULARY - 1  # the id of the last word
    poisoned = [f"w{WORDS - 1}" in text.split()[:46] for text in distinct_texts(LENGTHS)]
    forward = PackedForward.__call__

    def overflow(self: PackedForward, inputs: Any, bucket: Any) -> Any:
        ids, _, bounds = inputs.split([bucket.tokens, bucket.tokens, bucket.slots + 1])
        found = forward(self, inputs, bucket)
        for row, (first, end) in enumerate(pairwise(bounds.tolist())):
            if poison in ids[first:end]:
                found[row, 5] = [float("nan"), float("inf")][row % 2]
        return found

    monkeypatch.setattr(PackedForward, "__call__", overflow)
    corpus, output = write_corpus(tmp_path / "corpus.parquet", distinct_texts(LENGTHS)), tmp_path / "vectors.parquet"
    options = {"model": model, "device": "cpu", "task_rows": 300}
    with pytest.raises(
        LimitExceeded, match=rf"{sum(poisoned)} of 700 rows failed \({sum(poisoned)} nonfinite\)"
    ) as caught:
        vectorize(corpus, output, **options)
    assert caught.value.exit_code == 4
    assert not output.exists()

    report = vectorize(corpus, output, max_bad_rows=sum(poisoned), **options)
    assert (report.exit_code, report.computed_tokens, report.failed) == (3, 0, sum(poisoned))
    assert report.status == {"ok": 700 - sum(poisoned), "nonfinite": sum(poisoned)}
    rows = pq.read_table(output)
    assert [status == "nonfinite" for status in rows["status"].to_pylist()] == poisoned
    assert [vector is None for vector in rows["embedding"].to_pylist()] == poisoned
    kept = rows["embedding"].combine_chunks().drop_null().flatten().to_numpy().reshape(-1, 64)
    assert np.array_equal(kept, plain[~np.array(poisoned)])


# Nothing is told.

CANARY = "Kanarienvogel"


@pytest.fixture(scope="module")
def told(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    """Two verbose runs over texts of every status, the first beyond the limit of bad rows; temporary files in tmp/."""
    folder = tmp_path_factory.mktemp("told")
    (folder / "tmp").mkdir()
    texts: list[bytes | None] = [f"{CANARY} w{row} {CANARY}{row}".encode() * (1 + row % 30) for row in range(400)]
    texts += [None, b" ", f"{CANARY} \xff".encode("latin-1"), f"{CANARY}{' ' * (1 << 20)}{CANARY}".encode()]
    table = pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.binary()).view(pa.string())})
    pq.write_table(table, folder / "corpus.parquet")
    runs = []
    for allowed in (1, 2):
        command = [folder / "corpus.parquet", "--model", model, "--task-rows", 150, "--max-bad-rows", allowed, "-v"]
        process = start(*command, "-o", folder / "out", "--json", TMPDIR=str(folder / "tmp"))
        while process.poll() is None:
            assert not any(CANARY in path.name for path in folder.rglob("*"))
            time.sleep(POLL)
        runs.append(ended(process))
    return folder, runs


def test_no_word_of_a_text_is_told(told):
    folder, runs = told
    assert [run.code for run in runs] == [4, 3]
    assert json.loads(runs[1].out)["status"] == {"ok": 400, "null": 1, "empty": 1, "utf8": 1, "too_large": 1}
    assert not any(CANARY in stream for run in runs for stream in (run.out, run.err))
    assert list((folder / "tmp").iterdir()) == []
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "corpus.parquet"]
    assert {"plan.json", "000000.json", "_manifest.json", "part-000002.parquet"} <= {path.name for path in files}
    for path in files:
        assert CANARY.encode() not in path.read_bytes()
    assert CANARY not in str(pq.read_table(folder / "out").drop_columns("embedding").to_pylist())


def test_files_and_folders_are_for_their_owner_alone(told):
    output = told[0] / "out"
    for path in [output, *output.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


# Equal passages are computed once.


def test_a_corpus_with_duplicates_computes_less_and_ends_with_the_same_bytes(model, tmp_path, monkeypatch):
    fresh = distinct_texts(LENGTHS[:120])
    random = np.random.default_rng(1)
    # Four rows in ten repeat another one, some only to the model: it does not see what is behind its limit, or spaces.
    rows = fresh + [f"  {fresh[index]} " for index in random.choice(len(fresh), 80)]
    texts = [rows[index] for index in random.permutation(len(rows))]
    corpus = write_corpus(tmp_path / "corpus.parquet", texts)
    options = {"model": model, "device": "cpu", "task_rows": 1000}
    once = vectorize(corpus, tmp_path / "once", **options)
    monkeypatch.setattr("gte_vectorize.run.marked", lambda windows: windows)
    each = vectorize(corpus, tmp_path / "each", **options)
    assert each.duplicates == 0
    assert each.computed_tokens == each.tokens == once.tokens
    assert once.duplicates >= 80
    assert once.computed_tokens < 0.7 * once.tokens
    for name in ("part-000000.parquet", "_manifest.json", "_SUCCESS"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "each" / name).read_bytes()

"""Documents longer than the model's limit, end to end: one row per window, or their mean, or both."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import MAX_LENGTH, VOCABULARY, save_tiny
from safetensors.numpy import load_file, save_file

import gte_vectorize
from gte_vectorize import ConfigError, LimitExceeded, OutputError, vectorize
from gte_vectorize.batch import Shard, Task
from gte_vectorize.encoder import cpu
from gte_vectorize.model.spec import load_model
from gte_vectorize.progress import Progress
from gte_vectorize.report import Report
from gte_vectorize.tokens.pieces import gathered, pieces_of
from gte_vectorize.tokens.tokenizer import TextTokenizer
from gte_vectorize.tokens.windowing import Windowing
from gte_vectorize.tokens.workers import TokenWorkers

LENGTHS = [3, 200, 40, 46, 47, 61, 7, 900, 5, 46, 130, 12, 92, 300, 20, 1, 45, 48, 400, 33]
ODD = [
    None,
    "",
    " \n\t",
    b"\xff\xfe",
    "一家👩\u200d👧\u200d👦，好👍🏽！ cafe\u0301\r\n\x00 İ " * 30,
    "\ufeff  \u202eأ b \n" * 60 + " \u3000 ",
    "w7",
]
TASKS, TASK_ROWS = 7, 5
"""Of a corpus whose row groups have ten rows."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "bert")


def words(count: int, rng: random.Random) -> str:
    """Lines of some words."""
    return "".join(f"w{rng.randrange(VOCABULARY - 4)}{rng.choice('   ' + chr(10))}" for _ in range(count))


@pytest.fixture(scope="module")
def texts() -> list[Any]:
    """Short and long documents, some that begin alike or are equal, and odd ones."""
    rng = random.Random(0)
    found: list[Any] = [words(length, rng) for length in LENGTHS]
    clauses = words(500, rng)
    found += [clauses + words(30, rng), clauses, clauses + words(90, rng), clauses, found[7]]
    found += ODD
    return found + [words(length, rng) for length in (10, 250, 60)]


@pytest.fixture(scope="module")
def corpus(texts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("corpus") / "corpus.parquet", texts)


def as_bytes(texts: list[Any]) -> list[bytes | None]:
    return [text.encode() if isinstance(text, str) else text for text in texts]


def write(path: Path, texts: list[Any], kind: pa.DataType | None = None, **more: Any) -> Path:
    rows = range(len(texts))
    raw = pa.array(as_bytes(texts), pa.binary())
    columns = {
        "id": pa.array([None if row % 9 == 4 else row for row in rows], pa.int64()),
        "tags": pa.array([None if row % 4 == 1 else [f"第{row}条", None] * (row % 3) for row in rows]),
        "text": raw.view(pa.string()) if kind is None else raw.cast(kind),
        "meta": pa.array([None if row % 5 == 0 else {"page": row, "of": f"{row}页"} for row in rows]),
        "code": pa.array([f"c{row % 3}" for row in rows]).dictionary_encode(),
        **more,
    }
    pq.write_table(pa.table(columns), path, row_group_size=10)
    return path


def embed(corpus: Path, output: Path, model: Path, long: str = "windows", **options: Any) -> Report:
    options = {"device": "cpu", "workers": 1, "max_bad_rows": "20%", "batch_tokens": 300, **options}
    return vectorize(corpus, output, model=model, long=long, **options)


def rows_of(output: Path) -> pa.Table:
    return pq.read_table(output, partitioning=None)


def vectors_of(table: pa.Table) -> list[bytes | None]:
    """The bits of each row's vector."""
    column = table["embedding"].combine_chunks()
    there = iter(column.drop_null().flatten().to_numpy().reshape(-1, column.type.list_size))
    return [next(there).tobytes() if valid else None for valid in column.is_valid().to_pylist()]


def documents_of(table: pa.Table) -> list[list[int]]:
    """The rows of each document."""
    starts = [row for row, index in enumerate(table["chunk_index"].to_pylist()) if index == 0]
    return [list(range(*pair)) for pair in zip(starts, [*starts[1:], len(table)], strict=True)]


def parts_of(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(output.glob("part-*.parquet"))}


@pytest.fixture(scope="module")
def plain(corpus: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    output = tmp_path_factory.mktemp("plain") / "out.parquet"
    embed(corpus, output, model, "truncate")
    return rows_of(output)


@pytest.fixture(scope="module")
def both(corpus: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of --long both, in one task: out.parquet and out.documents.parquet."""
    folder = tmp_path_factory.mktemp("both")
    report = embed(corpus, folder / "out.parquet", model, "both", keep_text=True)
    assert report.documents is not None
    assert (report.rows, report.documents.rows) == tuple(len(rows_of(path)) for path in outputs_in(folder))
    return folder


@pytest.fixture(scope="module")
def in_tasks(corpus: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of --long both in tasks: the folders out and out.documents."""
    folder = tmp_path_factory.mktemp("tasks")
    embed(corpus, folder / "out", model, "both", task_rows=TASK_ROWS)
    return folder


def outputs_in(folder: Path) -> tuple[Path, Path]:
    return folder / "out.parquet", folder / "out.documents.parquet"


# What the rows are.


@pytest.mark.parametrize("options", [{}, {"overlap": 0}, {"overlap": 24}, {"splitter": "semchunk"}])
def test_a_window_has_its_own_text_and_that_texts_vector(
    options: dict[str, Any], corpus: Path, texts: list[Any], model: Path, tmp_path: Path
) -> None:
    """These tokens are words: a window's text gives the window's ids alone as well."""
    embed(corpus, tmp_path / "out.parquet", model, keep_text=True, **options)
    table = rows_of(tmp_path / "out.parquet")
    documents = documents_of(table)
    assert len(documents) == len(texts)
    assert max(table["n_tokens"].to_pylist()) == MAX_LENGTH
    assert not any(table["truncated"].to_pylist())
    places = list(zip(*(table[name].to_pylist() for name in ("char_start", "char_end")), strict=True))
    stored = table["text"].combine_chunks().view(pa.binary()).to_pylist()
    for rows, text in zip(documents, texts, strict=True):
        assert table["chunk_index"].take(rows).to_pylist() == list(range(len(rows)))
        if places[rows[0]] == (None, None):
            assert (len(rows), stored[rows[0]]) == (1, as_bytes([text])[0])
            continue
        assert (places[rows[0]][0], places[rows[-1]][1]) == (0, len(text))
        for row in rows:
            start, end = places[row]
            assert stored[row] == text[start:end].encode()
            assert row == rows[-1] or places[row + 1][0] <= end < places[row + 1][1]
    shared = [places[row][1] - places[row + 1][0] for rows in documents for row in rows[:-1]]
    assert any(shared) == (options != {"overlap": 0})

    write(tmp_path / "windows.parquet", stored)
    embed(tmp_path / "windows.parquet", tmp_path / "alone.parquet", model, "truncate")
    alone = rows_of(tmp_path / "alone.parquet")
    assert alone["status"].to_pylist() == table["status"].to_pylist()
    assert alone["n_tokens"].to_pylist() == table["n_tokens"].to_pylist()
    assert not any(alone["truncated"].to_pylist())
    assert vectors_of(alone) == vectors_of(table)


def test_other_columns_are_repeated_for_every_window(both: Path, corpus: Path) -> None:
    source = pq.read_table(corpus)
    table, means = map(rows_of, outputs_in(both))
    row_of = [row for row, rows in enumerate(documents_of(table)) for _ in rows]
    for name in ("id", "tags", "meta", "code"):
        values = source[name].to_pylist()
        assert table[name].to_pylist() == [values[row] for row in row_of]
        assert means[name].to_pylist() == values
    assert (
        means["text"].combine_chunks().view(pa.binary()).to_pylist()
        == source["text"].combine_chunks().view(pa.binary()).to_pylist()
    )
    assert table.column_names == [*source.column_names, *rows_of(outputs_in(both)[0]).column_names[5:]]


def test_columns_can_be_chosen_and_left_out(corpus: Path, both: Path, model: Path, tmp_path: Path) -> None:
    expected = rows_of(both / "out.parquet")
    for number, columns in enumerate(([], ["meta"], ["tags", "text"])):
        embed(corpus, tmp_path / f"{number}.parquet", model, columns=columns)
        table = rows_of(tmp_path / f"{number}.parquet")
        copied = [name for name in expected.column_names[:5] if name in columns]
        assert table.column_names == [*copied, *expected.column_names[5:]]
        assert table.equals(expected.select(table.column_names).replace_schema_metadata(table.schema.metadata))


def test_documents_that_fit_have_the_bits_of_truncate_mode(both: Path, plain: pa.Table) -> None:
    table, means = map(rows_of, outputs_in(both))
    documents, ours, averages, expected = documents_of(table), *map(vectors_of, (table, means, plain))
    long = plain["truncated"].to_pylist()
    assert 8 < sum(long) < len(long) - 8
    for row, rows in enumerate(documents):
        assert (len(rows) > 1) == long[row]
        if not long[row]:
            assert ours[rows[0]] == averages[row] == expected[row]
    names = ["status", "text_hash"]
    assert means.select(names).equals(plain.select(names).cast(means.select(names).schema))
    first = table.take([rows[0] for rows in documents])
    assert first.select(names).equals(plain.select(names).cast(table.select(names).schema))
    assert set(first["status"].to_pylist()) == {"ok", "null", "empty", "utf8"}


def test_the_mean_is_of_the_windows_weighted_by_tokens(both: Path) -> None:
    table, means = map(rows_of, outputs_in(both))
    vectors, averages = vectors_of(table), vectors_of(means)
    tokens = table["n_tokens"].to_pylist()
    for row, rows in enumerate(documents_of(table)):
        assert means["n_tokens"][row].as_py() == sum(tokens[one] for one in rows)
        if len(rows) > 1:
            stacked = np.array([np.frombuffer(vectors[one], np.float32) for one in rows], np.float64)
            total = (stacked * np.array([tokens[one] for one in rows])[:, None]).sum(axis=0)
            mean = np.frombuffer(averages[row], np.float32)
            assert np.allclose(mean, total / np.sqrt(np.square(total).sum()), rtol=1e-6, atol=1e-9)


def test_one_bad_window_makes_the_document_bad(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("word_embeddings.weight")]
    broken = weights[name].copy()
    broken[11] = 3e38  # w7: beyond fp32 once it is summed
    shutil.copytree(model, tmp_path / "model")
    save_file({**weights, name: broken}, tmp_path / "model/model.safetensors", {"format": "pt"})
    texts = ["w1 " * 100, "w2 " * 46 + "w7 " + "w3 " * 80, "w4", "w7"]
    corpus = write(tmp_path / "corpus.parquet", texts)
    report = embed(corpus, tmp_path / "out.parquet", tmp_path / "model", "both", overlap=0, max_bad_rows="100%")
    assert report.exit_code == 3
    table, means = map(rows_of, outputs_in(tmp_path))
    assert means["status"].to_pylist() == ["ok", "nonfinite", "ok", "nonfinite"]
    assert means["embedding"].is_null().to_pylist() == [False, True, False, True]
    status = [[table["status"][row].as_py() for row in rows] for rows in documents_of(table)]
    assert status == [["ok"] * 3, ["ok", "nonfinite", "ok"], ["ok"], ["nonfinite"]]
    # A window that has no vector keeps its place.
    assert table["char_start"].is_null().to_pylist() == [False] * len(table)


KINDS = [
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
    *(pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int32(), pa.binary())),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_text_column_is_cut(
    kind: pa.DataType, texts: list[Any], both: Path, model: Path, tmp_path: Path
) -> None:
    usable = [text for text in texts if not isinstance(text, bytes)]
    corpus = write(tmp_path / "corpus.parquet", usable, kind)
    embed(corpus, tmp_path / "out.parquet", model, keep_text=True)
    table, expected = rows_of(tmp_path / "out.parquet"), rows_of(both / "out.parquet")
    expected = expected.filter(pa.array([name != "utf8" for name in expected["status"].to_pylist()]))
    assert table["text"].cast(pa.large_binary()).to_pylist() == expected["text"].cast(pa.large_binary()).to_pylist()
    assert vectors_of(table) == vectors_of(expected)


def test_a_column_of_that_name_is_in_the_way_of_windows_alone(model: Path, tmp_path: Path) -> None:
    texts = ["w1 w2", "w3 " * 100]
    corpus = write(tmp_path / "corpus.parquet", texts, chunk_index=pa.array(["a", "b"]), char_end=pa.array([7, 8]))
    for long in ("truncate", "mean"):
        embed(corpus, tmp_path / f"{long}.parquet", model, long)
        table = rows_of(tmp_path / f"{long}.parquet")
        assert (table["chunk_index"].to_pylist(), table["char_end"].to_pylist()) == (["a", "b"], [7, 8])
    for long in ("windows", "both"):
        with pytest.raises(OutputError, match="'chunk_index' has the name of an output column"):
            embed(corpus, tmp_path / "out.parquet", model, long)
    embed(corpus, tmp_path / "out.parquet", model, columns=["id"])
    assert rows_of(tmp_path / "out.parquet")["chunk_index"].to_pylist() == [0, 0, 1, 2]


# However a run goes, the bytes are the same.


@pytest.mark.parametrize("window_rows", [1, 5, 16])
def test_documents_that_are_spread_over_windows_have_the_same_bytes(
    window_rows: int, both: Path, corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "WINDOW_ROWS", window_rows)
    seen: list[Progress] = []
    embed(corpus, tmp_path / "out.parquet", model, "both", keep_text=True, on_progress=seen.append)
    passages = len(rows_of(tmp_path / "out.parquet"))
    assert len(seen) >= passages / window_rows
    assert [progress.done_rows for progress in seen] == sorted(progress.done_rows for progress in seen)
    assert seen[-1].done_rows == seen[-1].total_rows == pq.read_metadata(corpus).num_rows
    for ours, expected in zip(outputs_in(tmp_path), outputs_in(both), strict=True):
        assert ours.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("options", [{"workers": 3}, {"batch_tokens": 48}, {"batch_tokens": 5000}])
def test_workers_and_batches_leave_every_bit(
    options: dict[str, Any], both: Path, corpus: Path, model: Path, tmp_path: Path
) -> None:
    embed(corpus, tmp_path / "out.parquet", model, "both", keep_text=True, **options)
    for ours, expected in zip(outputs_in(tmp_path), outputs_in(both), strict=True):
        assert ours.read_bytes() == expected.read_bytes()


def test_tasks_hold_the_windows_of_their_rows(both: Path, in_tasks: Path) -> None:
    table, means = map(rows_of, outputs_in(both))
    documents = documents_of(table)
    assert len(documents) == TASKS * TASK_ROWS
    bounds = [*(documents[first][0] for first in range(0, len(documents), TASK_ROWS)), len(table)]
    for task, (first, end) in enumerate(pairwise(bounds)):
        windows, averages = (
            pq.read_table(in_tasks / name / f"part-{task:06}.parquet") for name in ("out", "out.documents")
        )
        assert windows.equals(table.slice(first, end - first).drop_columns(["text"]))
        assert averages.equals(means.slice(task * TASK_ROWS, TASK_ROWS).drop_columns(["text"]))


def test_both_are_the_windows_and_the_means(both: Path, corpus: Path, model: Path, tmp_path: Path) -> None:
    for long, expected in zip(("windows", "mean"), outputs_in(both), strict=True):
        embed(corpus, tmp_path / f"{long}.parquet", model, long, keep_text=True)
        assert (tmp_path / f"{long}.parquet").read_bytes() == expected.read_bytes()


def test_the_command_does_the_same(both: Path, corpus: Path, model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gte_vectorize", corpus, "-o", tmp_path / "out.parquet", "--model", model]
    options = ["--long", "both", "--overlap", "6", "--keep-text", "--device", "cpu", "--max-bad-rows", "20%", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(gte_vectorize.__file__).parents[1])}
    end = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=120)
    assert end.returncode == 3, end.stderr  # one text is no UTF-8
    report = json.loads(end.stdout)
    assert (report["rows"], report["documents"]["rows"]) == tuple(len(rows_of(path)) for path in outputs_in(both))
    for ours, expected in zip(outputs_in(tmp_path), outputs_in(both), strict=True):
        assert ours.read_bytes() == expected.read_bytes()


class Stop(Exception):
    """Raised in the middle of a run."""


@pytest.mark.parametrize("calls", [1, 4, 11])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(
    calls: int, in_tasks: Path, corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are small: it stops within tasks, and within documents."""
    monkeypatch.setattr(cpu, "WINDOW_ROWS", 16)
    left = calls

    def stop(progress: Progress) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Stop

    with pytest.raises(Stop):
        embed(corpus, tmp_path / "out", model, "both", task_rows=TASK_ROWS, on_progress=stop)
    folders = [tmp_path / "out", tmp_path / "out.documents"]
    before = [parts_of(folder) for folder in folders]
    assert all(len(parts) < TASKS for parts in before)
    assert (calls == 1) == (not any(before))
    times = {path: path.stat().st_mtime_ns for folder in folders for path in folder.glob("part-*")}
    embed(corpus, tmp_path / "out", model, "both", task_rows=TASK_ROWS)
    for folder in folders:
        assert parts_of(folder) == parts_of(in_tasks / folder.name)
        assert (folder / "_SUCCESS").exists()
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize("gone", ["out", "out.documents"])
def test_one_of_two_outputs_is_made_again_without_touching_the_other(
    gone: str, in_tasks: Path, corpus: Path, model: Path, tmp_path: Path
) -> None:
    for name in ("out", "out.documents"):
        shutil.copytree(in_tasks / name, tmp_path / name)
    shutil.rmtree(tmp_path / gone)
    (kept,) = (tmp_path / name for name in ("out", "out.documents") if name != gone)
    times = {path: path.stat().st_mtime_ns for path in kept.glob("part-*")}
    report = embed(corpus, tmp_path / "out", model, "both", task_rows=TASK_ROWS)
    assert report.computed_tokens > 0
    assert parts_of(tmp_path / gone) == parts_of(in_tasks / gone)
    assert {path: path.stat().st_mtime_ns for path in kept.glob("part-*")} == times
    assert embed(corpus, tmp_path / "out", model, "both", task_rows=TASK_ROWS).computed_tokens == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [({"overlap": 7}, "overlap"), ({"splitter": "semchunk"}, "semchunk"), ({"long": "mean"}, "mean")],
)
def test_other_windows_are_another_job(
    options: dict[str, Any], said: str, in_tasks: Path, corpus: Path, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(in_tasks / "out", tmp_path / "out")
    with pytest.raises(OutputError, match=rf"long_documents: was .*windows.*, now .*{said}"):
        embed(corpus, tmp_path / "out", model, task_rows=TASK_ROWS, **options)


# What is the same is computed once.


def test_equal_windows_are_computed_once(
    both: Path, corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "WINDOW_ROWS", 16)
    once = embed(corpus, tmp_path / "once.parquet", model, "both", keep_text=True)
    table = rows_of(tmp_path / "once.parquet")
    vectors = [vector for vector in vectors_of(table) if vector is not None]
    assert once.duplicates == len(vectors) - len(set(vectors)) > 40
    monkeypatch.setattr("gte_vectorize.run.marked", lambda windows: windows)
    each = embed(corpus, tmp_path / "out.parquet", model, "both", keep_text=True)
    assert (each.duplicates, each.computed_tokens) == (0, sum(table["n_tokens"].to_pylist()))
    assert once.computed_tokens < 0.7 * each.computed_tokens
    for ours, expected in zip(outputs_in(tmp_path), outputs_in(both), strict=True):
        assert ours.read_bytes() == expected.read_bytes()


# Refused.


def test_what_has_no_sense_is_refused(
    corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.parquet"
    with pytest.raises(ConfigError, match="--overlap 25: at most half of the limit of 48 tokens"):
        embed(corpus, output, model, overlap=25)
    with pytest.raises(ConfigError, match="choose --long windows, mean or both"):
        embed(corpus, output, model, "truncate", overlap=8)
    monkeypatch.setattr("gte_vectorize.job.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--splitter semchunk.*pip install"):
        embed(corpus, output, model, splitter="semchunk")
    assert not output.exists()


# Large documents.

MIB = 1 << 20
LARGE = {
    "spaces": "The party of the first part shall indemnify the other one. " * (2 * MIB // 59),
    "unbroken": "".join(random.Random(0).choices("没有空格的一段很长话也标点条款双方应当履行义务", k=5 * MIB // 3)),
    "word": "ab" * (5 * MIB // 2),
}


def peak(process: psutil.Process) -> int:
    """Bytes that it had resident, at most."""
    (line,) = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_document_costs_some_copies_and_its_neighbours_nothing(minilm_dir: str, tmp_path: Path) -> None:
    spec = load_model(minilm_dir, max_length=256).tokenizer
    short = [f"document {number} of many" for number in range(1000)]
    texts = short[:300]
    for place, text in enumerate(LARGE.values()):
        texts += [text, *short[300 + 100 * place : 400 + 100 * place]]
    texts += short[600:]
    corpus = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"text": texts}), corpus, row_group_size=500)
    rows, size = len(texts), corpus.stat().st_size
    task = Task(0, Shard(str(corpus), size, 0, (500, 503)), 0, rows)
    expected = [list(found.ids) for found in TextTokenizer(spec).encode(short)]
    windowing = Windowing(mode="windows", overlap=32)
    with TokenWorkers(1, spec, "text", windowing) as workers:
        found = list(gathered(workers.stream(pieces_of([task], 512, whole=True)), 512))
        (worker,) = psutil.Process().children()
        highest = peak(worker)
    assert highest < 1200 * MIB
    ids: dict[int, list[list[int]]] = {}
    chars: dict[int, int] = {}
    for window in found:
        ends = np.cumsum(window.lengths)
        for place, row in enumerate(window.row.tolist()):
            ids.setdefault(row, []).append(window.ids[ends[place] - window.lengths[place] : ends[place]].tolist())
            chars[row] = int(window.chunk[place, 2])
    assert [ids[row] for row in range(rows) if texts[row] in short] == [[one] for one in expected]
    large = [row for row, text in enumerate(texts) if len(text) > MIB]
    *usable, word = large
    assert len(large) == len(LARGE)
    for row in usable:
        assert (len(ids[row]) > 1000, chars[row]) == (True, len(texts[row]))
        assert max(map(len, ids[row])) <= 256
    # One word as long as that has no end that could be told from one inside a word.
    assert (ids[word], chars[word]) == ([[]], 0)


def test_a_limit_of_8192_tokens_is_a_limit_like_others(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "bert", max_position_embeddings=8192, limit=8192, num_hidden_layers=1)
    corpus = write(tmp_path / "corpus.parquet", [words(length, random.Random(6)) for length in (8190, 8191, 5)])
    embed(corpus, tmp_path / "out.parquet", model)
    assert rows_of(tmp_path / "out.parquet")["n_tokens"].to_pylist()[0] == 8192
    assert [len(document) for document in documents_of(rows_of(tmp_path / "out.parquet"))] == [1, 2, 1]


def test_a_percentage_of_bad_rows_is_one_of_documents(tmp_path: Path, model: Path) -> None:
    rng = random.Random(5)
    corpus = write(tmp_path / "corpus.parquet", [b"\xff", b"\xfe", *(words(900, rng) for _ in range(8))])
    with pytest.raises(LimitExceeded, match=r"2 of 1\d\d rows failed"):
        embed(corpus, tmp_path / "out.parquet", model, max_bad_rows="10%")
    assert embed(corpus, tmp_path / "out.parquet", model, max_bad_rows="11%").failed == 2

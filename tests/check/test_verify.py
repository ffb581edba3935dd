"""Verification of outputs with made-up vectors: what is whole passes untouched, and whatever changes is named."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from filelock import FileLock
from small_output import OUTPUTS, SHARDS, files_below, flip, forge, tree, unit_windows, with_column, with_vectors
from store import small_run

import gte_vectorize
from gte_vectorize.check import verify as room
from gte_vectorize.check.verify import Verification, verify
from gte_vectorize.cli import cli
from gte_vectorize.errors import InputError, OutputError, TemporaryError, VerificationFailed
from gte_vectorize.reader.corpus import find_corpus
from gte_vectorize.store.plan import make_tasks

pytestmark = pytest.mark.usefixtures("made_up")

STATE = "out/_gte_vectorize"
SMALL_FILES = [f"{STATE}/plan.json", f"{STATE}/records/000001.json", "out/_manifest.json", "out/_SUCCESS"]
PARTS = ["out/part-000000.parquet", "out/part-000001.parquet"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both kinds of output."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_run, "windows", unit_windows)
        for output in OUTPUTS:
            small_run.run(folder / output, shards=SHARDS)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return shutil.copytree(whole, tmp_path / "copy")


def named(found: Verification) -> set[str]:
    return {difference.file for difference in found.differences}


def stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_whole_output_passes_and_stays_as_it_is(folder, output):
    before, bytes_before = stamps(folder), tree(folder)
    found = verify(folder / output)
    assert (found.state, found.rows, found.differences) == ("finished", 24, [])
    assert len(found.contents) == found.files == (2 if output == "out" else 1)
    found.conclude()
    assert (stamps(folder), tree(folder)) == (before, bytes_before)


def test_an_input_that_is_gone_is_no_difference(folder):
    found = verify(folder / "out")
    assert [note.partition(":")[0] for note in found.notes] == [
        f"input '/corpus/{name}.parquet' is not there, or cannot be read" for name in "ab"
    ]


def test_an_input_that_has_changed_is_no_difference(tmp_path):
    corpus = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), corpus)
    small_run.run(tmp_path / "out", shards=find_corpus([str(corpus)], text_column="text").shards)
    assert verify(tmp_path / "out").notes == []
    pq.write_table(pa.table({"text": ["a", "b", "c", "d"]}), corpus)
    found = verify(tmp_path / "out")
    assert found.notes == [f"input {str(corpus)!r} has changed since: nothing was held against it"]
    assert (found.differences, found.gone_inputs) == ([], {str(corpus)})


def test_rows_of_an_input_that_no_task_has_are_found(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"text": ["a"] * 800}), corpus)
    monkeypatch.setattr(small_run, "make_tasks", lambda *args, **options: make_tasks(*args, **options)[:-1])
    small_run.run(tmp_path / "out", shards=find_corpus([str(corpus)], text_column="text").shards)
    (difference,) = verify(tmp_path / "out").differences
    assert difference.what == f"names 400 of the 800 rows of {str(corpus)!r}"


@pytest.mark.parametrize("file", [*SMALL_FILES, *PARTS])
@pytest.mark.parametrize("how", ["flipped", "cut", "emptied", "lengthened"])
def test_a_damaged_file_is_named_and_no_other(folder, file, how):
    path = folder / file
    data = path.read_bytes()
    if how == "flipped":
        flip(path, len(data) * 4)
    else:
        path.write_bytes({"cut": data[: len(data) // 2], "emptied": b"", "lengthened": data + b"\n"}[how])
    found = verify(folder / "out")
    assert named(found) == {os.path.relpath(path, folder / "out")}
    assert found.broken == ({PARTS.index(file)} if file in PARTS else set())
    with pytest.raises(VerificationFailed, match="differences"):
        found.conclude()


@pytest.mark.parametrize("file", [f for f in [*SMALL_FILES, *PARTS] if f != "out/_SUCCESS"])
def test_a_missing_file_is_named_and_no_other(folder, file):
    (folder / file).unlink()
    found = verify(folder / "out")
    assert [(difference.file, difference.what.partition(",")[0]) for difference in found.differences] == [
        (os.path.relpath(folder / file, folder / "out"), "is missing")
    ]


def test_without_success_an_output_is_not_finished(folder):
    (folder / "out/_SUCCESS").unlink()
    found = verify(folder / "out")
    assert (found.state, found.differences) == ("interrupted", [])
    with pytest.raises(TemporaryError, match="run its command again"):
        found.conclude()


@pytest.mark.parametrize("file", ["out.parquet", ".out.parquet.state/plan.json", ".out.parquet.state/manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_of_a_single_file_is_found(folder, file, how):
    path = folder / file
    data = path.read_bytes()
    if how == "flipped":
        flip(path, 8 * 20)
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    found = verify(folder / "out.parquet")
    assert file in named(found)


def test_a_damaged_page_is_named_by_its_rows(folder):
    """A single file has a row group for each that its parts had: the rows of the other task are read."""
    path = folder / "out.parquet"
    group = pq.read_metadata(path).row_group(1)
    flip(path, 8 * (group.column(1).data_page_offset + 100))
    page, file = verify(path).differences
    assert page.to_dict() == {
        "file": "out.parquet",
        "what": "cannot be read (OSError)",
        "task": 1,
        "input": "/corpus/b.parquet",
        "first_row": 0,
        "num_rows": 8,
    }
    assert page.line() == "'out.parquet' cannot be read (OSError): task 1, '/corpus/b.parquet' rows 0 to 7"
    assert file.line() == "'out.parquet' has other bytes than stated by the manifest"


def test_parts_that_have_changed_places_are_found(folder):
    a, b = (folder / part for part in PARTS)
    a.rename(folder / "aside")
    b.rename(a)
    (folder / "aside").rename(b)
    found = verify(folder / "out")
    assert (named(found), found.broken) == ({a.name, b.name}, {0, 1})


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.nan, "has a vector that is not finite"),
        (np.inf, "has a vector that is not finite"),
        (0.0, "has a vector whose norm is not 1"),
        (2.0, "has a vector whose norm is not 1"),
        (0.998, "has a vector whose norm is not 1"),
        (1e30, "has a vector whose norm is not 1"),
    ],
)
def test_a_wrong_vector_is_found_whose_checksums_are_right(folder, output, value, what):
    def change(vectors):
        vectors[5] *= value
        vectors[6] *= np.float32(1.0005)  # within what rounding may do

    forge(folder / output, with_vectors(change))
    (difference,) = verify(folder / output).differences
    assert (difference.what, difference.task, difference.first_row, difference.num_rows) == (what, 0, 5, 1)


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("status", "empty", "is ok without a vector, or has a vector without being ok"),
        ("status", "fine", "has a status that does not exist"),
        ("text_hash", None, "is ok without a text_hash"),
        ("text_hash", "abc", "is ok without a text_hash"),
    ],
)
def test_rows_that_contradict_themselves_are_found(folder, column, value, what):
    def change(table):
        values = table[column].to_pylist()
        values[3:5] = [value, value]
        return with_column(table, column, values)

    forge(folder / "out", change)
    found = {(item.what, item.first_row, item.num_rows) for item in verify(folder / "out").differences}
    assert (what, 3, 2) in found


def test_many_rows_are_counted_after_the_first_ranges(tmp_path):
    small_run.run(tmp_path / "out", shards=(replace(SHARDS[0], row_groups=(200,)),))

    def change(vectors):
        vectors[::3] = np.nan

    forge(tmp_path / "out", with_vectors(change))
    ok = np.array(
        [value == "ok" for value in pq.read_table(tmp_path / "out/part-000000.parquet")["status"].to_pylist()]
    )
    *ranges, more = verify(tmp_path / "out").differences
    assert [difference.first_row for difference in ranges] == (3 * np.flatnonzero(ok[::3])[:20]).tolist()
    assert more.what == f"has a vector that is not finite: {ok[::3].sum() - 20} more rows"


def test_missing_rows_are_found_whose_checksums_are_right(folder):
    forge(folder / "out", lambda table: table.slice(0, 15))
    assert "holds 15 rows, and 16 were planned" in {item.what for item in verify(folder / "out").differences}


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.rename_columns(["other", *table.column_names[1:]]),
        lambda table: table.drop_columns("id"),
        lambda table: table.replace_schema_metadata({"embeddings": "{}"}),
    ],
)
def test_other_columns_or_metadata_are_found(folder, change):
    forge(folder / "out", change)
    assert "has other columns, types or metadata than the plan says" in {
        difference.what for difference in verify(folder / "out").differences
    }


def test_a_parquet_file_that_no_run_wrote_is_found(folder):
    (folder / "out/part-000002.parquet").write_bytes((folder / PARTS[0]).read_bytes())
    (folder / "out/notes.txt").write_text("harmless")
    (difference,) = verify(folder / "out").differences
    assert difference.line() == "'part-000002.parquet' is no part of this output, but lies among its parts"


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_unfinished_output_is_told_and_what_is_published_is_checked(tmp_path, output):
    small_run.run(tmp_path / output, shards=SHARDS, tasks=1)
    found = verify(tmp_path / output)
    assert (found.state, found.rows, found.differences) == ("interrupted", 16, [])
    (part,) = tmp_path.rglob("part-000000.parquet")
    flip(part, 1000)
    with FileLock(found.layout.state / "lock"):
        found = verify(tmp_path / output)
    assert (found.state, found.broken) == ("running", {0})
    with pytest.raises(VerificationFailed):
        found.conclude()


def test_a_run_that_is_under_way_is_told_and_not_disturbed(folder):
    lock = FileLock(folder / STATE / "lock", timeout=0)
    with lock:
        found = verify(folder / "out")
        assert (found.state, found.differences) == ("running", [])
        with pytest.raises(TemporaryError, match="is still being written"):
            found.conclude()
    with lock:  # was let go
        pass


@pytest.mark.parametrize("output", ["missing", "missing.parquet", ".", "s3://corpora/out", "s3://corpora/out.parquet"])
def test_what_is_no_output_is_refused(tmp_path, output):
    with pytest.raises(OutputError):
        verify(output if "://" in output else tmp_path / output)


def test_the_plan_of_another_version_is_refused(tmp_path):
    small_run.run(tmp_path / "out", shards=SHARDS, tasks=0)
    plan = tmp_path / STATE / "plan.json"
    plan.write_bytes(plan.read_bytes().replace(b'"format":1', b'"format":2'))
    with pytest.raises(OutputError, match="written by another version"):
        verify(tmp_path / "out")


@pytest.mark.parametrize("output", OUTPUTS)
def test_no_flipped_bit_goes_unnoticed(folder, output):
    """Half of them by file, half by bytes, so that the small files get their share."""
    rng = random.Random(output)
    single = output == "out.parquet"
    files = [path for path in files_below(folder) if ("out.parquet" in str(path.relative_to(folder))) == single]
    sizes = [path.stat().st_size for path in files]
    for turn in range(500):
        (path,) = rng.choices(files, sizes if turn % 2 else None)
        bit = rng.randrange(8 * path.stat().st_size)
        before = flip(path, bit)
        found = verify(folder / output)
        assert found.differences, (path, bit)
        if not single:
            assert named(found) == {os.path.relpath(path, folder / output)}, (path, bit)
        path.write_bytes(before)
    assert verify(folder / output).differences == []


def test_the_command_ends_with_the_promised_codes(folder):
    source = str(Path(gte_vectorize.__file__).parents[1])

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gte_vectorize", "verify", *arguments]
        environment = {**os.environ, "PYTHONPATH": source}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    sound = run("out", "--json")
    assert (sound.returncode, json.loads(sound.stdout)["differences"]) == (0, [])
    assert "2 files, 24 rows are sound" in sound.stderr
    flip(folder / PARTS[1], 1000)
    broken = run("out", "-q")
    assert (broken.returncode, broken.stdout) == (5, "")
    assert "ERROR: 'part-000001.parquet' has other bytes than stated by its record and the manifest: task 1" in (
        broken.stderr
    )
    assert run("missing").returncode == 2


@pytest.mark.parametrize("rate", ["0", "0%", "101%", "2", "nan", "x", "1/0", "-1%", "inf"])
def test_a_rate_that_is_no_share_is_refused(folder, rate):
    end = CliRunner().invoke(cli, ["verify", str(folder / "out"), f"--reembed={rate}"])
    assert end.exit_code == 2
    assert "a share of the rows is expected" in end.output


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("change", ["finishes", "begins"])
def test_a_run_that_comes_meanwhile_makes_no_difference(tmp_path, output, change, monkeypatch):
    other = {**small_run.FIELDS, "model": "other"}
    read, done = room.read_papers, []

    def late(layout: Any) -> Any:
        papers = read(layout)
        if not done:
            done.append(True)
            if change == "finishes":
                small_run.run(tmp_path / output, shards=SHARDS)
            else:
                small_run.run(tmp_path / output, shards=SHARDS, fields=other, overwrite=True, tasks=1)
        return papers

    small_run.run(tmp_path / output, shards=SHARDS, tasks=1 if change == "finishes" else None)
    monkeypatch.setattr(room, "read_papers", late)
    assert verify(tmp_path / output).differences == []


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), pa.ArrowMemoryError("malloc failed")])
def test_storage_or_memory_that_fails_is_no_damage(folder, output, error, monkeypatch):
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", failing)
    with pytest.raises(TemporaryError, match="holds the bytes that were published"):
        verify(folder / output)


def test_a_folder_that_may_not_be_read_is_named(folder):
    (folder / STATE).chmod(0)
    with as_nobody(), pytest.raises(InputError, match="Permission denied"):
        verify(folder / "out")


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read anything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)

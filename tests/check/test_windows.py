"""Outputs whose rows are windows or chunks of documents, or means of these: checked, embedded again, repaired."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_output import (
    TASK_ROWS,
    again,
    copy_outputs,
    embed,
    files_below,
    flip,
    forge,
    rows_of,
    tree,
    with_column,
    with_vectors,
    write_long_corpus,
)

from gte_vectorize.check import part, reembed, sample
from gte_vectorize.check.repair import repair
from gte_vectorize.check.status import job_status
from gte_vectorize.check.verify import verify
from gte_vectorize.encoder import cpu
from gte_vectorize.writer import part as writer

OUTPUTS = ["both", "both.documents", "windows.parquet", "mean.parquet", "late.parquet"]
LIMIT = 12
ROWS = 24
LONG = 9
"""A row whose windows do not fit into one of the encoder's, nor into a row group."""

WRONG = "has a vector that its text does not give"
OTHER = "has other windows than its text gives"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents go on from window to window, from batch to batch and from row group to row group."""
    monkeypatch.setattr(cpu, "WINDOW_ROWS", 16)
    monkeypatch.setattr(writer, "GROUP_BYTES", 32 * 4 * 64)
    monkeypatch.setattr(part, "BATCH_ROWS", 7)
    monkeypatch.setattr(sample, "BATCH_ROWS", 5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_long_corpus(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "WINDOW_ROWS", 16)
        patch.setattr(writer, "GROUP_BYTES", 32 * 4 * 64)
        embed(folder, "both", long="both", max_length=LIMIT, overlap=3)
        for mode in ("windows", "mean"):
            embed(folder, f"{mode}.parquet", long=mode, max_length=LIMIT, overlap=3, keep_text=True)
        embed(folder, "late.parquet", long="late", chunk_tokens=16)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return copy_outputs(made, tmp_path, OUTPUTS)


def rows(folder: Path, output: str) -> pa.Table:
    return pq.read_table(sorted((folder / output).glob("part-*")) if (folder / output).is_dir() else folder / output)


def starts(table: pa.Table) -> list[int]:
    """The row of the output that each row of the input begins with."""
    return np.flatnonzero(table["chunk_index"].to_numpy() == 0).tolist()


def values(name: str, change: Callable[[list[Any], list[int]], None]) -> Callable[[pa.Table], pa.Table]:
    """A change of a column's values, in place; it is given the documents' first rows too."""

    def changed(table: pa.Table) -> pa.Table:
        found = table[name].to_pylist()
        change(found, starts(table))
        return with_column(table, name, found)

    return changed


def at(document: int, window: int, value: Any) -> Callable[[list[Any], list[int]], None]:
    def change(found: list[Any], first: list[int]) -> None:
        row = first[document] + window
        found[row] = value(found[row]) if callable(value) else value

    return change


def test_the_outputs_are_what_these_tests_are_about(made):
    for output in ("both", "windows.parquet"):
        table = rows(made, output)
        first = [*starts(table), len(table)]
        assert len(first) == ROWS + 1
        assert np.diff(first)[LONG] > 64  # of 32 rows are row groups, of 16 the encoder's windows
        assert np.diff(first)[[0, 4, 22]].tolist() == [1, 1, 1]
    assert pq.read_metadata(made / "windows.parquet").num_row_groups > 5
    assert [len(rows(made, output)) for output in ("both.documents", "mean.parquet")] == [ROWS, ROWS]


@pytest.mark.parametrize("window_rows", [16, 512])
@pytest.mark.parametrize("output", OUTPUTS)
def test_every_row_comes_out_the_same(made, output, window_rows, monkeypatch):
    monkeypatch.setattr(cpu, "WINDOW_ROWS", window_rows)
    before = tree(made)
    found = again(made / output)
    count = len(rows(made, output))
    assert (found.state, found.rows, found.reembedded, found.differences) == ("finished", count, count, [])
    found.conclude()
    assert tree(made) == before


@pytest.mark.parametrize("output", ["both", "windows.parquet"])
def test_a_document_is_drawn_with_all_its_windows(made, output, monkeypatch):
    counts = np.diff([*starts(rows(made, output)), len(rows(made, output))])
    drawn: list[int] = []

    def noted(files: Any, *args: Any, **options: Any) -> Any:
        for document in sample.draw(files, *args, **options):
            drawn.append(document.row + TASK_ROWS * document.task)
            yield document

    monkeypatch.setattr(reembed, "draw", noted)
    for rate, documents in ((Fraction(1, 10**9), 1), (Fraction(1, 4), 6)):
        drawn.clear()
        found = again(made / output, rate)
        assert len(drawn) == documents
        assert found.reembedded == counts[drawn].sum()


@pytest.mark.parametrize("output", OUTPUTS)
def test_vectors_of_each_others_rows_are_found(copy, output):
    mean = "chunk_index" not in rows(copy, output).column_names
    first = range(ROWS) if mean else starts(rows(copy, output))
    pairs = [(first[1], first[2])] if mean else [(first[1], first[2]), (first[5] + 1, first[5] + 2)]

    def change(vectors: Any) -> None:
        for one, other in pairs:
            vectors[[one, other]] = vectors[[other, one]]

    forge(copy / output, with_vectors(change))
    assert rows_of(again(copy / output)) == {WRONG: [1, 2] if mean else [1, 2, 5]}


@pytest.mark.parametrize("output", OUTPUTS)
def test_one_bit_is_found_where_bits_are_promised(copy, output, monkeypatch):
    def change(vectors: Any) -> None:
        vectors.view(np.uint32)[0, 7] ^= 1
        vectors.view(np.uint32)[-1, 7] ^= 1

    def turn(vectors: Any) -> None:
        vectors[0, :9] *= -1

    forge(copy / output, with_vectors(change))
    assert rows_of(again(copy / output)) == {WRONG: [0, 7 if (copy / output).is_dir() else 23]}
    monkeypatch.setattr(reembed, "version", lambda name: "another")
    assert again(copy / output).differences == []
    forge(copy / output, with_vectors(turn))
    assert rows_of(again(copy / output)) == {WRONG: [0]}


FOLLOW = "has a chunk_index that does not follow the one before"
NO_TOKENS = "is of no characters, or of some without tokens"
PLACE = "is of characters that do not follow on"
HASH = "has another text_hash than the window before"


@pytest.mark.parametrize(
    ("column", "change", "wrong"),
    [
        ("chunk_index", at(2, 3, lambda index: index + 1), {FOLLOW: [2]}),
        ("chunk_index", at(2, 3, None), {FOLLOW: [2]}),
        ("chunk_index", at(2, 3, -1), {FOLLOW: [2]}),
        ("char_start", at(2, 0, 1), {PLACE: [2]}),
        ("char_start", at(2, 3, lambda start: start - 40), {PLACE: [2]}),
        ("char_start", at(2, 3, lambda start: start + 40), {PLACE: [2], NO_TOKENS: [2]}),
        ("char_start", at(2, 3, None), {PLACE: [2], NO_TOKENS: [2]}),
        ("char_start", at(4, 0, 0), {NO_TOKENS: [4]}),
        ("char_end", at(2, 3, lambda end: end - 30), {PLACE: [2]}),
        ("char_end", at(2, 3, 0), {PLACE: [2], NO_TOKENS: [2]}),
        ("char_end", at(4, 0, 3), {NO_TOKENS: [4]}),
        ("text_hash", at(2, 3, lambda text_hash: text_hash[::-1]), {HASH: [2]}),
        ("n_tokens", at(2, 3, 0), {NO_TOKENS: [2], PLACE: [2]}),
    ],
)
@pytest.mark.parametrize("output", ["both", "windows.parquet"])
def test_windows_that_cannot_follow_one_another_are_found(copy, output, column, change, wrong):
    forge(copy / output, values(column, change))
    assert rows_of(verify(copy / output)) == wrong


def test_a_document_with_many_wrong_windows_is_named_once(copy):
    def change(hashes: list[Any], first: list[int]) -> None:
        hashes[first[LONG] + 5 : first[LONG + 1] : 10] = ["0" * 32] * len(range(first[LONG] + 5, first[LONG + 1], 10))

    forge(copy / "windows.parquet", values("text_hash", change))
    (difference,) = verify(copy / "windows.parquet").differences
    assert (difference.what, difference.task, difference.first_row, difference.num_rows) == (HASH, 1, LONG, 1)


@pytest.mark.parametrize("output", ["both", "windows.parquet"])
def test_a_window_that_is_missing_is_found(copy, output):
    def change(table: pa.Table) -> pa.Table:
        row = starts(table)[2] + 3
        return pa.concat_tables([table[:row], table[row + 1 :]])

    forge(copy / output, change)
    assert rows_of(verify(copy / output)) == {FOLLOW: [2], PLACE: [2]}


@pytest.mark.parametrize("output", ["both", "windows.parquet"])
def test_a_last_window_that_is_missing_is_found_by_the_text(copy, output):
    def change(table: pa.Table) -> pa.Table:
        behind = starts(table)[3]
        return pa.concat_tables([table[: behind - 1], table[behind:]])

    forge(copy / output, change)
    assert rows_of(again(copy / output)) == {OTHER: [2]}


def test_a_document_that_is_missing_is_found(copy):
    forge(copy / "both", lambda table: table[starts(table)[1] :])
    what = f"is of {TASK_ROWS - 1} rows of the input, and {TASK_ROWS} were planned"
    assert what in [item.what for item in verify(copy / "both").differences]


def test_rows_where_none_were_planned_are_found(tmp_path, made):
    """Damage must not be taken for a failing disk."""
    (tmp_path / "model").symlink_to(made / "model")
    pq.write_table(pq.read_table(made / "corpus.parquet")[:0], tmp_path / "corpus.parquet")
    embed(tmp_path, "out", long="windows", max_length=LIMIT)
    assert verify(tmp_path / "out").differences == []
    some = pq.read_table(made / "both/part-000000.parquet")
    forge(tmp_path / "out", lambda table: some.replace_schema_metadata(table.schema.metadata))
    found = {item.what for item in verify(tmp_path / "out").differences}
    assert "is of 8 rows of the input, and 0 were planned" in found


@pytest.mark.parametrize("output", ["both", "windows.parquet"])
@pytest.mark.parametrize("column", ["char_start", "char_end"])
def test_other_characters_than_the_texts_are_found_by_the_text(copy, output, column):
    """One more is as good as any other to whoever does not know the text."""
    forge(copy / output, values(column, at(2, 3, lambda place: place + 1)))
    assert rows_of(again(copy / output)) == {"is of other characters than its text gives": [2]}


@pytest.mark.parametrize("output", OUTPUTS)
def test_no_flipped_bit_goes_unnoticed(copy, output):
    rng = random.Random(output)
    files = files_below(copy / output) if (copy / output).is_dir() else [copy / output]
    files = [file for file in files if file.name != "canary.json"]  # about the machine, not the vectors
    for _ in range(60):
        path = rng.choice(files)
        bit = rng.randrange(8 * path.stat().st_size)
        before = flip(path, bit)
        assert verify(copy / output).differences, (path, bit)
        path.write_bytes(before)
    assert verify(copy / output).differences == []


@pytest.mark.parametrize("column", ["chunk_index", "char_start", "char_end"])
def test_a_flipped_bit_of_a_chunk_column_is_found(copy, column):
    """Of how many rows of the input the damaged pages are, nobody knows: the whole file is named."""
    path = copy / "windows.parquet"
    chunk = pq.read_metadata(path).row_group(2)
    (position,) = [at for at in range(chunk.num_columns) if chunk.column(at).path_in_schema == column]
    flip(path, 8 * (chunk.column(position).data_page_offset + chunk.column(position).total_compressed_size - 3))
    found = verify(path)
    assert [item.what for item in found.differences] == [
        "cannot be read (OSError)",
        "has other bytes than stated by the manifest",
    ]
    assert found.broken == {0, 1, 2}


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_damaged_file_is_made_again_and_no_other(copy, output):
    whole = tree(copy)
    path = copy / output
    part_path = path / "part-000001.parquet" if path.is_dir() else path
    places = {file: file.stat().st_ino for file in copy.rglob("*.parquet") if file != part_path}
    flip(part_path, 8000)
    found = repair(path, model=str(copy / "model"))
    assert (found.state, found.differences) == ("finished", [])
    assert tree(copy) == whole
    assert places == {file: file.stat().st_ino for file in copy.rglob("*.parquet") if file != part_path}


def test_overlap_and_splitter_are_taken_from_the_output(tmp_path):
    write_long_corpus(tmp_path)
    embed(tmp_path, "out", long="windows", max_length=LIMIT, overlap=0, columns=[])
    assert again(tmp_path / "out").differences == []
    whole = tree(tmp_path / "out")
    (tmp_path / "out/part-000001.parquet").unlink()
    assert repair(tmp_path / "out", model=str(tmp_path / "model")).differences == []
    assert tree(tmp_path / "out") == whole


def test_status_counts_rows_of_the_input_and_windows(copy):
    whole = job_status(copy / "both")
    windows = len(rows(copy, "both"))
    assert whole.to_dict()["rows"] == {"published": ROWS, "total": ROWS}
    assert whole.to_dict()["output_rows"] == windows
    assert f"  rows     24 of 24 in {windows} windows: " in "\n".join(whole.lines())
    for name in ("both/_SUCCESS", "both/part-000001.parquet", "both/_gte_vectorize/records/000001.json"):
        (copy / name).unlink()
    some = job_status(copy / "both")
    assert (some.state, some.published_rows, some.rows, some.published_tasks) == ("interrupted", 16, ROWS, 2)
    assert some.published.rows == len(rows(copy, "both"))
    means = job_status(copy / "both.documents")
    assert means.to_dict()["rows"] == {"published": ROWS, "total": ROWS}
    assert "  rows     24 of 24: " in "\n".join(means.lines())

"""Vectors out of an earlier output: the bytes of its files in any order, each row group decoded once or twice."""

from __future__ import annotations

import errno
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_previous import DIM, FIELDS, Row, document, found, hashes, key_of, plan_of, write_output

from gte_vectorize.batch import EncodedWindow, Passages, Shard, Status, Task, Window
from gte_vectorize.errors import DamagedInput, OutputError, TemporaryError
from gte_vectorize.reuse import vectors as vectors_module
from gte_vectorize.reuse.part import PartReader
from gte_vectorize.reuse.vectors import PreviousVectors, open_previous, refilled
from gte_vectorize.writer.part import parquet_writer

ADVICE = "see gte-vectorize verify and gte-vectorize repair, or run without --reuse"
ROWS = [row for text in range(12) for row in document(f"text {text}", "ok", "ok", "ok")]
GROUPS = 3 * 3
"""Three files of three row groups of four rows."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    write_output(tmp_path / "old", [ROWS[:12], ROWS[12:24], ROWS[24:]], chunked=True)
    return tmp_path / "old"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each row group was."""
    count: Counter[int] = Counter()
    read = PartReader.read

    def counted(reader: PartReader, group: int) -> Any:
        count[group] += 1
        return read(reader, group)

    monkeypatch.setattr(PartReader, "read", counted)
    return count


@contextmanager
def opened(output: Path) -> Iterator[PreviousVectors]:
    folder = output.parent / "scratch"
    folder.mkdir(exist_ok=True)
    with PreviousVectors(found(output, plan_of(output)), folder / "index", folder) as vectors:
        yield vectors


def take(vectors: PreviousVectors, rows: list[int]) -> Any:
    """The rows, held against what was written."""
    stored = vectors.take(np.array(rows, np.int64), hashes(ROWS[row].key for row in rows))
    assert stored["vector"].tobytes() == b"".join(ROWS[row].vector().tobytes() for row in rows)
    assert stored["n_tokens"].tolist() == [ROWS[row].n_tokens for row in rows]
    assert stored["truncated"].tolist() == [ROWS[row].truncated for row in rows]
    assert stored["chunk"].tolist() == [[*ROWS[row].places] for row in rows]
    return stored


def test_rows_in_order_take_each_row_group_once_and_no_disk(old, decoded, monkeypatch):
    monkeypatch.setattr(vectors_module, "CACHE_BYTES", 1)
    with opened(old) as vectors:
        for first in range(0, len(ROWS), 3):
            take(vectors, [*range(first, first + 3)])
    assert decoded == Counter(range(GROUPS))
    assert [*(old.parent / "scratch").iterdir()] == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cached", [1, 600, 1 << 20])
def test_rows_in_any_order_decode_no_row_group_more_than_twice(old, decoded, cached, seed, monkeypatch):
    monkeypatch.setattr(vectors_module, "CACHE_BYTES", cached)
    order = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(ROWS)), 5)).tolist()
    with opened(old) as vectors:
        take(vectors, [])
        for first in range(0, len(order), 20):
            take(vectors, order[first : first + 20])
    most = 1 if cached > 600 else 2
    assert (set(decoded), max(decoded.values())) == (set(range(GROUPS)), most)
    assert (old.parent / "scratch/vectors").exists() == (most == 2)


def test_a_take_visits_a_row_group_once(old, decoded, monkeypatch):
    monkeypatch.setattr(vectors_module, "CACHE_BYTES", 1)
    with opened(old) as vectors:
        take(vectors, [35, 0, 34, 1, 33, 2, 0, 0, 35])
    assert decoded == Counter([0, 8])


def test_what_is_copied_is_the_owners_alone_and_goes_with_the_run(old, monkeypatch):
    monkeypatch.setattr(vectors_module, "CACHE_BYTES", 1)
    with open_previous(found(old, plan_of(old)), old.parent / "tmp") as vectors:
        for row in (0, 35, 0, 35):
            take(vectors, [row])
        files = [path for path in (old.parent / "tmp").rglob("*") if path.is_file()]
        assert {path.name for path in files} == {"keys", "values", "vectors"}
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
        assert all(path.is_relative_to(vectors.index.parent) for path in files)
    assert [*(old.parent / "tmp").iterdir()] == []
    with open_previous(None, old.parent / "none") as vectors:
        assert vectors is None
    assert not (old.parent / "none").exists()


def test_without_room_for_a_copy_row_groups_are_decoded_again(old, decoded, monkeypatch, caplog):
    monkeypatch.setattr(vectors_module, "CACHE_BYTES", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with opened(old) as vectors, caplog.at_level(logging.WARNING):
        for row in (0, 35, 0, 35, 0):
            take(vectors, [row])
    assert decoded == {0: 3, 8: 2}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert [*(old.parent / "scratch").iterdir()] == []


def test_a_disk_that_fills_up_meanwhile_is_temporary(old, monkeypatch):
    def full(path: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(vectors_module, "CACHE_BYTES", 1)
    monkeypatch.setattr(vectors_module, "create_file", full)
    with opened(old) as vectors:
        take(vectors, [0])
        take(vectors, [35])
        with pytest.raises(TemporaryError, match="No space left"):
            take(vectors, [0])


def test_a_row_of_another_text_or_without_a_vector_is_damage(tmp_path):
    rows = [*document("a"), *document("b", "nonfinite")]
    write_output(tmp_path / "old", [rows])
    with opened(tmp_path / "old") as vectors:
        taken = vectors.take(np.array([0], np.int64), hashes([key_of("a")]))
        assert taken["vector"].tolist() == [rows[0].vector().tolist()]
        for row, text in ((0, "b"), (1, "b")):
            with pytest.raises(DamagedInput, match=f"holds other rows than when this run began: {ADVICE}"):
                vectors.take(np.array([row], np.int64), hashes([key_of(text)]))


def test_a_damaged_page_is_an_error_and_never_a_vector(old):
    path = old / "part-000001.parquet"
    data = bytearray(path.read_bytes())
    at = data.find(ROWS[17].vector().tobytes())
    data[at + 3] ^= 4
    path.write_bytes(data)
    with opened(old) as vectors:
        take(vectors, [0, 12, 15, 20, 35])
        with pytest.raises(DamagedInput, match=rf"part-000001\.parquet': reading row group 1 failed.*{ADVICE}"):
            take(vectors, [16])


def test_a_part_that_is_gone_is_an_error(old):
    with opened(old) as vectors:
        (old / "part-000001.parquet").unlink()
        take(vectors, [0, 35])
        with pytest.raises(DamagedInput, match=rf"part-000001\.parquet.*{ADVICE}"):
            take(vectors, [12])


def test_an_output_that_was_replaced_meanwhile_is_an_error(old):
    """The third file is by another device: in nothing but the bits of its vectors is it another one."""
    other = old.parent / "other"
    write_output(other, [ROWS[:12], ROWS[12:24], ROWS[24:]], chunked=True, fields={**FIELDS, "max_length": 256})
    elsewhere = pq.read_table(old / "part-000002.parquet")
    vector = elsewhere["embedding"].combine_chunks()
    nearly = pa.FixedSizeListArray.from_arrays(np.nextafter(vector.flatten(), np.float32(2)), type=vector.type)
    with opened(old) as vectors:
        shutil.copy(other / "part-000000.parquet", old)
        with (old / "part-000002.parquet").open("wb") as file, parquet_writer(file, elsewhere.schema) as writer:
            writer.write_table(elsewhere.set_column(1, elsewhere.schema.field(1), nearly), row_group_size=4)
        for number, row in ((0, 0), (2, 24)):
            with pytest.raises(DamagedInput, match=rf"part-00000{number}\.parquet' is another file than.*{ADVICE}"):
                take(vectors, [row])
        take(vectors, [12])


def test_another_device_is_told_by_its_answer(old):
    with opened(old) as vectors:
        vectors.recognise("a" * 64)
        with pytest.raises(OutputError, match=r"computes other bits than the one that made '.*old'.*without --reuse"):
            vectors.recognise("b" * 64)
    (old / "_gte_vectorize/canary.json").unlink()
    with opened(old) as vectors:
        vectors.recognise("b" * 64)


def window_of(rows: list[Row], reused: list[int], *, chunked: bool) -> EncodedWindow:
    """Passages as they come out of the encoder: those that are not reused have vectors of ones."""
    count, old = len(rows), np.array(reused, np.int64) >= 0
    task = Task(0, Shard("new", 1, 0, (count,)), 0, count)
    passages = Passages(
        window=Window(task, 0, count),
        ids=np.zeros(int(7 * (~old).sum()), np.int32),
        lengths=np.where(old, 0, 7).astype(np.int32),
        status=np.zeros(count, np.uint8),
        truncated=np.zeros(count, np.bool_),
        text_hash=hashes(row.key for row in rows),
        row=np.arange(count, dtype=np.int32),
        chunk=np.full((count, 3), 5, np.int32) if chunked else None,
        reused=np.array(reused, np.int64),
    )
    return EncodedWindow(passages, np.where(old, 0, np.ones((DIM, 1))).T.astype(np.float32), passages.status)


def test_windows_are_filled_with_what_is_known_of_their_passages(old):
    window = window_of([ROWS[30], ROWS[1], ROWS[4]], [30, -1, 4], chunked=True)
    with opened(old) as vectors:
        (filled,) = refilled([window], vectors)

    passages = filled.passages
    assert filled.vectors.tolist() == [ROWS[30].vector().tolist(), [1.0] * DIM, ROWS[4].vector().tolist()]
    assert passages.lengths.tolist() == [ROWS[30].n_tokens, 7, ROWS[4].n_tokens]
    assert passages.truncated.tolist() == [ROWS[30].truncated, False, ROWS[4].truncated]
    assert passages.chunk is not None
    assert passages.chunk.tolist() == [[*ROWS[30].places], [5, 5, 5], [*ROWS[4].places]]
    assert filled.status.tolist() == [Status.OK] * 3
    assert passages.encoded.tolist() == [False, True, False]


def test_of_an_output_without_windows_there_is_no_place_in_the_text(tmp_path):
    rows = [*document("a"), *document("b")]
    write_output(tmp_path / "old", [rows])
    with opened(tmp_path / "old") as vectors:
        for chunked in (False, True):
            (filled,) = refilled([window_of(rows, [0, 1], chunked=chunked)], vectors)
            assert filled.vectors.tolist() == [row.vector().tolist() for row in rows]
            assert (filled.passages.chunk is None) != chunked


def test_a_window_without_anything_to_reuse_passes_unchanged(old, decoded):
    window = window_of(ROWS[:2], [-1, -1], chunked=True)
    with opened(old) as vectors:
        (filled,) = refilled([window], vectors)
        assert filled.vectors.tolist() == window.vectors.tolist()
        assert filled.passages.lengths.tolist() == [7, 7]
    assert next(refilled([window], None)) is window
    assert not decoded

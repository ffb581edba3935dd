"""Which texts of an earlier output can be reused, and where they are."""

from __future__ import annotations

import random
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from small_previous import Row, document, found, hashes, key_of, make_schema, write_output, write_tables

from gte_vectorize.errors import DamagedInput, TemporaryError
from gte_vectorize.reuse import index as index_module
from gte_vectorize.reuse.index import TextIndex, build_index
from gte_vectorize.reuse.vectors import open_previous


def index_of(output: Path, plan, folder: Path) -> TextIndex:
    folder.mkdir(exist_ok=True)
    return TextIndex(build_index(found(output, plan), folder))


def find(index: TextIndex, *keys: bytes) -> list[tuple[int, int]]:
    rows, counts = index.find(hashes(keys))
    assert (rows.dtype, counts.dtype) == (np.int64, np.int32)
    return [*zip(rows.tolist(), counts.tolist(), strict=True)]


def expected(parts: list[list[Row]]) -> dict[bytes, tuple[int, int]]:
    """The first row and the number of rows of each text that is whole, found one row at a time."""
    known: dict[bytes, tuple[int, int]] = {}
    rows = [row for part in parts for row in part]
    for first, row in enumerate(rows):
        if row.chunk == 0:
            end = next((at for at in range(first + 1, len(rows)) if rows[at].chunk == 0), len(rows))
            if all(row.status == "ok" for row in rows[first:end]):
                known.setdefault(row.key, (first, end - first))
    return known


def test_a_text_is_found_where_its_vector_is_and_no_other_text_is(tmp_path):
    parts = [[*document("a"), *document("b", "null"), *document("c", "nonfinite")], [*document("d")], []]
    index = index_of(tmp_path / "old", write_output(tmp_path / "old", parts), tmp_path)

    keys = map(key_of, ["d", "x", "a", "b", "c"])
    assert find(index, *keys, bytes(16)) == [(3, 1), (-1, 0), (0, 1), (-1, 0), (-1, 0), (-1, 0)]
    assert find(index) == []
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == ["keys", "values"]


@pytest.mark.parametrize("output", ["old", "old.parquet"])
@pytest.mark.parametrize("seed", range(4))
def test_documents_of_many_rows_are_found_wherever_row_groups_and_partitions_end(output, seed, tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "RUN_ROWS", 5)
    monkeypatch.setattr(index_module, "PARTITION_BYTES", 28 * 4)
    draw = random.Random(seed)
    texts = [f"text {number}" for number in range(60)]
    parts = [
        [
            row
            for _ in range(draw.randrange(30))
            for row in document(
                draw.choice(texts), *draw.choices(["ok", "nonfinite"], [12, 1], k=draw.choice([1, 1, 2, 9]))
            )
        ]
        for _ in range(4)
    ]
    plan = write_output(tmp_path / output, parts, group_rows=3, chunked=True)
    index = index_of(tmp_path / output, plan, tmp_path)

    known = expected(parts)
    assert len(known) > 5
    assert find(index, *map(key_of, texts)) == [known.get(key_of(text), (-1, 0)) for text in texts]


def test_one_bad_window_leaves_its_document_out_and_no_other(tmp_path):
    rows = [*document("a", "ok", "ok", "zero"), *document("b", "ok", "ok"), *document("c", "zero", "ok")]
    index = index_of(tmp_path / "old", write_output(tmp_path / "old", [rows], chunked=True), tmp_path)
    assert find(index, *map(key_of, "abc")) == [(-1, 0), (3, 2), (-1, 0)]


@pytest.mark.parametrize("run_rows", [1, 100])
def test_of_equal_texts_the_first_one_is_found(run_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "RUN_ROWS", run_rows)
    rows = [row for text in "bababba" for row in document(text)]
    index = index_of(tmp_path / "old", write_output(tmp_path / "old", [rows], group_rows=1), tmp_path)
    assert find(index, key_of("a"), key_of("b")) == [(1, 1), (0, 1)]


def test_a_text_is_never_taken_for_another_whose_hash_begins_alike(tmp_path):
    alike = [b"same-begin" + bytes([last] * 6) for last in (9, 1, 5)]
    index = index_of(tmp_path / "old", write_output(tmp_path / "old", [[Row(key) for key in alike]]), tmp_path)
    assert find(index, *alike, b"same-begin" + bytes(6)) == [(0, 1), (-1, 0), (-1, 0), (-1, 0)]


def test_hashes_are_found_at_both_ends_of_their_range(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "PARTITION_BYTES", 28)
    ends = [bytes([first]) + bytes([fill] * 15) for first, fill in ((255, 255), (0, 1), (128, 0), (127, 255), (64, 0))]
    index = index_of(tmp_path / "old", write_output(tmp_path / "old", [[Row(key) for key in ends]]), tmp_path)

    assert find(index, *ends) == [(at, 1) for at in range(5)]
    assert find(index, bytes(8) + b"12345678", bytes([255] * 15 + [254])) == [(-1, 0), (-1, 0)]


@pytest.mark.parametrize("parts", [[[]], [document("a", "null")]])
def test_an_index_of_nothing_finds_nothing(parts, tmp_path):
    index = index_of(tmp_path / "old", write_output(tmp_path / "old", parts), tmp_path)
    assert find(index, key_of("a"), bytes(16)) == [(-1, 0), (-1, 0)]


def test_a_hash_that_is_none_is_damage(tmp_path):
    schema = make_schema()
    good = write_tables(tmp_path / "old", [_table(3, schema)], group_rows=4)
    assert find(index_of(tmp_path / "old", good, tmp_path / "good"), bytes(16)) == [(-1, 0)]
    for number, text in enumerate(("", "0", "z" * 32)):
        table = _table(3, schema).set_column(schema.get_field_index("text_hash"), "text_hash", [[text] * 3])
        plan = write_tables(tmp_path / f"bad{number}", [table.cast(schema)], group_rows=4)
        with pytest.raises(DamagedInput, match=r"part-000000\.parquet': a text_hash is not 32.*run without --reuse"):
            index_of(tmp_path / f"bad{number}", plan, tmp_path / f"index{number}")


def test_a_full_disk_is_temporary_and_leaves_nothing(tmp_path):
    rows = [row for number in range(40) for row in document(f"text {number}")]
    previous = found(tmp_path / "old", write_output(tmp_path / "old", [rows]))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 200, 700):  # of 40 × 28 bytes, and then of 40 × 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        try:
            with (
                pytest.raises(TemporaryError, match=r"index': File too large.*run the same command again"),
                open_previous(previous, tmp_path / "tmp"),
            ):
                pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert [*(tmp_path / "tmp").iterdir()] == []


def test_memory_does_not_grow_with_the_output(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "RUN_ROWS", 1 << 15)
    monkeypatch.setattr(index_module, "PARTITION_BYTES", 1 << 19)
    peaks = []
    for name, count in (("small", 1 << 18), ("large", 1 << 20)):
        plan = write_tables(tmp_path / name, [_table(count, make_schema(dim=1))], group_rows=1 << 14)
        previous = found(tmp_path / name, plan)
        (tmp_path / f"{name}-index").mkdir()
        tracemalloc.start()
        build_index(previous, tmp_path / f"{name}-index")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 28 * (1 << 18)


def _table(rows: int, schema: pa.Schema) -> pa.Table:
    """Rows with random hashes."""
    dim = schema.field("embedding").type.list_size
    digits = np.random.default_rng(rows).bytes(16 * rows).hex().encode()
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), rows, [None, pa.py_buffer(digits)])
    columns = {
        "id": np.arange(rows),
        "embedding": pa.FixedSizeListArray.from_arrays(pa.array(np.ones(rows * dim, np.float32)), dim),
        "n_tokens": np.ones(rows, np.int32),
        "truncated": np.zeros(rows, np.bool_),
        "status": pa.repeat("ok", rows),
        "text_hash": fixed.cast(pa.binary()).cast(pa.string()),
    }
    return pa.table([pa.array(columns[name]).cast(schema.field(name).type) for name in schema.names], schema=schema)

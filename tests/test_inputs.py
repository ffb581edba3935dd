"""From an input file to output rows and an exit code: whatever a corpus holds, and whatever is wrong with it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import MAX_LENGTH, save_tiny

import gte_vectorize
from gte_vectorize import InputError, LimitExceeded, OutputError, vectorize

ADDED = ["embedding", "n_tokens", "truncated", "status", "text_hash"]
TEXTS = ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w10"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "bert")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, columns: dict[str, Any] | pa.Table | None = None, **options: Any) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "text": TEXTS} if columns is None else columns), path, **options)
    return path


def vectors(table: pa.Table) -> np.ndarray:
    """float32[rows, dim]; a row without a vector is all NaN."""
    dim = table.schema.field("embedding").type.list_size
    return np.array([row or [np.nan] * dim for row in table["embedding"].to_pylist()], np.float32)


def snapshot(folder: Path) -> dict[Path, Any]:
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


def command(*arguments: object) -> tuple[int, dict[str, Any] | None, str]:
    """Exit code, report and log of the command, run as a program."""
    program = [sys.executable, "-m", "gte_vectorize", *map(str, arguments), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(gte_vectorize.__file__).parents[1])}
    end = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    return end.returncode, json.loads(end.stdout) if end.stdout else None, end.stderr


class TestTexts:
    """Rows of every kind in one good file."""

    def test_rows_without_a_usable_text_keep_their_place_and_are_counted(self, model):
        blank = ["", " ", "　", "\t\r\n\v\f", "\x00\x01\x1f\x7f\x85", "\u2003\u200a", "\n　 \x00"]
        texts = ["w1", None, *blank, "w2 w3"]
        write("a.parquet", {"id": range(len(texts)), "text": texts})
        report = vectorize("a.parquet", model=model)
        assert (report.exit_code, report.failed) == (0, 0)
        assert report.status == {"ok": 2, "null": 1, "empty": len(blank)}
        table = pq.read_table("a.embeddings.parquet")
        assert table["status"].to_pylist() == ["ok", "null", *["empty"] * len(blank), "ok"]
        assert table["embedding"].is_null().to_pylist() == [status != "ok" for status in table["status"].to_pylist()]
        assert table["n_tokens"].to_pylist() == [3, *[0] * (len(texts) - 2), 4]
        assert table["text_hash"][1].as_py() is None
        assert table["text_hash"][2].as_py() == hashlib.blake2b(b"", digest_size=16).hexdigest()
        assert table["id"].to_pylist() == list(range(len(texts)))
        found = vectors(table)[[0, -1]]
        assert np.isfinite(found).all()
        assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6

    def test_broken_utf8_fails_alone_in_3_or_4_and_is_never_computed_again(self, model):
        good = [text.encode() for text in TEXTS]
        bad = [b"w1 \xff", b"\xed\xa0\x80 w2", b"w3 \xe4\xb8", b"\xc0\x80"]
        text = pa.array([value for pair in zip(good, bad, strict=True) for value in pair]).view(pa.string())
        write("a.parquet", {"text": text, "id": range(8), "blob": [bytes([200 + row]) for row in range(8)]})
        arguments = ["a.parquet", "--model", model]
        code, report, log = command(*arguments, "--max-bad-rows", "3")
        assert (code, report) == (4, None)
        assert "4 of 8 rows failed (4 utf8)" in log
        assert not Path("a.embeddings.parquet").exists()

        code, report, log = command(*arguments, "--max-bad-rows", "50%")
        assert (code, report["failed"], report["computed_tokens"]) == (3, 4, 0)
        assert "rows without a vector: 4 utf8" in log
        assert "\\xff" not in log
        table = pq.read_table("a.embeddings.parquet")
        assert table["status"].to_pylist() == ["ok", "utf8"] * 4
        assert table["blob"].to_pylist() == [bytes([200 + row]) for row in range(8)]
        assert table["text_hash"].to_pylist() == [
            hashlib.blake2b(value.as_py(), digest_size=16).hexdigest() for value in text.view(pa.binary())
        ]
        write("good.parquet")
        vectorize("good.parquet", model=model)
        assert np.array_equal(vectors(table)[::2], vectors(pq.read_table("good.embeddings.parquet")))

    def test_half_a_surrogate_pair_in_jsonl_fails_alone(self, model):
        lines = ['{"text": "w1", "n": 1}', '{"text": "\\ud800 w2", "n": 2}', '{"text": "w3\\udfff", "n": 3}']
        Path("a.jsonl").write_text("\n".join([*lines, '{"text": "\\ud83d\\ude00 w4", "n": 4}']))
        with pytest.raises(LimitExceeded, match=r"2 of 4 rows failed \(2 utf8\)"):
            vectorize("a.jsonl", model=model)
        report = vectorize("a.jsonl", model=model, max_bad_rows=2)
        assert (report.exit_code, report.computed_tokens) == (3, 0)
        table = pq.read_table("a.embeddings.parquet")
        assert table.select(["n", "status"]).to_pydict() == {"n": [1, 2, 3, 4], "status": ["ok", "utf8", "utf8", "ok"]}

    def test_control_characters_and_special_tokens_are_text(self, model):
        texts = ["w1 \x00 w2", "w1 \ufeff w2", "w1 \u202e w2", "w1 {0} %s w2", "</s> <pad> w1", "😀", "a\u0301" * 500]
        write("a.parquet", {"text": texts})
        assert vectorize("a.parquet", model=model).status == {"ok": len(texts)}
        found = vectors(pq.read_table("a.embeddings.parquet"))
        # All three are w1, one unknown token, w2: nothing is normalised, cut at the NUL, or taken for a format.
        assert np.array_equal(found[0], found[1])
        assert np.array_equal(found[0], found[2])

    def test_long_documents_are_marked_counted_and_warned_of(self, model, caplog):
        lengths = [1, MAX_LENGTH - 3, MAX_LENGTH - 2, MAX_LENGTH - 1, 10 * MAX_LENGTH]
        write("a.parquet", {"text": [" ".join(["w1"] * length) for length in lengths]})
        with caplog.at_level(logging.WARNING):
            report = vectorize("a.parquet", model=model)
        assert (report.exit_code, report.truncated) == (0, 2)
        table = pq.read_table("a.embeddings.parquet")
        assert table["truncated"].to_pylist() == [False, False, False, True, True]
        assert table["n_tokens"].to_pylist() == [3, MAX_LENGTH - 1, MAX_LENGTH, MAX_LENGTH, MAX_LENGTH]
        documents, tokens = (record.message for record in caplog.records)
        assert documents.startswith("2 documents (40.0 %) are longer")
        cut, total = 1 + 9 * MAX_LENGTH + 2, 3 + (MAX_LENGTH - 1) + MAX_LENGTH + MAX_LENGTH + 1 + 10 * MAX_LENGTH + 2
        assert report.cut_tokens == cut
        assert tokens.startswith(f"about {100 * cut / total:.0f} % OF ALL TOKENS")

    def test_every_type_of_text_column_gives_the_same_vectors_and_one_schema(self, model):
        array = pa.array([*TEXTS, None, "w1 w2 w3"])
        kinds = [array, array.cast(pa.large_string()), array.cast(pa.string_view()), array.dictionary_encode()]
        kinds += [array.cast(pa.binary()), array.cast(pa.large_binary())]
        for number, kind in enumerate(kinds):
            write(f"in/{number}.parquet", {"text": kind, "id": range(6)})
        write("in/9.parquet", {"text": pa.nulls(6), "id": range(6)})
        assert vectorize("in", "out", model=model).status == {"ok": 30, "null": 12}
        *parts, nulls = sorted(Path("out").glob("part-*.parquet"))
        assert len(parts) == len(kinds)
        assert len({part.read_bytes() for part in parts}) == 1
        assert pq.read_schema(nulls).equals(pq.read_schema(parts[0]), check_metadata=True)
        assert pq.read_table(nulls)["status"].to_pylist() == ["null"] * 6

        vectorize([f"in/{number}.parquet" for number in range(4)], "kept", model=model, keep_text=True)
        kept = [pq.read_table(part) for part in sorted(Path("kept").glob("part-*.parquet"))]
        assert all(table.equals(kept[0], check_metadata=True) for table in kept)
        assert kept[0]["text"].to_pylist() == array.to_pylist()
        with pytest.raises(InputError, match=r"'text' is .*string in .* and binary"):
            vectorize(["in/0.parquet", "in/4.parquet"], "mixed", model=model, keep_text=True)


class TestColumns:
    """What is copied beside the vectors."""

    def test_values_of_every_type_come_through_bit_for_bit(self, model):
        now = datetime(2024, 2, 29, 23, 59, 59, 999999, UTC)
        floats = np.array([0x7FF0DEADBEEF0001, 0x8000000000000000, 1], np.uint64).view(np.float64)
        key = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([os.urandom(16), None, b"\xff" * 16], pa.binary(16)))
        columns = {
            "text": pa.array(TEXTS[:3]),
            "id": pa.array([2**63 - 1, None, 2**53 + 1]),
            "unsigned": pa.array([2**64 - 1, 2**53 + 1, None], pa.uint64()),
            "same id": pa.array([7, 7, None], pa.int8()),
            "float": pa.array(floats),
            "half": pa.array(np.array([1.5, -0.0, np.inf], np.float16)),
            "money": pa.array([Decimal("-1234567890123456789012345678.90"), None, Decimal("0.01")]),
            "large money": pa.array([Decimal("9" * 60), None, Decimal(1)], pa.decimal256(76, 2)),
            "when": pa.array([now, None, now], pa.timestamp("us", "Asia/Shanghai")),
            "nanoseconds": pa.array([2**62, None, -1], pa.timestamp("ns")),
            "day": pa.array([date(1, 1, 1), None, date(9999, 12, 31)]),
            "clock": pa.array([time(23, 59, 59, 999999), None, time()]),
            "lasting": pa.array([timedelta(microseconds=-1), None, timedelta(days=999)]),
            "key": key,
            "raw": pa.array([b"\x00\xff", b"", None]),
            "not text": pa.array([b"\xff\xfe", b"", None]).view(pa.string()),
            "language": pa.array(["zh", None, "zh"]).dictionary_encode(),
            "large": pa.array(["x" * 100_000, "", None], pa.large_string()),
            "flags": pa.array([[True, None], [], None], pa.list_(pa.bool_())),
            "parts": pa.array([[{"a": [1, None], "b.c": {"d": "x"}}], [], None]),
            "pairs": pa.array([[("k", [1])], [], None], pa.map_(pa.string(), pa.list_(pa.int16()))),
            "box": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.uint8(), 2)),
            "a.dot and 'quote'\n": pa.array([1, 2, 3]),
            "nothing": pa.nulls(3),
        }
        write("a.parquet", columns, row_group_size=2)
        expected = pq.read_table("a.parquet", arrow_extensions_enabled=False).drop_columns("text").combine_chunks()
        vectorize("a.parquet", model=model)
        table = pq.read_table("a.embeddings.parquet").combine_chunks()
        assert table.column_names == [*expected.column_names, *ADDED]
        for name in expected.column_names:
            assert same_bits(table[name].chunk(0), expected[name].chunk(0)), name

    def test_columns_and_keep_text_choose_what_is_copied(self, model):
        wide = pa.array([[["x"] * 50] * 50] * 4)
        write("a.parquet", {"z": [1, 2, 3, 4], "text": TEXTS, "wide": wide, "a": TEXTS})
        for name, options, kept in (
            ("all", {}, ["z", "wide", "a"]),
            ("some", {"columns": "a, z"}, ["z", "a"]),
            ("none", {"columns": []}, []),
            ("text", {"columns": "z", "keep_text": True}, ["z", "text"]),
        ):
            vectorize("a.parquet", f"{name}.parquet", model=model, **options)
            table = pq.read_table(f"{name}.parquet")
            assert table.column_names == [*kept, *ADDED]
            assert table.select(kept).equals(pq.read_table("a.parquet", columns=kept).select(kept))
        with pytest.raises(OutputError, match="belongs to another run"):
            vectorize("a.parquet", "some.parquet", model=model)

    @pytest.mark.parametrize("name", ["embedding", "status"])
    def test_an_input_column_with_an_output_columns_name_is_refused_with_advice(self, model, name):
        write("a.parquet", {"text": TEXTS, name: TEXTS, "id": range(4)})
        with pytest.raises(OutputError, match=f"'{name}' has the name of an output column; .* --columns"):
            vectorize("a.parquet", model=model)
        assert list(Path().iterdir()) == [Path("a.parquet")]
        assert vectorize("a.parquet", model=model, columns="id").rows == 4

    def test_shards_that_hold_the_same_values_otherwise_share_a_schema(self, model):
        tags = [["x"], None, [], ["y", None]]
        write(
            "in/a.parquet", {"text": pa.nulls(4), "lang": pa.nulls(4), "tags": tags, "n": pa.array([1] * 4, pa.int8())}
        )
        large = pa.array(tags, pa.large_list(pa.large_string()))
        write("in/lang=en/b.parquet", {"n": [2**40] * 4, "tags": large, "lang": ["zh"] * 4, "text": TEXTS})
        vectorize("in", "all.parquet", model=model)
        table = pq.read_table("all.parquet")
        assert table["lang"].to_pylist() == [*[None] * 4, *["zh"] * 4]
        assert table["tags"].to_pylist() == tags * 2
        assert table["n"].to_pylist() == [1] * 4 + [2**40] * 4


def same_bits(one: pa.Array, other: pa.Array) -> bool:
    """Equal values where NaN has a payload and 0 a sign; lists of any offset, texts that are not UTF-8."""
    if pa.types.is_dictionary(other.type):
        other = other.dictionary_decode()
    if pa.types.is_floating(one.type):
        width = one.type.bit_width // 8
        bits = [np.frombuffer(a.buffers()[1], f"u{width}", len(a), a.offset * width) for a in (one, other)]
        return bool(np.array_equal(*bits))
    if pa.types.is_string(one.type):
        one, other = one.view(pa.binary()), other.view(pa.binary())
    return bool(one.cast(other.type).equals(other))

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gte_vectorize.errors import InputError, TemporaryError
from gte_vectorize.reader.rows import RowCursor

Write = Callable[..., str]


def rows(batches: Iterator[pa.RecordBatch], column: int | str = 0) -> list[Any]:
    return [value for batch in batches for value in batch.column(column).to_pylist()]


@pytest.fixture
def shard(write: Write) -> str:
    """1,000 rows that hold their own numbers, in row groups of 130."""
    return write("a.parquet", {"text": [f"text {n}" for n in range(1000)], "id": range(1000)}, row_group_size=130)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(sorted), max_size=8))
def test_any_reads_in_any_order(shard: str, spans: list[list[int]]) -> None:
    with RowCursor(shard, ["id"]) as cursor:
        for start, end in spans:
            assert rows(cursor.read(start, end - start)) == list(range(start, end))


def test_an_abandoned_read_leaves_the_cursor_right(shard: str) -> None:
    with RowCursor(shard, ["id"]) as cursor:
        assert next(cursor.read(100, 500)).column(0)[0].as_py() == 100
        assert rows(cursor.read(110, 300)) == list(range(110, 410))


def test_going_on_decodes_nothing_again(shard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    original = pq.ParquetFile.iter_batches

    def iter_batches(self: Any, size: int, *, row_groups: list[int], **options: Any) -> Any:
        opened.append(row_groups[0])
        return original(self, size, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    with RowCursor(shard, ["id"]) as cursor:
        for start in range(0, 600, 7):
            assert rows(cursor.read(start, 7)) == list(range(start, start + 7))
        assert opened == [0, 1, 2, 3, 4]
        assert rows(cursor.read(910, 5)) == list(range(910, 915))  # row group 7: those between are skipped unread
        assert opened == [0, 1, 2, 3, 4, 7]
        assert rows(cursor.read(3, 5)) == list(range(3, 8))
        assert opened == [0, 1, 2, 3, 4, 7, 0]


def test_only_the_columns_asked_for_in_that_order(write: Write) -> None:
    table = pa.table({"wide": [["x"] * 50] * 3, "text": ["a", "b", "c"], "id": [1, 2, 3]})
    with RowCursor(write("a.parquet", table), ["id", "text"]) as cursor:
        assert [batch.schema.names for batch in cursor.read(0, 3)] == [["id", "text"]]


def test_names_shared_with_struct_children(write: Write) -> None:
    table = pa.table({"doc": [{"text": "child", "id": 1}], "doc.text": ["dotted"], "text": ["top"]})
    path = write("a.parquet", table)
    for column, value in [("text", "top"), ("doc.text", "dotted"), ("doc", {"text": "child", "id": 1})]:
        with RowCursor(path, [column]) as cursor:
            (batch,) = cursor.read(0, 1)
            assert (batch.schema.names, rows(iter([batch]))) == ([column], [value])


@pytest.mark.parametrize("names", [["nope"], ["x"], ["text", "nope"]])
def test_a_missing_or_ambiguous_column_is_never_filled_in(write: Write, names: list[str]) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array([1]), pa.array([2])], names=["text", "x", "x"])
    path = write("a.parquet", table)
    with pytest.raises(TemporaryError, match=r"(0|2) columns named"):
        RowCursor(path, names)
    with RowCursor(path, ["text"]) as cursor:
        assert rows(cursor.read(0, 1)) == ["a"]


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b""), Path.mkdir])
def test_a_shard_that_is_no_longer_what_was_listed(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    path = tmp_path / "a.parquet"
    if change is Path.unlink:
        path.touch()
    change(path)
    with pytest.raises(TemporaryError, match=r"a\.parquet'.*removed or changed meanwhile"):
        RowCursor(str(path), ["text"])


def test_one_that_is_gone_from_s3(bucket: Any) -> None:
    with pytest.raises(TemporaryError, match="removed or changed meanwhile"):
        RowCursor("s3://corpora/gone.parquet", ["text"])


def test_invalid_utf8_comes_through_as_it_is(write: Write) -> None:
    raw = pa.array([b"ok", b"\xff\xfe", None])
    strings = pa.Array.from_buffers(pa.string(), 3, raw.buffers(), 1)
    with RowCursor(write("a.parquet", {"text": strings}), ["text"]) as cursor:
        (batch,) = cursor.read(0, 3)
    assert batch.column(0).cast(pa.binary()).to_pylist() == [b"ok", b"\xff\xfe", None]


@pytest.mark.parametrize(
    "type_", [pa.large_string(), pa.string_view(), pa.binary_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_type_of_text(write: Write, type_: pa.DataType) -> None:
    values = [f"v{n % 7}" for n in range(300)]
    with RowCursor(write("a.parquet", {"text": pa.array(values).cast(type_)}, row_group_size=90), ["text"]) as cursor:
        read = rows(cursor.read(50, 200))
    assert [value.decode() if isinstance(value, bytes) else value for value in read] == values[50:250]


def test_no_rows(write: Write) -> None:
    with RowCursor(write("a.parquet", pa.schema({"text": pa.string()}).empty_table()), ["text"]) as cursor:
        assert list(cursor.read(0, 0)) == []
        with pytest.raises(TemporaryError, match="has 0 rows"):
            list(cursor.read(0, 1))


def test_many_row_groups_of_one_row(write: Write) -> None:
    path = write("a.parquet", {"id": range(3000)}, row_group_size=1)
    with RowCursor(path, ["id"]) as cursor:
        assert rows(cursor.read(0, 3000)) == list(range(3000))


def test_on_s3(bucket: Any, shard: str) -> None:
    bucket.upload_file(shard, "a.parquet")
    with RowCursor("s3://corpora/a.parquet", ["text"]) as cursor:
        assert rows(cursor.read(500, 3)) == ["text 500", "text 501", "text 502"]


class TestDamage:
    def test_a_flipped_bit_in_a_page_with_a_checksum(self, write: Write) -> None:
        values = [f"text {n:06}" for n in range(5000)]
        options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
        path = Path(write("a.parquet", {"text": values}, **options))
        content = bytearray(path.read_bytes())
        content[content.index(b"text 000042")] ^= 1
        path.write_bytes(content)
        with RowCursor(str(path), ["text"]) as cursor, pytest.raises(InputError, match=r"rows 0 to 99.*CRC") as raised:
            list(cursor.read(0, 100))
        assert repr(str(path)) in str(raised.value)

    def test_a_hole_in_the_middle(self, write: Write) -> None:
        path = Path(write("a.parquet", {"text": [f"text {n * 7919}" for n in range(50000)]}, row_group_size=25000))
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[: middle - 40000] + content[middle:])
        with RowCursor(str(path), ["text"]) as cursor, pytest.raises(InputError, match=r"rows 0 to 49999"):
            list(cursor.read(0, 50000))

    def test_fewer_rows_than_the_footer_says(self, write: Write, tmp_path: Path) -> None:
        options = {"use_dictionary": False, "write_statistics": False, "store_schema": False}
        content = Path(write("whole.parquet", {"text": ["x"] * 100}, **options)).read_bytes()
        footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        # The numbers of rows become 101; the second is the column's number of values, and stays.
        first, second, *rest = content[footer:].split(b"\xc8\x01")
        forged = tmp_path / "forged.parquet"
        forged.write_bytes(
            content[:footer] + b"\xca\x01".join([first + b"\xca\x01" + second + b"\xc8\x01" + rest[0], *rest[1:]])
        )
        with (
            RowCursor(str(forged), ["text"]) as cursor,
            pytest.raises(InputError, match=r"row group 0 ends at row 100, .* says 101"),
        ):
            list(cursor.read(0, 101))

    def test_rows_beyond_the_end(self, shard: str) -> None:
        with (
            RowCursor(shard, ["id"]) as cursor,
            pytest.raises(TemporaryError, match="has 1000 rows, not those from 900"),
        ):
            list(cursor.read(900, 101))


def _peak_growth(path: str, count: int) -> int:
    """MiB by which reading `count` rows, without keeping them, raises the peak memory of a fresh process."""
    # VmHWM and not ru_maxrss, which a child begins with its parent's value.
    code = """
import re, sys
from pathlib import Path
from gte_vectorize.reader.rows import RowCursor
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10
with RowCursor(sys.argv[1], ["text"]) as cursor:
    before, count = peak(), sum(batch.num_rows for batch in cursor.read(0, int(sys.argv[2])))
print(peak() - before, count)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, path, str(count)],
        capture_output=True,
        check=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    growth, read = map(int, done.stdout.split())
    assert read == count
    return growth


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
class TestMemory:
    def test_a_bomb(self, write: Write) -> None:
        """About a kilobyte that decodes to 4 GiB, and a footer that owns up to 1 MiB."""
        text = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), pa.array(["x" * (1 << 20)]))
        path = write("a.parquet", {"text": text}, compression="zstd", store_schema=False, write_statistics=False)
        assert Path(path).stat().st_size < 2000
        assert _peak_growth(path, 1000) < 400

    def test_honest_large_texts_come_one_by_one(self, write: Write) -> None:
        path = write("a.parquet", {"text": [str(n) * (12 << 20) for n in range(8)]})
        with RowCursor(path, ["text"]) as cursor:
            sizes = [batch.num_rows for batch in cursor.read(0, 8)]
        assert sizes == [1] * 8

    def test_a_large_row_group_is_streamed(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        chunk = pa.array([bytes(1000 * [n % 256]) + str(n).encode() for n in range(4000)], pa.large_binary())
        with pq.ParquetWriter(
            path, pa.schema({"text": pa.large_binary()}), compression="none", use_dictionary=False
        ) as w:
            w.write_table(pa.table({"text": pa.chunked_array([chunk] * 64)}), row_group_size=1 << 30)
        assert path.stat().st_size > 240 << 20
        assert _peak_growth(str(path), 64 * 4000) < 100

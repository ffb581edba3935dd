from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gte_vectorize.errors import InputError, TemporaryError
from gte_vectorize.reader import convert
from gte_vectorize.reader.convert import is_convertible, remove_leftovers, to_parquet


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of the Hugging Face libraries, which every test must leave empty."""
    import datasets.config

    folder = tmp_path / "caches"
    folder.mkdir()
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, folder / name.lower())
    return folder


def converted(tmp_path: Path, name: str, content: str | bytes) -> pa.Table:
    """The content after its way through a file of that name."""
    source = tmp_path / name
    source.write_bytes(content.encode() if isinstance(content, str) else content)
    return pq.read_table(to_parquet(str(source), tmp_path / "spool")).replace_schema_metadata(None)


def kept(spool: Path) -> list[Path]:
    return [path for path in spool.iterdir() if path.name != "lock"]


def refusal(tmp_path: Path, name: str, content: str | bytes) -> str:
    with pytest.raises(InputError) as raised:
        converted(tmp_path, name, content)
    assert kept(tmp_path / "spool") == []
    return str(raised.value)


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def test_which_names() -> None:
    convertible = ["a.jsonl", "a.ndjson", "a.json", "s3://b/a.csv.gz", "a.TSV", "a.txt.zst"]
    assert all(map(is_convertible, convertible))
    assert not any(map(is_convertible, ["a.parquet", "jsonl", "a.jsonl.bz2", "a.csv/b", "a.parquet.gz"]))


class TestJsonLines:
    def test_values_come_through_unchanged(self, tmp_path: Path) -> None:
        rows = [
            {
                "text": "2024-01-01",
                "id": 2**60 + 1,
                "tags": ["x"],
                "meta": {"a": 1},
                "flag": True,
                "date": "2024-01-02",
            },
            {
                "text": "007\u2028\u0000\r\n 法律",
                "id": None,
                "tags": [],
                "meta": {"b": "y"},
                "flag": None,
                "date": "NA",
            },
        ]
        table = converted(tmp_path, "a.jsonl", "\ufeff" + lines(rows[0]) + "\n  \n" + lines(rows[1]).rstrip("\n"))
        rows[0]["meta"] = {"a": 1, "b": None}
        rows[1]["meta"] = {"a": None, "b": "y"}
        assert table.to_pylist() == rows
        assert table.schema.names == list(rows[0])

    def test_a_type_may_show_late(self, tmp_path: Path) -> None:
        many = 500
        early = [{"text": str(n), "score": 1, "lang": None} for n in range(many)]
        late = [{"lang": "zh", "score": 0.5, "text": "x", "new": [1]}]
        table = converted(tmp_path, "a.json", lines(*early, *late))
        assert table.schema.field("score").type == pa.float64()
        assert table["lang"].to_pylist() == [None] * many + ["zh"]
        assert table["new"].to_pylist() == [None] * many + [[1]]
        assert table["text"].to_pylist() == [*map(str, range(many)), "x"]

    def test_half_a_surrogate_pair_is_one_bad_text(self, tmp_path: Path) -> None:
        content = '{"text": "good"}\n{"text": "bad \\ud800"}\n{"text": null}\n{"text": "\\ud83d\\ude00"}\n'
        column = converted(tmp_path, "a.jsonl", content)["text"]
        assert column.type == pa.string()
        assert column.cast(pa.binary()).to_pylist() == [b"good", b"bad \xed\xa0\x80", None, "😀".encode()]

    @pytest.mark.parametrize(
        ("bad", "column"),
        [
            ({"text": "a", "id": "secret"}, "id"),
            ({"text": 3.25, "id": 1}, "text"),
            ({"text": "a", "id": True}, "id"),
            ({"text": "a", "id": 1, "more": [1, "a"]}, "more"),
            ({"text": "a", "id": 2**70}, "id"),
            ({"text": "a", "id": 1, "more": ["\ud800"]}, "more"),
        ],
    )
    @pytest.mark.parametrize("before", [1, 300])
    def test_a_column_that_changes_its_type(self, tmp_path: Path, bad: Any, column: str, before: int) -> None:
        content = lines(*[{"text": "a", "id": 1}] * before) + json.dumps(bad)
        message = refusal(tmp_path, "a.jsonl", content)
        assert f"a.jsonl', column {column!r}: values of different types" in message
        assert "secret" not in message

    def test_a_truth_value_is_no_number(self, tmp_path: Path) -> None:
        assert "column 'score'" in refusal(tmp_path, "a.jsonl", lines({"text": "a", "score": 0.5}, {"score": True}))

    @pytest.mark.parametrize("bad", ['{"text": "secret', '["secret"]', "secret", "[" * 100_000])
    def test_a_line_that_is_no_object(self, tmp_path: Path, bad: str) -> None:
        message = refusal(tmp_path, "a.jsonl", lines(*[{"text": "a"}] * 99) + bad)
        assert "a.jsonl', line 100: not a JSON object" in message
        assert "secret" not in message

    def test_no_rows(self, tmp_path: Path) -> None:
        assert "holds no rows" in refusal(tmp_path, "a.jsonl", "\n")


class TestCsv:
    def test_every_value_is_the_string_it_was(self, tmp_path: Path) -> None:
        content = '\ufeffid,text,score\n007,NA,1.50\n1e5,"two\nlines, ""quoted""",\n\nnull,,TRUE\n'
        assert converted(tmp_path, "a.csv", content).to_pylist() == [
            {"id": "007", "text": "NA", "score": "1.50"},
            {"id": "1e5", "text": 'two\nlines, "quoted"', "score": ""},
            {"id": "null", "text": "", "score": "TRUE"},
        ]

    def test_tabs(self, tmp_path: Path) -> None:
        assert converted(tmp_path, "a.tsv", "id\ttext\n1\ta,b\n").to_pylist() == [{"id": "1", "text": "a,b"}]

    def test_a_long_value(self, tmp_path: Path) -> None:
        text = "x" * 1_000_000
        assert converted(tmp_path, "a.csv", f"text\n{text}\n")["text"].to_pylist() == [text]

    def test_only_a_header(self, tmp_path: Path) -> None:
        assert converted(tmp_path, "a.csv", "id,text\n").schema == pa.schema({"id": pa.string(), "text": pa.string()})

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("", "first line must name"),
            ("text,text\na,b\n", "first line must name"),
            ("id,text\n1,a\n2,a,secret\n", "line 3: 3 values where the first line names 2"),
            ("id,text\n1,a\n2\n", "line 3: 1 values"),
            ('id,text\n1,"secret\n', "not CSV"),
            ('id,text\n1,"secret"x\n', "not CSV"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, content: str, says: str) -> None:
        message = refusal(tmp_path, "a.csv", content)
        assert says in message
        assert "secret" not in message


class TestText:
    def test_one_row_a_line(self, tmp_path: Path) -> None:
        table = converted(tmp_path, "a.txt", "one\r\n\n two \u2028\x85 still\nlast")
        assert table["text"].to_pylist() == ["one", "", " two \u2028\x85 still", "last"]

    def test_an_empty_file(self, tmp_path: Path) -> None:
        assert converted(tmp_path, "a.txt", "").schema == pa.schema({"text": pa.string()})

    def test_another_encoding_is_refused(self, tmp_path: Path) -> None:
        assert "not valid UTF-8" in refusal(tmp_path, "a.txt", "法律\n".encode("gb18030") * 100)

    def test_more_than_one_row_group(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(convert, "_GROUP_ROWS", 256)
        texts = [str(n) for n in range(1000)]
        assert converted(tmp_path, "a.txt", "\n".join(texts))["text"].to_pylist() == texts
        (made,) = kept(tmp_path / "spool")
        assert [pq.read_metadata(made).row_group(n).num_rows for n in range(4)] == [256, 256, 256, 232]


class TestFiles:
    @pytest.mark.parametrize("name", ["a [1]*.jsonl", ".hid den?.txt", "a::b\n%.csv"])
    def test_odd_names_in_odd_folders(self, tmp_path: Path, name: str) -> None:
        folder = tmp_path / ".x [2].state"
        folder.mkdir()
        content = {"jsonl": '{"text": "a"}', "txt": "a", "csv": "text\na"}[name.rsplit(".")[-1]]
        (folder / name).write_text(content)
        made = to_parquet(str(folder / name), folder / "spool")
        assert pq.read_table(made)["text"].to_pylist() == ["a"]

    @pytest.mark.parametrize("ending", ["gz", "zst"])
    def test_compressed(self, tmp_path: Path, ending: str) -> None:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, {"gz": "gzip", "zst": "zstd"}[ending]) as stream:
            stream.write(b"one\ntwo\n")
        content = sink.getvalue().to_pybytes()
        assert converted(tmp_path, f"a.txt.{ending}", content)["text"].to_pylist() == ["one", "two"]
        assert "converting to Parquet failed" in refusal_of_damage(tmp_path, f"b.txt.{ending}", content)

    def test_several_compressed_parts_in_a_row(self, tmp_path: Path) -> None:
        content = gzip.compress(b"one\n") + gzip.compress(b"two\n")
        assert converted(tmp_path, "a.txt.gz", content)["text"].to_pylist() == ["one", "two"]

    def test_on_s3(self, tmp_path: Path, bucket: Any) -> None:
        bucket.put_object(Key="a.jsonl", Body=b'{"text": "a"}\n')
        assert pq.read_table(to_parquet("s3://corpora/a.jsonl", tmp_path))["text"].to_pylist() == ["a"]

    def test_readable_by_the_owner_alone_and_nothing_beside(self, tmp_path: Path, caches: Path) -> None:
        converted(tmp_path, "a.txt.gz", gzip.compress(b"one\n"))
        spool = tmp_path / "spool"
        assert len(kept(spool)) == 1
        assert {stat.S_IMODE(path.stat().st_mode) for path in spool.iterdir()} == {0o600}
        assert stat.S_IMODE(spool.stat().st_mode) == 0o700
        assert list(caches.iterdir()) == []

    def test_no_network(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Any] = []

        def refuse(*args: Any, **options: Any) -> None:
            calls.append(args)
            raise OSError("no network")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        converted(tmp_path, "a.txt", "one\n")
        assert calls == []

    def test_made_once_until_the_source_changes(self, tmp_path: Path) -> None:
        source, spool = tmp_path / "a.txt", tmp_path / "spool"
        source.write_text("one\n")
        made = to_parquet(str(source), spool)
        first, content = made.stat(), made.read_bytes()
        assert first.st_mtime_ns == source.stat().st_mtime_ns
        assert to_parquet(str(source), spool).stat().st_ino == first.st_ino
        made.unlink()
        assert to_parquet(str(source), spool).read_bytes() == content
        made.write_bytes(content[:-9])
        assert to_parquet(str(source), spool).read_bytes() == content
        source.write_text("two\n")
        assert pq.read_table(to_parquet(str(source), spool))["text"].to_pylist() == ["two"]

    def test_a_source_that_changes_meanwhile(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = tmp_path / "a.txt"
        source.write_text("one\n")
        original = convert._write

        def write_and_touch(*args: Any) -> None:
            original(*args)
            source.write_text("one\ntwo\n")

        monkeypatch.setattr(convert, "_write", write_and_touch)
        with pytest.raises(TemporaryError, match="changed while it was converted"):
            to_parquet(str(source), tmp_path / "spool")
        assert kept(tmp_path / "spool") == []

    def test_what_a_killed_conversion_left_is_removed(self, tmp_path: Path) -> None:
        source, spool = tmp_path / "a.txt", tmp_path / "spool"
        source.write_text("one\n")
        with converting(source, spool) as process:
            (left,) = spool.glob("tmp*/made.parquet")
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert left.exists()
        made = to_parquet(str(source), spool)
        assert kept(spool) == [made]

    def test_a_conversion_that_is_running_is_left_alone(self, tmp_path: Path) -> None:
        source, spool = tmp_path / "a.txt", tmp_path / "spool"
        source.write_text("one\n")
        with converting(source, spool):
            (left,) = spool.glob("tmp*/made.parquet")
            with pytest.raises(TemporaryError, match="another run is converting"):
                to_parquet(str(source), spool)
            remove_leftovers(spool)
            assert left.exists()

    def test_the_bytes_are_safe_before_the_name_and_the_name_after(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, spool, events = tmp_path / "a.txt", tmp_path / "spool", []
        source.write_text("one\n")
        spool.mkdir()
        sync, replace = os.fsync, os.replace

        def watched_sync(descriptor: int) -> None:
            events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
            sync(descriptor)

        def watched_replace(made: Path, target: Path) -> None:
            events.append(("name", target.name))
            replace(made, target)

        monkeypatch.setattr(os, "fsync", watched_sync)
        monkeypatch.setattr(os, "replace", watched_replace)
        made = to_parquet(str(source), spool)
        assert events == [("sync", "made.parquet"), ("name", made.name), ("sync", "spool")]


@contextmanager
def converting(source: Path, spool: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is about to name what it converted."""
    script = (
        "import sys, time; from pathlib import Path; from gte_vectorize.reader import convert\n"
        "convert.publish = lambda *args, **options: (print(flush=True), time.sleep(600))\n"
        "convert.to_parquet(sys.argv[1], Path(sys.argv[2]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(convert.__file__).parents[2])}
    command = [sys.executable, "-c", script, str(source), str(spool)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        try:
            yield process
        finally:
            process.kill()


def refusal_of_damage(tmp_path: Path, name: str, content: bytes) -> str:
    with pytest.raises(InputError) as raised:
        converted(tmp_path, name, content[:-10] + b"\0" * 5)
    return str(raised.value)

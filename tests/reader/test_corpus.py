from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gte_vectorize.errors import InputError, TemporaryError
from gte_vectorize.reader.corpus import check_unchanged, find_corpus
from gte_vectorize.store.layout import find_layout

Write = Callable[..., str]

IDS = [1, 2]
TEXTS = ["a", "b"]


def refusal(*inputs: str, text_column: str = "text", columns: list[str] | None = None) -> str:
    with pytest.raises(InputError) as raised:
        find_corpus(inputs, text_column=text_column, columns=columns)
    return str(raised.value)


class TestShards:
    def test_order_is_that_of_the_inputs_then_of_the_paths(self, write: Write, tmp_path: Path) -> None:
        names = ["z/b.parquet", "z/a.parquet", "m.parquet", "a/c.parquet"]
        paths = [write(name) for name in names]
        corpus = find_corpus([str(tmp_path / "z"), paths[2], str(tmp_path / "a/*.parquet")], text_column="text")
        assert [shard.uri for shard in corpus.shards] == [paths[1], paths[0], paths[2], paths[3]]
        assert corpus == find_corpus([str(tmp_path / "z"), paths[2], str(tmp_path / "a/*.parquet")], text_column="text")

    def test_what_the_footer_says(self, write: Write) -> None:
        path = write("a.parquet", {"text": ["x"] * 10}, row_group_size=4)
        (shard,) = find_corpus([path], text_column="text").shards
        status = Path(path).stat()
        assert (shard.uri, shard.size, shard.modified_ns) == (path, status.st_size, status.st_mtime_ns)
        assert shard.row_groups == (4, 4, 2)

    def test_no_rows_and_no_row_groups_among_good_files(self, write: Write, tmp_path: Path) -> None:
        schema = pa.schema({"text": pa.string(), "id": pa.int64()})
        write("a.parquet", schema.empty_table())
        with pq.ParquetWriter(tmp_path / "b.parquet", schema):
            pass
        write("c.parquet", {"text": TEXTS, "id": IDS})
        corpus = find_corpus([str(tmp_path)], text_column="text")
        assert [shard.num_rows for shard in corpus.shards] == [0, 0, 2]
        assert corpus.schema == pa.schema({"id": pa.int64()})

    def test_on_s3(self, bucket: Any, write: Write) -> None:
        path = write("a.parquet", {"text": TEXTS, "id": IDS})
        bucket.upload_file(path, "in/a [1].parquet")
        corpus = find_corpus(["s3://corpora/in"], text_column="text")
        (shard,) = corpus.shards
        assert shard.uri == "s3://corpora/in/a [1].parquet"
        assert (shard.size, shard.num_rows) == (Path(path).stat().st_size, 2)
        assert shard.modified_ns > 0
        check_unchanged(shard)
        bucket.put_object(Key="in/a [1].parquet", Body=b"other")
        with pytest.raises(TemporaryError, match="changed while it was read"):
            check_unchanged(shard)

    def test_a_change_is_noticed(self, write: Write) -> None:
        path = write("a.parquet")
        (shard,) = find_corpus([path], text_column="text").shards
        check_unchanged(shard)
        os.utime(path, ns=(0, shard.modified_ns + 1))
        with pytest.raises(TemporaryError, match="changed while it was read"):
            check_unchanged(shard)

    @pytest.mark.parametrize("gone", [Path.unlink, lambda path: (path.unlink(), path.mkdir())])
    def test_a_file_that_is_gone_is_noticed(self, write: Write, gone: Callable[[Path], Any]) -> None:
        path = write("a.parquet")
        (shard,) = find_corpus([path], text_column="text").shards
        gone(Path(path))
        with pytest.raises(TemporaryError, match=r"a\.parquet'.*removed or changed meanwhile"):
            check_unchanged(shard)

    def test_no_input(self) -> None:
        assert "no input" in refusal()

    def test_the_same_file_by_glob_and_by_name(self, write: Write, tmp_path: Path) -> None:
        path = write("a.parquet")
        assert repr(path) in refusal(str(tmp_path / "*.parquet"), path)


class TestOutputsOfGteVectorize:
    """They lie where their corpus lies, and hold its rows again."""

    @pytest.fixture
    def embedded(self, write: Write) -> str:
        table = pa.table({"text": TEXTS, "id": IDS})
        return write("b.parquet", table.replace_schema_metadata({"embeddings": '{"producer": "gte-vectorize"}'}))

    @pytest.mark.parametrize("given", ["", "*.parquet"])
    def test_are_left_out_unless_named(
        self, write: Write, tmp_path: Path, embedded: str, given: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        others = [write("a.parquet"), write("c.parquet", pa.table({"text": TEXTS}, metadata={"embeddings": "[1]"}))]
        with caplog.at_level(logging.INFO):
            corpus = find_corpus([str(tmp_path / given)], text_column="text")
        assert [shard.uri for shard in corpus.shards] == others
        assert corpus.skipped == (embedded,)
        assert f"outputs of gte-vectorize among the inputs: 1, first {embedded!r}; they are left out" in caplog.text

    def test_are_read_when_named(self, embedded: str, caplog: pytest.LogCaptureFixture) -> None:
        corpus = find_corpus([embedded], text_column="text")
        assert ([shard.uri for shard in corpus.shards], corpus.schema.names) == ([embedded], ["id"])
        assert "embedded again" in caplog.text

    def test_alone_are_no_corpus(self, tmp_path: Path, embedded: str) -> None:
        assert f"only outputs of gte-vectorize, first {embedded!r}" in refusal(str(tmp_path))

    def test_on_s3(self, bucket: Any, write: Write, embedded: str) -> None:
        for path in (write("a.parquet"), embedded):
            bucket.upload_file(path, f"in/{Path(path).name}")
        assert [shard.uri for shard in find_corpus(["s3://corpora/in"], text_column="text").shards] == [
            "s3://corpora/in/a.parquet"
        ]
        assert len(find_corpus(["s3://corpora/in/b.parquet"], text_column="text").shards) == 1


class TestDamage:
    """One file that cannot be read ends the run before it begins."""

    @pytest.mark.parametrize("content", [b"", b"PAR1", b"some text\n" * 9, "cut", b"PAR1" + b"\0" * 40 + b"PAR1"])
    def test_not_parquet(self, write: Write, tmp_path: Path, content: bytes | str) -> None:
        good = write("a.parquet", {"text": ["x"] * 1000})
        whole = Path(good).read_bytes()
        bad = tmp_path / "b\n.parquet"
        bad.write_bytes(whole[:-40] if isinstance(content, str) else content)
        message = refusal(str(tmp_path))
        assert repr(str(bad)) in message
        assert "footer" in message

    def test_a_pipe_in_a_folder_does_not_block(self, write: Write, tmp_path: Path) -> None:
        write("a.parquet")
        os.mkfifo(tmp_path / "b.parquet")
        assert "not a regular file" in refusal(str(tmp_path))

    def test_an_encrypted_footer_is_named(self, write: Write, tmp_path: Path) -> None:
        content = Path(write("a.parquet")).read_bytes()
        (tmp_path / "a.parquet").write_bytes(content[:-4] + b"PARE")
        assert "a.parquet" in refusal(str(tmp_path / "a.parquet"))


class TestTextColumn:
    def test_missing(self, write: Write) -> None:
        message = refusal(write("a.parquet", {"id": IDS, "texts": TEXTS}))
        assert "no column 'text' (did you mean 'texts'?)" in message
        assert "'id', 'texts'" in message
        assert "--text-column" in message

    def test_missing_in_a_later_shard(self, write: Write) -> None:
        assert "b.parquet" in refusal(write("a.parquet"), write("b.parquet", {"body": TEXTS}))

    def test_another_case_is_suggested_and_never_guessed(self, write: Write) -> None:
        assert "did you mean 'Text' or 'TEXT'" in refusal(write("a.parquet", {"Text": TEXTS, "TEXT": TEXTS}))

    def test_the_exact_name_wins(self, write: Write) -> None:
        path = write("a.parquet", {"Text": TEXTS, "text": TEXTS})
        assert find_corpus([path], text_column="text").schema.names == ["Text"]

    def test_two_of_one_name(self, write: Write) -> None:
        table = pa.Table.from_arrays([pa.array(TEXTS), pa.array(TEXTS)], names=["text", "text"])
        assert "2 columns named 'text'" in refusal(write("a.parquet", table))

    def test_a_struct_child_is_no_column(self, write: Write) -> None:
        assert "no column 'text'" in refusal(write("a.parquet", {"doc": [{"text": "a"}]}))

    @pytest.mark.parametrize("values", [[1, 2], [True, False], [["a"], ["b"]], [{"a": 1}, None], [1.5, 2.5]])
    def test_a_type_that_is_no_text(self, write: Write, values: list[Any]) -> None:
        message = refusal(write("a.parquet", {"text": values}))
        assert f"column 'text' has the type {pa.array(values).type}".split("<")[0] in message

    def test_every_type_of_text(self, write: Write, tmp_path: Path) -> None:
        strings = pa.array(TEXTS)
        arrays = [strings.cast(t) for t in (pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())]
        arrays += [pa.array([b"a", b"b"], pa.binary_view()), strings.dictionary_encode(), pa.nulls(2), strings]
        for number, array in enumerate(arrays):
            write(f"{number}.parquet", {"text": array, "id": IDS})
        corpus = find_corpus([str(tmp_path)], text_column="text")
        assert len(corpus.shards) == len(arrays)
        assert corpus.schema == pa.schema({"id": pa.int64()})


class TestSchema:
    def test_every_column_but_the_text_in_file_order(self, write: Write) -> None:
        path = write("a.parquet", {"z": IDS, "text": TEXTS, "a": TEXTS})
        assert find_corpus([path], text_column="text").schema.names == ["z", "a"]
        assert find_corpus([path], text_column="text", keep_text=True).schema.names == ["z", "text", "a"]
        assert find_corpus([path], text_column="text", columns=["a", "z"]).schema.names == ["z", "a"]
        assert find_corpus([path], text_column="text", columns=["a"], keep_text=True).schema.names == ["text", "a"]
        assert find_corpus([path], text_column="text", columns=["text"]).schema.names == ["text"]
        assert find_corpus([path], text_column="text", columns=[]).schema.names == []

    def test_all_null_first_shard_does_not_fix_the_type(self, write: Write) -> None:
        paths = [
            write("a.parquet", {"text": pa.nulls(2), "lang": pa.nulls(2)}),
            write("b.parquet", {"text": TEXTS, "lang": ["zh", "en"]}),
        ]
        for inputs in (paths, paths[::-1]):
            schema = find_corpus(inputs, text_column="text", keep_text=True).schema
            assert schema == pa.schema({"text": pa.string(), "lang": pa.string()})

    def test_lists_of_either_offset(self, write: Write) -> None:
        paths = [
            write("a.parquet", {"text": TEXTS, "tags": pa.array([["x"], None], pa.list_(pa.string()))}),
            write("b.parquet", {"text": TEXTS, "tags": pa.array([["x"], None], pa.large_list(pa.string()))}),
        ]
        field = find_corpus(paths, text_column="text").schema.field("tags")
        assert pa.types.is_large_list(field.type)

    def test_metadata_of_other_tools_is_dropped(self, write: Write) -> None:
        huge = {b"pandas": b"{}", b"huggingface": b"x" * 5_000_000}
        field = pa.field("id", pa.int64(), metadata={b"PARQUET:field_id": b"7", b"note": b"x"})
        schema = pa.schema([("text", pa.string()), field], metadata=huge)
        path = write("a.parquet", pa.table([TEXTS, IDS], schema=schema))
        (kept,) = find_corpus([path], text_column="text").schema
        assert kept.metadata is None
        assert find_corpus([path], text_column="text").schema.metadata is None

    def test_extension_types_become_their_storage(self, write: Write) -> None:
        uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"x" * 16, None], pa.binary(16)))
        path = write("a.parquet", {"text": TEXTS, "key": uuids})
        assert find_corpus([path], text_column="text").schema.field("key").type == pa.binary(16)

    def test_a_column_that_one_shard_lacks(self, write: Write) -> None:
        paths = [write("a.parquet", {"text": TEXTS, "id": IDS}), write("b.parquet")]
        for inputs in (paths, paths[::-1]):
            assert f"{paths[1]!r} has no column 'id', which {paths[0]!r} has" in refusal(*inputs)
        assert len(find_corpus(paths, text_column="text", columns=[]).shards) == 2

    def test_types_that_do_not_agree_name_both_files(self, write: Write) -> None:
        paths = [
            write("a.parquet", {"text": TEXTS, "id": pa.nulls(2)}),
            write("b.parquet", {"text": TEXTS, "id": IDS}),
            write("c.parquet", {"text": TEXTS, "id": TEXTS}),
        ]
        message = refusal(*paths)
        assert f"int64 in {paths[1]!r} and string in {paths[2]!r}" in message
        assert "--columns" in message

    def test_repeated_names(self, write: Write) -> None:
        table = pa.Table.from_arrays([pa.array(TEXTS), *[pa.array(IDS)] * 3], names=["text", "x", "x", "y"])
        path = write("a.parquet", table)
        assert "several columns of one name: 'x'" in refusal(path)
        assert "several columns of one name: 'x'" in refusal(path, columns=["x"])
        assert find_corpus([path], text_column="text", columns=["y"]).schema.names == ["y"]

    def test_an_unknown_column_names_the_nearest(self, write: Write) -> None:
        path = write("a.parquet", {"text": TEXTS, "source": TEXTS})
        assert "no column 'sourc' (did you mean 'source'?)" in refusal(path, columns=["sourc"])

    def test_a_column_nobody_asked_for_does_no_harm(self, write: Write) -> None:
        uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"x" * 16] * 2, pa.binary(16)))
        odd = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), uuids)
        paths = [
            write("a.parquet", {"text": TEXTS, "id": IDS, "odd": odd}),
            write("b.parquet", {"text": TEXTS, "id": IDS, "odd": TEXTS}),
        ]
        assert "'odd'" in refusal(paths[0])
        assert find_corpus(paths, text_column="text", columns=["id"]).schema.names == ["id"]

    def test_a_folder_name_with_a_value_adds_no_column(self, write: Write, tmp_path: Path) -> None:
        write("lang=zh/year=2024/a.parquet", {"text": TEXTS, "lang": ["en", "en"]})
        assert find_corpus([str(tmp_path)], text_column="text").schema.names == ["lang"]

    def test_many_names_are_cut_in_a_message(self, write: Write) -> None:
        message = refusal(write("a.parquet", {f"c{number}": IDS for number in range(500)}))
        assert "and 470 more" in message


class TestOtherFormats:
    def test_jsonl_beside_parquet(self, write: Write, tmp_path: Path) -> None:
        parquet = write("a.parquet", {"text": TEXTS, "id": IDS})
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "c", "id": 3}).encode()))
        inputs = [parquet, str(tmp_path / "*.gz")]
        layout = find_layout(tmp_path / "out.parquet", ())
        corpus = find_corpus(inputs, text_column="text", layouts=[layout])
        assert [shard.num_rows for shard in corpus.shards] == [2, 1]
        assert corpus.shards[1].uri.startswith(str(layout.spool))
        assert corpus.schema == pa.schema({"id": pa.int64()})
        assert find_corpus(inputs, text_column="text", layouts=[layout]) == corpus

    def test_without_a_spool_folder(self, tmp_path: Path) -> None:
        (tmp_path / "b.csv").write_text("text\na\n")
        assert "convert it to Parquet first" in refusal(str(tmp_path / "b.csv"))

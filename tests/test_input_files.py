"""Files, folders, patterns, stores and formats of an input, good and bad, through the whole flow."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import save_tiny

import gte_vectorize
from gte_vectorize import DamagedInput, InputError, OutputError, TemporaryError, VectorizeError, vectorize

TEXTS = ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w10"]
CORPUS = {"text": TEXTS, "id": ["1", "2", "3", "4"]}
ODD_NAMES = ["a [1].parquet", "b%41#?.PARQUET", "c\nd.parquet", "-e.parquet", "f'\"\\.parquet", "合同.parquet"]
SIDE_FILES = ["_SUCCESS", "_metadata", ".a.parquet.crc", ".hidden.parquet", "readme.txt", "no_ending", "_tmp/x.parquet"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "bert")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, columns: Any = CORPUS, **options: Any) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, path, **options)
    return path


def snapshot(folder: str | Path) -> dict[Path, tuple[int, bytes]]:
    """Every file with its time and its bytes."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in Path(folder).rglob("*") if path.is_file()}


def parts(folder: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(folder).glob("part-*.parquet"))]


def refusal(*inputs: str, kind: type[VectorizeError] = InputError, **options: Any) -> str:
    """The message; nothing may have been written."""
    before = snapshot(".")
    with pytest.raises(kind) as raised:
        vectorize(list(inputs), **options)
    assert raised.value.exit_code == 2
    assert snapshot(".") == before
    return str(raised.value)


@pytest.mark.parametrize("output", ["out", "out.parquet"])
def test_files_without_rows_or_row_groups_among_good_ones(model, output):
    schema = pa.table(CORPUS).schema
    write("in/a.parquet", schema.empty_table())
    write("in/b.parquet")
    with pq.ParquetWriter("in/c.parquet", schema):
        pass
    write("in/d.parquet", row_group_size=1)
    report = vectorize("in", output, model=model)
    assert (report.exit_code, report.rows, report.status) == (0, 8, {"ok": 8})
    files = [Path(output)] if output.endswith(".parquet") else sorted(Path(output).glob("part-*.parquet"))
    tables = [pq.read_table(file) for file in files]
    assert [table.num_rows for table in tables] in ([8], [0, 4, 0, 4])
    assert all(table.schema.equals(tables[0].schema, check_metadata=True) for table in tables)


def test_a_corpus_without_any_row_is_an_empty_output(model):
    write("a.parquet", pa.table(CORPUS).slice(0, 0))
    report = vectorize("a.parquet", model=model)
    assert (report.exit_code, report.rows, report.status) == (0, 0, {})
    assert pq.read_schema("a.embeddings.parquet").names[:2] == ["id", "embedding"]
    assert vectorize("a.parquet", model=model).rows == 0


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"texts": TEXTS, "id": TEXTS}, "no column 'text' (did you mean 'texts'?)"),
        (pa.Table.from_arrays([pa.array(TEXTS)] * 2, ["text", "text"]), "2 columns named 'text'"),
        ({"text": [1, 2]}, "column 'text' has the type int64"),
        ({"text": [["w1"]]}, "column 'text' has the type list"),
        ({"text": [{"text": "w1"}]}, "column 'text' has the type struct"),
    ],
)
def test_a_text_column_that_cannot_be_used_is_refused_before_the_model_is_read(model, columns, said):
    broken = Path("model")
    broken.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (broken / file.name).write_bytes(file.read_bytes()[: 100 if file.suffix == ".safetensors" else None])
    write("a.parquet", columns)
    message = refusal("a.parquet", model=broken)
    assert said in message
    assert repr(str(Path("a.parquet").absolute())) in message


def test_the_command_ends_in_2_with_one_line(model):
    write("a.parquet", {"id": TEXTS})
    program = [sys.executable, "-m", "gte_vectorize", "a.parquet", "--model", str(model)]
    environment = {**os.environ, "PYTHONPATH": str(Path(gte_vectorize.__file__).parents[1])}
    end = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert (end.returncode, end.stdout, end.stderr.count("\n")) == (2, "", 1)
    assert "no column 'text'" in end.stderr
    assert list(Path().iterdir()) == [Path("a.parquet")]


def test_folders_patterns_and_odd_names_are_taken_as_meant(model, caplog):
    write("plain/a.parquet")
    for number, name in enumerate(ODD_NAMES):
        write(f"in/sub {number}/{name}")
    for name in SIDE_FILES:
        write(f"in/{name}", {"other": [1]})
    with caplog.at_level(logging.INFO):
        assert vectorize("in", "folder", model=model).rows == 4 * len(ODD_NAMES)
    assert f"{len(SIDE_FILES)} files beside the corpus are left out" in caplog.text
    vectorize("plain/a.parquet", "plain-out", model=model)
    assert parts("folder") == parts("plain-out") * len(ODD_NAMES)
    vectorize("in/sub 0/a [1].parquet", model=model)
    assert Path("in/sub 0/a [1].embeddings.parquet").is_file()
    os.chdir("in/sub 3")
    assert vectorize("-e.parquet", model=model).rows == 4
    os.chdir("../..")
    assert vectorize("in/sub ?/*[!s].parquet", "pattern", model=model).rows == 20


def test_inputs_that_name_nothing_or_one_file_twice_are_refused(model):
    write("in/a.parquet")
    write("other/b.txt")
    Path("hard.parquet").hardlink_to("in/a.parquet")
    Path("soft.parquet").symlink_to("in/a.parquet")
    for nothing in ("missing.parquet", "in/*.csv", "other", "in/b*.parquet"):
        assert repr(nothing) in refusal("in/a.parquet", nothing, output="out", model=model)
    for twice in ("in/*.parquet", "in", "hard.parquet", "soft.parquet"):
        assert "give every file once" in refusal("in/a.parquet", twice, output="out", model=model)


def test_an_output_over_an_input_or_over_foreign_files_is_refused(model):
    write("in/a.parquet")
    Path("lines").mkdir()
    Path("lines/a.jsonl").write_text('{"text": "w1"}\n')
    Path("link.parquet").symlink_to("in/a.parquet")
    for source, output in [
        ("in/a.parquet", "in/a.parquet"),
        ("in/a.parquet", "link.parquet"),
        ("in/a.parquet", "in"),
        ("in/a.parquet", "in/a.parquet/out"),
        ("lines/a.jsonl", "lines"),
        ("lines/a.jsonl", "lines/a.jsonl"),
    ]:
        refusal(source, output=output, model=model, kind=OutputError)
        refusal(source, output=output, model=model, kind=OutputError, overwrite=True)


@pytest.mark.parametrize(
    ("given", "output"), [("in", "in/out"), ("in/*.parquet", "in/out.parquet"), ("**", "out"), ("in", "in/z.parquet")]
)
def test_an_output_among_the_inputs_is_no_input(model, given, output):
    for name in ("in/a.parquet", "in/b.parquet"):
        write(name)
    options = {"model": model, "task_rows": 4, "keep_text": True, "columns": ["id"]}

    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vectorize(given, output, on_progress=stop, **options)
    assert vectorize(given, output, **options).rows == 8
    before = snapshot(".")
    report = vectorize(given, output, **options)
    assert (report.rows, report.computed_tokens) == (8, 0)
    assert snapshot(".") == before
    assert vectorize(given, "other", **options).rows == 8
    named = output if output.endswith(".parquet") else f"{output}/part-000000.parquet"
    with pytest.raises(OutputError, match="would lie over the input"):
        vectorize(["in/a.parquet", named], output, **options)


def test_an_output_does_not_hide_a_corpus_of_another_format(model):
    Path("in").mkdir()
    Path("in/a.jsonl").write_text('{"text": "w1", "id": "1"}\n')
    for _ in range(2):
        assert vectorize("in/*", "in/out.parquet", model=model).rows == 1


def test_an_input_found_by_pattern_is_never_overwritten(model):
    write("in/a.parquet")
    write("in/b.parquet")
    for given in ("in", "in/*.parquet"):
        refusal(given, output="in/b.parquet", model=model, kind=OutputError, overwrite=True)


def test_jsonl_csv_and_text_give_what_parquet_gives(model):
    write("a.parquet")
    rows = list(zip(*CORPUS.values(), strict=True))
    Path("a.jsonl").write_text("".join(f'{{"text": "{text}", "id": "{key}"}}\n' for text, key in rows))
    Path("a.csv").write_text("text,id\n" + "".join(f'"{text}",{key}\n' for text, key in rows))
    Path("a.tsv").write_text("text\tid\n" + "".join(f"{text}\t{key}\n" for text, key in rows))
    Path("a.txt").write_text("\n".join(TEXTS))
    vectorize("a.parquet", "a.out", model=model)
    for name in ("a.jsonl", "a.csv", "a.tsv"):
        assert vectorize(name, f"{name}.out", model=model, task_rows=4).exit_code == 0
        assert parts(f"{name}.out") == parts("a.out")
    vectorize("a.txt", model=model)
    assert pq.read_table("a.embeddings.parquet").equals(pq.read_table("a.out/part-000000.parquet").drop_columns("id"))

    before = snapshot(".")
    assert vectorize("a.jsonl", "a.jsonl.out", model=model, task_rows=4).computed_tokens == 0
    assert vectorize("a.txt", model=model).computed_tokens == 0
    assert snapshot(".") == before
    assert Path("a.jsonl.out").stat().st_mode & 0o077 == 0

    assert "a.csv" in refusal("a.csv", output="a.csv.out", model=model, text_column="body")
    Path("a.jsonl").write_text('{"text": "w1", "id": "1"}\n')
    with pytest.raises(OutputError, match=r"input file '.*a\.jsonl.*' has changed"):
        vectorize("a.jsonl", "a.jsonl.out", model=model, task_rows=4)


def test_s3_gives_what_local_files_give(model, bucket):
    for name in ("in/a [1].parquet", "in/sub/b.parquet"):
        bucket.upload_file(str(write(name)), name)
    bucket.put_object(Key="in/_SUCCESS", Body=b"")
    bucket.put_object(Key="lines/a.jsonl", Body=b'{"text": "w1 w2 w3", "id": "1"}\n')
    report = vectorize("in", "local", model=model)
    for number, given in enumerate(("s3://corpora/in", "s3://corpora/in/", "s3://corpora/**/*.parquet")):
        output = f"remote-{number}"
        assert vectorize(given, output, model=model).status == report.status == {"ok": 8}
        assert parts(output) == parts("local")
        assert vectorize(given, output, model=model).computed_tokens == 0
    vectorize("s3://corpora/in/a [1].parquet", "one.parquet", model=model)
    vectorize("s3://corpora/lines/*.jsonl", "lines.parquet", model=model)
    one, lines = pq.read_table("one.parquet"), pq.read_table("lines.parquet")
    assert lines.equals(one.slice(0, 1))
    for nothing in ("s3://corpora/none", "s3://corpora/in/*.csv", "s3://nowhere/in"):
        assert nothing in refusal(nothing, output="out", model=model)
    assert vectorize("in", "s3://corpora/out", model=model).status == {"ok": 8}
    for index, part in enumerate(parts("local")):
        assert bucket.Object(f"out/part-{index:06d}.parquet").get()["Body"].read() == part
    with pytest.raises(OutputError, match="cannot be written to gs"):
        vectorize("in", "gs://corpora/out", model=model)


def test_a_file_that_changes_meanwhile_is_not_published_and_ends_in_75(model):
    write("in/a.parquet")
    write("in/b.parquet")
    tasks = {"task_rows": 4, "model": model}

    def touch(progress: Any) -> None:
        os.utime("in/b.parquet", ns=(1, 1))

    with pytest.raises(TemporaryError, match=r"b\.parquet' changed while it was read") as raised:
        vectorize("in", "out", on_progress=touch, **tasks)
    assert raised.value.exit_code == 75
    assert [path.name for path in Path("out").glob("*.parquet")] == ["part-000000.parquet"]
    assert not Path("out/_SUCCESS").exists()
    # The corpus is another one now, which the first part does not belong to.
    with pytest.raises(OutputError, match=r"input file '.*b\.parquet' has changed"):
        vectorize("in", "out", **tasks)
    assert vectorize("in", "out", overwrite=True, **tasks).exit_code == 0
    assert len(parts("out")) == 2


@pytest.mark.parametrize("columns", [[], ["id"]])
def test_a_file_that_is_removed_meanwhile_ends_in_75(model, columns):
    write("in/a.parquet")
    write("in/b.parquet")

    def remove(progress: Any) -> None:
        Path("in/b.parquet").unlink(missing_ok=True)

    with pytest.raises(TemporaryError, match=r"b\.parquet'.*removed or changed meanwhile"):
        vectorize("in", "out", on_progress=remove, task_rows=4, columns=columns, model=model)
    assert not Path("out/_SUCCESS").exists()


@pytest.mark.parametrize("content", [b"", b"PAR1", b"some text\n" * 9, "cut"])
def test_a_file_that_is_no_parquet_is_named_before_work(model, content):
    whole = write("in/a.parquet").read_bytes()
    Path("in/b.parquet").write_bytes(whole[:-40] if isinstance(content, str) else content)
    assert repr(str(Path("in/b.parquet").absolute())) in refusal("in", output="out", model=model)


@pytest.mark.parametrize("damaged", ["text", "id"])
def test_damage_that_only_reading_shows_is_named_and_never_published(model, damaged):
    write("in/a.parquet")
    options = {"write_page_checksum": True, "use_dictionary": False, "compression": "none"}
    whole = bytearray(write("in/b.parquet", **options).read_bytes())
    group = pq.ParquetFile("in/b.parquet").metadata.row_group(0)
    column = next(group.column(i) for i in range(2) if group.column(i).path_in_schema == damaged)
    whole[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    Path("in/b.parquet").write_bytes(whole)
    with pytest.raises(DamagedInput, match=r"b\.parquet': reading rows 0 to 3 failed: .*[Cc]hecksum") as raised:
        vectorize("in", "out", model=model)
    assert raised.value.exit_code == 4
    assert len(parts("out")) <= 1
    assert not Path("out/_SUCCESS").exists()

"""Which earlier outputs are reused, and what the others are refused with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import save_tiny
from small_previous import (
    COMPUTE,
    DIM,
    FIELDS,
    NAMES,
    document,
    found,
    hashes,
    key_of,
    make_plan,
    make_schema,
    plan_of,
    table_of,
    write_output,
)

from gte_vectorize.errors import InputError, OutputError, Refused
from gte_vectorize.reuse.index import TextIndex
from gte_vectorize.reuse.previous import find_previous
from gte_vectorize.reuse.vectors import open_previous
from gte_vectorize.store.layout import find_layout
from gte_vectorize.store.manifest import seal
from gte_vectorize.store.plan import Plan
from gte_vectorize.writer.part import parquet_writer

PARTS = [[*document("a"), *document("b", "null"), *document("c")], [], [*document("d")] * 9]


def check_reuse(output: str | Path, plan: Plan, folder: Path) -> None:
    """Every text of PARTS gets its vector."""
    with open_previous(found(output, plan), folder) as vectors:
        assert vectors is not None
        keys = hashes(map(key_of, "dac"))
        rows, counts = TextIndex(vectors.index).find(keys)
        assert counts.tolist() == [1, 1, 1]
        expected = [document(text)[0].vector().tolist() for text in "dac"]
        assert vectors.take(rows, keys)["vector"].tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_finished_output_is_found_with_its_files_in_row_order(name, tmp_path):
    plan = write_output(tmp_path / name, PARTS)
    previous = found(tmp_path / name, plan)

    assert (previous.rows, previous.dim, previous.chunked, previous.canary) == (12, DIM, False, "a" * 64)
    assert previous.starts.tolist() == ([0, 3, 7, 11, 12] if name == "old" else [0, 4, 8, 12])
    assert [Path(uri).name for uri in previous.uris] == (
        [f"part-{at:06d}.parquet" for at in range(3)] if name == "old" else [name]
    )
    check_reuse(tmp_path / name, plan, tmp_path / "scratch")


def test_a_link_and_a_path_from_here_lead_to_the_same_output(tmp_path, monkeypatch):
    plan = write_output(tmp_path / "old", PARTS)
    (tmp_path / "link").symlink_to(tmp_path / "old")
    monkeypatch.chdir(tmp_path)
    for name in ("old", "./old/", "link", f"file://{tmp_path}/old"):
        check_reuse(name, plan, tmp_path / "scratch")
        with pytest.raises(OutputError, match=f"'{name}' is what this run writes.*write to another output"):
            find_previous(name, plan, [find_layout(tmp_path / "new", ()), find_layout(tmp_path / "old", ())])


@pytest.mark.parametrize("name", NAMES)
def test_a_link_may_be_to_a_single_file_too_and_lead_elsewhere_before_the_run_ends(name, tmp_path):
    plan = write_output(tmp_path / name, PARTS)
    write_output(tmp_path / "other" / name, [document("x")])
    latest = tmp_path / f"latest-{name}"
    latest.symlink_to(tmp_path / name)
    with open_previous(found(latest, plan), tmp_path / "scratch") as vectors:
        assert vectors is not None
        latest.unlink()
        latest.symlink_to(tmp_path / "other" / name)
        assert vectors.take(np.array([2]), hashes([key_of("c")]))["vector"].tolist() == [
            document("c")[0].vector().tolist()
        ]


@pytest.mark.parametrize("name", NAMES)
def test_an_output_in_a_bucket_is_reused_in_place(name, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    plan = write_output(tmp_path / "here" / name, PARTS)
    for path in (tmp_path / "here").rglob("*"):
        if path.is_file():
            bucket.upload_file(str(path), str(path.relative_to(tmp_path / "here")))

    check_reuse(f"s3://corpora/{name}", plan, tmp_path / "scratch")
    with pytest.raises(OutputError, match="is what this run writes"):
        find_previous(f"s3://corpora/{name}/", plan, [find_layout(f"S3://corpora/{name}", ())])
    with pytest.raises(OutputError, match="'s3://corpora/none' is not an output of gte-vectorize"):
        found("s3://corpora/none", plan)


def test_other_stores_are_refused_and_credentials_never_shown():
    with pytest.raises(OutputError, match="local file systems and in s3://") as refusal:
        found("gs://corpora/old", make_plan())
    for uri in ("s3://key:wJalrXUtnFEMI@corpora/old", "gs://key:wJalrXUtnFEMI@corpora/old"):
        with pytest.raises(Refused) as refusal:
            found(uri, make_plan())
        assert "wJalrXUtnFEMI" not in str(refusal.value)


def test_what_no_run_has_written_is_refused(tmp_path):
    pq.write_table(table_of(PARTS[0], make_schema()), tmp_path / "file.parquet")
    (tmp_path / "folder").mkdir()
    for name in ("file.parquet", "folder", "nothing", "file.parquet/below"):
        with pytest.raises(OutputError, match=f"{name}' is not an output of gte-vectorize.*or run without --reuse"):
            found(tmp_path / name, make_plan())


def test_another_fingerprint_is_refused_by_the_fields_that_differ(tmp_path):
    write_output(tmp_path / "old", PARTS)
    other = make_plan(fields={**FIELDS, "max_length": 256, "pooling": ("mean",)})
    with pytest.raises(OutputError) as refusal:
        found(tmp_path / "old", other)
    lines = str(refusal.value).splitlines()
    assert "holds other vectors than this run makes" in lines[0]
    assert lines[1:] == ["  max_length: was 512, now 256", "  pooling: was ['cls'], now ['mean']"]


def test_a_model_that_only_has_another_name_is_the_same(tmp_path):
    plan = write_output(tmp_path / "old", PARTS)
    moved = replace(plan, fingerprint_fields={**FIELDS, "model": "/elsewhere"})
    assert found(tmp_path / "old", moved).rows == 12


def test_another_device_or_library_is_refused_by_name(tmp_path):
    write_output(tmp_path / "old", PARTS)
    with pytest.raises(OutputError) as refusal:
        found(tmp_path / "old", make_plan(compute={**COMPUTE, "torch": "2.14.0"}))
    assert str(refusal.value).endswith("\n  torch: was '2.13.0', now '2.14.0'")
    assert "once without --reuse" in str(refusal.value)


def test_what_only_lays_out_files_may_be_another(tmp_path):
    write_output(tmp_path / "old", PARTS, compute={**COMPUTE, "pyarrow": "24.0.0"})
    assert found(tmp_path / "old", make_plan(compute={**COMPUTE, "pyarrow": "25.0.0"})).rows == 12


def _remove(name: str) -> Callable[[Path], None]:
    return lambda output: (output / name).unlink()


def _shorten(output: Path) -> None:
    (output / "part-000002.parquet").write_bytes((output / "part-000002.parquet").read_bytes()[:-1])


def _edit_manifest(output: Path) -> None:
    manifest = json.loads((output / "_manifest.json").read_bytes())
    (output / "_manifest.json").write_text(json.dumps({**manifest, "format": 2}))


@pytest.mark.parametrize(
    "damage", [_remove("_SUCCESS"), _remove("_manifest.json"), _remove("part-000001.parquet"), _shorten, _edit_manifest]
)
def test_what_is_not_finished_or_not_whole_is_refused(damage, tmp_path):
    plan = write_output(tmp_path / "old", PARTS)
    damage(tmp_path / "old")
    with pytest.raises(OutputError, match=r"is not finished, or its files are not.*repair, or run without --reuse"):
        found(tmp_path / "old", plan)


def test_a_single_file_that_was_about_to_be_replaced_is_not_finished(tmp_path):
    plan = write_output(tmp_path / "old.parquet", PARTS)
    (tmp_path / ".old.parquet.state/parts").mkdir()
    (tmp_path / ".old.parquet.state/parts/part-000000.parquet").touch()
    assert found(tmp_path / "old.parquet", plan).rows == 12

    data = bytearray((tmp_path / "old.parquet").read_bytes())
    data[100] ^= 1
    (tmp_path / "old.parquet").write_bytes(data)
    with pytest.raises(OutputError, match="is not finished"):
        found(tmp_path / "old.parquet", plan)


@pytest.mark.parametrize(("name", "data"), [("plan.json", b"{}"), ("canary.json", b"[]"), ("canary.json", b"{")])
def test_damaged_small_files_are_refused(name, data, tmp_path):
    plan = write_output(tmp_path / "old", PARTS)
    (tmp_path / "old/_gte_vectorize" / name).write_bytes(data)
    with pytest.raises(OutputError, match=r"(cannot be read|is damaged).*run without --reuse"):
        found(tmp_path / "old", plan)


@pytest.mark.parametrize("change", ["footer", "metadata", "rows"])
def test_a_file_that_is_not_what_the_small_files_say_is_refused(change, tmp_path):
    """Of the same size, so that only the footer tells."""
    plan = write_output(tmp_path / "old", [document("a"), document("b")])
    path = tmp_path / "old/part-000001.parquet"
    size = path.stat().st_size
    if change == "footer":
        path.write_bytes(path.read_bytes()[:-8] + b"\0\0\0\0PAR1")
    else:
        fields = {**FIELDS, "pooling": ["max"]} if change == "metadata" else FIELDS
        rows = document("b") if change == "metadata" else []
        path.unlink()
        with path.open("xb") as file, parquet_writer(file, make_schema(fields)) as writer:
            writer.write_table(table_of(rows, make_schema(fields)))
    _set_size(path, size, tmp_path / "old")
    with pytest.raises((OutputError, InputError), match=r"part-000001\.parquet.*repair, or run without --reuse"):
        found(tmp_path / "old", plan)


def _set_size(path: Path, size: int, output: Path) -> None:
    """Make the manifest and its seal say the size that the file has."""
    text = (output / "_manifest.json").read_text().replace(f'"bytes":{size},', f'"bytes":{path.stat().st_size},')
    (output / "_manifest.json").write_text(text)
    (output / "_SUCCESS").write_bytes(seal(text.encode()))


def test_vectors_of_another_kind_are_refused(tmp_path):
    plan = write_output(tmp_path / "old", [document("a")])
    path = tmp_path / "old/part-000000.parquet"
    size, table = path.stat().st_size, pq.read_table(path)
    embedding = table["embedding"].cast(pa.list_(pa.float32()))
    for changed, words in (
        (table.set_column(1, "embedding", embedding), "keeps its vectors as list"),
        (table.drop_columns(["text_hash", "n_tokens"]), "lacks columns: n_tokens, text_hash"),
    ):
        pq.write_table(changed, path)
        _set_size(path, size, tmp_path / "old")
        size = path.stat().st_size
        with pytest.raises(InputError, match=rf"part-000000\.parquet' {words}.*run without --reuse"):
            found(tmp_path / "old", plan)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_real_run_wrote_is_reused_whole(name, tmp_path):
    from gte_vectorize import vectorize

    texts = [" ".join(f"w{(row * 7 + at) % 190}" for at in range(1 + row % 9)) for row in range(40)]
    texts[3], texts[21] = "  ", texts[7]
    pq.write_table(pa.table({"text": texts}), tmp_path / "corpus.parquet")
    save_tiny(tmp_path / "model", "bert")
    vectorize(tmp_path / "corpus.parquet", tmp_path / name, model=tmp_path / "model", task_rows=16)
    written = pq.read_table(
        [tmp_path / name] if name.endswith(".parquet") else sorted((tmp_path / name).glob("*.parquet"))
    )
    with open_previous(found(tmp_path / name, plan_of(tmp_path / name)), tmp_path / "scratch") as vectors:
        assert vectors is not None
        keys = hashes(map(key_of, texts))
        rows, counts = TextIndex(vectors.index).find(keys)
        assert rows.tolist() == [-1 if row == 3 else {21: 7}.get(row, row) for row in range(40)]
        assert counts.tolist() == [int(row != 3) for row in range(40)]
        known = np.flatnonzero(counts)
        stored = vectors.take(rows[known], keys[known])
        assert stored["vector"].tolist() == [vector for vector in written["embedding"].to_pylist() if vector]
        assert stored["n_tokens"].tolist() == [count for count in written["n_tokens"].to_pylist() if count]

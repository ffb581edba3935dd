"""Search over real outputs, against a real model's own order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from encoder.tiny import save_tiny

from gte_vectorize import InputError, ModelError, vectorize
from gte_vectorize.cli import cli
from gte_vectorize.reader.rows import RowCursor
from gte_vectorize.search import Hit, search

TEXTS = [
    "The tenant must pay the rent on the first day of every month.",
    None,
    "Photosynthesis turns light into chemical energy.",
    "   ",
    "The landlord may end the lease when rent is overdue.",
    "The orchestra played the second movement too fast.",
    "",
    "Chlorophyll makes the leaves of plants green.",
    "A cello has four strings.",
]
QUERIES = ["late payment of rent", "plants and sunlight", "string instruments"]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory, minilm_dir: str) -> dict[str, Path]:
    """The same documents as one file and as a directory of parts of two rows."""
    folder = tmp_path_factory.mktemp("search")
    titles = [f"title\n {row}\x1b[31m" for row in range(len(TEXTS))]
    pq.write_table(pa.table({"title": titles, "text": TEXTS}), folder / "corpus.parquet")
    for name, rows in (("vectors.parquet", 100), ("vectors", 2)):
        vectorize(folder / "corpus.parquet", folder / name, model=minilm_dir, keep_text=True, task_rows=rows)
    return {"file": folder / "vectors.parquet", "directory": folder / "vectors"}


def found(output: Path, queries: list[str], model: str | None, **options: Any) -> dict[str, list[Hit]]:
    options = {"top": 3, "prompt": None, "device": "cpu", **options}
    return dict(search(output, queries, model=model, **options))


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_the_nearest_documents_come_first(outputs, minilm_dir, kind):
    hits = found(outputs[kind], QUERIES, minilm_dir)
    assert list(hits) == QUERIES
    best = {query: {hit.row for hit in of_query[:2]} for query, of_query in hits.items()}
    assert best == {QUERIES[0]: {0, 4}, QUERIES[1]: {2, 7}, QUERIES[2]: {8, 5}}
    for of_query in hits.values():
        assert [hit.cosine for hit in of_query] == sorted((hit.cosine for hit in of_query), reverse=True)
        for hit in of_query:
            assert hit.columns["text"] == TEXTS[hit.row]
            assert hit.columns["title"].startswith(f"title\n {hit.row}")


def test_the_score_is_the_cosine_of_the_stored_vectors(outputs, minilm_dir):
    (hits,) = found(outputs["file"], [TEXTS[2]], minilm_dir, top=100).values()
    table = pq.read_table(outputs["file"])
    vectors = {row: np.array(value) for row, value in enumerate(table["embedding"].to_pylist()) if value}
    for hit in hits:
        cosine = vectors[hit.row] @ vectors[2] / np.linalg.norm(vectors[hit.row]) / np.linalg.norm(vectors[2])
        assert hit.cosine == pytest.approx(cosine, abs=1e-6)
    assert hits[0].row == 2
    assert hits[0].cosine == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_rows_without_a_vector_are_never_found(outputs, minilm_dir, kind):
    for hits in found(outputs[kind], QUERIES, minilm_dir, top=100).values():
        assert sorted(hit.row for hit in hits) == [0, 2, 4, 5, 7, 8]
        assert min(hit.cosine for hit in hits) < 0  # a zero vector would have come before


def test_equal_documents_come_in_row_order(tmp_path, minilm_dir):
    pq.write_table(pa.table({"text": ["same"] * 7 + ["other"]}), tmp_path / "corpus.parquet")
    vectorize(tmp_path / "corpus.parquet", tmp_path / "out", model=minilm_dir, task_rows=3)
    (hits,) = found(tmp_path / "out", ["same"], minilm_dir, top=4).values()
    assert [hit.row for hit in hits] == [0, 1, 2, 3]


def test_the_prompt_changes_the_query(outputs, minilm_dir):
    (plain,) = found(outputs["file"], ["rent"], minilm_dir).values()
    (prompted,) = found(outputs["file"], ["rent"], minilm_dir, prompt="plants in the sun: ").values()
    assert [hit.row for hit in plain][:2] != [hit.row for hit in prompted][:2]


@pytest.mark.parametrize(("query", "status"), [("", "empty"), (" \u3000\n", "empty"), ("rent \udcff", "utf8")])
def test_a_query_without_text_is_refused_and_not_repeated(outputs, minilm_dir, query, status):
    with pytest.raises(InputError, match=rf"query 2 has no usable text \({status}\)"):
        found(outputs["file"], ["good", query], minilm_dir)


@pytest.mark.parametrize(
    "embeddings", [None, "not json", "[]", '"text"', "{}", '{"producer": "other", "model": "x", "revision": null}']
)
def test_a_foreign_file_is_refused(tmp_path, embeddings):
    metadata = {} if embeddings is None else {"embeddings": embeddings}
    schema = pa.schema([("embedding", pa.list_(pa.float32(), 2))], metadata=metadata)
    pq.write_table(schema.empty_table(), tmp_path / "foreign.parquet")
    with pytest.raises(InputError, match=r"'foreign.parquet' was not written by gte-vectorize"):
        found(tmp_path / "foreign.parquet", ["x"], None)


def test_what_is_no_parquet_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no part"):
        found(tmp_path, ["x"], None)
    (tmp_path / "part-000000.parquet").write_bytes(b"no Parquet at all")
    with pytest.raises(InputError, match="part-000000"):
        found(tmp_path, ["x"], None)


def test_a_damaged_part_is_named(outputs, minilm_dir, tmp_path):
    data = bytearray(outputs["file"].read_bytes())
    vector = np.array(pq.read_table(outputs["file"])["embedding"][0].as_py(), np.float32).tobytes()
    data[data.index(vector)] ^= 1
    (tmp_path / "damaged.parquet").write_bytes(data)
    with pytest.raises(InputError, match=r"damaged\.parquet"):
        found(tmp_path / "damaged.parquet", ["x"], minilm_dir)


def test_another_model_than_the_outputs_is_refused(outputs, minilm_dir, tmp_path):
    tiny = save_tiny(tmp_path / "tiny", "bert", max_position_embeddings=256)
    with pytest.raises(ModelError, match="made with 'model', and 'tiny' has another weights file"):
        found(outputs["file"], ["x"], str(tiny))
    short = save_tiny(tmp_path / "short", "bert")
    with pytest.raises(ModelError, match=r"made with 'model', and '.*short' cannot be run like it: .*64 positions"):
        found(outputs["file"], ["x"], str(short))
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in Path(minilm_dir).rglob("*"):
        target = copy / path.relative_to(minilm_dir)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            target.symlink_to(path)
    tokenizer = (copy / "tokenizer.json").read_bytes()
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").write_bytes(tokenizer + b"\n")
    with pytest.raises(ModelError, match="'copy' has another tokenizer file"):
        found(outputs["file"], ["x"], str(copy))


def test_a_model_directory_has_to_be_said_again(outputs):
    with pytest.raises(ModelError, match="model directory 'model'; say where it is with --model"):
        found(outputs["file"], ["x"], None)


def test_pooling_that_the_caller_gave_is_taken_from_the_output(tmp_path):
    model = save_tiny(tmp_path / "model", "bert")
    (model / "modules.json").unlink()
    texts = ["w1 w2", "w3 w4 w5", "w6"]
    pq.write_table(pa.table({"text": texts}), tmp_path / "corpus.parquet")
    vectorize(tmp_path / "corpus.parquet", tmp_path / "out.parquet", model=model, pooling="max")
    (hits,) = found(tmp_path / "out.parquet", [texts[1]], str(model)).values()
    assert hits[0].row == 1
    assert hits[0].cosine == pytest.approx(1, abs=1e-6)


def test_length_and_prompt_that_the_caller_gave_are_taken_from_the_output(tmp_path):
    """Without them the model is refused: its length leaves no room for text, and its prompt is not to be pooled."""
    model = save_tiny(tmp_path / "model", "bert", limit=2)
    pooling = json.loads((model / "1_Pooling/config.json").read_text())
    (model / "1_Pooling/config.json").write_text(json.dumps(pooling | {"include_prompt": False}))
    (model / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"document": "w1 "}}))
    texts = ["w1 w2 w3 w4", "w5 w6 w7 w8"]
    pq.write_table(pa.table({"text": texts}), tmp_path / "corpus.parquet")
    vectorize(tmp_path / "corpus.parquet", tmp_path / "out.parquet", model=model, max_length=6, prompt="")
    (hits,) = found(tmp_path / "out.parquet", [texts[1] + " w9" * 50], str(model)).values()
    assert (hits[0].row, hits[0].cosine) == (1, pytest.approx(1, abs=1e-6))


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two parts whose rows are windows of at most ten words, and the same two of documents."""
    folder = tmp_path_factory.mktemp("windows")
    save_tiny(folder / "model", "bert")
    texts = [" ".join(f"w{row * 50 + word}" for word in range(count)) for row, count in enumerate((35, 3, 48))]
    pq.write_table(pa.table({"title": ["a", "b", "c"], "text": texts}), folder / "corpus.parquet")
    options: dict[str, Any] = {"model": folder / "model", "max_length": 12, "overlap": 0, "task_rows": 2}
    vectorize(folder / "corpus.parquet", folder / "out", long="windows", keep_text=True, **options)
    vectorize(folder / "corpus.parquet", folder / "means", long="mean", **options)
    return folder


def test_windows_are_shown_with_their_places(windows):
    table = pa.concat_tables([pq.read_table(part) for part in sorted((windows / "out").glob("part-*"))])
    texts, titles = table["text"].to_pylist(), table["title"].to_pylist()
    for row in (2, len(table) - 1):
        (hits,) = found(windows / "out", [texts[row]], str(windows / "model"), top=3).values()
        assert hits[0].row == row
        assert hits[0].cosine == pytest.approx(1, abs=1e-6)
        assert hits[0].columns == {"title": titles[row], "text": texts[row]}
        assert hits[0].window == {name: table[name][row].as_py() for name in ("chunk_index", "char_start", "char_end")}
        assert hits[0].window["chunk_index"] > 1
        assert hits[0].line().startswith(f"  1.000  #{hits[0].window['chunk_index']}  {titles[row]}  w")
        assert hits[0].to_dict("q").items() >= hits[0].window.items()
    (hits,) = found(windows / "means", [" ".join(texts[-5:])], str(windows / "model"), top=3).values()
    assert (hits[0].row, hits[0].window, hits[0].columns) == (2, {}, {"title": "c"})


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_documents_are_read_for_the_hits_alone(outputs, minilm_dir, kind, monkeypatch):
    """A document may be a book: scoring every row must not read it."""
    scanned: list[list[str]] = []
    shown: list[int] = []
    scan, read = pq.ParquetFile.iter_batches, RowCursor.read

    def iter_batches(self: Any, *args: Any, columns: list[str], **options: Any) -> Any:
        scanned.append(columns)
        return scan(self, *args, columns=columns, **options)

    def read_rows(self: Any, first_row: int, num_rows: int) -> Any:
        shown.append(num_rows)
        return read(self, first_row, num_rows)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    monkeypatch.setattr(RowCursor, "read", read_rows)
    (hits,) = found(outputs[kind], ["rent"], minilm_dir, top=2).values()
    assert shown == [1, 1]
    assert [hit.columns["text"] for hit in hits] == [TEXTS[hit.row] for hit in hits]
    parts = 1 if kind == "file" else 5
    assert scanned[:parts] == [["embedding"]] * parts
    assert scanned[parts:] == [["title", "text"]] * len(scanned[parts:])


def test_the_command_prints_text_or_json_lines(outputs, minilm_dir):
    arguments = ["search", str(outputs["file"]), *QUERIES[:2], "--model", minilm_dir, "--device", "cpu", "-k", "2"]
    text = CliRunner().invoke(cli, arguments)
    assert (text.exit_code, text.stderr) == (0, "")
    assert text.stdout.count("\n") == 2 * (2 + 2)
    assert QUERIES[0] in text.stdout
    assert "title 0?[31m" in text.stdout  # one line, and no control characters of the corpus' making
    as_json = CliRunner().invoke(cli, [*arguments, "--json"])
    assert (as_json.exit_code, as_json.stderr) == (0, "")
    entries = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert [entry["query"] for entry in entries] == [QUERIES[0]] * 2 + [QUERIES[1]] * 2
    assert {entry["row"] for entry in entries[:2]} == {0, 4}
    assert entries[0]["columns"].keys() == {"title", "text"}


def test_columns_that_python_cannot_hold_are_not_shown(tmp_path):
    model = save_tiny(tmp_path / "model", "bert")
    columns = {
        "bad": pa.array([b"\xff\xfe", b"ok"]).view(pa.string()),
        "when": pa.array([0, 0], pa.timestamp("s")),
        "raw": pa.array([b"\x00", b"\x01"]),
        "text": ["w1 w2", "w3"],
    }
    pq.write_table(pa.table(columns), tmp_path / "corpus.parquet")
    vectorize(tmp_path / "corpus.parquet", tmp_path / "out.parquet", model=model)
    (hits,) = found(tmp_path / "out.parquet", ["w1 w2"], str(model)).values()
    assert hits[0].columns["bad"] == "?"
    assert hits[1].columns["bad"] == "ok"
    assert json.loads(json.dumps(hits[0].to_dict("q"), default=str))["columns"]["when"] == "1970-01-01 00:00:00"

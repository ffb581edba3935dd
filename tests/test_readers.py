"""What a run wrote, as its consumers read it: pyarrow, DuckDB, Polars, pandas and datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from encoder.tiny import save_tiny

from gte_vectorize import vectorize

TEXTS = ["w1 w2 w3", None, "w4", " ", "w5 w6 w7 w8", "w1 w2 w3", "w9 w10"]
ROWS = len(TEXTS)
WITHOUT = [1, 3]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run's output twice: one.parquet, and the directory `many`."""
    folder = tmp_path_factory.mktemp("run")
    model = save_tiny(folder / "model", "bert")
    table = pa.table({"id": range(ROWS), "language": pa.array(["zh", "en"] * 3 + [None]).dictionary_encode()})
    # What datasets and pandas leave in a file describes its columns, which are others now.
    junk = {b"huggingface": b'{"info": {"features": {"text": {"dtype": "string"}}}}', b"pandas": b'{"columns": []}'}
    pq.write_table(table.append_column("text", [TEXTS]).replace_schema_metadata(junk), folder / "corpus.parquet")
    for output in ("one.parquet", "many"):
        vectorize(folder / "corpus.parquet", folder / output, model=model, task_rows=3)
    assert len(list(folder.glob("many/part-*.parquet"))) == 3
    return folder


@pytest.fixture(scope="module")
def expected(run: Path) -> list[list[float] | None]:
    """The vectors of all rows, None for a row without one."""
    vectors = pq.read_table(run / "one.parquet")["embedding"].to_pylist()
    assert [row for row, vector in enumerate(vectors) if vector is None] == WITHOUT
    assert all(abs(np.linalg.norm(vector) - 1) < 1e-6 for vector in vectors if vector is not None)
    return vectors


def listed(values: Any) -> list[list[float] | None]:
    return [None if value is None else [float(number) for number in value] for value in values]


def test_pyarrow(run, expected):
    one = pq.read_table(run / "one.parquet")
    assert one.schema.field("embedding").type.list_size == len(expected[0])
    assert one.schema.field("embedding").type.value_type == pa.float32()
    assert one["id"].to_pylist() == list(range(ROWS))
    assert one["status"].to_pylist() == ["ok", "null", "ok", "empty", "ok", "ok", "ok"]
    many = ds.dataset(run / "many").to_table()
    assert many.equals(one, check_metadata=True)
    usable = ds.dataset(run / "many").to_table(filter=ds.field("status") == "ok", columns=["id"])
    assert usable["id"].to_pylist() == [0, 2, 4, 5, 6]


def test_polars(run, expected):
    one = pl.read_parquet(run / "one.parquet")
    assert one.schema["embedding"] == pl.Array(pl.Float32, len(expected[0]))
    assert listed(one["embedding"]) == expected
    assert one["language"].to_list() == ["zh", "en"] * 3 + [None]
    assert pl.read_parquet(run / "many/*.parquet").equals(one)
    assert pl.scan_parquet(run / "one.parquet").filter(status="null").collect()["id"].to_list() == [1]


def test_pandas(run, expected):
    one = pd.read_parquet(run / "one.parquet")
    assert listed(one["embedding"]) == expected
    assert {vector.dtype for vector in one["embedding"].dropna()} == {np.dtype(np.float32)}
    matrix = np.stack(one["embedding"].dropna())
    assert matrix.shape == (ROWS - len(WITHOUT), len(expected[0]))
    assert pd.read_parquet(run / "many").drop(columns="embedding").equals(one.drop(columns="embedding"))


@pytest.mark.parametrize("files", ["one.parquet", "many/*.parquet"])
def test_duckdb_with_the_cast_that_cosine_needs(run, expected, files):
    with duckdb.connect() as connection:
        connection.execute(f"CREATE VIEW output AS SELECT * FROM read_parquet('{run / files}')")
        described = dict(row[:2] for row in connection.execute("DESCRIBE output").fetchall())
        assert described["embedding"] in ("FLOAT[]", f"FLOAT[{len(expected[0])}]")
        assert listed(row[0] for row in connection.execute("SELECT embedding FROM output ORDER BY id").fetchall()) == (
            expected
        )
        vector = f"FLOAT[{len(expected[0])}]"
        first = f"(SELECT embedding::{vector} FROM output WHERE id = 0)"
        for cosine, where in (
            (f"array_cosine_similarity(embedding::{vector}, {first})", ""),
            # It would look into a list that is null and refuse it; without the cast, even into filtered rows.
            (f"list_cosine_similarity(embedding::{vector}, {first})", "WHERE status = 'ok'"),
        ):
            found = dict(connection.execute(f"SELECT id, {cosine} FROM output {where} ORDER BY id").fetchall())
            assert [row for row in range(ROWS) if found.get(row) is None] == WITHOUT
            similarities = {row: similarity for row, similarity in found.items() if similarity is not None}
            assert similarities == {
                row: pytest.approx(np.dot(expected[row], expected[0]), abs=1e-6) for row in similarities
            }
            assert sorted(similarities, key=lambda row: -similarities[row])[1] in (0, 5)


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets(run, expected, tmp_path, monkeypatch, streaming):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for files in ("one.parquet", "many/*.parquet"):
        loaded = datasets.load_dataset(
            "parquet", data_files=str(run / files), split="train", streaming=streaming, cache_dir=str(tmp_path)
        )
        feature = loaded.features["embedding"]
        assert (feature.length, feature.feature.dtype) == (len(expected[0]), "float32")
        rows = list(loaded)
        assert listed(row["embedding"] for row in rows) == expected
        assert [row["id"] for row in rows] == list(range(ROWS))

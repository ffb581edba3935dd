from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gte_vectorize.report import Report, Work
from gte_vectorize.store.manifest import Totals


def make(
    status: dict[str, int] | None = None,
    *,
    rows: int = 1000,
    truncated: int = 0,
    computed: int = 5000,
    duplicates: int = 0,
    cut: int = 0,
    reused: int = 0,
) -> Report:
    totals = Totals(files=2, bytes=1, rows=rows, tokens=9000, truncated=truncated, status=status or {"ok": rows})
    return Report.of(
        totals,
        output=Path("out"),
        work=Work(computed, duplicates, reused, cut_tokens=cut, read_tokens=9000),
        seconds=2.00049,
    )


def logged(report: Report, caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    caplog.set_level(logging.INFO, "gte_vectorize")
    report.log()
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize(
    ("status", "failed", "exit_code"),
    [
        ({"ok": 10}, 0, 0),
        ({"ok": 5, "null": 3, "empty": 2}, 0, 0),
        ({"ok": 5, "null": 3, "utf8": 2}, 2, 3),
        ({"utf8": 1, "too_large": 2, "nonfinite": 4}, 7, 3),
    ],
)
def test_null_and_empty_texts_are_no_failures(status, failed, exit_code):
    report = make(status)
    assert (report.failed, report.exit_code) == (failed, exit_code)


def test_failures_are_named():
    assert make({"ok": 5, "empty": 1, "nonfinite": 4, "utf8": 2}).failures == "2 utf8, 4 nonfinite"
    assert make().failures == "none"


def test_the_dictionary_is_json_and_holds_everything():
    report: dict[str, Any] = json.loads(json.dumps(make({"ok": 998, "utf8": 2}, truncated=7, duplicates=3).to_dict()))
    assert report == {
        "output": "out",
        "rows": 1000,
        "tokens": 9000,
        "truncated": 7,
        "status": {"ok": 998, "utf8": 2},
        "computed_tokens": 5000,
        "duplicates": 3,
        "reused": 0,
        "cut_tokens": 0,
        "read_tokens": 9000,
        "documents": None,
        "seconds": 2.0,
        "failed": 2,
        "exit_code": 3,
    }


def test_duplicates_are_told(caplog):
    said = ("INFO", "rows that are the same as another to the model, and took its vector: 40")
    assert said in logged(make(duplicates=40), caplog)


def test_a_clean_run_is_one_line(caplog):
    assert logged(make(), caplog) == [("INFO", "out: 1000 rows, 9000 tokens in 2.0 s, 2,500 tokens/s")]


def test_a_run_with_nothing_to_do_has_no_rate(caplog):
    assert logged(make(computed=0), caplog) == [("INFO", "out: 1000 rows, 9000 tokens in 2.0 s")]


def test_rows_without_a_vector_are_counted_and_failures_are_a_warning(caplog):
    assert logged(make({"ok": 8, "null": 1, "empty": 1}), caplog)[1:] == [
        ("INFO", "rows without a vector: 1 null, 1 empty")
    ]
    caplog.clear()
    assert logged(make({"ok": 8, "null": 1, "utf8": 1}), caplog)[1:] == [
        ("WARNING", "rows without a vector: 1 null, 1 utf8")
    ]


@pytest.mark.parametrize(("truncated", "level"), [(1, "INFO"), (50, "INFO"), (51, "WARNING")])
def test_cut_documents_are_said_and_many_of_them_loudly(truncated, level, caplog):
    ((said, message),) = logged(make(truncated=truncated), caplog)[1:]
    assert said == level
    assert f"{truncated} documents ({truncated / 10:.1f} %)" in message


@pytest.mark.parametrize(("cut", "said"), [(470, ""), (1000, "about 10 % OF ALL TOKENS"), (9000, "about 50 %")])
def test_the_tokens_that_are_in_no_vector_are_said_loudly(cut, said, caplog):
    messages = logged(make(truncated=1, cut=cut), caplog)[2:]
    assert len(messages) == bool(said)
    assert all(level == "WARNING" and said in message and "--long windows" in message for level, message in messages)


def test_the_tokens_of_texts_that_were_reused_are_not_known(caplog):
    """They were not read, so they are in neither number."""
    messages = logged(make(truncated=1, cut=1000, reused=900), caplog)
    assert messages[-1][1].startswith("about 10 % OF ALL TOKENS OF CHANGED TEXTS ARE BEHIND THAT LIMIT")


def test_an_empty_corpus_has_a_report(caplog):
    report = make({}, rows=0, computed=0)
    assert report.exit_code == 0
    assert len(logged(report, caplog)) == 1


def test_a_document_that_fails_alone_is_told_by_the_exit_code():
    """The windows of a document may cancel each other out."""
    assert replace(make(), documents=make({"ok": 9, "zero": 1})).exit_code == 3
    assert replace(make(), documents=make()).exit_code == 0

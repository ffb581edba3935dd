"""A task is cut into windows: every row once, in order, fewer rows where documents are long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gte_vectorize.batch import LEAST_WINDOW_ROWS, WINDOW_BYTES, Passages, Shard, Status, Task, Window


@given(
    rows=st.integers(0, 5000), first=st.integers(0, 3000), row_bytes=st.integers(1, 10**6), most=st.integers(1, 3000)
)
def test_windows_cover_a_task_once_and_in_order(rows: int, first: int, row_bytes: int, most: int) -> None:
    shard = Shard("a", (first + rows) * row_bytes, 0, (first + rows,))
    task = Task(0, shard, first, rows)
    windows = list(task.windows(most))
    assert len(windows) >= 1
    assert all(window.task is task for window in windows)
    covered = [row for w in windows for row in range(w.first_row, w.first_row + w.num_rows)]
    assert covered == list(range(first, first + rows))
    assert max(window.num_rows for window in windows) <= most


@pytest.mark.parametrize(
    ("row_bytes", "expected"),
    [(10, 16384), (WINDOW_BYTES // 1000, 1000), (WINDOW_BYTES, LEAST_WINDOW_ROWS), (10**9, LEAST_WINDOW_ROWS)],
)
def test_windows_of_long_documents_have_fewer_rows(row_bytes: int, expected: int) -> None:
    shard = Shard("a", 50_000 * row_bytes, 0, (50_000,))
    first = next(Task(0, shard, 0, 50_000).windows(16384))
    assert first.num_rows == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(("row_bytes", "expected"), [(10, 5000), (WINDOW_BYTES // 10, 10), (10**9, 1)])
def test_where_documents_are_embedded_whole_windows_may_have_one_row(row_bytes: int, expected: int) -> None:
    shard = Shard("a", 5000 * row_bytes, 0, (5000,))
    windows = list(Task(0, shard, 0, 5000).windows(16384, 1))
    assert windows[0].num_rows == expected
    assert sum(window.num_rows for window in windows) == 5000


def passages_of(places: list[tuple[int, int]], lengths: list[int] | None = None) -> Passages:
    """Passages of these rows and chunk indices, of a task that begins with row 100 of its shard."""
    count = len(places)
    task = Task(0, Shard("a", 1, 0, (200,)), 100, 50)
    return Passages(
        window=Window(task, 100, 0),
        ids=np.zeros(0, np.int32),
        lengths=np.ones(count, np.int32) if lengths is None else np.array(lengths, np.int32),
        status=np.zeros(count, np.uint8),
        truncated=np.zeros(count, np.bool_),
        text_hash=np.zeros((count, 16), np.uint8),
        row=np.array([row for row, _ in places], np.int32),
        chunk=np.array([(index, 0, 0) for _, index in places], np.int32).reshape(-1, 3),
    )


@pytest.mark.parametrize(
    ("places", "begun"),
    [
        ([(3, 0)], (3, 1)),
        ([(3, 0), (3, 1), (4, 0), (5, 0), (5, 1)], (3, 3)),
        ([(3, 2), (4, 0), (5, 0)], (4, 2)),
        ([(3, 1), (3, 2)], (4, 0)),
        ([], (0, 0)),
    ],
)
def test_a_row_begins_with_its_first_passage(places: list[tuple[int, int]], begun: tuple[int, int]) -> None:
    assert passages_of(places).begun == begun


def test_a_window_counts_its_rows_from_its_tasks_first() -> None:
    task = Task(0, Shard("a", 1, 0, (200,)), 100, 50)
    assert Window(task, 120, 3).rows.tolist() == [20, 21, 22]
    assert [Window(task, first, 25).ends_task for first in (100, 125)] == [False, True]


def test_what_has_no_tokens_or_takes_anothers_vector_is_not_encoded() -> None:
    passages = passages_of([(row, 0) for row in range(4)], [5, 0, 5, 5])
    assert passages.encoded.tolist() == [True, False, True, True]
    same = replace(passages, same_as=np.array([-1, -1, 0, -1], np.int32))
    assert same.encoded.tolist() == [True, False, False, True]
    reused = replace(same, reused=np.array([-1, -1, -1, 7]))
    assert reused.encoded.tolist() == [True, False, False, False]


def test_only_null_empty_and_ok_rows_are_no_failures() -> None:
    assert {status.name for status in Status if not status.failed} == {"OK", "NULL", "EMPTY"}

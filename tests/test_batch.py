"""A task is cut into windows: every row once, in order, fewer rows where documents are long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gte_vectorize.batch import LEAST_WINDOW_ROWS, WINDOW_BYTES, Shard, Status, Task


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


def test_only_null_empty_and_ok_rows_are_no_failures() -> None:
    assert {status.name for status in Status if not status.failed} == {"OK", "NULL", "EMPTY"}

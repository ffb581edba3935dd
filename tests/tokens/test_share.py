from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gte_vectorize.batch import Passages, Shard, Status, Task, Window
from gte_vectorize.errors import WorkerError
from gte_vectorize.tokens.share import MOST_CRASHES, PIECES, Pending, Share


def window_of(rows: int, first_row: int = 100) -> Window:
    return Window(Task(0, Shard("a.parquet", 1, 0, (9_999,)), 0, 9_999), first_row, rows)


def passages_of(window: Window) -> Passages:
    rows = np.arange(window.first_row, window.first_row + window.num_rows, dtype=np.int32)
    lengths = rows % 7
    hashes = np.repeat((rows % 251).astype(np.uint8)[:, None], 16, axis=1)
    return Passages(
        window, np.repeat(rows, lengths), lengths, np.zeros(len(rows), np.uint8), lengths > 3, hashes, window.rows
    )


@given(st.integers(1, 3000), st.randoms(use_true_random=False))
def test_what_pieces_give_is_what_the_window_gives(rows, random):
    whole = window_of(rows)
    shares = [Share(Pending(0, whole), whole)]
    cut = []
    while shares:
        share = shares.pop(random.randrange(len(shares)))
        if share.window.num_rows > 1 and random.random() < 0.7:
            pieces = share.pieces()
            assert 1 < len(pieces) <= PIECES
            assert [piece.window.first_row for piece in pieces] == sorted(piece.window.first_row for piece in pieces)
            shares += pieces
        else:
            cut.append(share)
    *first, last = cut
    assert all(share.of.add(passages_of(share.window)) is None for share in first)
    joined, expected = last.of.add(passages_of(last.window)), passages_of(whole)
    assert joined is not None
    assert joined.window is whole
    for field in ("ids", "lengths", "status", "truncated", "text_hash"):
        assert np.array_equal(getattr(joined, field), getattr(expected, field))
        assert getattr(joined, field).dtype == getattr(expected, field).dtype


def test_a_row_is_tried_once_more_than_a_window():
    pending = Pending(0, window_of(2))
    share = Share(pending, pending.window)
    assert not share.last_try
    share.strikes += 1
    assert share.last_try
    for row in share.pieces():
        assert not row.last_try
        row.strikes += 1
        assert row.last_try


def test_a_crash_is_a_row_without_anything(caplog):
    pending = Pending(0, window_of(2))
    first, second = Share(pending, pending.window).pieces()
    with caplog.at_level(logging.WARNING):
        assert first.crash("died of SIGSEGV") is None
    assert caplog.messages == [
        "'a.parquet', row 100: its text ends worker processes, the last one died of SIGSEGV; status 'crash'"
    ]
    found = pending.add(passages_of(second.window))
    assert found is not None
    assert [Status(status).name for status in found.status] == ["CRASH", "OK"]
    assert found.lengths.tolist() == [0, 101 % 7]
    assert found.ids.tolist() == [101] * (101 % 7)
    assert not found.text_hash[0].any()
    assert Status.CRASH.failed


def test_so_many_crashes_are_no_texts():
    pending = Pending(0, window_of(32))
    rows = Share(pending, pending.window).pieces()
    for row in rows[:MOST_CRASHES]:
        row.crash("died of SIGKILL")
    with pytest.raises(WorkerError, match=r"'a\.parquet', rows 100 to 131: .* over 17 of these, .* died of SIGKILL"):
        rows[MOST_CRASHES].crash("died of SIGKILL")

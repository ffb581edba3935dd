"""Vectors find their rows again; those that no store can use are dropped, by name."""

from __future__ import annotations

import numpy as np
import pytest

from gte_vectorize.batch import Passages, Shard, Status, Task, TokenBatch, Window
from gte_vectorize.encoder.scatter import encoded_windows


def batch_of(rows: list[int], passages: Passages, *, last: bool) -> TokenBatch:
    ones = np.ones(len(rows), np.int32)
    return TokenBatch(passages, ones, ones, np.array(rows, np.int32), last)


def passages_of(status: list[Status]) -> Passages:
    count = len(status)
    window = Window(Task(0, Shard("a", 1, 0, (count,)), 0, count), 0, count)
    lengths = np.array([one is Status.OK for one in status], np.int32)
    nothing = np.zeros(count, np.bool_)
    return Passages(
        window, lengths, lengths, np.array(status, np.uint8), nothing, np.zeros((count, 16), np.uint8), window.rows
    )


def test_rows_come_back_in_order_and_unusable_vectors_are_dropped() -> None:
    passages = passages_of([Status.OK, Status.NULL, Status.OK, Status.OK, Status.OK])
    vectors = {0: [1.0, 2.0], 2: [0.0, 0.0], 3: [np.nan, 1.0], 4: [0.0, -3.0]}
    batches = [batch_of([4, 2], passages, last=False), batch_of([0, 3], passages, last=True)]
    encoded = [(b, np.array([vectors[row] for row in b.rows.tolist()], np.float32)) for b in batches]
    (window,) = encoded_windows(encoded, 2)
    assert window.vectors.tolist() == [[1, 2], [0, 0], [0, 0], [0, 0], [0, -3]]
    assert [Status(code).name for code in window.status] == ["OK", "NULL", "ZERO", "NONFINITE", "OK"]


def test_a_batch_that_lost_a_vector_is_an_error() -> None:
    passages = passages_of([Status.OK, Status.OK])
    short = (batch_of([0, 1], passages, last=True), np.ones((1, 2), np.float32))
    with pytest.raises(RuntimeError, match="1 vectors for a batch of 2"):
        list(encoded_windows([short], 2))

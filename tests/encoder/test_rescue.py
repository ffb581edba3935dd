"""A row that is not finite is tried again alone: as it was, then in fp32; its neighbours are not touched."""

from __future__ import annotations

import numpy as np
from tiny import as_passages, random_passages

from gte_vectorize.batch import EncodedWindow, Float32, Status, TokenBatch
from gte_vectorize.encoder.rescue import rescued

IDS = random_passages([5, 9, 3, 7])


def window(status: list[Status]) -> EncodedWindow:
    vectors = np.array([[row + 1.0, 0.0] if one is Status.OK else [0.0, 0.0] for row, one in enumerate(status)])
    return EncodedWindow(as_passages(IDS), vectors.astype(np.float32), np.array(status, np.uint8))


class Attempt:
    """Gives a vector to passages of the lengths it can do, and NaN to others."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.asked = lengths, list[TokenBatch]()

    def __call__(self, batch: TokenBatch) -> Float32:
        self.asked.append(batch)
        good = int(batch.lengths[0]) in self.lengths
        return np.array([[0.0, float(batch.lengths[0])] if good else [np.nan, 0.0]], np.float32)


def test_each_row_takes_the_first_attempt_that_is_finite() -> None:
    again, exact = Attempt([9]), Attempt([9, 7])
    bad = [Status.NONFINITE, Status.NONFINITE, Status.OK, Status.NONFINITE]
    (done,) = rescued([window(bad)], (again, exact))
    assert done.vectors.tolist() == [[0, 0], [0, 9], [3, 0], [0, 7]]
    assert [Status(code).name for code in done.status] == ["NONFINITE", "OK", "OK", "OK"]
    assert [batch.lengths.tolist() for batch in again.asked] == [[5], [9], [7]]
    assert [batch.lengths.tolist() for batch in exact.asked] == [[5], [7]]
    assert all(np.array_equal(b.ids, IDS[row]) for b, row in zip(again.asked, [0, 1, 3], strict=True))


def test_other_rows_are_not_computed_again() -> None:
    attempt = Attempt([])
    before = window([Status.OK, Status.ZERO, Status.EMPTY, Status.OK])
    assert list(rescued([before], (attempt,))) == [before]
    assert attempt.asked == []

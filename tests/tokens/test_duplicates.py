"""Equal passages are encoded once per task; what is only alike to the hash is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gte_vectorize.batch import EncodedWindow, Float32, Passages, Shard, Status, Task, Window
from gte_vectorize.tokens import duplicates
from gte_vectorize.tokens.duplicates import fanned_out, marked

SHARD = Shard("a", 1, 0, (1000,))


def window(task: Task, first_row: int, texts: list[list[int]]) -> Passages:
    rows = len(texts)
    return Passages(
        window=Window(task, first_row, rows),
        ids=np.array([token for text in texts for token in text], np.int32),
        lengths=np.array([len(text) for text in texts], np.int32),
        status=np.array([Status.OK if text else Status.EMPTY for text in texts], np.uint8),
        truncated=np.zeros(rows, np.bool_),
        text_hash=np.zeros((rows, 16), np.uint8),
        row=Window(task, first_row, rows).rows,
        first=first_row - task.first_row,
    )


def windows_of(tasks: list[list[list[list[int]]]]) -> list[Passages]:
    """Tasks of windows of texts."""
    made, first = [], 0
    for index, cut in enumerate(tasks):
        task = Task(index, SHARD, first, sum(map(len, cut)))
        for texts in cut:
            made.append(window(task, first, texts))
            first += len(texts)
    return made


def encode(passages: Passages) -> EncodedWindow:
    """A vector that says what the ids are and that they were encoded; [0, 9] is not finite."""
    vectors = np.zeros((len(passages.lengths), 2), np.float32)
    status = passages.status.copy()
    ends = np.cumsum(passages.lengths)
    for row in np.flatnonzero(passages.encoded).tolist():
        ids = passages.ids[ends[row] - passages.lengths[row] : ends[row]].tolist()
        if ids == [0, 9]:
            status[row] = Status.NONFINITE
        else:
            vectors[row] = vector_of(ids)
    return EncodedWindow(passages, vectors, status)


def vector_of(ids: list[int]) -> Float32:
    return np.array([hash(tuple(ids)) % 9973, len(ids)], np.float32)


TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=8)
TASKS = st.lists(st.lists(TEXTS, min_size=1, max_size=4), max_size=3)


@given(TASKS, st.booleans())
def test_every_row_has_the_vector_of_its_ids(tasks: list[list[list[list[int]]]], colliding: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if colliding:
            patch.setattr(duplicates, "_MULTIPLIERS", np.zeros(1, np.uint64))
        done = list(fanned_out(map(encode, marked(windows_of(tasks)))))
    texts = [texts for task in tasks for texts in task]
    assert len(done) == len(texts)
    for encoded, expected in zip(done, texts, strict=True):
        for row, ids in enumerate(expected):
            assert encoded.vectors[row].tolist() == (vector_of(ids).tolist() if ids else [0, 0])
            assert encoded.status[row] == (Status.OK if ids else Status.EMPTY)
    computed = [int(encoded.passages.encoded.sum()) for encoded in done]
    distinct = [len({tuple(ids) for texts in task for ids in texts if ids}) for task in tasks]
    assert sum(computed) == sum(distinct)


def test_a_status_is_shared_like_a_vector_and_tasks_share_nothing() -> None:
    tasks = [[[[1], [0, 9]], [[0, 9], [1]]], [[[1], [0, 9]]]]
    done = list(fanned_out(map(encode, marked(windows_of(tasks)))))
    assert [passages.passages.same_as.tolist() for passages in done] == [[-1, -1], [1, 0], [-1, -1]]  # type: ignore[union-attr]
    assert [encoded.status.tolist() for encoded in done] == [[0, 5], [5, 0], [0, 5]]


def test_a_long_task_is_looked_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "LOOK_BACK", 4)
    done = list(fanned_out(map(encode, marked(windows_of([[[[1], [1]], [[1], [2]], [[1], [2]], [[2], [1]]]])))))
    assert [encoded.passages.same_as.tolist() for encoded in done] == [[-1, 0], [0, -1], [-1, -1], [5, 4]]  # type: ignore[union-attr]
    assert np.concatenate([encoded.vectors[:, 0] for encoded in done]).tolist() == [
        vector_of([token])[0] for token in (1, 1, 1, 2, 1, 2, 2, 1)
    ]


def test_the_same_tokens_in_another_order_have_another_hash() -> None:
    task = Task(0, SHARD, 0, 3)
    keys = duplicates._keys(window(task, 0, [[1, 2, 3], [3, 2, 1], [1, 2]]))
    assert len(set(keys.tolist())) == 3


def test_what_nobody_marked_is_encoded_as_a_whole() -> None:
    passages = window(Task(0, SHARD, 0, 3), 0, [[1], [], [1]])
    assert passages.encoded.tolist() == [True, False, True]
    assert replace(passages, same_as=np.array([-1, -1, 0], np.int32)).encoded.tolist() == [True, False, False]

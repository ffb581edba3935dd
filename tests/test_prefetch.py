from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from gte_vectorize.prefetch import prefetch


def stages() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stage"]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert stages() == []


class Source:
    """Counts what was asked of it, and notes the thread in which it was closed."""

    def __init__(self, count: int):
        self.count = count
        self.made = 0
        self.closed_in: str | None = None

    def items(self) -> Iterator[int]:
        try:
            for item in range(self.count):
                self.made += 1
                yield item
        finally:
            self.closed_in = threading.current_thread().name


def wait_until_idle(source: Source) -> None:
    made = -1
    while made != source.made:
        made = source.made
        time.sleep(0.05)


@pytest.mark.parametrize("depth", [1, 3, 1000])
def test_the_order_is_kept(depth):
    assert list(prefetch(range(200), depth)) == list(range(200))


def test_nothing_is_a_stage_too():
    assert list(prefetch([], 1)) == []


def test_a_stage_runs_beside_its_consumer():
    assert list(prefetch((threading.current_thread().name for _ in range(3)), 1)) == ["stage"] * 3


@pytest.mark.parametrize("depth", [1, 4])
def test_a_stage_is_a_bounded_number_of_items_ahead(depth):
    source = Source(100)
    items = prefetch(source.items(), depth)
    for taken in range(1, 4):
        next(items)
        wait_until_idle(source)
        assert source.made == taken + depth + 1
    items.close()


def test_no_item_is_asked_for_before_the_first_is_wanted():
    source = Source(3)
    items = prefetch(source.items(), 1)
    assert source.made == 0
    items.close()


def test_an_exception_passes_through_after_the_items_before_it():
    def failing():
        yield 1
        yield 2
        raise OSError("disk")

    taken: list[int] = []
    with pytest.raises(OSError, match="disk"):
        taken.extend(prefetch(failing(), 5))
    assert taken == [1, 2]


def test_an_exception_that_is_no_exception_passes_through():
    def leaving():
        yield 1
        raise SystemExit(3)

    items = prefetch(leaving(), 5)
    assert next(items) == 1
    with pytest.raises(SystemExit, match="3"):
        next(items)


def test_closing_early_ends_the_thread_and_closes_the_stage_in_it():
    source = Source(10**9)
    items = prefetch(source.items(), 2)
    assert next(items) == 0
    assert len(stages()) == 1
    items.close()
    assert stages() == []
    assert source.closed_in == "stage"


def test_closing_waits_for_the_item_in_work():
    finished = threading.Event()

    def slow():
        yield 1
        time.sleep(0.2)
        finished.set()
        yield 2

    items = prefetch(slow(), 1)
    next(items)
    items.close()
    assert finished.is_set()


def test_an_exception_in_the_consumer_ends_the_thread():
    source = Source(10**9)

    def consume():
        for item in prefetch(source.items(), 2):
            if item == 5:
                raise ValueError("consumer")

    with pytest.raises(ValueError, match="consumer") as caught:
        consume()
    del caught  # its traceback holds the generator
    assert source.closed_in == "stage"


def test_nested_stages_close_from_the_outside_in():
    source = Source(10**9)
    items = prefetch((item + 1 for item in prefetch(source.items(), 2)), 2)
    assert next(items) == 1
    assert len(stages()) == 2
    items.close()
    assert stages() == []
    assert source.closed_in == "stage"


def test_an_exception_of_an_inner_stage_reaches_the_consumer():
    def failing():
        yield 1
        raise OSError("inner")

    items = prefetch(prefetch(prefetch(failing(), 1), 1), 1)
    assert next(items) == 1
    with pytest.raises(OSError, match="inner"):
        next(items)


def test_what_is_not_a_generator_needs_no_close():
    items = prefetch(iter([1, 2, 3]), 1)
    assert next(items) == 1
    items.close()

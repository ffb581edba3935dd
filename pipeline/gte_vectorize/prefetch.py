"""Run a stage in a thread of its own, a bounded number of items ahead of its consumer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class _End:
    """The end of a stage, and what ended it."""

    def __init__(self, error: BaseException | None = None):
        self.error = error


def prefetch(items: Iterable[T], depth: int, leaving: threading.Event | None = None) -> Generator[T, None, None]:
    """The same items, produced by a thread; at most `depth` of them wait, beside the one it is working on.

    What the stage raises is raised here. Closing this generator ends the thread before control returns; the stage, if a
    generator, is closed in the thread it ran in. The thread starts with the first item that is asked for. `leaving` is
    set when the consumer leaves: a stage whose items take long to make can look at it and end sooner.
    """
    ready: queue.Queue[T | _End] = queue.Queue(depth)
    stopped = leaving or threading.Event()

    def produce(source: Iterator[T]) -> None:
        end = _End()
        try:
            for item in source:
                ready.put(item)
                if stopped.is_set():
                    break
            if isinstance(source, Generator):
                source.close()
        except BaseException as error:
            end = _End(error)
        ready.put(end)

    thread = threading.Thread(target=produce, args=(iter(items),), name="stage", daemon=True)
    thread.start()
    item: T | _End | None = None
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        while not isinstance(item, _End):
            item = ready.get()
        thread.join()

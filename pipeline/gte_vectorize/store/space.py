"""The disk that a run will need, asked for before any work."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable

from gte_vectorize.batch import Task
from gte_vectorize.errors import TemporaryError
from gte_vectorize.store.layout import Layout
from gte_vectorize.store.plan import Plan

PATIENCE = 600.0
"""Seconds that a run waits for somebody to make room."""

_LOOK = 5.0
_SLACK = 64 << 20

log = logging.getLogger(__name__)


def wait_for_space(at: Layout, task: Task, *, dim: int) -> None:
    """Pause while the disk cannot hold the task's vectors. TemporaryError: nobody has made room for PATIENCE seconds.

    A disk that fills up while a part is written ends the run: half a part is worth nothing.
    """
    need, waited = 4 * dim * task.num_rows + _SLACK, 0.0
    while (free := shutil.disk_usage(at.local).free) < need:
        if waited >= PATIENCE:
            raise TemporaryError(
                f"no room for the next part: {free >> 20} MiB are free at {str(at.local)!r}, and it takes "
                f"{need >> 20} MiB; what was published is kept: make room, then run the same command again"
            )
        if not waited:
            log.warning("%r is full: waiting for %d MiB of room", str(at.local), need >> 20)
        time.sleep(_LOOK)
        waited += _LOOK


def require_space(at: Layout, plan: Plan, pending: Iterable[Task], *, dim: int) -> None:
    """TemporaryError where the disk cannot hold the vectors that are still to be written.

    Parts on their way to a bucket lie here one at a time, and a single file as a whole.
    """
    rows = [task.num_rows for task in pending]
    remote = at.local != at.state
    held = max(rows, default=0) if remote else sum(rows)
    if at.single:
        held += sum(task.num_rows for task in plan.tasks)
    where = at.local if remote else at.output
    need, free = 4 * dim * held, shutil.disk_usage(at.local).free
    if need > free:
        raise TemporaryError(
            f"the vectors need at least {need / 2**30:.1f} GiB at {str(where)!r}, where {free / 2**30:.1f} GiB are "
            "free; make room, then run the same command again"
        )

"""The disk that a run will need, asked for before any work."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from gte_vectorize.batch import Task
from gte_vectorize.errors import TemporaryError
from gte_vectorize.store.layout import Layout
from gte_vectorize.store.plan import Plan


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

"""The record of each published part: what makes it done. A part without one is made again."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from gte_vectorize.batch import Task
from gte_vectorize.store.layout import Layout
from gte_vectorize.store.plan import Plan
from gte_vectorize.store.publish import Content, publish_bytes
from gte_vectorize.writer.schema import canonical_json

log = logging.getLogger(__name__)


def publish_record(layout: Layout, plan: Plan, task: Task, content: Content) -> None:
    """The part of `task` is published and holds `content`."""
    record = {"plan": plan.sha256, "content": asdict(content)}
    publish_bytes(canonical_json(record).encode(), layout.record(task.index), layout.tmp)


def published(layout: Layout, plan: Plan) -> Iterator[tuple[int, Content]]:
    """Task index and content of the parts that are as their record says.

    A record that is torn, of another plan or without its part is removed; so is a part of another size than its record
    says. Their tasks are to be done again.
    """
    recorded = {path.name for path in layout.records.iterdir()}
    for task in plan.tasks:
        record, part = layout.record(task.index), layout.part(task.index)
        if record.name not in recorded:
            continue
        content = _read(record, plan)
        if content is not None and file_size(part) == content.bytes:
            yield task.index, content
            continue
        log.warning("%s is missing or not what its record says: it is made again", part)
        record.unlink()
        if content is not None:
            part.unlink(missing_ok=True)


def file_size(path: Path) -> int | None:
    """Bytes of a regular file; None for anything else or nothing."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _read(path: Path, plan: Plan) -> Content | None:
    try:
        record = json.loads(path.read_bytes())
        return Content(**record["content"]) if record["plan"] == plan.sha256 else None
    except (ValueError, KeyError, TypeError):
        return None

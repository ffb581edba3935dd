"""The record of each published part: what makes it done. A part without one is made again."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict

from gte_vectorize.batch import Task
from gte_vectorize.failpoint import failpoint
from gte_vectorize.store.layout import Layout
from gte_vectorize.store.plan import Plan
from gte_vectorize.store.publish import Content, publish_bytes
from gte_vectorize.writer.schema import canonical_json

log = logging.getLogger(__name__)


def publish_record(layout: Layout, plan: Plan, task: Task, content: Content) -> None:
    """The part of `task` is published and holds `content`."""
    failpoint("record.write")
    record = {"plan": plan.sha256, "content": asdict(content)}
    publish_bytes(canonical_json(record).encode(), layout.record(task.index), layout.tmp, layout.files.publish)


def published(layout: Layout, plan: Plan) -> Iterator[tuple[int, Content]]:
    """Task index and content of the parts that are as their record says.

    A record that is torn, of another plan or without its part is removed; so is a part of another size than its record
    says. Their tasks are to be done again.
    """
    files = layout.files

    def stands(task: Task) -> Content | None:
        record, part = layout.record(task.index), layout.part(task.index)
        try:
            content = _read(files.read(record), plan)
        except FileNotFoundError:
            return None
        if content is not None and files.size(part) == content.bytes:
            return content
        log.warning("%r is missing or not what its record says: it is made again", str(part))
        files.remove(record)
        # What is no file is not ours.
        if content is not None and files.size(part) is not None:
            files.remove(part)
        return None

    for task, content in zip(plan.tasks, files.map(stands, plan.tasks), strict=True):
        if content is not None:
            yield task.index, content


def _read(data: bytes, plan: Plan) -> Content | None:
    try:
        record = json.loads(data)
        return Content(**record["content"]) if record["plan"] == plan.sha256 else None
    except (ValueError, KeyError, TypeError):
        return None

"""The list of a finished output's files. While it is missing or does not fit them, the output is not complete.

A directory's manifest is vouched for by _SUCCESS, which holds its SHA-256 and is published last of all; a single file's
manifest is published before the file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from gte_vectorize.batch import Task
from gte_vectorize.store.layout import Layout
from gte_vectorize.store.plan import Plan
from gte_vectorize.store.publish import Content, publish_bytes, sha256
from gte_vectorize.store.record import file_size
from gte_vectorize.writer.schema import canonical_json


@dataclass(frozen=True, slots=True)
class Totals:
    """What the published files hold together. `status` maps each status that occurs to its rows."""

    files: int
    bytes: int
    rows: int
    tokens: int
    truncated: int
    status: dict[str, int]

    @classmethod
    def of(cls, contents: Iterable[Content]) -> Self:
        held, status = list(contents), Counter[str]()
        for content in held:
            status.update(content.status)
        return cls(
            files=len(held),
            bytes=sum(content.bytes for content in held),
            rows=sum(content.rows for content in held),
            tokens=sum(content.tokens for content in held),
            truncated=sum(content.truncated for content in held),
            status=dict(status),
        )


def publish_manifest(layout: Layout, plan: Plan, contents: dict[int, Content]) -> None:
    """Publish a directory's manifest and then _SUCCESS; `contents` by task index, all tasks."""
    parts = [
        {"name": layout.part(task.index).name, "input": _rows(task), "content": asdict(contents[task.index])}
        for task in plan.tasks
    ]
    data = _manifest(plan, parts, contents.values())
    publish_bytes(data, layout.manifest, layout.tmp)
    publish_bytes(_seal(data), layout.success, layout.tmp)


def publish_file_manifest(layout: Layout, plan: Plan, content: Content) -> None:
    """Publish a single file's manifest; the file comes after it."""
    data = _manifest(plan, [{"name": layout.output.name, "content": asdict(content)}], [content])
    publish_bytes(data, layout.manifest, layout.tmp)


def unpublish_manifest(layout: Layout) -> None:
    """Nothing may call the output complete while it is not."""
    if not layout.single:
        layout.success.unlink(missing_ok=True)
    layout.manifest.unlink(missing_ok=True)


def finished(layout: Layout, plan: Plan, *, hashed: bool = False) -> Totals | None:
    """The totals, if the manifest is this plan's and each file it names has the size it states; `hashed`: and its hash.

    The size alone does not tell a single file from the one it was about to replace when its run died.
    """
    try:
        data = layout.manifest.read_bytes()
        manifest = json.loads(data)
        contents = {part["name"]: Content(**part["content"]) for part in manifest["parts"]}
        sealed = layout.single or layout.success.read_bytes() == _seal(data)
        if not sealed or manifest["plan"] != plan.sha256:
            return None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    folder = layout.success.parent
    for name, content in contents.items():
        if file_size(folder / name) != content.bytes or (hashed and sha256(folder / name) != content.sha256):
            return None
    return Totals.of(contents.values())


def _rows(task: Task) -> dict[str, Any]:
    return {"uri": task.shard.uri, "first_row": task.first_row, "num_rows": task.num_rows}


def _manifest(plan: Plan, parts: list[dict[str, Any]], contents: Iterable[Content]) -> bytes:
    manifest = {
        "format": 1,
        "plan": plan.sha256,
        "fingerprint": plan.fingerprint,
        "fingerprint_fields": dict(plan.fingerprint_fields),
        "parts": parts,
        "totals": asdict(Totals.of(contents)),
    }
    return canonical_json(manifest).encode()


def _seal(manifest: bytes) -> bytes:
    return (hashlib.sha256(manifest).hexdigest() + "\n").encode()

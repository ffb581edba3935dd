"""The list of a finished output's files. While it is missing or does not fit them, the output is not complete.

A directory's manifest is vouched for by _SUCCESS, which holds its SHA-256 and is published last of all; a single file's
manifest is published before the file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from gte_vectorize.batch import Task
from gte_vectorize.failpoint import failpoint
from gte_vectorize.store.layout import Layout
from gte_vectorize.store.plan import Plan
from gte_vectorize.store.publish import Content, publish_bytes
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


def manifest_of(layout: Layout, plan: Plan, contents: Mapping[int, Content]) -> dict[str, Any]:
    """What a finished output's manifest says; `contents` by task index, that of a single file under 0."""
    if layout.single:
        parts: list[dict[str, Any]] = [{"name": layout.output.name, "content": asdict(contents[0])}]
    else:
        parts = [
            {"name": layout.part(task.index).name, "input": _rows(task), "content": asdict(contents[task.index])}
            for task in plan.tasks
        ]
    return {
        "format": 1,
        "plan": plan.sha256,
        "fingerprint": plan.fingerprint,
        "fingerprint_fields": dict(plan.fingerprint_fields),
        "parts": parts,
        "totals": asdict(Totals.of(contents.values())),
    }


def seal(manifest: bytes) -> bytes:
    """What _SUCCESS holds."""
    return (hashlib.sha256(manifest).hexdigest() + "\n").encode()


def publish_manifest(layout: Layout, plan: Plan, contents: Mapping[int, Content]) -> None:
    """Publish a directory's manifest and then _SUCCESS; `contents` by task index, all tasks."""
    data = canonical_json(manifest_of(layout, plan, contents)).encode()
    failpoint("manifest.write")
    publish_bytes(data, layout.manifest, layout.tmp, layout.files.publish)
    failpoint("success.write")
    publish_bytes(seal(data), layout.success, layout.tmp, layout.files.publish)


def publish_file_manifest(layout: Layout, plan: Plan, content: Content) -> None:
    """Publish a single file's manifest; the file comes after it."""
    data = canonical_json(manifest_of(layout, plan, {0: content})).encode()
    failpoint("manifest.write")
    publish_bytes(data, layout.manifest, layout.tmp, layout.files.publish)


def unpublish_manifest(layout: Layout) -> None:
    """Nothing may call the output complete while it is not."""
    if not layout.single:
        layout.files.remove(layout.success)
    layout.files.remove(layout.manifest)


def finished(layout: Layout, plan: Plan, *, hashed: bool = False) -> Totals | None:
    """The totals, if the manifest is this plan's and each file it names has the size it states; `hashed`: and its hash.

    The size alone does not tell a single file from the one it was about to replace when its run died.
    """
    files, folder = layout.files, layout.success.parent
    try:
        data = files.read(layout.manifest)
        manifest = json.loads(data)
        contents = {part["name"]: Content(**part["content"]) for part in manifest["parts"]}
        sealed = layout.single or files.read(layout.success) == seal(data)
        if not sealed or manifest["plan"] != plan.sha256:
            return None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None

    def as_stated(name: str) -> bool:
        file, content = folder / name, contents[name]
        return files.size(file) == content.bytes and (not hashed or files.sha256(file) == content.sha256)

    return Totals.of(contents.values()) if all(files.map(as_stated, contents)) else None


def _rows(task: Task) -> dict[str, Any]:
    return {"uri": task.shard.uri, "first_row": task.first_row, "num_rows": task.num_rows}

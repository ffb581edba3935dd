"""What an output's small files say, read without changing anything; and how a task's damaged files are let go."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import Timeout

from gte_vectorize.errors import OutputError, TemporaryError
from gte_vectorize.reader.storage import is_remote, reading
from gte_vectorize.store.layout import Layout, find_layout, lock_of
from gte_vectorize.store.plan import Plan
from gte_vectorize.store.publish import Content, file_size
from gte_vectorize.writer.part import storage_errors
from gte_vectorize.writer.schema import canonical_json


@dataclass(frozen=True, slots=True)
class Papers:
    """An output's small files as far as they are whole.

    plan      None: missing, or not the one that the records and the manifest name
    manifest  None: missing or damaged
    records   by task index: the content of each part that is recorded
    damaged   what is wrong with the others
    legible   the hashes that can still be read in them
    """

    plan: Plan | None
    manifest: dict[str, Any] | None
    records: dict[int, Content]
    damaged: dict[Path, str]
    legible: set[str]

    def manifest_contents(self) -> dict[str, Content]:
        """The content of each file that the manifest names, by name; none where it is not laid out like one."""
        try:
            return {part["name"]: Content(**part["content"]) for part in (self.manifest or {}).get("parts", ())}
        except (KeyError, TypeError):
            return {}


def find_output(output: str | Path) -> Layout:
    """Where the files of an output are. OutputError: no run has written there, or not to a local file system."""
    if is_remote(str(output)):
        raise OutputError("only outputs on a local file system can be looked at; copy it here, state and all")
    layout = find_layout(output, ())
    with reading(str(output), "looking for its plan"):
        found = layout.plan.exists() or layout.manifest.exists()
    if not found:
        raise OutputError(
            f"{str(output)!r} is not an output of gte-vectorize, or its state {str(layout.state)!r} is gone; "
            "name what a run has written"
        )
    return layout


def read_papers(layout: Layout) -> Papers:
    """OutputError: another version wrote the plan. TemporaryError or InputError: the storage fails."""
    damaged: dict[Path, str] = {}
    legible: set[str] = set()
    with reading(str(layout.state)):
        manifest = _document(layout.manifest, damaged, legible)
        paths = sorted(layout.records.glob("*.json")) if layout.records.is_dir() else []
        documents = {int(path.stem): _document(path, damaged, legible) for path in paths if path.stem.isdecimal()}
        named = {str(document.get("plan")) for document in (manifest, *documents.values()) if document is not None}
        plan = _plan(layout, named, damaged)
    records = {}
    for index, document in documents.items():
        content = _recorded(document, plan)
        if content is not None:
            records[index] = content
        else:
            damaged.setdefault(layout.record(index), "is not a record of this plan")
    return Papers(plan, manifest, records, damaged, legible)


def is_held(layout: Layout) -> bool:
    """Whether a run holds the output. Nothing is written: the lock is tried shared, and let go at once."""
    with reading(str(layout.output), "looking at its lock"):
        try:
            with (layout.local / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def claims_to_be_finished(layout: Layout) -> bool:
    """Whether what a run leaves last stands there, however damaged the output is.

    A single file may be one that is to be replaced, until its parts go, when it has been.
    """
    if layout.single:
        return (layout.manifest.exists() or layout.output.exists()) and not layout.parts.exists()
    return layout.success.exists()


@contextmanager
def hold(layout: Layout) -> Iterator[None]:
    """Keep runs out. TemporaryError: one is in. OutputError: this user may not write there."""
    try:
        with storage_errors(layout.output):
            held = lock_of(layout).acquire()
    except Timeout:
        raise TemporaryError(
            f"a run is writing {str(layout.output)!r}; when it has ended, run the same command again"
        ) from None
    with held:
        yield


def forget(path: Path) -> None:
    """Remove a damaged file of ours, if it is there. OutputError: what has its name is no file."""
    if path.is_symlink() or (path.exists() and file_size(path) is None):
        raise OutputError(f"{str(path)!r} is not a regular file, so no run has written it; move it away")
    path.unlink(missing_ok=True)


def _document(path: Path, damaged: dict[Path, str], legible: set[str]) -> dict[str, Any] | None:
    """A JSON object of ours; None if it is missing, or not byte by byte what such an object is written as."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(data)
        if isinstance(document, dict) and canonical_json(document).encode() == data:
            return document
    except (ValueError, RecursionError):
        pass
    damaged[path] = "is damaged"
    legible.update(found.decode() for found in re.findall(rb"[0-9a-f]{64}", data))
    return None


def _recorded(document: dict[str, Any] | None, plan: Plan | None) -> Content | None:
    try:
        content = Content(**(document or {})["content"])
    except (KeyError, TypeError):
        return None
    return content if plan is None or document == {"plan": plan.sha256, "content": asdict(content)} else None


def _plan(layout: Layout, named: set[str], damaged: dict[Path, str]) -> Plan | None:
    try:
        data = layout.plan.read_bytes()
    except FileNotFoundError:
        damaged[layout.plan] = "is missing"
        return None
    if named and hashlib.sha256(data).hexdigest() not in named:
        damaged[layout.plan] = "is not the plan that the records and the manifest name"
        return None
    try:
        return Plan.from_json(data)
    except ValueError as error:
        raise OutputError(
            f"the plan of {str(layout.output)!r} cannot be read ({error}); use the version that wrote it"
        ) from error

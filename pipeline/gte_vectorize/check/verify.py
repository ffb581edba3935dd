"""Is an output what its run published? Every byte, row and count of it, held against what was written down.

The small files (plan, records, manifest, _SUCCESS) and the parts vouch for one another, so whichever of them changes,
another one contradicts it. What vouches for the texts, that each vector is its own text's, is in reembed.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from gte_vectorize.batch import Shard, Task
from gte_vectorize.check.difference import Difference, of_tasks
from gte_vectorize.check.part import check_file
from gte_vectorize.errors import TemporaryError, VectorizeError, VerificationFailed
from gte_vectorize.reader.storage import open_store, reading
from gte_vectorize.store.inspect import Papers, claims_to_be_finished, find_output, is_held, read_papers
from gte_vectorize.store.layout import Layout
from gte_vectorize.store.manifest import finished, manifest_of, seal
from gte_vectorize.store.plan import Plan
from gte_vectorize.store.publish import Content

log = logging.getLogger(__name__)

_INPUTS_AT_ONCE = 16
_LISTED = 50


@dataclass(slots=True, kw_only=True)
class Verification:
    """What was found.

    state        "finished" (as its run left it, damaged or not), "running" or "interrupted"
    plan         None: it is missing or damaged, and then nothing else was looked at
    contents     of the files that are sound, by their first task: all of a finished single file under 0
    broken       indices of the tasks whose rows are missing or wrong
    rows         of the output, like `reembedded`, those that were embedded again
    notes        what is no difference of the output: inputs that are gone or have changed
    """

    layout: Layout
    state: str
    plan: Plan | None = None
    files: int = 0
    rows: int = 0
    reembedded: int = 0
    contents: dict[int, Content] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    gone_inputs: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    def differ(self, path: Path, what: str) -> None:
        self.differences.append(Difference(name_of(path, self.layout), what))

    @property
    def finished(self) -> bool:
        return self.state == "finished"

    def sound_files(self) -> Iterator[tuple[Path, list[Task]]]:
        """The files whose every row can be relied on, with their tasks."""
        for path, tasks in files_of(self.layout, self.plan, self.finished) if self.plan else ():
            if not self.broken.intersection(task.index for task in tasks) and tasks[0].index in self.contents:
                yield path, tasks

    def conclude(self) -> None:
        """Log what was found. VerificationFailed: there are differences. TemporaryError: the output is not finished."""
        for note in self.notes:
            log.warning("%s", note)
        for difference in self.differences[:_LISTED]:
            log.error("%s", difference.line())
        output = str(self.layout.output)
        if self.differences:
            raise VerificationFailed(
                f"{output!r}: {len(self.differences)} differences; `gte-vectorize repair` makes damaged parts again"
            )
        log.info("%s: %d files, %d rows are sound; embedded again: %d", output, self.files, self.rows, self.reembedded)
        if not self.finished:
            advice = "is still being written" if self.state == "running" else "was interrupted: run its command again"
            raise TemporaryError(f"what is published is sound, but {output!r} {advice}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "output": str(self.layout.output),
            "state": self.state,
            "files": self.files,
            "rows": self.rows,
            "reembedded_rows": self.reembedded,
            "notes": self.notes,
            "differences": [difference.to_dict() for difference in self.differences],
        }


def verify(output: str | Path) -> Verification:
    """Check a finished output, or of an unfinished one what is published. Nothing is written.

    Differences are looked for once more, and reported when they are the same.

    Raises OutputError for what is no output, TemporaryError or InputError where its storage cannot be read.
    """
    layout, before = find_output(output), None
    while True:
        found = Verification(layout=layout, state="running" if is_held(layout) else _state(layout))
        _check(found)
        # A run that begins, goes on or ends meanwhile removes files that it has no more use for.
        if not found.differences or found.differences == before:
            return found
        before = found.differences


def verify_held(layout: Layout) -> Verification:
    """`verify`, while the caller keeps runs out."""
    found = Verification(layout=layout, state=_state(layout))
    _check(found)
    return found


def files_of(layout: Layout, plan: Plan, is_finished: bool) -> Iterator[tuple[Path, list[Task]]]:
    """The files that hold the plan's tasks, and the tasks of each."""
    if layout.single and is_finished:
        yield layout.output, list(plan.tasks)
    else:
        yield from ((layout.part(task.index), [task]) for task in plan.tasks)


def name_of(path: Path, layout: Layout) -> str:
    """The path as differences give it: relative to a directory, or to the folder of a single file."""
    return str(path.relative_to(layout.output.parent if layout.single else layout.output))


def _state(layout: Layout) -> str:
    """Of an output that no run is writing."""
    return "finished" if claims_to_be_finished(layout) or _is_unswept(layout) else "interrupted"


def _is_unswept(layout: Layout) -> bool:
    """Whether a single file is published, but its parts are still there."""
    try:
        plan = Plan.from_json(layout.plan.read_bytes())
        return layout.single and finished(layout, plan, hashed=True) is not None
    except (OSError, ValueError):
        return False


def _check(found: Verification) -> None:
    layout, papers = found.layout, read_papers(found.layout)
    found.plan = papers.plan
    for path, what in papers.damaged.items():
        found.differ(path, what)
    if papers.plan is None:
        return
    listed = papers.manifest_contents() if found.finished else {}
    for path, tasks in files_of(layout, papers.plan, found.finished):
        recorded = papers.records.get(tasks[0].index) if path != layout.output else None
        # A manifest that has lost a single file's name still knows its bytes.
        stated = next(iter(listed.values()), None) if path == layout.output else listed.get(path.name)
        if recorded or found.finished:
            claims = {"its record": recorded, "the manifest": stated}
            _check_file(found, papers, path, tasks, claims, papers.plan.schema)
    if found.finished:
        _check_manifest(found, papers.plan, papers, listed)
    if not layout.single:
        _check_strangers(found, papers.plan)
    _check_inputs(found, papers.plan)


def _check_file(
    found: Verification, papers: Papers, path: Path, tasks: list[Task], claims: dict[str, Content | None], schema: str
) -> None:
    """Hold a file against its own checksums and against those who claim to know its bytes."""
    name = name_of(path, found.layout)
    checked = check_file(path, name, tasks, schema)
    found.files += 1
    found.rows += checked.rows
    found.differences += checked.differences
    known = {claim.sha256 for claim in claims.values() if claim} or papers.legible
    if checked.unread and checked.sha256 in known:
        raise TemporaryError(
            f"{str(path)!r} cannot be read, and yet holds the bytes that were published: check disk and memory, then "
            "run the same command again"
        )
    if checked.bytes >= 0 and checked.sha256 not in known:
        who = " and ".join(who for who, claim in claims.items() if claim)
        what = f"has other bytes than stated by {who}" if who else "is vouched for by nothing that can still be read"
        found.differences.append(of_tasks(name, what, tasks))
    if checked.differences or checked.sha256 not in known:
        found.broken.update(task.index for task in tasks)
        return
    found.contents[tasks[0].index] = checked.content()
    record = found.layout.record(tasks[0].index)
    if path != found.layout.output and claims["its record"] != checked.content() and record not in papers.damaged:
        found.differ(record, "does not say what its part holds" if claims["its record"] else "is missing")


def _check_manifest(found: Verification, plan: Plan, papers: Papers, listed: dict[str, Content]) -> None:
    layout = found.layout
    files = list(files_of(layout, plan, is_finished=True))
    # Of a broken file, what the manifest says; the file itself is named already.
    contents = {tasks[0].index: found.contents.get(tasks[0].index) or listed.get(path.name) for path, tasks in files}
    known = {index: content for index, content in contents.items() if content}
    fits = len(known) == len(files) and papers.manifest == manifest_of(layout, plan, known)
    if papers.manifest is None and layout.manifest not in papers.damaged:
        found.differ(layout.manifest, "is missing")
    elif papers.manifest is not None and not fits:
        found.differ(layout.manifest, "does not say what the plan and the files hold")
    if fits and not layout.single and not _is_sealed(layout):
        found.differ(layout.success, f"does not hold the SHA-256 of {layout.manifest.name!r}")


def _is_sealed(layout: Layout) -> bool:
    try:
        return layout.success.read_bytes() == seal(layout.manifest.read_bytes())
    except FileNotFoundError:  # a run has begun
        return False


def _check_strangers(found: Verification, plan: Plan) -> None:
    """Parquet files among the parts: whoever reads the directory would read them too."""
    planned = {found.layout.part(task.index).name for task in plan.tasks}
    for path in sorted(found.layout.parts.iterdir()):
        if path.suffix == ".parquet" and path.name not in planned:
            found.differ(path, "is no part of this output, but lies among its parts")


def _check_inputs(found: Verification, plan: Plan) -> None:
    """An input that is gone or has changed is noted: the output is still right about what was read."""
    planned = Counter[str]()
    for task in plan.tasks:
        planned[task.shard.uri] += task.num_rows
    with ThreadPoolExecutor(_INPUTS_AT_ONCE) as pool:
        for shard, note in zip(plan.shards, pool.map(_changed, plan.shards), strict=True):
            if note:
                found.gone_inputs.add(shard.uri)
                found.notes.append(note)
            elif planned[shard.uri] != shard.num_rows:
                what = f"names {planned[shard.uri]} of the {shard.num_rows} rows of {shard.uri!r}"
                found.differ(found.layout.plan, what)


def _changed(shard: Shard) -> str | None:
    try:
        store, path = open_store(shard.uri)
        with reading(shard.uri, "reading the Parquet footer"):
            info = store.get_file_info(path)
            with store.open_input_file(path) as file:
                metadata = pq.read_metadata(file)
            rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    except VectorizeError:
        return f"input {shard.uri!r} is not there, or cannot be read: nothing was held against it"
    if Shard(shard.uri, info.size, info.mtime_ns or 0, rows) != shard:
        return f"input {shard.uri!r} has changed since: nothing was held against it"
    return None

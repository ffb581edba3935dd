"""How far a job is, from its small files and the sizes of its parts: quick, however large the output is."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gte_vectorize.errors import OutputError, TemporaryError, VerificationFailed
from gte_vectorize.store.inspect import Papers, claims_to_be_finished, find_output, is_held, read_papers
from gte_vectorize.store.layout import Layout
from gte_vectorize.store.manifest import Totals, finished
from gte_vectorize.store.plan import Plan
from gte_vectorize.store.publish import Content, file_size

ADVICE = {
    "finished": "nothing is left to do",
    "running": "a run is at work on it",
    "interrupted": "run the same command again: what is published is kept",
    "damaged": "files are missing or cut short: see gte-vectorize verify, then gte-vectorize repair",
}
"""What would help, by state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """`rows` and `published_rows` are of the input; `published` counts what has been published so far, by rows of the
    output; times are the modification times of files.
    """

    output: str
    model: str
    state: str
    tasks: int
    published_tasks: int
    rows: int
    published_rows: int
    published: Totals
    started: datetime | None
    updated: datetime | None

    @property
    def run_again(self) -> bool:
        """Whether the same command would get the job further, now."""
        return self.state == "interrupted"

    @property
    def exit_code(self) -> int:
        return {"finished": 0, "damaged": VerificationFailed.exit_code}.get(self.state, TemporaryError.exit_code)

    def to_dict(self) -> dict[str, Any]:
        held = self.published
        return {
            "output": self.output,
            "model": self.model,
            "state": self.state,
            "advice": ADVICE[self.state],
            "run_again": self.run_again,
            "tasks": {"published": self.published_tasks, "total": self.tasks},
            "rows": {"published": self.published_rows, "total": self.rows},
            "output_rows": held.rows,
            "tokens": held.tokens,
            "truncated": held.truncated,
            "bytes": held.bytes,
            "status": held.status,
            "started": self.started and self.started.isoformat(),
            "updated": self.updated and self.updated.isoformat(),
        }

    def lines(self) -> list[str]:
        """For people to read."""
        held, share = self.published, 100 * self.published_tasks / max(1, self.tasks)
        counts = ", ".join(f"{count:,} {name}" for name, count in sorted(held.status.items())) or "none yet"
        windows = f" in {held.rows:,} windows" if held.rows != self.published_rows else ""
        times = [f"{time:%Y-%m-%d %H:%M:%S}" if time else "?" for time in (self.started, self.updated)]
        return [
            f"{self.output}: {self.state}; {ADVICE[self.state]}",
            f"  tasks    {self.published_tasks:,} of {self.tasks:,} ({share:.1f} %)",
            f"  rows     {self.published_rows:,} of {self.rows:,}{windows}: {counts}",
            f"  tokens   {held.tokens:,}; {held.truncated:,} documents cut",
            f"  bytes    {held.bytes:,} in {held.files:,} files",
            f"  model    {self.model}",
            f"  started  {times[0]} UTC, last published {times[1]} UTC",
        ]


def job_status(output: str | Path) -> JobStatus:
    """OutputError: no run has written there, another version has, or its plan is damaged."""
    layout = find_output(output)
    is_running = is_held(layout)
    papers = read_papers(layout)
    plan = papers.plan
    if plan is None:
        raise OutputError(
            f"the plan of {str(output)!r} {papers.damaged[layout.plan]}, so nothing can be said of the job; "
            "see gte-vectorize repair"
        )
    # While its parts are there, a single file may be an older one of the same size.
    totals = None if layout.single and layout.parts.exists() else finished(layout, plan)
    whole = _whole(layout, papers)
    held, lost = Totals.of(whole.values()), len(papers.records) - len(whole)
    published = [task for task in plan.tasks if totals or task.index in whole]
    if is_running:
        state = "running"
    elif totals:
        state = "finished"
    else:
        state = "damaged" if lost or papers.damaged or claims_to_be_finished(layout) else "interrupted"
    return JobStatus(
        output=str(output),
        model=str(plan.fingerprint_fields.get("model")),
        state=state,
        tasks=len(plan.tasks),
        published_tasks=len(published),
        rows=sum(task.num_rows for task in plan.tasks),
        published_rows=sum(task.num_rows for task in published),
        published=totals or held,
        started=_modified(layout.plan),
        updated=_last_published(layout, plan),
    )


def _whole(layout: Layout, papers: Papers) -> dict[int, Content]:
    """The recorded parts, by task, but for those that are gone or have another size."""
    parts = papers.records.items()
    return {index: content for index, content in parts if file_size(layout.part(index)) == content.bytes}


def _last_published(layout: Layout, plan: Plan) -> datetime | None:
    places = [layout.success, layout.manifest, layout.plan, *(layout.record(task.index) for task in plan.tasks)]
    return max((time for time in map(_modified, places) if time), default=None)


def _modified(path: Path) -> datetime | None:
    with suppress(OSError):
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return None

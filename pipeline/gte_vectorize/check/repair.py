"""Make a damaged output again, and of it only what is damaged: the bytes are then those of an undisturbed run."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq

from gte_vectorize.check.restore import restore_config
from gte_vectorize.check.verify import Verification, files_of, verify, verify_held
from gte_vectorize.config import Config
from gte_vectorize.errors import OutputError, TemporaryError, VerificationFailed
from gte_vectorize.job import prepare
from gte_vectorize.progress import Progress
from gte_vectorize.store.inspect import Papers, find_output, forget, hold, read_papers
from gte_vectorize.store.layout import Layout
from gte_vectorize.store.manifest import publish_file_manifest, unpublish_manifest
from gte_vectorize.store.plan import Plan, differences
from gte_vectorize.store.record import publish_record
from gte_vectorize.store.store import Store
from gte_vectorize.writer.part import storage_errors

log = logging.getLogger(__name__)


def repair(
    output: str | Path, *, model: str | None = None, on_progress: Callable[[Progress], None] = lambda progress: None
) -> Verification:
    """Verify, remove what is damaged, make it again, and verify once more → what was found last.

    `model` says where the model is, if it was a directory. Before anything is removed it is made sure that a run would
    make the same; only an output that was not finished, or of which no file's metadata remain, is left for its own
    command.

    Raises VerificationFailed for damage that cannot be repaired, TemporaryError where the original command has to be
    run again or a run is at work, and what `run` raises.
    """
    layout = find_output(output)
    if not layout.plan.exists():
        raise _no_plan(layout)
    with hold(layout):  # what a run has made meanwhile must not be taken for what was damaged before
        found = verify_held(layout)
        if not found.differences:
            return found
        for difference in found.differences:
            log.warning("%s", difference.line())
        plan = _repairable(found)
        config = restore_config(found, model) if found.finished and found.broken else None
        if config is not None:
            _refuse_another(config, plan)
        with storage_errors(layout.output):
            _clear(found, plan, read_papers(layout))
    if not found.finished or (found.broken and config is None):
        raise TemporaryError(
            f"what was damaged of {str(output)!r} is removed; run the original command again: it makes that anew, and "
            "what else is missing"
        )
    if config is not None:
        from gte_vectorize.run import run

        run(config, on_progress)
    elif not layout.single:
        _finish(found, plan)
    return verify(output)


def _repairable(found: Verification) -> Plan:
    """The plan. VerificationFailed: it is damaged; or a single file is, and nothing says that it is ours to remove."""
    layout = found.layout
    if found.plan is None:
        raise _no_plan(layout)
    papers = read_papers(layout)
    claimed = papers.legible or papers.manifest_contents()
    if layout.single and found.finished and found.broken and layout.output.exists() and not claimed:
        raise VerificationFailed(
            f"no manifest says that {str(layout.output)!r} is what the run published; move the file away, and run the "
            "original command again"
        )
    return found.plan


def _no_plan(layout: Layout) -> VerificationFailed:
    moved = "" if layout.plan.exists() else "move the output away and "
    return VerificationFailed(
        f"{str(layout.plan)!r} is damaged or missing, and only it says what the output is made of; {moved}run the "
        "original command again with --overwrite: everything is made anew"
    )


def _refuse_another(config: Config, plan: Plan) -> None:
    """OutputError: a run here and now would be another one: other software, another device, changed inputs."""
    from gte_vectorize.encoder.encoder import describe_device, resolve_device, resolve_dtype

    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    now = prepare(config, device=device, dtype=dtype, machine=describe_device(device)).targets[0].plan
    if now.sha256 != plan.sha256:
        listed = "".join(f"\n  {line}" for line in differences(plan, now)[:10])
        raise OutputError(f"a run here and now would make other bytes, so nothing was removed or repaired:{listed}")


def _clear(found: Verification, plan: Plan, papers: Papers) -> None:
    """Remove broken files, and write the small ones anew that sound files vouch for.

    Broken files go first: whenever this is stopped, a run sees by their absence what it has to make again. For a single
    file the manifest must go last anyhow, for without one a file of that name is foreign.
    """
    layout = found.layout
    for path, tasks in files_of(layout, plan, found.finished):
        if tasks[0].index in found.broken:
            rows = sum(task.num_rows for task in tasks)
            log.warning("%r is removed, to be made again: %d rows of the input", str(path), rows)
            forget(path)
    unpublish_manifest(layout)
    if layout.single and found.finished:
        if not found.broken:
            publish_file_manifest(layout, plan, found.contents[0])
            shutil.rmtree(layout.tmp, ignore_errors=True)
        return
    for task in plan.tasks:
        record, content = layout.record(task.index), found.contents.get(task.index)
        if record in papers.damaged or papers.records.get(task.index) != content:
            forget(record)
            if content:
                publish_record(layout, plan, task, content)


def _finish(found: Verification, plan: Plan) -> None:
    """Every part is there; only the files that say so were damaged."""
    path, _ = next(found.sound_files())
    with Store.open(found.layout.output, plan, pq.read_schema(path)) as store:
        store.finish()

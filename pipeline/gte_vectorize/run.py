"""Read this first: the whole flow, from a corpus to published vectors.

corpus → plan of tasks → worker processes read and tokenize windows of rows → token batches, longest first → encoder →
vectors back in row order → part → publish. One direction; every hand-over is bounded, so memory does not grow with the
corpus. Feeding, encoding and writing overlap: each is a thread, a few items ahead of the next. Text never leaves the
worker that read it: ids come out of it, and vectors meet the other columns in the writer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import chain, groupby, takewhile
from os import PathLike, fspath
from threading import Event
from typing import Any

from gte_vectorize.batch import EncodedWindow, Task, Window
from gte_vectorize.config import Config, resolve
from gte_vectorize.encoder.canary import Canary, after_every_task, ask, checked
from gte_vectorize.encoder.encoder import (
    Encoder,
    batches_for,
    describe_device,
    open_encoder,
    resolve_device,
    resolve_dtype,
)
from gte_vectorize.encoder.mean import averaged
from gte_vectorize.errors import LimitExceeded
from gte_vectorize.job import Job, Target, prepare, worker_count
from gte_vectorize.prefetch import prefetch
from gte_vectorize.progress import Progress
from gte_vectorize.reader.corpus import check_unchanged
from gte_vectorize.reader.rows import RowCursor
from gte_vectorize.report import Report, Work
from gte_vectorize.reuse.vectors import open_previous, refilled
from gte_vectorize.store.store import Store
from gte_vectorize.tokens.duplicates import fanned_out, marked
from gte_vectorize.tokens.pieces import gathered, pieces_of
from gte_vectorize.tokens.workers import TokenWorkers
from gte_vectorize.writer.part import PartWriter

BATCHES_AHEAD = 8
WINDOWS_AHEAD = 2

Output = tuple[Target, Store]

log = logging.getLogger(__name__)


def run(config: Config, on_progress: Callable[[Progress], None] = lambda progress: None) -> Report:
    """Embed the corpus. The same call again goes on where an interrupted one stopped, and ends with the same bytes.

    Raises VectorizeError: Refused before any work, LimitExceeded when too many rows failed, TemporaryError when
    running again may help.
    """
    started = time.monotonic()
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    job = prepare(config, device=device, dtype=dtype, machine=describe_device(device))
    with ExitStack() as held:
        outputs = [(target, held.enter_context(_open(target, config))) for target in job.targets]
        work = _work(job, outputs, on_progress) if any(store.pending() for _, store in outputs) else Work()
        report: Report | None = None
        for target, store in reversed(outputs):
            seconds = time.monotonic() - started
            report = Report.of(store.published(), output=target.output, work=work, seconds=seconds, documents=report)
            _check_limit(report, job)
        for _, store in outputs:
            store.finish()
    if report is None:
        raise RuntimeError("a job has at least one output")
    report.log()
    return report


def _open(target: Target, config: Config) -> Store:
    return Store.open(target.output, target.plan, target.schema, overwrite=config.overwrite)


def _check_limit(report: Report, job: Job) -> None:
    """A percentage is one of the input's rows: of windows, whole documents would hardly count."""
    limit = job.config.max_bad_rows
    if not limit.allows(report.failed, job.rows):
        raise LimitExceeded(
            f"{report.failed} of {report.rows} rows failed ({report.failures}), and --max-bad-rows allows "
            f"{limit}; raise the limit and run again (nothing is computed twice), or mend the rows "
            "and run with --overwrite"
        )


def vectorize(
    inputs: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str] | None = None,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    **options: Any,
) -> Report:
    """`run` for callers from Python: the command line's options by name, `vectorize("a.parquet", model=DIRECTORY)`.

    Environment and config files are not consulted. Returns the report or raises; it never ends the process.
    """
    sources = [inputs] if isinstance(inputs, str | PathLike) else inputs
    given: dict[str, Any] = {"inputs": [fspath(source) for source in sources], **options}
    if output is not None:
        given["output"] = fspath(output)
    for name in ("model", "reuse"):
        if isinstance(options.get(name), PathLike):
            given[name] = fspath(options[name])
    config, _ = resolve(given, environment={}, file=None, caller="the call")
    return run(config, on_progress)


def _work(job: Job, outputs: Sequence[Output], on_progress: Callable[[Progress], None]) -> Work:
    """Compute and publish what any of the outputs lacks."""
    config, work = job.config, Work()
    lacking = [store for _, store in outputs if store.pending()]  # the others are finished, and only read
    pending = {task.index: task for store in lacking for task in store.pending()}
    tasks = [pending[index] for index in sorted(pending)]
    done = job.rows - sum(task.num_rows for task in tasks)
    with (
        open_previous(job.previous, lacking[0].scratch) as previous,
        TokenWorkers(
            worker_count(config, job.device),
            job.spec.tokenizer,
            config.text_column,
            job.windowing,
            previous.index if previous else None,
        ) as workers,
        open_encoder(
            job.spec,
            device=job.device,
            dtype=job.dtype,
            graphs=config.graphs,
            late=job.windowing.late,
            batch_tokens=config.batch_tokens,
        ) as encoder,
    ):
        canary = ask(encoder, job.spec, device=job.device, dtype=job.dtype)
        if encoder.layout == "packed":
            for store in lacking:
                store.recognise(canary.digest)
            if previous:
                previous.recognise(canary.digest)
        log.info("tasks to do: %d, on %s in %s", len(tasks), job.device, job.dtype)
        started = time.monotonic()
        leaving = Event()
        pieces = pieces_of(tasks, encoder.window_rows, whole=job.windowing.whole)
        encoded = refilled(_encode(pieces, workers, encoder, canary, leaving), previous)
        with closing(prefetch(encoded, WINDOWS_AHEAD, leaving)) as windows:
            for window in _write(windows, outputs, job):
                done += window.passages.window.num_rows
                work.add(window.passages)
                on_progress(Progress(job.rows, done, work.tokens, time.monotonic() - started))
    return work


def _encode(
    pieces: Iterable[Window], workers: TokenWorkers, encoder: Encoder, canary: Canary, leaving: Event
) -> Iterator[EncodedWindow]:
    """Every window of the tasks, in order, with its vectors; ends at the next batch once the run is `leaving`."""
    windows = marked(gathered(workers.stream(pieces, leaving), encoder.window_rows))
    passages = after_every_task(windows, canary)
    batches = batches_for(encoder, passages)
    # Closed by name: the traceback of an error in the encoder would keep the thread alive, and it the workers.
    with closing(prefetch(batches, BATCHES_AHEAD)) as ahead:
        encoded = encoder.stream(takewhile(lambda _: not leaving.is_set(), ahead))
        yield from fanned_out(checked(encoded, encoder, canary))


def _write(windows: Iterable[EncodedWindow], outputs: Sequence[Output], job: Job) -> Iterator[EncodedWindow]:
    """Publish one part per task in each output that lacks it, and hand every window on once it is written."""
    lacking = [{task.index for task in store.pending()} for _, store in outputs]
    means = any(target.mean for target, _ in outputs)
    pairs = averaged(windows) if means else ((window, window) for window in windows)
    with ExitStack() as open_shard:
        cursors: list[RowCursor | None] = [None] * len(outputs)
        uri = None
        for index, of_task in groupby(pairs, key=lambda pair: pair[0].passages.window.task.index):
            first = next(of_task)
            task = first[0].passages.window.task
            if job.columns and task.shard.uri != uri:
                # Kept for the shard's next task, which begins where this one ends in the same row group.
                open_shard.close()
                uri = task.shard.uri
                cursors = [open_shard.enter_context(RowCursor(uri, job.columns)) for _ in outputs]
            with ExitStack() as publishing:
                parts = [
                    (target.mean, cursor, publishing.enter_context(_part(target, store, task, job)))
                    for (target, store), cursor, tasks in zip(outputs, cursors, lacking, strict=True)
                    if index in tasks
                ]
                for window, documents in chain([first], of_task):
                    for mean, cursor, part in parts:
                        rows = documents if mean else window
                        begin, count = rows.passages.begun
                        part.write(rows, cursor.read(task.first_row + begin, count) if cursor else None)
                    yield window
                check_unchanged(task.shard)


@contextmanager
def _part(target: Target, store: Store, task: Task, job: Job) -> Iterator[PartWriter]:
    with store.part(task) as path, PartWriter(path, target.schema, task, job.config.text_column) as part:
        yield part

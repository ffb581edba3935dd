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
from contextlib import ExitStack, closing
from itertools import chain, groupby, takewhile
from os import PathLike, fspath
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa

from gte_vectorize.batch import EncodedWindow, Task
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
from gte_vectorize.errors import LimitExceeded
from gte_vectorize.job import Job, prepare, worker_count
from gte_vectorize.prefetch import prefetch
from gte_vectorize.progress import Progress
from gte_vectorize.reader.corpus import check_unchanged
from gte_vectorize.reader.rows import RowCursor
from gte_vectorize.report import Report
from gte_vectorize.store.store import Store
from gte_vectorize.tokens.duplicates import fanned_out, marked
from gte_vectorize.tokens.pieces import gathered, pieces_of
from gte_vectorize.tokens.workers import TokenWorkers
from gte_vectorize.writer.part import PartWriter

BATCHES_AHEAD = 8
WINDOWS_AHEAD = 2

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
    with Store.open(config.output_path, job.plan, job.schema, overwrite=config.overwrite) as store:
        computed, duplicates = _work(job, store, on_progress) if store.pending() else (0, 0)
        totals = store.published()
        report = Report.of(
            totals,
            output=config.output_path,
            computed=computed,
            duplicates=duplicates,
            seconds=time.monotonic() - started,
        )
        if not config.max_bad_rows.allows(report.failed, report.rows):
            raise LimitExceeded(
                f"{report.failed} of {report.rows} rows failed ({report.failures}), and --max-bad-rows allows "
                f"{config.max_bad_rows}; raise the limit and run again (nothing is computed twice), or mend the rows "
                "and run with --overwrite"
            )
        store.finish()
    report.log()
    return report


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
    if isinstance(options.get("model"), PathLike):
        given["model"] = fspath(options["model"])
    config, _ = resolve(given, environment={}, file=None, caller="the call")
    return run(config, on_progress)


def _work(job: Job, store: Store, on_progress: Callable[[Progress], None]) -> tuple[int, int]:
    """Compute and publish the pending tasks → the tokens computed, and the rows that took another's vector."""
    config, tasks = job.config, store.pending()
    done, tokens, duplicates = store.published().rows, 0, 0
    with (
        TokenWorkers(worker_count(config, job.device), job.spec.tokenizer, config.text_column) as workers,
        open_encoder(
            job.spec, device=job.device, dtype=job.dtype, graphs=config.graphs, batch_tokens=config.batch_tokens
        ) as encoder,
    ):
        canary = ask(encoder, job.spec, device=job.device, dtype=job.dtype)
        if encoder.layout == "packed":
            store.recognise(canary.digest)
        log.info("tasks to do: %d, on %s in %s", len(tasks), job.device, job.dtype)
        started = time.monotonic()
        leaving = Event()
        encoded = _encode(tasks, workers, encoder, canary, leaving)
        with closing(prefetch(encoded, WINDOWS_AHEAD, leaving)) as windows:
            for window in _write(windows, store, job.schema, job.columns):
                done += len(window.status)
                passages = window.passages
                tokens += int(passages.lengths[passages.encoded].sum())
                duplicates += int(np.count_nonzero(passages.lengths) - np.count_nonzero(passages.encoded))
                on_progress(Progress(job.rows, done, tokens, time.monotonic() - started))
    return tokens, duplicates


def _encode(
    tasks: Iterable[Task], workers: TokenWorkers, encoder: Encoder, canary: Canary, leaving: Event
) -> Iterator[EncodedWindow]:
    """Every window of the tasks, in order, with its vectors; ends at the next batch once the run is `leaving`."""
    pieces = pieces_of(tasks, encoder.window_rows)
    windows = marked(gathered(workers.stream(pieces, leaving), encoder.window_rows))
    passages = after_every_task(windows, canary)
    batches = batches_for(encoder, passages)
    # Closed by name: the traceback of an error in the encoder would keep the thread alive, and it the workers.
    with closing(prefetch(batches, BATCHES_AHEAD)) as ahead:
        encoded = encoder.stream(takewhile(lambda _: not leaving.is_set(), ahead))
        yield from fanned_out(checked(encoded, encoder, canary))


def _write(
    windows: Iterable[EncodedWindow], store: Store, schema: pa.Schema, columns: list[str]
) -> Iterator[EncodedWindow]:
    """Publish one part per task, and hand every window on once it is written."""
    with ExitStack() as open_shard:
        cursor, uri = None, None
        for _, of_task in groupby(windows, key=lambda window: window.passages.window.task.index):
            first = next(of_task)
            task = first.passages.window.task
            if columns and task.shard.uri != uri:
                # Kept for the shard's next task, which begins where this one ends in the same row group.
                open_shard.close()
                cursor, uri = open_shard.enter_context(RowCursor(task.shard.uri, columns)), task.shard.uri
            with store.part(task) as path, PartWriter(path, schema, task) as part:
                for window in chain([first], of_task):
                    span = window.passages.window
                    part.write(window, cursor.read(span.first_row, span.num_rows) if cursor else None)
                    yield window
                check_unchanged(task.shard)

"""The output of a run and the state beside it: what is done, what is left, and the last file that says all is there.

A directory OUT/ holds part-000000.parquet … and, when all are there, _manifest.json and then _SUCCESS (the manifest's
SHA-256); its state is OUT/_gte_vectorize/. A single file NAME.parquet has its state in .NAME.parquet.state/ beside it,
parts included, until they are assembled under the final name. In the state: plan.json, records/ (one for each published
part), tmp/ (what a dead run leaves there is removed by the next), lock, and spool/: the inputs that are not Parquet,
converted, which stay, so that running a finished job again is quick. Every file is published as publish.py says.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pyarrow as pa
from filelock import FileLock, Timeout

from gte_vectorize.batch import Task
from gte_vectorize.errors import OutputError, TemporaryError, VectorizeError
from gte_vectorize.reader.convert import remove_leftovers
from gte_vectorize.store.assemble import assemble
from gte_vectorize.store.layout import Layout, find_layout, refuse_foreign
from gte_vectorize.store.manifest import Totals, finished, publish_file_manifest, publish_manifest, unpublish_manifest
from gte_vectorize.store.plan import Plan, differences
from gte_vectorize.store.publish import Content, make_folder, publish, publish_bytes, read_back, scratch
from gte_vectorize.store.record import file_size, publish_record, published
from gte_vectorize.writer.part import storage_errors

log = logging.getLogger(__name__)

_LISTED = 10


class Store:
    """The output of one plan, held by one process at a time. `Store.open` makes it, leaving the context frees it.

        with Store.open(output, plan, schema) as store:
            for task in store.pending():
                with store.part(task) as path, PartWriter(path, schema, task) as part:
                    part.write(…)
            totals = store.finish()

    Whatever happens between, the same lines again go on with what is left and end with the same bytes.
    """

    def __init__(self, layout: Layout, plan: Plan, schema: pa.Schema, overwrite: bool) -> None:
        self._at = layout
        self._plan = plan
        self._schema = schema
        self._overwrite = overwrite
        self._lock = FileLock(layout.state / "lock", timeout=0, mode=0o600, thread_local=False)
        self._contents: dict[int, Content] = {}
        self._totals: Totals | None = None

    @classmethod
    def open(cls, output: str | Path, plan: Plan, schema: pa.Schema, *, overwrite: bool = False) -> Self:
        """Take the output for this plan, or take it up again where an earlier run of an equal plan left it.

        A finished output is only read: `done` is true and nothing is changed. `overwrite` lets another run's output
        go: a single file stays until the new one replaces it, a directory's parts are removed now.

        OutputError: the output is foreign, another plan's, over an input, or may not be written. TemporaryError:
        another run holds it, or the disk is too small.
        """
        store = cls(find_layout(output, plan.shards), plan, schema, overwrite)
        with storage_errors(store._at.output):
            store._totals = finished(store._at, plan)
            if not store.done or store._at.tmp.exists():
                store._take()
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def done(self) -> bool:
        """Whether the output is complete under its final name."""
        return self._totals is not None

    def pending(self) -> list[Task]:
        """The tasks whose part is not published, in order."""
        return [] if self.done else [task for task in self._plan.tasks if task.index not in self._contents]

    def published(self) -> Totals:
        """What the parts that are published hold together."""
        return self._totals or Totals.of(self._contents.values())

    @contextmanager
    def part(self, task: Task) -> Iterator[Path]:
        """A free temporary name for the task's part; leaving without an exception checks the file and publishes it.

        TemporaryError: the storage failed, or the file reads back differently. VectorizeError: the file is wrong.
        """
        final = self._at.part(task.index)
        with scratch(self._at.tmp) as folder:
            temp = folder / final.name
            yield temp
            with storage_errors(final):
                content = read_back(temp, self._schema, task.num_rows)
                self._make_way(final, task, content)
            publish(temp, final)
        publish_record(self._at, self._plan, task, content)
        self._contents[task.index] = content

    def finish(self) -> Totals:
        """Publish what says that all is there: a directory's manifest and _SUCCESS, or the single file itself.

        VectorizeError: a task is still pending.
        """
        if self._totals is not None:
            return self._totals
        if pending := self.pending():
            raise VectorizeError(f"{len(pending)} of {len(self._plan.tasks)} parts are missing; run the command again")
        if self._at.single:
            self._totals = Totals.of([self._publish_single()])
        else:
            publish_manifest(self._at, self._plan, self._contents)
            self._totals = Totals.of(self._contents.values())
        self._sweep()
        return self._totals

    def _publish_single(self) -> Content:
        at, tasks = self._at, self._plan.tasks
        with scratch(at.tmp) as folder:
            temp = folder / at.output.name
            assemble((at.part(task.index) for task in tasks), temp, self._schema)
            with storage_errors(at.output):
                content = read_back(temp, self._schema, sum(task.num_rows for task in tasks))
            publish_file_manifest(at, self._plan, content)
            publish(temp, at.output, replace=self._overwrite)
        return content

    def _take(self) -> None:
        at = self._at
        if not at.plan.exists():
            refuse_foreign(at, overwrite=self._overwrite)
        make_folder(at.state)
        try:
            self._lock.acquire()
        except Timeout:
            raise TemporaryError(
                f"another run is writing {str(at.output)!r}; when it has ended, run the same command again"
            ) from None
        try:
            self._prepare()
        except BaseException:
            self._lock.release()
            raise

    def _prepare(self) -> None:
        at = self._at
        self._settle_plan()
        self._totals = finished(at, self._plan, hashed=at.single)
        remove_leftovers(at.spool)
        if self.done:
            self._sweep()
            return
        if at.single:
            refuse_foreign(at, overwrite=self._overwrite)
        unpublish_manifest(at)
        # Not before: with tmp/ gone, sizes alone are believed.
        shutil.rmtree(at.tmp, ignore_errors=True)
        make_folder(at.records)
        make_folder(at.parts)
        self._contents = dict(published(at, self._plan))
        self._check_space()

    def _settle_plan(self) -> None:
        path, new = self._at.plan, self._plan.to_json()
        if path.exists() and (old := path.read_bytes()) != new:
            if not self._overwrite:
                raise OutputError(self._conflict(old))
            self._reset(old)
        if not path.exists():
            publish_bytes(new, path, self._at.tmp)

    def _conflict(self, old: bytes) -> str:
        try:
            lines = differences(Plan.from_json(old), self._plan)
        except ValueError as error:
            lines = [f"its plan cannot be read ({error})"]
        if len(lines) > _LISTED:
            lines[_LISTED:] = [f"and {len(lines) - _LISTED} more"]
        listed = "".join(f"\n  {line}" for line in lines)
        return f"{str(self._at.output)!r} belongs to another run; use --overwrite, or choose another output:{listed}"

    def _reset(self, old: bytes) -> None:
        """Forget another plan's progress, its plan last. Only files that its plan or its records name are removed."""
        at = self._at
        try:
            indices = set(range(len(Plan.from_json(old).tasks)))
        except ValueError:
            indices = set()
        indices |= {int(path.stem) for path in at.records.glob("*.json") if path.stem.isdecimal()}
        unpublish_manifest(at)
        for index in sorted(indices):
            at.part(index).unlink(missing_ok=True)
            at.record(index).unlink(missing_ok=True)
        at.plan.unlink()

    def _make_way(self, final: Path, task: Task, content: Content) -> None:
        """Remove a part without a record that is damaged, or that is this plan's but not what this run made.

        A crash between the two leaves a whole part, which is adopted if its bytes are the same. Publishing refuses
        anything else.
        """
        if file_size(final) is None:
            return
        try:
            if read_back(final, self._schema, task.num_rows).sha256 == content.sha256:
                return
            found = "has no record and other vectors than this run makes"
        except TemporaryError:
            found = "is damaged"
        except VectorizeError:
            return
        log.warning("%s %s: it is replaced", final, found)
        final.unlink()

    def _check_space(self) -> None:
        """TemporaryError where the disk cannot hold the vectors that are still to be written."""
        row_bytes = 4 * self._schema.field("embedding").type.list_size
        rows = sum(task.num_rows for task in self.pending())
        if self._at.single:
            rows += sum(task.num_rows for task in self._plan.tasks)
        need, free = rows * row_bytes, shutil.disk_usage(self._at.state).free
        if need > free:
            raise TemporaryError(
                f"the vectors need at least {need / 2**30:.1f} GiB at {str(self._at.output)!r}, where "
                f"{free / 2**30:.1f} GiB are free; make room, then run the same command again"
            )

    def _sweep(self) -> None:
        """Remove what a finished output no longer needs; tmp/ goes last, as the sign that this has been done."""
        if self._at.single:
            shutil.rmtree(self._at.parts, ignore_errors=True)
            shutil.rmtree(self._at.records, ignore_errors=True)
        shutil.rmtree(self._at.tmp, ignore_errors=True)

"""The output of a run and the state beside it: what is done, what is left, and the last file that says all is there.

A directory OUT/ holds part-000000.parquet … and, when all are there, _manifest.json and then _SUCCESS (the manifest's
SHA-256); its state is OUT/_gte_vectorize/. A single file NAME.parquet has its state in .NAME.parquet.state/ beside it,
parts included, until they are assembled under the final name. In the state: plan.json, records/ (one for each published
part), tmp/ (what a dead run leaves there is removed by the next), lock, and spool/: the inputs that are not Parquet,
converted, which stay, so that running a finished job again is quick. Every file is published as publish.py says.

In a bucket the names are the same, but that lock, tmp/ and spool/ lie in this machine's cache folder, and lease.json
keeps the machines apart; files are published as s3.py says.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import Timeout

from gte_vectorize.batch import Task
from gte_vectorize.errors import OutputError, TemporaryError, VectorizeError
from gte_vectorize.failpoint import failpoint
from gte_vectorize.reader.convert import remove_leftovers
from gte_vectorize.store.assemble import assemble
from gte_vectorize.store.files import Claim, Damaged
from gte_vectorize.store.layout import Layout, find_layout, lock_of, refuse_foreign
from gte_vectorize.store.manifest import Totals, finished, publish_file_manifest, publish_manifest, unpublish_manifest
from gte_vectorize.store.plan import Plan, differences
from gte_vectorize.store.publish import Content, make_folder, publish_bytes, read_back, scratch
from gte_vectorize.store.record import publish_record, published
from gte_vectorize.store.space import require_space, wait_for_space
from gte_vectorize.writer.part import storage_errors
from gte_vectorize.writer.schema import canonical_json

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
        self._dim: int = schema.field("embedding").type.list_size
        self._overwrite = overwrite
        self._files = layout.files
        self._lock = lock_of(layout)
        self._claim: Claim | None = None
        self._settled = False
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
            if not store.done or store._at.tmp.exists() or store._files.unsettled():
                store._take()
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    @property
    def done(self) -> bool:
        """Whether the output is complete under its final name."""
        return self._totals is not None

    @property
    def scratch(self) -> Path:
        """A local folder for what is of use to this run alone; it goes with the next one, or at the end."""
        return self._at.tmp

    def pending(self) -> list[Task]:
        """The tasks whose part is not published, in order."""
        return [] if self.done else [task for task in self._plan.tasks if task.index not in self._contents]

    def published(self) -> Totals:
        """What the parts that are published hold together."""
        return self._totals or Totals.of(self._contents.values())

    def recognise(self, answer: str) -> None:
        """Hold a device's answer to known texts against that of the device that began this output.

        The plan names what decides bits, but not all of it: kernels may fall back to others, and libraries of one
        version come in many builds. OutputError: the answer differs, and parts of the other device are published.
        """
        path, new = self._at.canary, canonical_json({"answer": answer}).encode()
        with storage_errors(path):
            other = self._files.exists(path) and self._files.read(path) != new
        if other:
            if self._contents:
                raise OutputError(
                    f"this machine computes other bits than the one that began {str(self._at.output)!r}, which would "
                    "mix two kinds of vectors: go on there (a warning above may say what is missing here), or use "
                    "--overwrite"
                )
            self._files.remove(path)
        if not self._files.exists(path):
            publish_bytes(new, path, self._at.tmp, self._files.publish)

    @contextmanager
    def part(self, task: Task) -> Iterator[Path]:
        """A free temporary name for the task's part; leaving without an exception checks the file and publishes it.

        TemporaryError: the storage failed, or the file reads back differently. VectorizeError: the file is wrong.
        """
        self._check_claim()
        final = self._at.part(task.index)
        with storage_errors(final):
            wait_for_space(self._at, task, dim=self._dim)
        with scratch(self._at.tmp) as folder:
            temp = folder / final.name
            yield temp
            with storage_errors(final):
                content = read_back(temp, self._schema, task.num_rows)
                self._make_way(final, task, content)
            self._files.publish(temp, final)
        publish_record(self._at, self._plan, task, content)
        self._contents[task.index] = content

    def finish(self) -> Totals:
        """Publish what says that all is there: a directory's manifest and _SUCCESS, or the single file itself.

        VectorizeError: a task is still pending. TemporaryError: a part is not there any more, or the output is
        another run's by now.
        """
        if self._totals is not None:
            return self._totals
        if pending := self.pending():
            raise VectorizeError(f"{len(pending)} of {len(self._plan.tasks)} parts are missing; run the command again")
        self._check_claim()
        if self._at.single:
            self._totals = Totals.of([self._publish_single()])
        else:
            with storage_errors(self._at.output):
                self._require_parts()
            publish_manifest(self._at, self._plan, self._contents)
            self._totals = Totals.of(self._contents.values())
        self._sweep()
        return self._totals

    def _publish_single(self) -> Content:
        at, tasks = self._at, self._plan.tasks
        with scratch(at.tmp) as folder:
            temp = folder / at.output.name
            parts = ((at.part(task.index), self._contents[task.index]) for task in tasks)
            assemble(self._files, parts, temp, self._schema)
            with storage_errors(at.output):
                content = read_back(temp, self._schema, sum(task.num_rows for task in tasks))
            publish_file_manifest(at, self._plan, content)
            failpoint("single.link")
            self._files.publish(temp, at.output, replace=self._overwrite)
        return content

    def _check_claim(self) -> None:
        if self._claim is not None:
            self._claim.check()

    def _require_parts(self) -> None:
        parts = {self._at.part(index): content.bytes for index, content in self._contents.items()}
        for part, size in zip(parts, self._files.map(self._files.size, parts), strict=True):
            if size != parts[part]:
                raise TemporaryError(
                    f"{str(part)!r} has been removed or changed since it was published; run the same command again to "
                    "make it anew"
                )

    def _take(self) -> None:
        at = self._at
        if not self._files.exists(at.plan):
            refuse_foreign(at, overwrite=self._overwrite)
        make_folder(at.local)
        try:
            failpoint("lock")
            self._lock.acquire()
        except Timeout:
            raise TemporaryError(
                f"another run is writing {str(at.output)!r}; when it has ended, run the same command again"
            ) from None
        try:
            self._claim = self._files.claim(at.local)
            self._prepare()
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release(settled=self._settled)
        self._lock.release()

    def _prepare(self) -> None:
        at = self._at
        self._settle_plan()
        self._totals = finished(at, self._plan, hashed=at.single)
        remove_leftovers(at.spool)
        if self.done:
            self._sweep()
            return
        if at.single and not self._may_be_ours():
            refuse_foreign(at, overwrite=self._overwrite)
        unpublish_manifest(at)
        # Not before: with tmp/ gone, sizes alone are believed.
        shutil.rmtree(at.tmp, ignore_errors=True)
        self._files.make_folder(at.records)
        self._files.make_folder(at.parts)
        self._contents = dict(published(at, self._plan))
        require_space(at, self._plan, self.pending(), dim=self._dim)

    def _may_be_ours(self) -> bool:
        """Whether a single file is of our kind: then a rival of the same plan, whom no lock kept out, may have made it.

        Publishing adopts it if its bytes are the same, and else refuses it.
        """
        try:
            with self._files.copy(self._at.output, self._at.tmp) as path:
                return bool(pq.read_schema(path).equals(self._schema, check_metadata=True))
        except (OSError, pa.ArrowException, TemporaryError):
            return False

    def _settle_plan(self) -> None:
        path, new, files = self._at.plan, self._plan.to_json(), self._files
        if files.exists(path) and (old := files.read(path)) != new:
            if not self._overwrite:
                raise OutputError(self._conflict(old))
            self._reset(old)
        if not files.exists(path):
            failpoint("plan.write")
            publish_bytes(new, path, self._at.tmp, files.publish)

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
        stems = {name.removesuffix(".json") for name in self._files.names(at.records)}
        indices |= {int(stem) for stem in stems if stem.isdecimal()}
        unpublish_manifest(at)
        for index in sorted(indices):
            self._files.remove(at.part(index))
            self._files.remove(at.record(index))
        for folder in (at.parts, at.records):
            self._files.settle(folder)
        self._files.remove(at.canary)
        self._files.remove(at.plan)

    def _make_way(self, final: Path, task: Task, content: Content) -> None:
        """Remove a part without a record that is damaged, or that is this plan's but not what this run made.

        A crash between the two leaves a whole part, which is adopted if its bytes are the same. Publishing refuses
        anything else, and so a part that a rival has recorded meanwhile.
        """
        size = self._files.size(final)
        if size is None or (size == content.bytes and self._files.sha256(final) == content.sha256):
            return
        if self._files.exists(self._at.record(task.index)):
            return
        try:
            with self._files.copy(final, self._at.tmp) as path:
                read_back(path, self._schema, task.num_rows)
            found = "has no record and other vectors than this run makes"
        except Damaged:
            found = "is damaged"
        except TemporaryError:
            raise
        except VectorizeError:
            return
        log.warning("%r %s: it is replaced", str(final), found)
        self._files.remove(final)

    def _sweep(self) -> None:
        """Remove what a finished output no longer needs; tmp/ goes last, as the sign that this has been done."""
        failpoint("sweep")
        if self._at.single:
            self._files.clear(self._at.parts)
            self._files.clear(self._at.records)
            if self._files.names(self._at.parts) or self._files.names(self._at.records):
                return
        shutil.rmtree(self._at.tmp, ignore_errors=True)
        self._settled = True

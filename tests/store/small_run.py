"""A whole run with made-up vectors: what the pipeline does with a Store, without a model.

As a script (`small_run.py OUTPUT`) it prints a line at each step and waits for a moment: an instant to kill it.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from gte_vectorize.batch import EncodedWindow, Passages, Shard, Status, Task, Window
from gte_vectorize.store.manifest import Totals
from gte_vectorize.store.plan import Plan, make_tasks
from gte_vectorize.store.store import Store
from gte_vectorize.writer.part import PartWriter
from gte_vectorize.writer.schema import output_schema, schema_fingerprint

DIM = 32
FIELDS = {"model": "thenlper/gte-large-zh", "pooling": "cls", "max_length": 512}
SHARDS = (
    Shard("/corpus/a.parquet", 1000, 1, (300, 300)),
    Shard("/corpus/b.parquet", 0, 2, ()),
    Shard("/corpus/c.parquet", 3000, 3, (900,)),
)


def make_schema(fields: dict[str, object] = FIELDS) -> pa.Schema:
    return output_schema(pa.schema([("id", pa.string())]), dim=DIM, embeddings={**fields, "dim": DIM})


def make_plan(fields: dict[str, object] = FIELDS, shards: tuple[Shard, ...] = SHARDS) -> Plan:
    return Plan(
        fingerprint=hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest(),
        fingerprint_fields=fields,
        shards=shards,
        tasks=make_tasks(shards, task_rows=500),
        schema=schema_fingerprint(make_schema(fields)),
        options={"columns": ["id"]},
        compute={"device": "cpu", "torch": "2.13.0"},
    )


def windows(task: Task, *, rows: int = 100, model: str = FIELDS["model"]) -> Iterator[tuple[EncodedWindow, pa.Table]]:
    """The task's windows: each row's vector depends on its shard, its number and the model alone."""
    for first in range(task.first_row, task.first_row + task.num_rows, rows):
        window = Window(task, first, min(rows, task.first_row + task.num_rows - first))
        names = [f"{model} {task.shard.uri} {row}" for row in range(first, first + window.num_rows)]
        hashes = [hashlib.blake2b(name.encode(), digest_size=16).digest() for name in names]
        vectors = np.stack([np.random.default_rng(list(key)).standard_normal(DIM, np.float32) for key in hashes])
        status = np.array([Status.EMPTY if key[0] < 8 else Status.OK for key in hashes], np.uint8)
        passages = Passages(
            window=window,
            ids=np.zeros(0, np.int32),
            lengths=np.array([key[1] for key in hashes], np.int32) * (status == Status.OK),
            status=status,
            truncated=np.array([key[2] < 16 for key in hashes]),
            text_hash=np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 16),
            row=window.rows,
        )
        yield EncodedWindow(passages, vectors * (status == Status.OK)[:, None], status), pa.table({"id": names})


def write_task(store: Store, task: Task, schema: pa.Schema, *, model: str, step: Callable[[], None]) -> None:
    with store.part(task) as path, PartWriter(path, schema, task) as part:
        for window, columns in windows(task, model=model):
            part.write(window, columns.to_batches())
            step()


def run(
    output: str | Path,
    *,
    fields: dict[str, object] = FIELDS,
    shards: tuple[Shard, ...] = SHARDS,
    overwrite: bool = False,
    tasks: int | None = None,
    step: Callable[[], None] = lambda: None,
) -> Totals | None:
    """A run to its end, or over the first `tasks` pending tasks only; None then."""
    schema, plan = make_schema(fields), make_plan(fields, shards)
    with Store.open(output, plan, schema, overwrite=overwrite) as store:
        step()
        for task in store.pending()[:tasks]:
            write_task(store, task, schema, model=str(fields["model"]), step=step)
            step()
        return store.finish() if tasks is None else None


def _report() -> None:
    print("step", flush=True)
    time.sleep(0.01)


if __name__ == "__main__":
    run(sys.argv[1], step=_report)

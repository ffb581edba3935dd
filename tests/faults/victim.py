"""The process that faults happen to: a whole run with made-up vectors, small enough to be killed a thousand times.

It publishes six parts of two row groups or none, as a directory or as a single file. As a program (`victim JSON`) it
is an interpreter of its own; `fork` takes it from a server that has everything imported.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from faults import mutants, patches
from store import small_run

import gte_vectorize
from gte_vectorize.batch import Shard
from gte_vectorize.errors import VectorizeError
from gte_vectorize.store.plan import Plan, make_tasks
from gte_vectorize.store.store import Store
from gte_vectorize.writer import part
from gte_vectorize.writer.part import PartWriter

CANARY = "marzipan-lighthouse-5309"  # in every row
SECRET = "porcupine-ferry-8812"  # in the environment
SHARDS = (
    Shard("/corpus/a.parquet", 1000, 1, (90, 60)),
    Shard("/corpus/b.parquet", 0, 2, ()),
    Shard("/corpus/c.parquet", 3000, 3, (110,)),
)
ROWS = [f"{CANARY} {shard.uri} {row}" for shard in SHARDS for row in range(sum(shard.row_groups))]
WINDOW_ROWS = 20
PATH = ":".join(str(Path(module.__file__).parents[1]) for module in (patches, gte_vectorize))

_open: list[ExitStack] = []  # until the interpreter ends
_context = multiprocessing.get_context("forkserver")
# pandas and numpy.random are what the first use of pyarrow and of a generator would import.
_context.set_forkserver_preload(["__main__", "faults.victim", "pandas", "numpy.random"])


@dataclass(frozen=True, slots=True)
class Victim:
    """What to run. `patches` and `mutant` name functions of patches.py and mutants.py; a patch is `name:argument`."""

    output: str
    log: str
    failpoints: str = ""
    patches: tuple[str, ...] = ()
    mutant: str = ""
    overwrite: bool = False
    nan: bool = False
    leave_open: bool = False

    def environment(self) -> dict[str, str]:
        return {"GTE_VECTORIZE_FAILPOINTS": self.failpoints, "AWS_SECRET_ACCESS_KEY": SECRET}


def fork(victim: Victim) -> Any:
    """The running victim, at the head of a process group of its own."""
    process = _context.Process(target=live, args=(victim,))
    process.start()
    return process


def live(victim: Victim) -> None:
    os.setsid()
    os.umask(0o077)
    os.environ.update(victim.environment())
    log = os.open(victim.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    for name, argument in (patch.partition(":")[::2] for patch in victim.patches):
        getattr(patches, name)(victim, argument)
    if victim.mutant:
        mutants.SMALL[victim.mutant]()
    part.GROUP_BYTES = 4096  # 32 rows
    try:
        run(victim)
    except VectorizeError as error:
        logging.error("%s", error)
        sys.exit(error.exit_code)
    except Exception:
        logging.critical("a bug", exc_info=True)
        sys.exit(1)


def plan() -> Plan:
    return replace(small_run.make_plan(shards=SHARDS), tasks=make_tasks(SHARDS, task_rows=60))


def run(victim: Victim) -> None:
    schema = small_run.make_schema()
    with Store.open(victim.output, plan(), schema, overwrite=victim.overwrite) as store:
        for task in store.pending():
            with ExitStack() as stack:
                path = stack.enter_context(store.part(task))
                writer = stack.enter_context(PartWriter(path, schema, task))
                for window, columns in small_run.windows(task, rows=WINDOW_ROWS, model=CANARY):
                    if victim.nan:
                        window = replace(window, vectors=np.where(window.vectors, np.float32("nan"), 0))
                    writer.write(window, columns.to_batches())
                    if victim.leave_open and window.passages.window.first_row:
                        _open.append(stack.pop_all())
                        return
        store.finish()


def program(victim: Victim) -> list[str]:
    """The command line of a victim that is an interpreter of its own; its PYTHONPATH is `PATH`."""
    return [sys.executable, "-m", "faults.victim", json.dumps(asdict(victim))]


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    live(Victim(**{**given, "patches": tuple(given["patches"])}))

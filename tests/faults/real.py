"""The same faults through the command line, with a tiny model: exit codes, signals, worker processes."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from faults.case import AGAIN, DONE, KILLED, PATIENCE, REFUSED, Case, Outcome, Reference, tree
from faults.harness import Harness, Red
from faults.victim import CANARY, PATH, SECRET

ROWS = list(range(240))
TERMINATED = 128 + signal.SIGTERM
GRACE = 20  # seconds


class Command:
    """A running command, with what a `multiprocessing.Process` has. Its workers are known until it is closed."""

    def __init__(self, case: Case, environment: dict[str, str], *, mutant: str = "") -> None:
        inputs = case.log.parents[2] / "inputs"
        program = "from faults import mutants; from gte_vectorize.cli import main\n"
        program += f"mutants.REAL[{mutant!r}]() if {mutant!r} else None; main()"
        options = ["--device", "cpu", "--task-rows", "60", "--batch-tokens", "256", "--workers", "2"]
        paths = [inputs / "corpus.parquet", "-o", case.output, "--model", inputs / "model"]
        with case.log.open("ab") as log:
            self.process = psutil.Popen(
                [sys.executable, "-c", program, *map(str, paths), *options],
                env={**os.environ, "PYTHONPATH": PATH, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid: int = self.process.pid
        self.workers: set[Any] = set()

    @property
    def exitcode(self) -> int | None:
        return self.process.poll()

    def join(self, timeout: float | None = None) -> None:
        until = time.monotonic() + (timeout or PATIENCE)
        while self.process.poll() is None and time.monotonic() < until:
            self.see_workers()
            time.sleep(0.01)

    def see_workers(self) -> list[Any]:
        try:
            found = self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.workers.update(found)
        return found

    def close(self) -> None:
        self.process.wait()


class RealCase(Case):
    rows = ROWS

    def start(self, failpoints: str = "", *_: str, **environment: str) -> Command:
        given = {"AWS_SECRET_ACCESS_KEY": SECRET, "HF_HUB_OFFLINE": "1", **environment}
        if failpoints:
            given["GTE_VECTORIZE_FAILPOINTS"] = failpoints
        command = Command(self, given, mutant=self._mutant)
        self._started.append(command)
        return command

    def ended(self, code: int, codes: Any) -> int:
        for command in self._started:
            if psutil.wait_procs(command.workers, timeout=5)[1] and command.exitcode is not None:
                self.wrong("a worker outlives the command")
        return super().ended(code, codes)


def real_case(harness: Harness, fault: str, case: str) -> AbstractContextManager[RealCase]:
    return harness.of(RealCase, f"command line: {fault}", case, "real")


def reference(root: Path) -> Reference:
    """Make a model and a corpus in `root`/inputs, and embed it undisturbed."""
    from encoder.tiny import VOCABULARY, save_tiny

    inputs = root / "inputs"
    save_tiny(inputs / "model", "bert")
    words = np.random.default_rng(0).integers(0, VOCABULARY - 4, (len(ROWS), 40))
    texts = [f"{CANARY} {' '.join(f'w{word}' for word in row[: 3 + number % 37])}" for number, row in enumerate(words)]
    pq.write_table(pa.table({"id": ROWS, "text": texts}), inputs / "corpus.parquet", row_group_size=60)
    case = RealCase(inputs / "reference", Reference("out", {}, {}, 0), Outcome("", ""))
    started = time.monotonic()
    command = case.start()
    command.join()
    if command.exitcode != DONE:
        raise Red(f"a command without faults ended with {command.exitcode}: {case.log.read_text()}")
    found = tree(case.folder)
    return Reference("out", found, found, time.monotonic() - started)


def misspelt(harness: Harness) -> None:
    """a failpoint or action that is not there: refused (2)"""
    for entry in ("publish.lnik=kill@1", "publish.link=kil@1", "publish.link=kill")[: 3 if harness.full else 1]:
        with real_case(harness, "failpoint misspelt", entry) as case:
            case.end(case.start(entry), {REFUSED})


def storage_fails(harness: Harness) -> None:
    """ENOSPC and EIO: exit 75"""
    entries = (
        "part.write=enospc@2",
        "publish.sync=eio@3",
        "publish.link=eio@4",
        "folder.make=enospc@1",
        "part.close=eio@3",
    )
    for entry in entries if harness.full else entries[:1]:
        with real_case(harness, "storage fails", entry) as case:
            case.end(case.start(entry), {AGAIN})


def killed(harness: Harness) -> None:
    """kill -9 of the command alone, at random and at failpoints: no worker outlives it"""
    for seed in range(10 if harness.full else 0):
        with real_case(harness, "killed at random", f"seed {seed}") as case:
            _after(case.start(), random.Random(seed).uniform(0, harness.references["real"].seconds), signal.SIGKILL)
            case.end(case._started[-1], {KILLED, DONE})
    for entry in ("publish.link=kill@3", "record.write=kill@2", "success.write=kill@1")[: 3 if harness.full else 1]:
        with real_case(harness, "killed at a failpoint", entry) as case:
            case.end(case.start(entry), {KILLED})


def terminated(harness: Harness) -> None:
    """SIGTERM to the group at a random instant: exit 143 within 20 s"""
    for seed in range(8 if harness.full else 1):
        with real_case(harness, "SIGTERM", f"seed {seed}") as case:
            command = case.start()
            _after(command, random.Random(seed).uniform(0.2, 0.8) * harness.references["real"].seconds, signal.SIGTERM)
            asked = time.monotonic()
            code = case.end(command, {TERMINATED, DONE, -signal.SIGTERM})
            # Without its handlers, before any work and when Python itself ends, it dies as any program does.
            if code == -signal.SIGTERM and case.state.exists() and not (case.output / "_SUCCESS").exists():
                case.wrong("it was killed at work")
            if time.monotonic() - asked > GRACE:
                case.wrong(f"it took more than {GRACE} s to stop")


def worker_killed(harness: Harness) -> None:
    """kill -9 of a worker process over its n-th window: exit 0"""
    for nth in (1, 2) if harness.full else (1,):
        with real_case(harness, "worker killed", f"at its window {nth}") as case:
            command, dead = case.start(f"worker.window=stop@{nth}"), False
            while command.exitcode is None:
                for worker in command.see_workers():
                    if not dead and _stopped(worker):
                        worker.kill()
                        dead = True
                    elif _stopped(worker):
                        worker.resume()
                time.sleep(0.02)
            case.end(command, {DONE})
            if not dead:
                case.wrong("no worker has been killed")


def _after(command: Command, seconds: float, number: signal.Signals) -> None:
    command.join(seconds)
    if command.exitcode is None:
        command.see_workers()
        # The workers are in groups of their own.
        os.killpg(command.pid, number)


def _stopped(process: Any) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False

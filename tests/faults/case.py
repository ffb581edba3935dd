"""What every case goes through: the fault, a look at what is visible, the same command again, and the whole output.

A case is red if a file under a final name is anything but whole at any time, if the run that follows ends with other
bytes than an undisturbed one, if a row is lost, doubled or moved, if something is left over, if an exit code is not as
promised, or if a text or a secret is told.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from faults.victim import CANARY, ROWS, SECRET, Victim, fork

DONE, REFUSED, BUG, AGAIN, KILLED = 0, 2, 1, 75, -int(signal.SIGKILL)
PATIENCE = 60  # seconds
POLL = 0.01  # seconds


@dataclass
class Outcome:
    fault: str
    case: str
    faults: int = 1
    codes: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    same: bool = False
    lost: int = 0
    doubled: int = 0
    moved: int = 0
    leftovers: int = 0


@dataclass(frozen=True)
class Reference:
    """An undisturbed output: the tree at the end, every file that may be visible before, and how long it took."""

    name: str
    tree: dict[str, bytes]
    known: dict[str, bytes]
    seconds: float


class Case:
    rows: Sequence[Any] = ROWS

    def __init__(self, folder: Path, reference: Reference, outcome: Outcome, mutant: str = "") -> None:
        name = reference.name
        self.folder = folder / "data"
        self.output = self.folder / name
        self.state = self.output / "_gte_vectorize" if name == "out" else self.folder / f".{name}.state"
        self.log = folder / "log"
        self.outcome = outcome
        self.foreign: set[Path] = set()
        self._reference, self._mutant = reference, mutant
        self._recorded: dict[Path, tuple[int, int]] = {}
        self._started: list[Any] = []
        self.folder.mkdir(parents=True)

    def victim(self, failpoints: str = "", *patches: str, **options: Any) -> Victim:
        log = str(self.log) if not patches else str(self.log.with_name(f"log-{len(list(self.log.parent.iterdir()))}"))
        return Victim(str(self.output), log, failpoints, patches, self._mutant, **options)

    def start(self, failpoints: str = "", *patches: str, **options: Any) -> Any:
        process = fork(self.victim(failpoints, *patches, **options))
        self._started.append(process)
        return process

    def clean_up(self) -> None:
        for process in self._started:
            if process.exitcode is None:
                _kill_group(process.pid)
            process.join()
            process.close()

    def end(self, process: Any, codes: Collection[int], *, kill: bool = False) -> int:
        """Wait, or kill the group; look all the while. `codes`: the exit codes that are as promised."""
        if kill:
            _kill_group(process.pid)
        with self.watched():
            process.join(PATIENCE)
        if process.exitcode is None:
            self.wrong("it hangs")
            _kill_group(process.pid)
            process.join()
        return self.ended(process.exitcode, codes)

    def ended(self, code: int, codes: Collection[int]) -> int:
        self.outcome.codes[code] += 1
        if code not in codes:
            self.wrong(f"exit code {code}, not one of {sorted(codes)}")
        self.look()
        return code

    @contextmanager
    def watched(self) -> Iterator[None]:
        stop = threading.Event()

        def poll() -> None:
            while not stop.wait(POLL):
                try:
                    self.look(running=True)
                except Exception as error:
                    self.wrong(f"the poller failed: {error!r}")

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def await_stop(self, process: Any) -> bool:
        """Whether the victim has stopped itself at a failpoint, rather than ended."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                status = psutil.Process(process.pid).status()
            except psutil.NoSuchProcess:
                return False
            if status in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                self.look()
                return bool(status == psutil.STATUS_STOPPED)
            time.sleep(0.002)
        raise TimeoutError("the victim neither stops nor ends")

    def look(self, *, running: bool = False) -> None:
        """Every file under a final name is whole; a record has its part, and _SUCCESS has all."""
        claims = [path for path in self._visible() if path.name == "_SUCCESS" or path.parent.name == "records"]
        for path in self._visible():
            name = str(path.relative_to(self.folder))
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                if running:
                    continue
                raise
            if self._reference.known.get(name) != data:
                self.wrong(f"{name} is visible and not whole")
        for path in claims:
            part = f"part-{path.stem}.parquet"
            needed = [self.output / part if self.output.suffix != ".parquet" else self.state / "parts" / part]
            if path.name == "_SUCCESS":
                needed = [self.folder / file for file in self._reference.tree if not file.endswith("/")]
            # Under a single file, parts and records go when the file is there.
            missing = [file for file in needed if not file.exists() and file not in self.foreign]
            if missing and path.exists() and not self.output.is_file():
                self.wrong(f"{path.name} is there before what it vouches for")
            elif not running and path.stem.isdecimal() and needed[0] not in self.foreign and needed[0].exists():
                self._keep(needed[0])

    def finish(self) -> None:
        """The same command again ends with what an undisturbed run leaves."""
        self.end(self.start(), {DONE})
        found, right = tree(self.folder), self._reference.tree
        self.outcome.same = found == right
        self.outcome.leftovers = len(found.keys() - right.keys())
        if differ := sorted(name for name in found.keys() | right if found.get(name) != right.get(name)):
            self.wrong(f"at the end {', '.join(differ)} differ")
        self._account()

    def tell_nothing(self) -> None:
        told = [path.read_bytes() for path in self.log.parent.glob("log*") if path.is_file()]
        told += [path.read_bytes() for path in self.folder.rglob("*.json")]
        told += [str(path).encode() for path in self.folder.rglob("*")]
        for phrase in (CANARY, SECRET):
            if any(phrase.encode() in data for data in told):
                self.wrong("a text or a secret is told")

    def wrong(self, what: str) -> None:
        if what not in self.outcome.wrong:
            self.outcome.wrong.append(what)

    def _visible(self) -> Iterator[Path]:
        for folder, _, files in os.walk(self.folder):  # which takes it calmly when a folder goes meanwhile
            if "tmp" not in Path(folder).relative_to(self.folder).parts:
                yield from {Path(folder, file) for file in files if file != "lock"} - self.foreign

    def _keep(self, part: Path) -> None:
        found = part.stat()
        was = self._recorded.setdefault(part, (found.st_ino, found.st_mtime_ns))
        if was != (found.st_ino, found.st_mtime_ns):
            self.wrong(f"{part.name} was published and has been touched")

    def _account(self) -> None:
        files = sorted(self.output.glob("part-*")) if self.output.is_dir() else [self.output]
        rows = [row for file in files if file.exists() for row in pq.read_table(file)["id"].to_pylist()]
        expected, found = Counter(self.rows), Counter(rows)
        self.outcome.lost, self.outcome.doubled = (expected - found).total(), (found - expected).total()
        if expected == found:
            self.outcome.moved = sum(a != b for a, b in zip(rows, self.rows, strict=True))
        if rows != list(self.rows):
            self.wrong("rows are lost, doubled or moved")


def tree(folder: Path) -> dict[str, bytes]:
    """Files and their bytes, folders with a slash; but for the lock, which may stay."""
    return {
        f"{path.relative_to(folder)}{'/' if path.is_dir() else ''}": b"" if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
        if path.name != "lock"
    }


def _kill_group(pid: int) -> None:
    # The group comes into being with the victim's first step.
    for kill in (os.killpg, os.kill):
        try:
            return kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return None

"""Two runs over one output, with the lock and without it; and clocks that jump."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

from faults.case import AGAIN, DONE, PATIENCE, REFUSED, Case
from faults.harness import NAMES, Harness
from faults.victim import PATH, program

# A run whose temporary files its rival has removed may end in any of these; its output may not suffer.
ANY_WAY = {DONE, REFUSED, AGAIN}
_INSTANTS = ("part.write", "part.readback", "publish.sync", "publish.link", "publish.syncdir", "record.write")


def refused_by_the_lock(harness: Harness) -> None:
    """a run is frozen, a second one is refused (75), the first thaws and ends well"""
    for name in NAMES:
        for point in _INSTANTS if harness.full else _INSTANTS[:1]:
            with harness.case("second run, locked", f"frozen at {point}", name) as case:
                first = case.start(f"{point}=stop@2")
                case.await_stop(first)
                case.end(case.start(), {AGAIN})
                os.kill(first.pid, signal.SIGCONT)
                case.end(first, {DONE})


def frozen_and_thawed(harness: Harness) -> None:
    """the lock is lost: a run is frozen, a second one finishes, the first thaws: the second's files stay as they are"""
    for name in NAMES:
        for point in _INSTANTS if harness.full else _INSTANTS[3:5]:
            for nth in (1, 2, 5) if harness.full else (2,):
                with harness.case("frozen and thawed, no lock", f"{point}@{nth}", name) as case:
                    first = case.start(f"{point}=stop@{nth}", "no_lock")
                    case.await_stop(first)
                    case.end(case.start("", "no_lock"), {DONE})
                    before = _identities(case)
                    os.kill(first.pid, signal.SIGCONT)
                    case.end(first, ANY_WAY)
                    if _identities(case) != before:
                        case.wrong("the second run's output has been touched")


def two_at_once(harness: Harness) -> None:
    """the lock is lost: two runs, the second starts at a random instant of the first"""
    for seed in range(50 if harness.full else 2):
        name, chance = NAMES[seed % 2], random.Random(seed)
        with harness.case("two at once, no lock", f"seed {seed}", name) as case:
            first = case.start("", "no_lock")
            time.sleep(chance.uniform(0, harness.references[name].seconds))
            second = case.start("", "no_lock")
            case.end(first, ANY_WAY)
            case.end(second, ANY_WAY)


def clocks_that_jump(harness: Harness) -> None:
    """the clock goes back and forth by a day, to 1970 and to 2037, at once or in mid-run: no name or byte changes"""
    jumps = ("-1d", "+1d", "@1970-01-02 00:00:00", "@2037-01-01 00:00:00")
    for name in NAMES:
        for jump in jumps if harness.full else jumps[:1]:
            for late in (False, True) if harness.full else (name == "out",):
                with harness.case("clock jumps", f"{jump}{' in mid-run' if late else ''}", name) as case:
                    clock = case.log.with_name("clock")
                    clock.write_text("+0" if late else jump)
                    faked = {
                        "LD_PRELOAD": str(_faketime()),
                        "FAKETIME_TIMESTAMP_FILE": str(clock),
                        "FAKETIME_NO_CACHE": "1",
                    }
                    faked |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}
                    victim = case.victim("part.write=stop@4" if late else "")
                    process = subprocess.Popen(program(victim), env={**os.environ, "PYTHONPATH": PATH, **faked})
                    if late and case.await_stop(process):
                        clock.write_text(jump)
                        os.kill(process.pid, signal.SIGCONT)
                    case.ended(process.wait(PATIENCE), {DONE})


def _identities(case: Case) -> dict[Path, tuple[int, int]]:
    """Inode and time of all that is published."""
    found = [case.output] if case.output.is_file() else [path for path in case.output.glob("*") if path.is_file()]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


def missing() -> str:
    """Why clocks cannot jump; empty if they can."""
    return "" if _faketime() else "libfaketime is not installed"


def _faketime() -> Path | None:
    return next(Path("/usr/lib").glob("**/faketime/libfaketime.so.1"), None)

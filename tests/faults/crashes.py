"""Runs that end before their end: killed, raised, left, or without power."""

from __future__ import annotations

import os
import random
import subprocess
import time

from faults import tracer
from faults.case import BUG, DONE, KILLED
from faults.harness import NAMES, Harness
from faults.patches import disk_after
from faults.victim import PATH, program

from gte_vectorize.failpoint import POINTS


def killed_at_random(harness: Harness) -> None:
    """kill -9 of the process group at a random instant; every fourth run three times"""
    for seed in range(200 if harness.full else 6):
        name, chance = NAMES[seed % 2], random.Random(seed)
        with harness.case("killed at random", f"seed {seed}", name) as case:
            case.outcome.faults = 3 if seed % 4 == 3 else 1
            for _ in range(case.outcome.faults):
                process = case.start()
                time.sleep(chance.uniform(0, 0.85 * harness.references[name].seconds))
                case.end(process, {KILLED, DONE}, kill=True)


def killed_everywhere(harness: Harness) -> None:
    """kill -9 at each failpoint, at its n-th hit for every n"""
    for name in NAMES:
        for point in POINTS if harness.full else POINTS[NAMES.index(name) :: 2]:
            for nth in range(1, 100 if harness.full else 2):
                with harness.case("killed at a failpoint", f"{point}@{nth}", name) as case:
                    if case.end(case.start(f"{point}=kill@{nth}"), {KILLED, DONE}) == DONE:
                        case.outcome.faults = 0
                        break


def killed_at_system_calls(harness: Harness) -> None:
    """kill -9 at the n-th system call of each kind, for every n"""
    for name in NAMES:
        with harness.case("killed at a system call", "none", name) as case:
            found = tracer.calls(case)
            case.outcome.faults = 0
        for call in found if harness.full else found[5::150]:
            with harness.case("killed at a system call", f"{call.name} {call.nth}", name) as case:
                code, _ = tracer.run(case, [f"{call.name}:signal=KILL:when={call.nth}"], {KILLED, DONE})
                if code == DONE:  # threads of Arrow make a call or two more or less
                    case.outcome.faults = 0


def raised_between_row_groups(harness: Harness) -> None:
    """an exception, sys.exit, and the end of the interpreter, with the Parquet writer open"""
    for name in NAMES:
        for nth in range(1, 12 if harness.full else 2):
            with harness.case("raised between row groups", f"RuntimeError at {nth}", name) as case:
                case.end(case.start(f"part.write=raise@{nth}"), {BUG if nth <= 10 else DONE})
            with harness.case("raised between row groups", f"SystemExit at {nth}", name) as case:
                case.end(case.start("", f"exit_in_write:{nth}"), {7 if nth <= 10 else DONE})
        with harness.case("raised between row groups", "left open", name) as case, case.watched():
            environment = {**os.environ, "PYTHONPATH": PATH}
            case.ended(subprocess.run(program(case.victim(leave_open=True)), env=environment).returncode, {DONE})


def without_power(harness: Harness) -> None:
    """power loss before and after each sync, link and rename: what was not synced is lost, or named but empty"""
    for name in NAMES:
        with harness.case("power loss", "recorded", name) as recorded:
            victim = recorded.victim("", "power:")
            recorded.end(recorded.start("", *victim.patches), {DONE})
            recorded.outcome.faults = 0
            snapshots = sorted(recorded.log.parent.glob("*.shadow/*.json"))
            chosen = snapshots if harness.full else [*snapshots[9:-1:36], snapshots[-1]]
            for snapshot in chosen:
                for kind in ("synced", "named"):
                    with harness.case("power loss", f"{kind} at step {snapshot.stem}", name) as case:
                        case.folder.rmdir()
                        disk_after(snapshot, kind, case.folder)
                        case.look()
                        whole = case.output if name != "out" else case.output / "_SUCCESS"
                        if snapshot == snapshots[-1] and not whole.exists():
                            case.wrong("the run has ended with exit code 0, and its output is not safe")

"""Inject faults into runs, and print a table of what became of them; exit code 1 where anything is red.

PYTHONPATH=tests python -m faults.run [--short] [--only WORD] [--table FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from faults import crashes, real, rivals, storage, tracer
from faults.case import Outcome
from faults.harness import Harness, Red, references

Fault = Callable[[Harness], None]
SMALL: Sequence[Fault] = (
    crashes.killed_at_random,
    crashes.killed_everywhere,
    crashes.killed_at_system_calls,
    crashes.raised_between_row_groups,
    crashes.without_power,
    storage.errors_at_failpoints,
    storage.errors_at_system_calls,
    storage.fsync_fails_once,
    storage.links_that_lie,
    storage.names_already_taken,
    storage.bits_flipped,
    storage.vectors_not_finite,
    rivals.refused_by_the_lock,
    rivals.frozen_and_thawed,
    rivals.two_at_once,
    rivals.clocks_that_jump,
)
REAL: Sequence[Fault] = (real.misspelt, real.storage_fails, real.killed, real.terminated, real.worker_killed)
# What cannot be done without a program that may not be there, and why not.
MISSING: dict[Fault, Callable[[], str]] = {
    crashes.killed_at_system_calls: tracer.missing,
    storage.errors_at_system_calls: tracer.missing,
    rivals.clocks_that_jump: rivals.missing,
}
# Each of mutants.py, and the fault that has to show it.
CAUGHT_BY: dict[str, Fault] = {
    "no_fsync": crashes.without_power,
    "no_folder_fsync": crashes.without_power,
    "fsync_retried": storage.fsync_fails_once,
    "replace_for_link": storage.names_already_taken,
    "lock_only": storage.names_already_taken,
    "record_before_part": crashes.killed_everywhere,
    "errors_swallowed": storage.errors_at_failpoints,
    "nan_check_off": storage.vectors_not_finite,
    "page_checksums_off": storage.bits_flipped,
    "unsort_skipped": real.misspelt,
    "last_batch_dropped": real.misspelt,
    "worker_death_swallowed": real.worker_killed,
}


def caught(mutant: str, harness: Harness) -> str:
    """The first case that the mutant turns red; empty if none does."""
    try:
        CAUGHT_BY[mutant](harness)
    except Red as red:
        return str(red)
    return ""


def fault_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: one line for each fault, and their sum."""
    lines = [
        "| fault | injected | same bytes | lost | doubled | moved | left over | exit codes | red |",
        "|" + "---|" * 9,
    ]
    groups = [(fault, list(cases)) for fault, cases in groupby(outcomes, key=lambda one: one.fault)]
    for fault, cases in [*groups, ("all", outcomes)]:
        codes = sum((one.codes for one in cases), Counter[int]())
        cells = [
            *(fault, sum(one.faults for one in cases), f"{sum(one.same for one in cases)} of {len(cases)}"),
            *(sum(getattr(one, what) for one in cases) for what in ("lost", "doubled", "moved", "leftovers")),
            *(", ".join(f"{code} ×{codes[code]}" for code in sorted(codes)), sum(bool(one.wrong) for one in cases)),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def mutant_table(shown: dict[str, str]) -> str:
    lines = ["| wrong code | first red case |", "|---|---|"]
    return "\n".join([*lines, *(f"| {mutant} | {red or 'NONE'} |" for mutant, red in shown.items())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few cases of each fault, and no wrong code")
    parser.add_argument("--only", default="", metavar="WORD", help="faults and wrong code with this in their name")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table here too")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    started = time.monotonic()
    found = {**references(root), "real": real.reference(root)}
    harness = Harness(root / "right", found, full=not given.short)
    skipped = []
    for fault in (*SMALL, *REAL):
        if given.only not in fault.__name__:
            continue
        if why := MISSING.get(fault, str)():
            skipped.append(f"{fault.__name__} is left out: {why}")
            continue
        before = len(harness.outcomes)
        fault(harness)
        for one in harness.outcomes[before:]:
            if one.wrong:
                print(f"RED {one.fault} ({one.case}, {dict(one.codes)}): {'; '.join(one.wrong)}", flush=True)
        print(
            f"{fault.__name__}: {len(harness.outcomes) - before} cases, {time.monotonic() - started:.0f} s", flush=True
        )
    mutants = [] if given.short else [mutant for mutant in CAUGHT_BY if given.only in mutant]
    shown = {mutant: caught(mutant, Harness(root / mutant, found, mutant=mutant)) for mutant in mutants}
    tables = [fault_table(harness.outcomes), mutant_table(shown)] if shown else [fault_table(harness.outcomes)]
    text = "\n\n".join([*tables, *skipped, f"{time.monotonic() - started:.0f} s"]) + "\n"
    print(text)
    if given.table:
        given.table.write_text(text)
    red = any(one.wrong for one in harness.outcomes) or not all(shown.values())
    if red:
        print(f"what the red cases left is in {root}")
    return int(red)


if __name__ == "__main__":
    sys.exit(main())

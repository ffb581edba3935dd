"""The cases that have been, and what an undisturbed run leaves."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from faults.case import DONE, KILLED, PATIENCE, Case, Outcome, Reference, tree
from faults.victim import Victim, fork

NAMES = ("out", "out.parquet")
AnyCase = TypeVar("AnyCase", bound=Case)


class Red(Exception):
    """A case went wrong, and the first one is enough."""


@dataclass
class Harness:
    """`full`: all cases rather than a few. `mutant`: the wrong code in the victims; the first red case ends it."""

    root: Path
    references: dict[str, Reference]
    full: bool = False
    mutant: str = ""
    outcomes: list[Outcome] = field(default_factory=list)

    def case(self, fault: str, case: str, name: str = "out") -> AbstractContextManager[Case]:
        return self.of(Case, fault, case, name)

    @contextmanager
    def of(self, kind: type[AnyCase], fault: str, case: str, name: str) -> Iterator[AnyCase]:
        """Leaving checks all; the files of a red case stay."""
        folder = self.root / f"case-{len(self.outcomes):05d}"
        outcome = Outcome(fault, f"{name}: {case}")
        self.outcomes.append(outcome)
        one = kind(folder, self.references[name], outcome, self.mutant)
        try:
            yield one
            if not outcome.wrong:
                one.finish()
        finally:
            one.clean_up()
        one.tell_nothing()
        if outcome.wrong and self.mutant:
            raise Red(f"{outcome.fault} ({outcome.case}): {outcome.wrong[0]}")
        if not outcome.wrong:
            shutil.rmtree(folder)


def references(root: Path) -> dict[str, Reference]:
    """Of right code, by name."""
    found = {}
    for name in NAMES:
        case = Case(root / f"reference-{name}", Reference(name, {}, {}, 0), Outcome("", ""))
        _run(case.victim("sweep=kill@1"), KILLED)
        before = tree(case.folder)
        _run(case.victim(), DONE)
        again = Case(root / f"timed-{name}", Reference(name, {}, {}, 0), Outcome("", ""))
        started = time.monotonic()
        _run(again.victim(), DONE)
        after = tree(case.folder)
        if after != tree(again.folder):
            raise Red(f"{name}: two undisturbed runs differ")
        found[name] = Reference(name, after, before | after, time.monotonic() - started)
    return found


def _run(victim: Victim, code: int) -> None:
    process = fork(victim)
    process.join(PATIENCE)
    if process.exitcode != code:
        raise Red(f"a run without faults ended with {process.exitcode}: {Path(victim.log).read_text()}")

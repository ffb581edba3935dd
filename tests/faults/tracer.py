"""strace around a victim: which system calls it makes, and a fault in the n-th of them.

Calls are counted from where the tracer is attached, after everything is imported.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
from faults.case import DONE, Case

CALLS = ("openat", "write", "fsync", "link", "linkat", "unlink", "unlinkat", "rename", "mkdir")
_LINE = re.compile(r"^(?:\d+ +)?(\w+)\((.*)")


class Call(NamedTuple):
    name: str
    nth: int
    arguments: str


def missing() -> str:
    """Why there is no tracer; empty if there is one."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


def calls(case: Case) -> list[Call]:
    """What an undisturbed run of the case does to its folder, in order."""
    _, log = run(case, [], {DONE})
    return [call for call in _parse(log) if str(case.folder) in call.arguments]


def run(case: Case, inject: list[str], codes: Collection[int]) -> tuple[int, str]:
    """The exit code of a victim under strace with these `-e inject=` expressions, and strace's log."""
    log = case.log.with_name("strace")
    process = case.start("", "wait")
    case.await_stop(process)
    options = [option for expression in inject for option in ("-e", f"inject={expression}")]
    trace = ["-y", "-s", "8", "-e", f"trace={','.join(CALLS)}", "-e", "signal=none", *options]
    command = ["strace", "-f", "-o", log, *trace, "-p", str(process.pid)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL):
        status = Path(f"/proc/{process.pid}/status")
        while "TracerPid:\t0\n" in status.read_text():
            time.sleep(0.002)
        psutil.Process(process.pid).resume()
        code = case.end(process, codes)
    return code, log.read_text()


def injected(log: str, folder: Path) -> bool:
    """Whether the fault met the case's folder."""
    return any("(INJECTED)" in line and str(folder) in line for line in log.splitlines())


def _parse(log: str) -> Iterator[Call]:
    counts: dict[str, int] = {}
    for line in log.splitlines():
        if (found := _LINE.match(line)) and found[1] in CALLS:
            counts[found[1]] = counts.get(found[1], 0) + 1
            yield Call(found[1], counts[found[1]], found[2])

"""Faults on demand, to prove what a crash or a failing disk leaves behind.

Nothing happens unless GTE_VECTORIZE_FAILPOINTS is set: POINT=ACTION@N, several separated by commas. The N-th time a
process comes to the point, it does the action; each process counts for itself. `publish.link=kill@3` dies just before
the third file gets its final name.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable
from functools import cache

from gte_vectorize.errors import ConfigError

VARIABLE = "GTE_VECTORIZE_FAILPOINTS"
POINTS = (
    *("lock", "plan.write", "folder.make"),
    *("part.create", "part.write", "part.close", "part.readback"),
    *("publish.write", "publish.sync", "publish.link", "publish.syncdir"),
    *("record.write", "manifest.write", "success.write"),
    *("assemble.write", "single.link", "sweep", "worker.window"),
)
ERRORS = {"eio": errno.EIO, "enospc": errno.ENOSPC, "edquot": errno.EDQUOT}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segfault": signal.SIGSEGV}
ACTIONS = (*ERRORS, *SIGNALS, "raise", "sleep")

_hits: Counter[str] = Counter()


def failpoint(point: str) -> None:
    """Do what is asked for at this point, if anything. ConfigError: what is asked for cannot be read."""
    if not _asked():
        return
    _hits[point] += 1
    if (action := _asked().get((point, _hits[point]))) is not None:
        _do(*action)


def parse(text: str) -> dict[tuple[str, int], tuple[str, float]]:
    """Point and hit → action and its seconds (0 but for `sleep:SECONDS`).

    ConfigError: an entry is no entry, or names a point or an action that is not there. A slip must not pass for a test.
    """
    asked = {}
    for entry in text.split(",") if text else ():
        found = re.fullmatch(r"([a-z.]+)=([a-z]+)(?::([0-9]+(?:\.[0-9]+)?))?@([1-9][0-9]*)", entry)
        if found is None or (found[2] == "sleep") != (found[3] is not None):
            raise ConfigError(f"{VARIABLE}: {entry!r} is not POINT=ACTION@N (or POINT=sleep:SECONDS@N)")
        point, action, seconds, hit = found.groups()
        for kind, word, known in (("point", point, POINTS), ("action", action, ACTIONS)):
            if word not in known:
                raise ConfigError(f"{VARIABLE}: no {kind} is called {word!r}{_nearest(word, known)}")
        asked[point, int(hit)] = (action, float(seconds or 0))
    return asked


@cache
def _asked() -> dict[tuple[str, int], tuple[str, float]]:
    return parse(os.environ.get(VARIABLE, ""))


def _do(action: str, seconds: float) -> None:
    if action in ERRORS:
        raise OSError(ERRORS[action], os.strerror(ERRORS[action]))
    if action in SIGNALS:
        os.kill(os.getpid(), SIGNALS[action])
    elif action == "raise":
        raise RuntimeError("raised by a failpoint")
    else:
        time.sleep(seconds)


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"

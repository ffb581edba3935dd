"""What is changed in a victim beside its failpoints: the world around it, never the code under test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faults.victim import Victim


def wait(victim: Victim, _: str) -> None:
    """Until the harness has attached a tracer."""
    os.kill(os.getpid(), signal.SIGSTOP)


def no_lock(victim: Victim, _: str) -> None:
    """A lock that a network file system has lost."""
    from filelock import FileLock

    FileLock.acquire = FileLock.release = lambda self, *_, **__: None  # type: ignore[method-assign]


def link_lies(victim: Victim, nth: str) -> None:
    """The n-th link is made and reported as failed, as a network may do."""
    link, calls = os.link, iter(range(1, 1 << 30))

    def lie(*arguments: Any, **options: Any) -> None:
        link(*arguments, **options)
        if next(calls) == int(nth):
            raise OSError(5, "Input/output error")

    os.link = lie


def exit_in_write(victim: Victim, nth: str) -> None:
    """`sys.exit` between two row groups."""
    from gte_vectorize.writer.part import PartWriter

    flush, calls = PartWriter._flush, iter(range(1, 1 << 30))

    def leave(self: PartWriter) -> None:
        flush(self)
        if next(calls) == int(nth):
            raise SystemExit(7)

    PartWriter._flush = leave  # type: ignore[method-assign]


def power(victim: Victim, failing: str) -> None:
    """Keep beside the log what a power loss at each step would leave: only what has been synced is safe.

    `failing`: the fsync, counted from 1, that fails once. The kernel then drops what was to be written and calls the
    next fsync of the same file a success, so its content never becomes safe.
    """
    shadow = _Shadow(Path(victim.output).parent, Path(victim.log).with_suffix(".shadow"), int(failing or 0))
    fsync, link, replace = os.fsync, os.link, os.replace
    os.fsync = lambda descriptor: shadow.sync(descriptor, fsync)
    os.link = lambda *arguments, **options: shadow.step(link, *arguments, **options)
    os.replace = lambda *arguments, **options: shadow.step(replace, *arguments, **options)


class _Shadow:
    """`safe`: names of each synced folder, relative to `root`, each with the key of its content ("/": a folder)."""

    def __init__(self, root: Path, where: Path, failing: int) -> None:
        where.mkdir()
        self._root, self._where, self._failing = root, where, failing
        self._safe = {".": self._names(root)}
        self._contents: set[str] = set()
        self._dropped: set[int] = set()
        self._steps = self._syncs = 0

    def sync(self, descriptor: int, fsync: Any) -> None:
        self._syncs += 1
        found = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if self._syncs == self._failing:
            self._dropped.add(found.st_ino)
            (self._where / "failed").touch()
            raise OSError(5, "Input/output error")
        fsync(descriptor)
        if path != self._root and self._root not in path.parents:
            return
        if stat.S_ISDIR(found.st_mode):
            self._safe[str(path.relative_to(self._root))] = self._names(path)
        elif found.st_ino not in self._dropped:
            self._contents.add(_key(found))
            shutil.copyfile(path, self._where / _key(found))
        self._snapshot()

    def step(self, call: Any, *arguments: Any, **options: Any) -> None:
        self._snapshot()
        call(*arguments, **options)
        self._snapshot()

    def _names(self, folder: Path) -> dict[str, str]:
        return {
            entry.name: "/" if entry.is_dir(follow_symlinks=False) else _key(entry.stat())
            for entry in os.scandir(folder)
        }

    def _snapshot(self) -> None:
        self._steps += 1
        folders = [self._root, *(path for path in self._root.rglob("*") if path.is_dir())]
        now = {str(folder.relative_to(self._root)): self._names(folder) for folder in folders}
        disk = {"synced": self._safe, "named": now, "contents": sorted(self._contents)}
        (self._where / f"{self._steps:04d}.json").write_text(json.dumps(disk))


def _key(found: os.stat_result) -> str:
    # An inode's number is used again; a link leaves the time of the last write as it is.
    return f"{found.st_ino}-{found.st_mtime_ns}"


def disk_after(snapshot: Path, kind: str, root: Path) -> None:
    """Make `root` what the disk holds after a power loss at this snapshot.

    `kind`: "synced" keeps only the names that were synced; "named" keeps every name, those not synced without content.
    """
    disk = json.loads(snapshot.read_text())

    def fill(folder: str) -> None:
        for name, key in disk[kind].get(folder, {}).items():
            path = root / folder / name
            if key == "/":
                path.mkdir()
                fill(os.path.normpath(f"{folder}/{name}"))
            elif key in disk["contents"]:
                shutil.copyfile(snapshot.with_name(key), path)
            else:
                path.touch()

    root.mkdir()
    fill(".")

"""Where a run's files are, from the output's name alone; and which outputs are refused because of it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from gte_vectorize.batch import Shard
from gte_vectorize.errors import OutputError
from gte_vectorize.reader.storage import split_uri
from gte_vectorize.store.bucket import Key
from gte_vectorize.store.files import Files
from gte_vectorize.store.local import LocalFiles
from gte_vectorize.store.s3 import S3Files

LOCK_PATIENCE = 0.5
"""Seconds. Whoever asks whether a run is at work holds the lock for an instant, and that must not end a run."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of an output, absolute. `single`: one file, NAME.parquet, rather than a directory of parts.

    What stands under them is for `files` to say: of an output in a bucket they are keys. `local` is this machine's
    folder for what is not published: a local output's state.
    """

    output: Path
    single: bool
    state: Path
    parts: Path
    manifest: Path
    success: Path
    local: Path
    files: Files

    @property
    def spool(self) -> Path:
        """Where inputs that are not Parquet are kept, converted."""
        return self.local / "spool"

    @property
    def plan(self) -> Path:
        return self.state / "plan.json"

    @property
    def canary(self) -> Path:
        """What the device that began this output answers to known texts."""
        return self.state / "canary.json"

    @property
    def records(self) -> Path:
        return self.state / "records"

    @property
    def tmp(self) -> Path:
        return self.local / "tmp"

    def part(self, task_index: int) -> Path:
        return self.parts / f"part-{task_index:06d}.parquet"

    def record(self, task_index: int) -> Path:
        return self.records / f"{task_index:06d}.json"


def find_layout(output: str | Path, shards: Iterable[Shard]) -> Layout:
    """OutputError: the output is in a store of another kind than S3, is an input file, or contains one."""
    if scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+", str(output)):
        layout = _in_bucket(f"{scheme[1].lower()}://{str(output)[scheme.end() :]}")
    else:
        given = Path(os.path.abspath(output))  # noqa: PTH100 - a link at the final name must stay unresolved
        path, single, state = _names(Path(os.path.realpath(given.parent)) / given.name)
        layout = _layout(path, single, state, state, LocalFiles())
    _refuse_inputs(layout, shards)
    return layout


def _in_bucket(uri: str) -> Layout:
    scheme, _, _ = split_uri(uri, "an output", OutputError)
    if scheme != "s3":
        raise OutputError(f"the output cannot be written to {scheme}://; give s3://, or write locally, then copy")
    path, single, state = _names(Key(uri))
    local = _cache() / hashlib.blake2b(str(path).encode(), digest_size=16).hexdigest()
    return _layout(path, single, state, local, S3Files(path, state))


def _cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "gte-vectorize"
    except RuntimeError as error:  # a container's user without a name
        raise OutputError("there is no home folder for the parts on their way; set XDG_CACHE_HOME") from error


def lock_of(layout: Layout) -> FileLock:
    """The lock that runs on this machine hold, not taken yet."""
    return FileLock(layout.local / "lock", timeout=LOCK_PATIENCE, mode=0o600, thread_local=False)


def refuse_foreign(at: Layout, *, overwrite: bool) -> None:
    """OutputError where something that is not this run's stands at the final name."""
    output = at.output
    if at.single:
        if at.files.exists(output) and (output.is_dir() or not overwrite):
            advice = "choose another output" if output.is_dir() else "use --overwrite, or choose another output"
            raise OutputError(f"{str(output)!r} exists and is not what this run published; {advice}")
        return
    try:
        foreign = at.files.names(output) - {at.state.name}
    except (NotADirectoryError, FileNotFoundError):  # a file, or a link to nothing
        foreign = {output.name}
    if foreign:
        raise OutputError(
            f"{str(output)!r} exists and is not an output of gte-vectorize; choose another output, or empty it"
        )


def _names(path: Path) -> tuple[Path, bool, Path]:
    """Output, whether it is a single file, and state."""
    if path.suffix.lower() == ".parquet":
        return path, True, path.with_name(f".{path.name}.state")
    return path, False, path / "_gte_vectorize"


def _layout(path: Path, single: bool, state: Path, local: Path, files: Files) -> Layout:
    if single:
        return Layout(path, single, state, state / "parts", state / "manifest.json", path, local, files)
    return Layout(path, single, state, path, path / "_manifest.json", path / "_SUCCESS", local, files)


def _refuse_inputs(layout: Layout, shards: Iterable[Shard]) -> None:
    output, target, spool = layout.output, _real(layout.output), _real(layout.spool)
    for shard in shards:
        source = _real(shard.uri)
        if source.startswith(spool + os.sep):
            continue
        if source == target or source.startswith(target + os.sep) or target.startswith(source + os.sep):
            raise OutputError(
                f"the output {str(output)!r} would lie over the input {shard.uri!r}; choose another with -o"
            )


def _real(place: str | Path) -> str:
    name = str(place).removeprefix("file://")
    return name if "://" in name else os.path.realpath(name)

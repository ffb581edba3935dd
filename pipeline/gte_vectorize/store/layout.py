"""Where a run's files are, from the output's name alone; and which outputs are refused because of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gte_vectorize.batch import Shard
from gte_vectorize.errors import OutputError


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of an output, absolute. `single`: one file, NAME.parquet, rather than a directory of parts."""

    output: Path
    single: bool
    state: Path
    parts: Path
    manifest: Path
    success: Path

    @property
    def plan(self) -> Path:
        return self.state / "plan.json"

    @property
    def records(self) -> Path:
        return self.state / "records"

    @property
    def tmp(self) -> Path:
        return self.state / "tmp"

    def part(self, task_index: int) -> Path:
        return self.parts / f"part-{task_index:06d}.parquet"

    def record(self, task_index: int) -> Path:
        return self.records / f"{task_index:06d}.json"


def find_layout(output: str | Path, shards: Iterable[Shard]) -> Layout:
    """OutputError: the output is in an object store, is an input file, or contains one."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(output)):
        raise OutputError(
            f"the output {str(output)!r} is not on a local file system, and this version writes no other; "
            "write locally, then copy"
        )
    given = Path(os.path.abspath(output))  # noqa: PTH100 - a link at the final name must stay unresolved
    path = Path(os.path.realpath(given.parent)) / given.name
    _refuse_inputs(path, shards)
    if path.suffix.lower() == ".parquet":
        state = path.with_name(f".{path.name}.state")
        return Layout(path, True, state, state / "parts", state / "manifest.json", path)
    state = path / "_gte_vectorize"
    return Layout(path, False, state, path, path / "_manifest.json", path / "_SUCCESS")


def _refuse_inputs(output: Path, shards: Iterable[Shard]) -> None:
    target = os.path.realpath(output)
    for shard in shards:
        uri = shard.uri.removeprefix("file://")
        if "://" in uri:
            continue
        source = os.path.realpath(uri)
        if source == target or source.startswith(target + os.sep) or target.startswith(source + os.sep):
            raise OutputError(
                f"the output {str(output)!r} would lie over the input {shard.uri!r}; choose another with -o"
            )

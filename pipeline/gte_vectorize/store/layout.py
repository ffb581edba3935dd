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
    def spool(self) -> Path:
        """Where inputs that are not Parquet are kept, converted."""
        return self.state / "spool"

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
    layout = _layout(path)
    _refuse_inputs(layout, shards)
    return layout


def refuse_foreign(at: Layout, *, overwrite: bool) -> None:
    """OutputError where something that is not this run's stands at the final name."""
    output = at.output
    if not os.path.lexists(output):
        return
    if at.single and (output.is_dir() or not overwrite):
        advice = "choose another output" if output.is_dir() else "use --overwrite, or choose another output"
        raise OutputError(f"{str(output)!r} exists and is not what this run published; {advice}")
    if not at.single and (not output.is_dir() or any(path != at.state for path in output.iterdir())):
        raise OutputError(
            f"{str(output)!r} exists and is not an output of gte-vectorize; choose another output, or empty it"
        )


def _layout(path: Path) -> Layout:
    if path.suffix.lower() == ".parquet":
        state = path.with_name(f".{path.name}.state")
        return Layout(path, True, state, state / "parts", state / "manifest.json", path)
    state = path / "_gte_vectorize"
    return Layout(path, False, state, path, path / "_manifest.json", path / "_SUCCESS")


def _refuse_inputs(layout: Layout, shards: Iterable[Shard]) -> None:
    output, target, spool = layout.output, os.path.realpath(layout.output), os.path.realpath(layout.spool)
    for shard in shards:
        uri = shard.uri.removeprefix("file://")
        if "://" in uri:
            continue
        source = os.path.realpath(uri)
        if source.startswith(spool + os.sep):
            continue
        if source == target or source.startswith(target + os.sep) or target.startswith(source + os.sep):
            raise OutputError(
                f"the output {str(output)!r} would lie over the input {shard.uri!r}; choose another with -o"
            )

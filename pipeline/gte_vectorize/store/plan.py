"""The plan: the corpus cut into tasks, and everything else that decides the output's bytes. Frozen before any work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from gte_vectorize.batch import Shard, Task
from gte_vectorize.writer.schema import canonical_json

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will do. Two runs with equal plans make equal bytes, so either may continue the other.

    `fingerprint` hashes what changes the vectors and `fingerprint_fields` says the same in readable fields (model,
    revision, pooling, …); `schema` is the fingerprint of the output schema; `options` are the other choices that change
    bytes; `compute` names the kind of device and the versions of the libraries that compute and write.
    """

    fingerprint: str
    fingerprint_fields: Mapping[str, Any]
    shards: tuple[Shard, ...]
    tasks: tuple[Task, ...]
    schema: str
    options: Mapping[str, Any]
    compute: Mapping[str, Any]

    def to_json(self) -> bytes:
        """Equal plans give equal bytes."""
        positions = {shard.uri: position for position, shard in enumerate(self.shards)}
        plan = {
            "format": _FORMAT,
            "fingerprint": self.fingerprint,
            "fingerprint_fields": dict(self.fingerprint_fields),
            "shards": [[shard.uri, shard.size, shard.modified_ns, shard.row_groups] for shard in self.shards],
            "tasks": [[positions[task.shard.uri], task.first_row, task.num_rows] for task in self.tasks],
            "schema": self.schema,
            "options": dict(self.options),
            "compute": dict(self.compute),
        }
        return canonical_json(plan).encode()

    @cached_property
    def sha256(self) -> str:
        """The plan's name in records and manifests."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """ValueError: not a plan of this version."""
        try:
            plan = json.loads(data)
            if plan.pop("format") != _FORMAT:
                raise ValueError("written by another version")
            shards = tuple(
                Shard(uri, size, modified_ns, tuple(groups)) for uri, size, modified_ns, groups in plan.pop("shards")
            )
            tasks = tuple(
                Task(index, shards[position], first_row, num_rows)
                for index, (position, first_row, num_rows) in enumerate(plan.pop("tasks"))
            )
            return cls(shards=shards, tasks=tasks, **plan)
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError("damaged") from error


def make_tasks(shards: Iterable[Shard], *, task_rows: int = 65536, task_bytes: int | None = None) -> tuple[Task, ...]:
    """Tasks of at most `task_rows` rows, in row order, every row in exactly one; a pure function of the listing.

    With `task_bytes`, a shard's tasks have so few rows that each is about that many bytes of its file, at most.

    Whole row groups stay together where they fit; a larger group is split evenly. A shard without rows is one task of
    none: its part holds the schema.
    """
    tasks: list[Task] = []
    for shard in shards:
        first_row, most = 0, task_rows
        if task_bytes is not None:
            most = min(task_rows, max(1, task_bytes * shard.num_rows // max(1, shard.size)))
        for num_rows in _cut(shard.row_groups, most):
            tasks.append(Task(len(tasks), shard, first_row, num_rows))
            first_row += num_rows
    return tuple(tasks)


def _cut(row_groups: Iterable[int], task_rows: int) -> Iterator[int]:
    gathered, any_task = 0, False
    for rows in row_groups:
        if gathered and gathered + rows > task_rows:
            yield gathered
            gathered, any_task = 0, True
        if rows > task_rows:
            pieces = -(-rows // task_rows)
            yield from (rows * (piece + 1) // pieces - rows * piece // pieces for piece in range(pieces))
            any_task = True
        else:
            gathered += rows
    if gathered or not any_task:
        yield gathered


def differences(old: Plan, new: Plan) -> list[str]:
    """What keeps a run of `new` from continuing one of `old`, one plain line each. Empty where the plans are equal."""
    found = [
        line
        for before, now in (
            (old.fingerprint_fields, new.fingerprint_fields),
            (old.options, new.options),
            (old.compute, new.compute),
        )
        for line in changed_fields(before, now)
    ]
    if old.fingerprint != new.fingerprint and not found:
        found.append(f"fingerprint: was {old.fingerprint!r}, now {new.fingerprint!r}")
    found += _changed_shards(old.shards, new.shards)
    if not found and old.schema != new.schema:
        found.append("the output columns, their types or their description differ")
    if not found and old.to_json() != new.to_json():
        found.append("the corpus is cut into other tasks")
    return found


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """One line for each field that is not the same in both."""
    before, now = _plain(old), _plain(new)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield f"{name}: was {before.get(name)!r}, now {now.get(name)!r}"


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: a tuple and the list it was stored as are the same."""
    plain: dict[str, Any] = json.loads(canonical_json(dict(fields)))
    return plain


def _changed_shards(old: tuple[Shard, ...], new: tuple[Shard, ...]) -> Iterator[str]:
    before, now = ({shard.uri: shard for shard in shards} for shards in (old, new))
    yield from (f"input file {uri!r} is new" for uri in now if uri not in before)
    yield from (f"input file {uri!r} is gone" for uri in before if uri not in now)
    for uri, shard in now.items():
        if uri in before and before[uri] != shard:
            yield f"input file {uri!r} has changed (was {before[uri].size} bytes, now {shard.size} bytes)"
    if before == now and old != new:
        yield "the input files come in another order"

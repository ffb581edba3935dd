"""An earlier output, held against the plan of this run: would this run make the same vectors, bit for bit?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import closing

from gte_vectorize.errors import InputError, OutputError
from gte_vectorize.reader.listing import vectors_description
from gte_vectorize.reader.storage import is_remote, local_path, reading
from gte_vectorize.reuse.part import ADVICE, Footer, footer_of, open_part, reading_previous
from gte_vectorize.reuse.part import Previous as Previous
from gte_vectorize.store.layout import Layout, find_layout
from gte_vectorize.store.manifest import finished
from gte_vectorize.store.plan import Plan, changed_fields
from gte_vectorize.store.publish import Content

_WRITING = {"pyarrow"}
"""Of what a plan says of its libraries: those that decide how a file is laid out, and no vector."""


def find_previous(output: str, plan: Plan, layouts: Iterable[Layout]) -> Previous:
    """The output that an earlier run left in `output`, for a run of `plan` that writes to `layouts`.

    Its small files and all its footers are read. OutputError: it is no output of ours, not finished, this run's own,
    or its vectors might not be the same; the message names the fields that differ. InputError or TemporaryError: it
    cannot be read.
    """
    at = _find(output)
    if _place(at) in map(_place, layouts):
        raise OutputError(
            f"{output!r} is what this run writes, so it cannot be reused as well; write to another output"
        )
    with reading(output, "reading what its run wrote down"):
        old = _read_plan(output, at)
        _require_same_vectors(output, old, plan)
        contents = _finished_contents(output, at, old)
        canary = _read_canary(output, at)
    uris = [str(at.success.parent / name) for name in contents]
    footers = tuple(at.files.map(_read_footer, uris))
    for uri, footer, content in zip(uris, footers, contents.values(), strict=True):
        description = vectors_description({b"embeddings": footer.description}) or {}
        alike = footer._replace(groups=(), modified_ns=0) == footers[0]._replace(groups=(), modified_ns=0)
        if not alike or description.get("fingerprint") != plan.fingerprint or sum(footer.groups) != content.rows:
            raise OutputError(f"{uri!r} is not what the plan and the manifest of {output!r} say: {ADVICE}")
    return Previous(output, canary, tuple(uris), footers)


def _find(output: str) -> Layout:
    if output.lower().startswith("s3:/"):
        return find_layout(output, ())
    if is_remote(output):
        raise OutputError("--reuse reads outputs on local file systems and in s3://; copy it there, state and all")
    # The state lies beside what a link points to; and the link may point elsewhere before this run ends.
    return find_layout(os.path.realpath(local_path(output)), ())


def _place(layout: Layout) -> str:
    name = str(layout.output)
    return name if "://" in name else os.path.realpath(name)


def _read_plan(output: str, at: Layout) -> Plan:
    if not at.files.exists(at.plan):
        raise OutputError(
            f"{output!r} is not an output of gte-vectorize, or its state {str(at.state)!r} is gone; name what an "
            "earlier run has written, or run without --reuse"
        )
    try:
        return Plan.from_json(at.files.read(at.plan))
    except ValueError as error:
        raise OutputError(f"the plan of {output!r} cannot be read ({error}): {ADVICE}") from error


def _require_same_vectors(output: str, old: Plan, new: Plan) -> None:
    if old.fingerprint != new.fingerprint:
        lines = [*changed_fields(old.fingerprint_fields, new.fingerprint_fields)]
        raise OutputError(
            f"{output!r} holds other vectors than this run makes; reuse an output of the same model and settings, or "
            f"run without --reuse:{_listed(lines)}"
        )
    before, now = ({name: plan.compute[name] for name in plan.compute.keys() - _WRITING} for plan in (old, new))
    if lines := [*changed_fields(before, now)]:
        raise OutputError(
            f"{output!r} was computed elsewhere or by other libraries, so the bits of its vectors need not be those of "
            f"a full run; once without --reuse, and what that run writes can be reused from then on:{_listed(lines)}"
        )


def _finished_contents(output: str, at: Layout, plan: Plan) -> dict[str, Content]:
    """What the manifest says of each file, by name, in row order."""
    # With parts beside it, a single file may be the one that an unfinished run was about to replace.
    if not finished(at, plan, hashed=at.single and bool(at.files.names(at.parts))):
        raise OutputError(
            f"{output!r} is not finished, or its files are not those that were published; finish it with its own "
            f"command: {ADVICE}"
        )
    parts = json.loads(at.files.read(at.manifest))["parts"]
    return {part["name"]: Content(**part["content"]) for part in parts}


def _read_canary(output: str, at: Layout) -> str | None:
    if not at.files.exists(at.canary):
        return None
    try:
        return str(json.loads(at.files.read(at.canary))["answer"])
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{str(at.canary)!r} of the output {output!r} is damaged; run without --reuse") from error


def _read_footer(uri: str) -> Footer:
    with reading_previous(uri, "reading the Parquet footer", InputError):
        source, file, modified_ns = open_part(uri)
        with closing(source), closing(file):
            return footer_of(uri, file, modified_ns)


def _listed(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)

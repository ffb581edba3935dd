"""An output → the configuration of the run that made it: what its plan and its files' metadata say of the options."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from typing import Any

import pyarrow.parquet as pq

from gte_vectorize.batch import Shard
from gte_vectorize.check.verify import Verification, files_of
from gte_vectorize.config import Config
from gte_vectorize.errors import ModelError
from gte_vectorize.option import limit
from gte_vectorize.reader.convert import converted_from
from gte_vectorize.reader.listing import vectors_description
from gte_vectorize.store.layout import Layout
from gte_vectorize.store.plan import Plan
from gte_vectorize.writer.schema import schema_fingerprint

_GIVEN = "given by the caller"


def restore_config(found: Verification, model: str | None) -> Config | None:
    """The configuration, as far as it changes bytes; None where no file's metadata are left to say how it was chosen.

    `model` says where the model is now. Everything may fail that a finished run let pass, so that no limit stands in
    the way of the same rows. ModelError: the model was a directory, and `model` is None.
    """
    plan = found.plan
    description = _description(found, plan) if plan else None
    if plan is None or description is None:
        return None
    fields, options = plan.fingerprint_fields, plan.options
    if model is None and fields["revision"] is None:
        raise ModelError(
            f"the output was made with the model directory {fields['model']!r}; say where it is with --model"
        )
    return Config(
        inputs=tuple(_given_as(shard, found.layout) for shard in plan.shards),
        output=str(found.layout.output),
        model=model or fields["model"],
        revision=None if model else fields["revision"],
        text_column=options["text_column"],
        columns=tuple(options["columns"]),
        device=str(plan.compute["device"]).partition(" ")[0],
        dtype=fields["dtype"],
        batch_tokens=plan.compute.get("batch_tokens"),
        task_rows=options["task_rows"],
        max_bad_rows=limit("100%"),
        **_model_options(fields, description["sources"]),
        **_long_options(fields["long_documents"]),
    )


def _description(found: Verification, plan: Plan) -> dict[str, Any] | None:
    """What the files say of their vectors: of any whose metadata are whole, for the plan holds their hash."""
    for path, _ in files_of(found.layout, plan, found.finished):
        with suppress(Exception):  # a damaged footer takes pyarrow to no end of places
            schema = pq.read_schema(path)
            if schema_fingerprint(schema) == plan.schema:
                return vectors_description(schema.metadata)
    return None


def _model_options(fields: Any, sources: Any) -> dict[str, Any]:
    """Those that were given; where the model's folder spoke, it speaks again, and the metadata say so."""
    chosen: dict[str, Any] = {}
    if sources["pooling"] == _GIVEN:
        (chosen["pooling"],) = fields["pooling"]
    if sources["max_length"] == _GIVEN:
        chosen["max_length"] = fields["max_length"]
    if sources["prompt"] == _GIVEN:
        chosen["prompt"] = fields["prompt"]
    elif name := re.search(r"\(prompt (.*), named by the caller\)", sources["prompt"]):
        chosen["prompt_name"] = ast.literal_eval(name[1])
    return chosen


def _long_options(long_documents: Any) -> dict[str, Any]:
    """What the plan says of long documents; see `Windowing.description`."""
    if isinstance(long_documents, str):
        return {"long": long_documents}
    options = ("overlap", "splitter", "chunk_tokens")
    return {"long": long_documents["mode"]} | {name: long_documents[name] for name in options if name in long_documents}


def _given_as(shard: Shard, layout: Layout) -> str:
    """The input that the shard was made of: itself, unless it was converted into the spool."""
    in_spool = shard.uri.startswith(f"{layout.spool}/")
    return (converted_from(shard.uri) or shard.uri) if in_spool else shard.uri

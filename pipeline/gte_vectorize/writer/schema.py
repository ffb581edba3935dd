"""The output's columns, in order, and the one metadata key that says what the vectors are."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gte_vectorize.errors import OutputError

ADDED_COLUMNS = ("embedding", "n_tokens", "truncated", "status", "text_hash")


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, ASCII only, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def output_schema(columns: pa.Schema, *, dim: int, embeddings: Mapping[str, Any]) -> pa.Schema:
    """The pass-through `columns` as Parquet stores them, then the five columns that are added to every row.

    embedding  fixed_size_list<float32 not null>[dim]   null for a row without a vector
    n_tokens   int32                                    0 for a row that was not tokenized
    truncated  bool                                     whether the model's length limit cut the text
    status     string                                   a batch.Status, by name in lower case
    text_hash  string                                   32 hex digits of BLAKE2b-128, null for a null and a crash

    `embeddings` becomes the file's only metadata key. Metadata of the input (pandas, huggingface) describes other
    columns than these, so none is taken over. OutputError: a column has the name of an added one, or a type that
    Parquet cannot hold.
    """
    for name in columns.names:
        if name in ADDED_COLUMNS:
            raise OutputError(
                f"the input column {name!r} has the name of an output column; rename it, or leave it out with --columns"
            )
    vector = pa.list_(pa.field("element", pa.float32(), nullable=False), dim)
    types = (vector, pa.int32(), pa.bool_(), pa.string(), pa.string())
    fields = [*map(_stored, columns), *(pa.field(*added) for added in zip(ADDED_COLUMNS, types, strict=True))]
    return pa.schema(fields, metadata={"embeddings": canonical_json(embeddings)})


def schema_fingerprint(schema: pa.Schema) -> str:
    """SHA-256 of the columns, their types and the metadata."""
    return hashlib.sha256(schema.serialize().to_pybytes()).hexdigest()


def _stored(field: pa.Field) -> pa.Field:
    """The field with the type it has after a round trip, so that a part read back compares equal to the schema."""
    file = io.BytesIO()
    try:
        pq.write_table(pa.schema([field.remove_metadata()]).empty_table(), file)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise OutputError(
            f"column {field.name!r} has the type {field.type}, which Parquet cannot hold; leave it out with --columns"
        ) from error
    return pq.read_schema(file).field(0)

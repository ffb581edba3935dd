"""The output's columns, in order, and the one metadata key that says what the vectors are."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gte_vectorize.errors import OutputError

CHUNK_COLUMNS = ("chunk_index", "char_start", "char_end")
ADDED_COLUMNS = ("embedding", "n_tokens", "truncated", "status", "text_hash")


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, ASCII only, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def output_schema(columns: pa.Schema, *, dim: int, embeddings: Mapping[str, Any], chunked: bool = False) -> pa.Schema:
    """The pass-through `columns` as Parquet stores them, then the columns that are added to every row.

    embedding  fixed_size_list<float32 not null>[dim]   null for a row without a vector
    n_tokens   int32                                    0 for a row that was not tokenized
    truncated  bool                                     whether the model's length limit cut the text
    status     string                                   a batch.Status, by name in lower case
    text_hash  string                                   32 hex digits of BLAKE2b-128, null for a null and a crash

    and where a row is a window of a document (`chunked`), null where there is no usable text but for the first:

    chunk_index           int32   which of the document's windows, from 0
    char_start, char_end  int32   the characters of the text that it stands for

    `embeddings` becomes the file's only metadata key. Metadata of the input (pandas, huggingface) describes other
    columns than these, so none is taken over. OutputError: a column has the name of an added one, or a type that
    Parquet cannot hold.
    """
    vector = pa.list_(pa.field("element", pa.float32(), nullable=False), dim)
    types = (vector, pa.int32(), pa.bool_(), pa.string(), pa.string())
    added = [pa.field(name, kind) for name, kind in zip(ADDED_COLUMNS, types, strict=True)]
    if chunked:
        added += (pa.field(name, pa.int32()) for name in CHUNK_COLUMNS)
    for name in columns.names:
        if name in [field.name for field in added]:
            raise OutputError(
                f"the input column {name!r} has the name of an output column; rename it, or leave it out with --columns"
            )
    return pa.schema([*map(_stored, columns), *added], metadata={"embeddings": canonical_json(embeddings)})


def is_chunked(schema: pa.Schema) -> bool:
    """Whether the rows of an output are windows of documents. A column that was copied may have such a name too."""
    return tuple(schema.names[-len(CHUNK_COLUMNS) :]) == CHUNK_COLUMNS


def count_documents(rows: pa.Table | pa.RecordBatch) -> int:
    """How many rows of the input these rows of an output begin with."""
    if not is_chunked(rows.schema):
        return int(rows.num_rows)
    return int(pc.sum(pc.equal(rows["chunk_index"], 0)).as_py() or 0)


def added_columns(schema: pa.Schema) -> list[str]:
    """The columns of an output that are not copied: its last ones."""
    names: list[str] = schema.names
    return names[-len(ADDED_COLUMNS) - len(CHUNK_COLUMNS) * is_chunked(schema) :]


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

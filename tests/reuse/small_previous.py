"""Finished outputs whose every row, hash and row group a test decides, written as a run publishes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gte_vectorize.batch import Shard, Task
from gte_vectorize.reuse.part import Previous
from gte_vectorize.reuse.previous import find_previous
from gte_vectorize.store.layout import find_layout
from gte_vectorize.store.manifest import publish_file_manifest, publish_manifest
from gte_vectorize.store.plan import Plan
from gte_vectorize.store.publish import make_folder, publish_bytes, read_back
from gte_vectorize.writer.part import parquet_writer
from gte_vectorize.writer.schema import canonical_json, output_schema, schema_fingerprint

DIM = 8
FIELDS = {"model": "thenlper/gte-large-zh", "pooling": ["cls"], "max_length": 512}
COMPUTE = {"device": "cpu", "torch": "2.13.0"}
NAMES = ["old", "old.parquet"]


class Row(NamedTuple):
    """A row of an output; `key` is its text's hash."""

    key: bytes
    chunk: int = 0
    status: str = "ok"

    @property
    def n_tokens(self) -> int:
        return 3 + self.key[1] + self.chunk

    @property
    def truncated(self) -> bool:
        return self.key[2] < 128

    @property
    def places(self) -> tuple[int, int, int]:
        return self.chunk, 100 * self.chunk, 100 * self.chunk + 120

    def vector(self, dim: int = DIM) -> Any:
        return np.random.default_rng([*self.key, self.chunk]).standard_normal(dim, np.float32)


def key_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def document(text: str, *status: str) -> list[Row]:
    """The rows of a document, with the status of each; one that is ok if nothing is said."""
    return [Row(key_of(text), chunk, said) for chunk, said in enumerate(status or ["ok"])]


def hashes(keys: Iterable[bytes]) -> Any:
    """uint8[n, 16]"""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)


def make_schema(fields: dict[str, Any] = FIELDS, *, chunked: bool = False, dim: int = DIM) -> pa.Schema:
    embeddings = {**fields, "producer": "gte-vectorize", "fingerprint": _fingerprint(fields)}
    return output_schema(pa.schema([("id", pa.int64())]), dim=dim, embeddings=embeddings, chunked=chunked)


def make_plan(
    documents: Sequence[int] = (1,),
    *,
    fields: dict[str, Any] = FIELDS,
    compute: dict[str, Any] = COMPUTE,
    schema: pa.Schema | None = None,
) -> Plan:
    """A plan with a shard and a task for each number of documents."""
    shards = tuple(Shard(f"/corpus/{at}.parquet", 1000, 1, (count,)) for at, count in enumerate(documents))
    return Plan(
        fingerprint=_fingerprint(fields),
        fingerprint_fields=fields,
        shards=shards,
        tasks=tuple(Task(at, shard, 0, shard.num_rows) for at, shard in enumerate(shards)),
        schema=schema_fingerprint(schema or make_schema(fields)),
        options={},
        compute=compute,
    )


def write_output(
    output: str | Path,
    parts: Sequence[Sequence[Row]],
    *,
    group_rows: int = 4,
    chunked: bool = False,
    fields: dict[str, Any] = FIELDS,
    compute: dict[str, Any] = COMPUTE,
) -> Plan:
    """A finished output of these rows; in a single file, the parts follow one another."""
    tables = [table_of(rows, make_schema(fields, chunked=chunked)) for rows in parts]
    return write_tables(output, tables, group_rows=group_rows, fields=fields, compute=compute)


def write_tables(
    output: str | Path,
    tables: Sequence[pa.Table],
    *,
    group_rows: int,
    fields: dict[str, Any] = FIELDS,
    compute: dict[str, Any] = COMPUTE,
) -> Plan:
    layout, schema = find_layout(output, ()), tables[0].schema
    documents = [_documents(table) for table in tables]
    plan = make_plan(documents, fields=fields, compute=compute, schema=schema)
    make_folder(layout.state)
    make_folder(layout.output.parent if layout.single else layout.parts)
    publish_bytes(plan.to_json(), layout.plan, layout.tmp)
    publish_bytes(canonical_json({"answer": "a" * 64}).encode(), layout.canary, layout.tmp)
    if layout.single:
        tables, documents = [pa.concat_tables(tables)], [sum(documents)]
    contents = {}
    for at, (table, count) in enumerate(zip(tables, documents, strict=True)):
        path = layout.output if layout.single else layout.part(at)
        with path.open("xb") as file, parquet_writer(file, schema) as writer:
            if table.num_rows:
                writer.write_table(table.combine_chunks(), row_group_size=group_rows)
        contents[at] = read_back(path, schema, count)
    if layout.single:
        publish_file_manifest(layout, plan, contents[0])
    else:
        publish_manifest(layout, plan, contents)
    layout.tmp.rmdir()
    return plan


def table_of(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    ok = [row.status == "ok" for row in rows]
    dim = schema.field("embedding").type.list_size
    columns: dict[str, Any] = {
        "id": list(range(len(rows))),
        "embedding": [row.vector(dim).tolist() if fine else None for row, fine in zip(rows, ok, strict=True)],
        "n_tokens": [row.n_tokens * fine for row, fine in zip(rows, ok, strict=True)],
        "truncated": [row.truncated for row in rows],
        "status": [row.status for row in rows],
        "text_hash": [None if row.status == "null" else row.key.hex() for row in rows],
    }
    if "chunk_index" in schema.names:
        places = [row.places for row in rows]
        columns["chunk_index"] = [index for index, _, _ in places]
        for name, at in (("char_start", 1), ("char_end", 2)):
            columns[name] = [place[at] if fine else None for place, fine in zip(places, ok, strict=True)]
    return pa.table(columns, schema=schema)


def plan_of(output: str | Path) -> Plan:
    """The plan that a local output was made by."""
    return Plan.from_json(find_layout(output, ()).plan.read_bytes())


def found(output: str | Path, plan: Plan) -> Previous:
    """`output`, as a run of the same plan finds it."""
    return find_previous(str(output), plan, [find_layout("/nowhere/new", ())])


def _documents(table: pa.Table) -> int:
    if "chunk_index" not in table.schema.names:
        return int(table.num_rows)
    return sum(index == 0 for index in table["chunk_index"].to_pylist())


def _fingerprint(fields: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(fields).encode()).hexdigest()

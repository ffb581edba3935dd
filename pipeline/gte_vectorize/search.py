"""The nearest documents to a query, to see that the vectors make sense. Exact, in bounded memory, not an index."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gte_vectorize.batch import Float32, Passages, Shard, Status, Task, Window
from gte_vectorize.encoder.encoder import open_encoder, resolve_device, resolve_dtype
from gte_vectorize.errors import InputError, ModelError
from gte_vectorize.model.spec import ModelSpec, load_model
from gte_vectorize.tokens.batcher import token_batches
from gte_vectorize.tokens.passages import read_passages
from gte_vectorize.tokens.tokenizer import TextTokenizer
from gte_vectorize.writer.scatter import encoded_windows
from gte_vectorize.writer.schema import ADDED_COLUMNS

SHOWN_CHARACTERS = 60
BATCH_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Hit:
    """A document near a query: its row in the whole output, its other columns, and the cosine."""

    row: int
    cosine: float
    columns: dict[str, Any]

    def line(self) -> str:
        shown = (" ".join(str(value).split())[:SHOWN_CHARACTERS] for value in self.columns.values())
        return f"  {self.cosine:.3f}  " + "  ".join(shown)

    def to_dict(self, query: str) -> dict[str, Any]:
        return {"query": query, "row": self.row, "cosine": round(self.cosine, 6), "columns": self.columns}


def search(
    output: Path, queries: Sequence[str], *, top: int, model: str | None, prompt: str | None, device: str
) -> Iterator[tuple[str, list[Hit]]]:
    """For each query the `top` documents by cosine, best first.

    `model` says where the model is that made the output, `prompt` replaces its query prompt. Raises InputError for a
    file without our vectors, ModelError for another model than the output's.
    """
    parts = _parts(output)
    description = _description(parts[0])
    spec = _load_model(description, model)
    vectors = _encode(spec, queries, spec.query_prompt if prompt is None else prompt, device)
    best: list[list[tuple[float, int, dict[str, Any]]]] = [[] for _ in queries]
    for first_row, table, documents in _documents(parts):
        scores = vectors @ documents.T
        for heap, row_scores in zip(best, scores, strict=True):
            for index in np.argsort(-row_scores, kind="stable")[:top]:
                entry = (float(row_scores[index]), -(first_row + int(index)), table, int(index))
                if len(heap) < top or entry[:2] > heap[0][:2]:
                    row = table.slice(entry[3], 1).to_pylist()[0]
                    (heapq.heappush if len(heap) < top else heapq.heappushpop)(heap, (entry[0], entry[1], row))
    for query, heap in zip(queries, best, strict=True):
        yield query, [Hit(-row, score, columns) for score, row, columns in sorted(heap, key=lambda hit: hit[:2])[::-1]]


def _parts(output: Path) -> list[Path]:
    parts = [output] if output.is_file() else sorted(output.glob("part-*.parquet"))
    if not parts:
        raise InputError(f"{str(output)!r} holds no part-*.parquet")
    return parts


def _description(part: Path) -> dict[str, Any]:
    try:
        metadata = pq.read_schema(part).metadata or {}
        description: dict[str, Any] = json.loads(metadata[b"embeddings"])
    except (KeyError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{part.name!r} was not written by gte-vectorize") from error
    return description


def _load_model(description: dict[str, Any], model: str | None) -> ModelSpec:
    try:
        spec = load_model(model or description["model"], revision=None if model else description["revision"])
    except ModelError as error:
        if model:
            raise
        raise ModelError(f"the output's model {description['model']!r}: {error}; say where it is with --model") from error
    if spec.weights_sha256 != description["weights_sha256"]:
        raise ModelError(f"the output was made with {description['model']!r}; {spec.name!r} has other weights")
    return replace(spec, pooling=tuple(description["pooling"]))


def _encode(spec: ModelSpec, queries: Sequence[str], prompt: str, device: str) -> Float32:
    """The queries' vectors, through the same tokenizer and encoder as the documents."""
    device = resolve_device(device)
    window = Window(Task(0, Shard("queries", 0, 0, (len(queries),)), 0, len(queries)), 0, len(queries))
    tokenizer = TextTokenizer(replace(spec.tokenizer, prompt=prompt))
    passages: Passages = read_passages(window, [pa.record_batch({"text": list(queries)})], tokenizer)
    for query, status in zip(queries, passages.status, strict=True):
        if status != Status.OK:
            raise InputError(f"the query of {len(query)} characters has no usable text")
    with open_encoder(spec, device=device, dtype=resolve_dtype("auto", device), graphs=False) as encoder:
        batches = token_batches(
            [passages], layout=encoder.layout, budget=encoder.budget, max_rows=encoder.max_rows
        )
        (encoded,) = encoded_windows(encoder.stream(batches), encoder.dim)
    return encoded.vectors


def _documents(parts: Sequence[Path]) -> Iterator[tuple[int, pa.Table, Float32]]:
    """Batch by batch: the number of its first row, the columns to show, and the vectors; rows without one score 0."""
    first_row = 0
    for part in parts:
        with pq.ParquetFile(part, page_checksum_verification=True) as file:
            shown = [name for name in file.schema_arrow.names if name not in ADDED_COLUMNS]
            dim = file.schema_arrow.field("embedding").type.list_size
            for batch in file.iter_batches(BATCH_ROWS, columns=[*shown, "embedding"]):
                embedding = batch.column("embedding")
                vectors = np.zeros((len(embedding), dim), np.float32)
                vectors[embedding.is_valid().to_numpy(zero_copy_only=False)] = (
                    embedding.flatten().to_numpy().reshape(-1, dim)
                )
                yield first_row, pa.Table.from_batches([batch]).select(shown), vectors
                first_row += len(embedding)

"""The nearest documents to a query, to see that the vectors make sense. Exact, in bounded memory, not an index."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gte_vectorize.batch import Float32, Shard, Status, Task, Window
from gte_vectorize.encoder.encoder import batches_for, open_encoder, resolve_device, resolve_dtype
from gte_vectorize.errors import InputError, ModelError
from gte_vectorize.model.spec import ModelSpec, load_model
from gte_vectorize.reader.listing import vectors_description
from gte_vectorize.reader.rows import RowCursor
from gte_vectorize.reader.storage import reading
from gte_vectorize.tokens.passages import read_passages
from gte_vectorize.tokens.tokenizer import TextTokenizer
from gte_vectorize.writer.schema import CHUNK_COLUMNS, added_columns, is_chunked

SHOWN_CHARACTERS = 60
BATCH_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Hit:
    """A document near a query: its row in the whole output, the cosine, its columns of the input, and where it is a
    window of one, also `window`: chunk_index, char_start and char_end.
    """

    row: int
    cosine: float
    columns: dict[str, Any]
    window: dict[str, int]

    def line(self) -> str:
        number = f"  #{self.window['chunk_index']}" if self.window else ""
        shown = (" ".join(str(value).split())[:SHOWN_CHARACTERS] for value in self.columns.values())
        # A document could hold a terminal's control sequences.
        plain = "".join(char if char.isprintable() else "?" for char in "  ".join(shown))
        return f"  {self.cosine:.3f}{number}  {plain}"

    def to_dict(self, query: str) -> dict[str, Any]:
        return {
            "query": query,
            "row": self.row,
            "cosine": round(self.cosine, 6),
            **self.window,
            "columns": self.columns,
        }


class _Place(NamedTuple):
    """A row that may become a hit. Of two, the better one is the larger: by cosine, then by the earlier row."""

    cosine: float
    minus_row: int
    part: Path
    row_in_part: int


def search(
    output: Path, queries: Sequence[str], *, top: int, model: str | None, prompt: str | None, device: str
) -> Iterator[tuple[str, list[Hit]]]:
    """For each query the `top` documents by cosine, best first; equal ones in row order. Rows without a vector are
    never among them.

    `model` says where the model is that made the output, `prompt` replaces its query prompt. Raises InputError for a
    file without our vectors or a query without text, ModelError for another model than the output's.
    """
    parts = _parts(output)
    description = _description(parts[0])
    spec = _load_model(description, model)
    vectors = _encode(spec, queries, spec.query_prompt if prompt is None else prompt, device)
    best: list[list[_Place]] = [[] for _ in queries]
    for part, first_row, rows, documents in _documents(parts):
        # Unlike a matrix product, this gives equal documents equal scores wherever they stand.
        for heap, scores in zip(best, np.einsum("qd,nd->qn", vectors, documents), strict=True):
            for index in np.argsort(-scores, kind="stable")[:top].tolist():
                place = _Place(float(scores[index]), -first_row - rows[index], part, rows[index])
                (heapq.heappush if len(heap) < top else heapq.heappushpop)(heap, place)
    for query, heap in zip(queries, best, strict=True):
        columns = _columns(heap)
        yield query, [Hit(-place.minus_row, place.cosine, *columns[place]) for place in sorted(heap, reverse=True)]


def _parts(output: Path) -> list[Path]:
    parts = [output] if output.is_file() else sorted(output.glob("part-*.parquet"))
    if not parts:
        raise InputError(f"{str(output)!r} holds no part-*.parquet; give a file or a folder that a run has written")
    return parts


def _description(part: Path) -> dict[str, Any]:
    with reading(str(part)):
        description = vectors_description(pq.read_schema(part).metadata)
    if description is None:
        raise InputError(
            f"{part.name!r} was not written by gte-vectorize; give a file or a folder that a run has written"
        )
    return description


def _load_model(description: dict[str, Any], model: str | None) -> ModelSpec:
    made_with, pooling = description["model"], description["pooling"]
    if model is None and description["revision"] is None:
        raise ModelError(f"the output was made with the model directory {made_with!r}; say where it is with --model")
    try:
        spec = load_model(
            model or made_with,
            revision=None if model else description["revision"],
            pooling=pooling[0] if len(pooling) == 1 else None,
            max_length=description["max_tokens"],
            prompt=description["prompt"],
        )
    except ModelError as error:
        raise ModelError(
            f"the output was made with {made_with!r}, and {model or made_with!r} cannot be run like it: {error}"
        ) from error
    for file, found in (("weights", spec.weights_sha256), ("tokenizer", spec.tokenizer.sha256)):
        if found != description[f"{file}_sha256"]:
            raise ModelError(
                f"the output was made with {made_with!r}, and {spec.name!r} has another {file} file; "
                "say where the right model is with --model"
            )
    return spec


def _encode(spec: ModelSpec, queries: Sequence[str], prompt: str, device: str) -> Float32:
    """The queries' vectors, through the same tokenizer and encoder as the documents."""
    device = resolve_device(device)
    window = Window(Task(0, Shard("queries", 0, 0, (len(queries),)), 0, len(queries)), 0, len(queries))
    tokenizer = TextTokenizer(replace(spec.tokenizer, prompt=prompt))
    column = pa.array([query.encode(errors="surrogateescape") for query in queries], pa.binary())
    passages = read_passages(window, [pa.record_batch({"text": column})], tokenizer)
    for number, status in enumerate(passages.status, start=1):
        if status != Status.OK:
            raise InputError(f"query {number} has no usable text ({Status(status).name.lower()}); give it some words")
    with open_encoder(spec, device=device, dtype=resolve_dtype("auto", device), graphs=False) as encoder:
        (encoded,) = encoder.stream(batches_for(encoder, [passages]))
    return encoded.vectors


def _documents(parts: Sequence[Path]) -> Iterator[tuple[Path, int, list[int], Float32]]:
    """Batch by batch the rows that have a vector: the part and its first row in the output, the rows within the part,
    the vectors. No other column is read: a document may be a book.
    """
    first_row = 0
    for part in parts:
        start = 0
        with reading(str(part)), pq.ParquetFile(part, page_checksum_verification=True) as file:
            dim = file.schema_arrow.field("embedding").type.list_size
            for batch in file.iter_batches(BATCH_ROWS, columns=["embedding"]):
                column = batch.column("embedding")
                rows = start + np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
                start += len(batch)
                yield part, first_row, rows.tolist(), column.drop_null().flatten().to_numpy().reshape(-1, dim)
        first_row += start


def _columns(places: Iterable[_Place]) -> dict[_Place, tuple[dict[str, Any], dict[str, Any]]]:
    """The columns of the input, and of windows theirs, to show of each place, read a few rows at a time."""
    shown = {}
    for part, of_part in groupby(sorted(places, key=lambda place: -place.minus_row), key=lambda place: place.part):
        with reading(str(part)):
            schema = pq.read_schema(part)
        ours = added_columns(schema)
        copied = [name for name in schema.names if name not in ours]
        window = CHUNK_COLUMNS if is_chunked(schema) else ()
        with RowCursor(str(part), [*copied, *window]) as cursor:
            for place in of_part:
                (batch,) = cursor.read(place.row_in_part, 1)
                values = {name: _value(batch.column(name)[0]) for name in batch.schema.names}
                shown[place] = {name: values[name] for name in copied}, {name: values[name] for name in window}
    return shown


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except ValueError:  # a text that is not UTF-8, a time finer than Python's
        return "?"

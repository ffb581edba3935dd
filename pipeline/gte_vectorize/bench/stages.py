"""Each stage of the pipeline alone, so that one sees which one limits it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from gte_vectorize.batch import EncodedWindow, Float32, Passages, Window
from gte_vectorize.bench.corpus import BenchCorpus
from gte_vectorize.bench.gpu import Card, Timed, copy_rate, sustained
from gte_vectorize.bench.ours import EncoderRate
from gte_vectorize.model.spec import ModelSpec
from gte_vectorize.reader.rows import RowCursor
from gte_vectorize.store.publish import publish, read_back
from gte_vectorize.tokens.pieces import pieces_of
from gte_vectorize.tokens.workers import TokenWorkers
from gte_vectorize.writer.part import PartWriter
from gte_vectorize.writer.schema import output_schema


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    tokens_per_second: float


def measure_stages(
    spec: ModelSpec,
    corpus: BenchCorpus,
    card: Card,
    *,
    seconds: float,
    encoder: EncoderRate,
    window_rows: int,
    workers: int,
    folder: Path,
) -> Iterator[Stage]:
    """The stages in the pipeline's order; the encoder was measured before."""
    windows = list(pieces_of(corpus.tasks, window_rows))
    yield Stage("read", _read(windows, corpus.tokens, workers, seconds, card).rate)
    yield Stage("tokenize", _tokenize(spec, windows, corpus.tokens, workers, seconds, card).rate)
    if card.on_gpu:
        copied = copy_rate(encoder.batch_input_bytes, encoder.batch_tokens, seconds / 4, card, to_gpu=True)
        yield Stage("copy-in", copied.rate)
    yield Stage("encode", encoder.timed.rate)
    if card.on_gpu:
        copied = copy_rate(encoder.batch_output_bytes, encoder.batch_tokens, seconds / 4, card, to_gpu=False)
        yield Stage("copy-out", copied.rate)
    yield Stage("write", _write(spec, corpus, seconds, card, folder).rate)


def _read(windows: list[Window], tokens: int, workers: int, seconds: float, card: Card) -> Timed:
    """The text column of every window, in as many threads as there are workers."""

    def read(window: Window) -> int:
        with RowCursor(window.task.shard.uri, ["text"]) as cursor:
            return sum(batch.num_rows for batch in cursor.read(window.first_row, window.num_rows))

    with ThreadPoolExecutor(workers) as pool:

        def work() -> int:
            sum(pool.map(read, windows))
            return tokens

        return sustained(work, seconds, card)


def _tokenize(spec: ModelSpec, windows: list[Window], tokens: int, workers: int, seconds: float, card: Card) -> Timed:
    """Every window by all workers, which read what they tokenize."""
    with TokenWorkers(workers, spec.tokenizer, "text") as pool:

        def work() -> int:
            for _ in pool.stream(windows):
                pass
            return tokens

        return sustained(work, seconds, card)


def _write(spec: ModelSpec, corpus: BenchCorpus, seconds: float, card: Card, folder: Path) -> Timed:
    """The first task's windows with vectors: written as a part, read back, and published."""
    task = corpus.tasks[0]
    mine = [passages for passages in corpus.windows if passages.window.task.index == task.index]
    ready = [EncodedWindow(passages, _random_vectors(passages, spec.dim), passages.status) for passages in mine]
    schema = output_schema(pa.schema([]), dim=spec.dim, embeddings={})
    tokens = sum(len(passages.ids) for passages in mine)

    def work() -> int:
        with TemporaryDirectory(dir=folder) as scratch:
            part = Path(scratch) / "part"
            with PartWriter(part, schema, task) as writer:
                for window in ready:
                    writer.write(window)
            read_back(part, schema, task.num_rows)
            publish(part, Path(scratch) / "part.parquet")
        return tokens

    return sustained(work, seconds, card)


def _random_vectors(passages: Passages, dim: int) -> Float32:
    """As many vectors of length 1 as the window has rows, float32[rows, dim]; zeros for a row without tokens."""
    vectors: Float32 = np.random.default_rng(0).standard_normal((len(passages.lengths), dim), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[passages.lengths == 0] = 0
    return vectors

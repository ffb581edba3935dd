"""The ladder: the steps that make an encoder fast, one upon the other, on the same texts.

Rungs 1 to 5 are what a script does with transformers, 6 to 8 are ours. Every rung but the last goes from token ids in
host memory to vectors in host memory; the last from Parquet to Parquet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from gte_vectorize.batch import Passages
from gte_vectorize.bench.corpus import QUERIES, BenchCorpus, short_queries
from gte_vectorize.bench.gpu import Card, Latency, latency, sustained
from gte_vectorize.bench.ours import EncoderRate, PipelineRate, measure_encoder
from gte_vectorize.bench.padded import Rows, by_length, encode_rows, in_order, open_padded
from gte_vectorize.bench.tensorrt_engine import open_engine
from gte_vectorize.encoder.forward import PaddedForward
from gte_vectorize.errors import ModelError, TemporaryError
from gte_vectorize.model.spec import ModelSpec

ROWS = 16
BUDGET = {"cuda": 32768, "cpu": 1024}
NEEDS_GPU = "needs a GPU"
BASELINE = "1b"

_CPU_LIMIT = 2048
"""Tokens of the longest passage whose attention scores, 16 rows at once, a CPU's memory is sure to hold."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A row of the ladder. `note` says why there are no figures; the pipeline answers no single query.

    `repeats` is how many calls the percentiles are of.
    """

    rung: str
    name: str
    tokens_per_second: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    repeats: int = 0
    memory_gib: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Step:
    """A rung of transformers. `padding` is `limit`, `longest` (of the batch) or `sorted` (under a token budget)."""

    rung: str
    name: str
    attention: str
    dtype: str
    padding: str


STEPS = (
    _Step("1", "fp32, eager attention, batches of 16 padded to the limit", "eager", "fp32", "limit"),
    _Step(BASELINE, "the same padded to the longest of the batch: the baseline", "eager", "fp32", "longest"),
    _Step("2", "1 with SDPA", "sdpa", "fp32", "limit"),
    _Step("3", "2 in fp16", "sdpa", "fp16", "limit"),
    _Step("4", "3 with dynamic padding, to the longest of the batch", "sdpa", "fp16", "longest"),
    _Step("5", "4 sorted by length, under a token budget", "sdpa", "fp16", "sorted"),
)


def climb(
    spec: ModelSpec,
    corpus: BenchCorpus,
    card: Card,
    *,
    dtype: str,
    seconds: float,
    encoder: EncoderRate,
    pipeline: PipelineRate,
) -> Iterator[Rung]:
    """Every rung in order; those of our own encoder and pipeline were measured before."""
    for step in STEPS:
        yield _transformers(step, spec, corpus, card, seconds)
    yield _graphs(spec, corpus, card, seconds, encoder.timed.rate)
    packed = "packed and fused" if card.on_gpu else "packed, a batch for each core"
    name = f"{packed if spec.layout == 'packed' else 'padded, as it runs'}, {dtype}"
    yield _figures("7", name, encoder.timed.rate, encoder.queries, encoder.memory_gib)
    yield Rung("8", "pipeline, Parquet → Parquet", pipeline.timed.rate, memory_gib=pipeline.memory_gib)
    yield _tensorrt(spec, corpus, card, seconds)


def _transformers(step: _Step, spec: ModelSpec, corpus: BenchCorpus, card: Card, seconds: float) -> Rung:
    if not card.on_gpu and step.rung == "3":
        return Rung(step.rung, step.name, note=NEEDS_GPU)
    if not card.on_gpu:
        step = replace(step, dtype="fp32", name=step.name.replace("3 with", "2 with"))
    limit = spec.tokenizer.max_length
    if not card.on_gpu and limit > _CPU_LIMIT:
        return Rung(step.rung, step.name, note=f"not on a CPU: a limit of {limit} tokens, and {_CPU_LIMIT} at most")
    card.fresh()
    try:
        forward = open_padded(spec, attention=step.attention, dtype=step.dtype, device=card.device)
        return _padded(step, forward, limit, corpus, card, seconds)
    except (ValueError, ModelError, MemoryError, RuntimeError) as error:
        return Rung(step.rung, step.name, note=reason(error))


def _padded(step: _Step, forward: PaddedForward, limit: int, corpus: BenchCorpus, card: Card, seconds: float) -> Rung:
    width = limit if step.padding == "limit" else None
    batches = cycle(_batches(step.padding, corpus.windows, width, card))

    def work() -> int:
        rows = next(batches)
        encode_rows(forward, rows, card.device)
        return len(rows.ids)

    timed = sustained(work, seconds, card)
    (queries,) = in_order([short_queries(corpus.windows)], QUERIES, width)
    answered = latency(lambda: encode_rows(forward, queries, card.device), seconds)
    return _figures(step.rung, step.name, timed.rate, answered, card.peak_gib())


def _batches(padding: str, windows: Sequence[Passages], width: int | None, card: Card) -> list[Rows]:
    if padding == "sorted":
        return by_length(windows, BUDGET[card.device])
    return list(islice(in_order(windows, ROWS, width), 4096))


def _graphs(spec: ModelSpec, corpus: BenchCorpus, card: Card, seconds: float, expected_rate: float) -> Rung:
    rung, name = "6", "5 with CUDA Graphs and overlapped copies"
    if not card.on_gpu:
        return Rung(rung, name, note=NEEDS_GPU)
    padded = replace(spec, layout="padded")
    try:
        found = measure_encoder(padded, corpus, card, dtype="fp16", seconds=seconds, expected_rate=expected_rate / 2)
    except (ModelError, TemporaryError, RuntimeError) as error:
        return Rung(rung, name, note=reason(error))
    return _figures(rung, name, found.timed.rate, found.queries, found.memory_gib)


def _tensorrt(spec: ModelSpec, corpus: BenchCorpus, card: Card, seconds: float) -> Rung:
    step = _Step(
        "TensorRT", "TensorRT fp16, batches of 16 padded to the longest of the batch", "sdpa", "fp16", "longest"
    )
    if not card.on_gpu:
        return Rung(step.rung, step.name, note=NEEDS_GPU)
    card.fresh()
    try:
        engine = open_engine(spec, rows=ROWS)
        return _padded(step, engine, spec.tokenizer.max_length, corpus, card, seconds)
    except ImportError:
        return Rung(step.rung, step.name, note="not installed")
    except Exception as error:  # an optional peer: whatever ends it is what there is to say of it
        return Rung(step.rung, step.name, note=f"failed: {reason(error)}")


def _figures(rung: str, name: str, rate: float, queries: Latency, memory: float | None) -> Rung:
    return Rung(rung, name, rate, queries.p50_ms, queries.p99_ms, queries.repeats, memory)


def reason(error: BaseException) -> str:
    """The first line of what an error says, at most 200 characters of it."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"

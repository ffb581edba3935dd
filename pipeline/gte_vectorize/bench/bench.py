"""Read this first: throughput of this machine with one model, on one set of texts.

Texts, the user's or made → one Parquet file and its tokens → our encoder and our pipeline → the ladder of steps that
lead there, the pipeline's stages alone, and the peers. Everything reads the same rows, and rates count real tokens:
padding is work, not throughput.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np

from gte_vectorize.bench.corpus import MADE_TEXTS, BenchCorpus, input_texts, made_texts, write_corpus
from gte_vectorize.bench.gpu import Card, ceiling
from gte_vectorize.bench.ladder import Rung, climb
from gte_vectorize.bench.ours import EncoderRate, PipelineRate, measure_encoder, measure_pipeline, probe
from gte_vectorize.bench.peers import Peer, measure_peers
from gte_vectorize.bench.shape import read_shape
from gte_vectorize.bench.stages import Stage, measure_stages
from gte_vectorize.config import Config
from gte_vectorize.encoder.encoder import resolve_device, resolve_dtype
from gte_vectorize.job import worker_count
from gte_vectorize.model.spec import ModelSpec, load_model

MOST_TOKENS = 40_000_000
"""Of the corpus: 160 MB of ids."""

PIPELINE_SECONDS = 8
"""Times `seconds`: a steady state of several windows."""

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The texts in figures. `distinct` of the `rows` come from the source, the others are turned copies of them."""

    source: str
    rows: int
    distinct: int
    tokens: int
    median_tokens: float
    longest_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`tflops` and `ceiling_tokens_per_second` are None where the layers' shape or a GPU is missing."""

    model: str
    device: str
    dtype: str
    seconds: float
    workers: int
    corpus: Corpus
    encoder: EncoderRate
    pipeline: PipelineRate
    energy_note: str
    tflops: float | None
    ceiling_tokens_per_second: float | None
    ladder: tuple[Rung, ...]
    peers: tuple[Peer, ...]
    stages: tuple[Stage, ...]

    @property
    def limit(self) -> Stage:
        """The slowest stage."""
        return min(self.stages, key=lambda stage: stage.tokens_per_second)


def bench(
    inputs: Sequence[str],
    *,
    model: str,
    text_column: str = "text",
    device: str = "auto",
    seconds: float = 3.0,
    peers: bool = True,
    ladder: bool = True,
    trace: Path | None = None,
) -> Result:
    """Measure; `seconds` per figure. Without inputs, texts are made from the model's own vocabulary.

    Raises Refused for a model, a device or inputs that cannot be used, TemporaryError where the GPU is full or lost.
    """
    device = resolve_device(device)
    spec = load_model(model)
    texts = input_texts(inputs, text_column) if inputs else made_texts(spec, MADE_TEXTS)
    source = "of the inputs" if inputs else "made from the model's vocabulary"
    return measure(
        spec, texts, model=model, source=source, device=device, seconds=seconds, peers=peers, ladder=ladder, trace=trace
    )


def measure(
    spec: ModelSpec,
    texts: Sequence[str],
    *,
    model: str,
    source: str,
    device: str,
    seconds: float,
    peers: bool = True,
    ladder: bool = True,
    stages: bool = True,
    trace: Path | None = None,
) -> Result:
    """`bench` on these texts, with the model of that name or folder. What is not asked for is left empty."""
    dtype = resolve_dtype("auto", device)
    workers = worker_count(Config(inputs=("texts",)), device)
    with Card(device) as card, TemporaryDirectory(prefix="gte-vectorize-bench-") as name:
        folder = Path(name)
        rate, window_rows = probe(spec, texts, device=device, dtype=dtype)
        tokens = min(MOST_TOKENS, int(PIPELINE_SECONDS * seconds * rate))
        corpus = write_corpus(texts, tokens, spec, folder, window_rows=window_rows, workers=workers, source=source)
        log.info("%d tokens, on %s in %s: the encoder and the pipeline", corpus.tokens, device, dtype)
        encoder = measure_encoder(spec, corpus, card, dtype=dtype, seconds=seconds, expected_rate=rate, trace=trace)
        pipeline = measure_pipeline(corpus, card, model=model, output=folder / "vectors")
        alone = measure_stages(
            spec,
            corpus,
            card,
            seconds=seconds,
            encoder=encoder,
            window_rows=window_rows,
            workers=workers,
            folder=folder,
        )
        rungs = climb(spec, corpus, card, dtype=dtype, seconds=seconds, encoder=encoder, pipeline=pipeline)
        tflops, products = _arithmetic(spec, corpus, card, encoder, seconds) if stages else (None, None)
        return Result(
            model=spec.name,
            device=device,
            dtype=dtype,
            seconds=seconds,
            workers=workers,
            corpus=_figures(corpus),
            encoder=encoder,
            pipeline=pipeline,
            energy_note=card.energy_note,
            tflops=tflops,
            ceiling_tokens_per_second=products,
            stages=_taken("the stages", alone, stages),
            ladder=_taken("the ladder", rungs, ladder),
            peers=_taken("the peers", measure_peers(spec, corpus, card, seconds=seconds), peers),
        )


def _taken(what: str, figures: Iterator[T], wanted: bool) -> tuple[T, ...]:
    """The figures, measured here and now, if they are wanted."""
    if not wanted:
        return ()
    log.info("%s", what)
    return tuple(figures)


def _arithmetic(
    spec: ModelSpec, corpus: BenchCorpus, card: Card, encoder: EncoderRate, seconds: float
) -> tuple[float | None, float | None]:
    """TFLOP/s of the encoder, and the tokens per second of the matrix products alone on a GPU."""
    shape = read_shape(spec)
    if shape is None:
        return None, None
    card.fresh()
    tflops = shape.flops(corpus.lengths) / corpus.tokens * encoder.timed.rate / 1e12
    return tflops, ceiling(shape, seconds, card).rate if card.on_gpu else None


def _figures(corpus: BenchCorpus) -> Corpus:
    lengths = corpus.lengths
    return Corpus(
        source=corpus.source,
        rows=len(lengths),
        distinct=corpus.distinct,
        tokens=corpus.tokens,
        median_tokens=float(np.median(lengths)),
        longest_tokens=int(lengths.max()),
    )

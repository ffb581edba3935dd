"""Our own encoder, ids → vectors, and our whole pipeline, Parquet → Parquet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gte_vectorize.batch import Passages, TokenBatch
from gte_vectorize.bench.corpus import BenchCorpus, as_passages, first_tokens, short_queries
from gte_vectorize.bench.gpu import Card, Latency, Timed, drawn, latency, sustained
from gte_vectorize.encoder.bucket import choose, exact_bucket, exact_rows, packed_buckets, padded_buckets
from gte_vectorize.encoder.encoder import Encoder, batches_for, open_encoder
from gte_vectorize.model.spec import ModelSpec
from gte_vectorize.progress import Progress
from gte_vectorize.run import vectorize
from gte_vectorize.tokens.tokenizer import TextTokenizer

TRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class EncoderRate:
    """Whole windows from ids in host memory to vectors in host memory, and the latency of 16 short queries.

    `padding` is the share of the batches' tokens that belong to no text, `start_up_seconds` the time to open; the
    figures of a batch are means, its inputs as they are copied to the device and its vectors as they come back.
    """

    timed: Timed
    queries: Latency
    memory_gib: float | None
    start_up_seconds: float
    padding: float
    batch_tokens: int
    batch_input_bytes: int
    batch_output_bytes: int


@dataclass(frozen=True, slots=True)
class PipelineRate:
    """The steady state, from the first task's last window that was written to the last one's, and the whole run.

    Not from the first window: what workers tokenize while it is under way would be counted, and not its time.
    """

    timed: Timed
    memory_gib: float | None
    run_seconds: float


def probe(spec: ModelSpec, texts: Sequence[str], *, device: str, dtype: str) -> tuple[float, int]:
    """A first look → about how many tokens a second, and the rows of the encoder's windows."""
    with open_encoder(spec, device=device, dtype=dtype) as encoder:
        wanted, ids = 4 * encoder.budget, []
        tokenizer = TextTokenizer(spec.tokenizer)
        for first in range(0, len(texts), 64):
            ids += [found.ids for found in tokenizer.encode(texts[first : first + 64]) if found.ids]
            if sum(map(len, ids)) >= wanted or len(ids) >= encoder.window_rows:
                break
        batches = batches_of(encoder, [as_passages(ids[: encoder.window_rows])])
        rate = 1.0
        for _ in ("to warm up", "to measure"):
            started = time.monotonic()
            tokens = _stream(encoder, batches)
            rate = tokens / (time.monotonic() - started)
        return rate, encoder.window_rows


def batches_of(encoder: Encoder, windows: Sequence[Passages]) -> list[TokenBatch]:
    return list(batches_for(encoder, windows))


def _stream(encoder: Encoder, batches: Sequence[TokenBatch]) -> int:
    for _ in encoder.stream(batches):
        pass
    return sum(len(batch.ids) for batch in batches)


def measure_encoder(
    spec: ModelSpec,
    corpus: BenchCorpus,
    card: Card,
    *,
    dtype: str,
    seconds: float,
    expected_rate: float,
    trace: Path | None = None,
) -> EncoderRate:
    """The encoder on ready token batches, as many as take about `seconds` at the rate that is expected."""
    card.fresh()
    started = time.monotonic()
    with open_encoder(spec, device=card.device, dtype=dtype) as encoder:
        start_up = time.monotonic() - started
        windows = first_tokens(corpus.windows, int(seconds * expected_rate))
        batches = batches_of(encoder, windows)
        timed = sustained(lambda: _stream(encoder, batches), seconds, card)
        queries = batches_of(encoder, [short_queries(corpus.windows)])
        answered = latency(lambda: _stream(encoder, queries), seconds)
        memory = card.peak_gib()
        if trace is not None:
            some = batches_of(encoder, first_tokens(corpus.windows, int(TRACE_SECONDS * timed.rate)))
            write_trace(encoder, some, card, trace)
        held, input_bytes = _bucketed(encoder, batches, card, spec.tokenizer.max_length)
    tokens = sum(len(batch.ids) for batch in batches)
    return EncoderRate(
        timed=timed,
        queries=answered,
        memory_gib=memory,
        start_up_seconds=start_up,
        padding=1 - tokens / held,
        batch_tokens=tokens // len(batches),
        batch_input_bytes=input_bytes // len(batches),
        batch_output_bytes=4 * spec.dim * sum(len(batch.rows) for batch in batches) // len(batches),
    )


def _bucketed(encoder: Encoder, batches: Sequence[TokenBatch], card: Card, limit: int) -> tuple[int, int]:
    """Tokens, filler included, and bytes of all the buckets that the batches run in.

    Packed, a bucket takes ids, positions and the bounds of its slots; padded, ids and the lengths of its slots.
    """
    packed = encoder.layout == "packed"
    if card.on_gpu:
        buckets = (packed_buckets if packed else padded_buckets)(encoder.budget, limit)
        chosen = [bucket for batch in batches if (bucket := choose(buckets, batch))]
    else:
        chosen = [(exact_bucket if packed else exact_rows)(batch) for batch in batches if len(batch.rows)]
    held = sum(bucket.tokens for bucket in chosen)
    slots = sum(bucket.slots + packed for bucket in chosen)
    return held, 4 * (held * (2 if packed else 1) + slots)


def write_trace(encoder: Encoder, batches: Sequence[TokenBatch], card: Card, file: Path) -> None:
    """A Chrome trace of one pass over the batches: the host's calls, and on a GPU its three streams."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if card.on_gpu else [])]
    # On a CPU the work is done by the lanes' threads; on a GPU this thread does all there is to do.
    lanes = None if card.on_gpu else _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=lanes, acc_events=True) as profiler:
        with record_function("stream"):
            _stream(encoder, batches)
        card.wait()
    profiler.export_chrome_trace(str(file))


def measure_pipeline(corpus: BenchCorpus, card: Card, *, model: str, output: Path) -> PipelineRate:
    """`vectorize` on the corpus into a directory of one part per task, as a user runs it."""
    card.fresh()
    seen: list[tuple[float, int, float | None]] = []  # from the end of the first task on

    def mark(progress: Progress) -> None:
        if progress.done_rows >= task_rows:
            seen.append((time.monotonic(), progress.tokens, card.joules()))

    task_rows = max(task.num_rows for task in corpus.tasks)
    report = vectorize(
        corpus.path, output, model=model, device=card.device, task_rows=task_rows, max_bad_rows="100%", on_progress=mark
    )
    (began, before, joules), (ended, tokens, joules_after) = seen[0], seen[-1]
    timed = Timed(tokens - before, ended - began, drawn(joules, joules_after))
    return PipelineRate(timed, card.peak_gib(), report.seconds)

"""The result as one Markdown page, and as one JSON object."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gte_vectorize.bench.bench import Result
from gte_vectorize.bench.gpu import FEWEST_REPEATS
from gte_vectorize.bench.ladder import BASELINE, Rung
from gte_vectorize.bench.peers import Peer

LIBRARIES = ("gte-vectorize", "torch", "transformers", "tokenizers", "pyarrow", "sentence-transformers", "triton")


def versions() -> dict[str, str]:
    """Of the libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware(device: str) -> str:
    cores = f"{len(os.sched_getaffinity(0))} cores, {_processor()}"
    if device == "cpu":
        return cores
    import torch

    return f"{torch.cuda.get_device_name()}; {cores}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def to_dict(result: Result, command: str) -> dict[str, Any]:
    """Everything that is on the page and what it is made of; rates in tokens per second, memory in GiB."""
    encoder, pipeline = result.encoder, result.pipeline
    return {
        **asdict(result),
        "hardware": hardware(result.device),
        "versions": versions(),
        "command": command,
        "date": date.today().isoformat(),
        "encoder_tokens_per_second": encoder.timed.rate,
        "pipeline_tokens_per_second": pipeline.timed.rate,
        "limited_by": result.limit.name if result.stages else None,
        "pipeline_share": pipeline.timed.rate / result.limit.tokens_per_second if result.stages else None,
        "ceiling_share": _ratio(encoder.timed.rate, result.ceiling_tokens_per_second),
        "encoder_joules_per_million_tokens": encoder.timed.joules_per_million,
        "pipeline_joules_per_million_tokens": pipeline.timed.joules_per_million,
    }


def render(result: Result, command: str) -> str:
    return "\n".join([*_head(result, command), *_ladder(result), *_peers(result), *_stages(result), ""])


def _head(result: Result, command: str) -> Iterator[str]:
    corpus = result.corpus
    yield f"# {result.model} on {hardware(result.device)}, {date.today().isoformat()}"
    yield ""
    yield ", ".join(f"{name} {number}" for name, number in versions().items()) + f"; {result.dtype}."
    yield ""
    yield f"    {command}"
    yield ""
    copies = corpus.rows - corpus.distinct
    repeated = f", the last {copies:,} of them turned copies" if copies else ""
    yield (
        f"Texts {corpus.source}: {corpus.rows:,} rows{repeated}; {corpus.tokens:,} tokens, median "
        f"{corpus.median_tokens:.0f}, longest {corpus.longest_tokens}. Rates count real tokens, sustained over "
        f"{result.seconds:g} s after a warm-up."
    )


def _ladder(result: Result) -> Iterator[str]:
    if not result.ladder:
        return
    rungs = {rung.rung: rung for rung in result.ladder}
    baseline = rungs[BASELINE].tokens_per_second
    yield from ("", "## Ladder", "")
    yield "Ids in host memory → vectors in host memory, but for 8. × is against 1b, P50 and P99 are of 16 queries of 8"
    yield "to 32 tokens, GiB is the peak of GPU memory."
    yield ""
    yield "| | | tokens/s | docs/s | × | P50 ms | P99 ms | GiB |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    mean = result.corpus.tokens / result.corpus.rows
    yield from (_rung(rung, baseline, mean) for rung in result.ladder)


def _rung(rung: Rung, baseline: float | None, mean: float) -> str:
    if rung.tokens_per_second is None:
        return f"| {rung.rung} | {rung.name} | {_cell(rung.note)} | | | | | |"
    rate = rung.tokens_per_second
    cells = (_count(rate), _count(rate / mean), _number(_ratio(rate, baseline), 1))
    p99 = rung.p99_ms if rung.repeats >= FEWEST_REPEATS else None  # of a few calls it would be the slowest one
    others = (_number(rung.p50_ms, 2), _number(p99, 2), _number(rung.memory_gib, 2))
    return f"| {rung.rung} | {rung.name} | {' | '.join((*cells, *others))} |"


def _peers(result: Result) -> Iterator[str]:
    if not result.peers:
        return
    yield from ("", "## Peers", "", "The same texts in memory → vectors in numpy; ours is Parquet → Parquet.", "")
    yield "| | batch | tokens/s | ours is × |"
    yield "|---|---:|---:|---:|"
    yield f"| gte-vectorize | | {_count(result.pipeline.timed.rate)} | 1.0 |"
    for name in dict.fromkeys(peer.name for peer in result.peers):
        yield _peer(best(result.peers, name), result.pipeline.timed.rate)


def best(peers: tuple[Peer, ...], name: str) -> Peer:
    """The peer of that name at its fastest batch size."""
    return max((peer for peer in peers if peer.name == name), key=lambda peer: peer.tokens_per_second or 0.0)


def _peer(peer: Peer, ours: float) -> str:
    if peer.tokens_per_second is None:
        return f"| {peer.name} | | {_cell(peer.note)} | |"
    return (
        f"| {peer.name} | {peer.batch_size} | {_count(peer.tokens_per_second)} | {ours / peer.tokens_per_second:.1f} |"
    )


def _stages(result: Result) -> Iterator[str]:
    if not result.stages:
        return
    encoder, pipeline, limit = result.encoder, result.pipeline, result.limit
    yield from ("", "## Stages", "", f"Each alone. Tokenizer processes: {result.workers}.", "")
    yield from ("| | tokens/s |", "|---|---:|")
    yield from (f"| {stage.name} | {_count(stage.tokens_per_second)} |" for stage in result.stages)
    yield f"| the pipeline, steady state | {_count(pipeline.timed.rate)} |"
    yield ""
    share = pipeline.timed.rate / limit.tokens_per_second
    yield f"- Limited by: {limit.name}; the pipeline reaches {share:.0%} of it."
    yield f"- Padding: {encoder.padding:.1%} of the encoder's tokens, {encoder.batch_tokens:,} real ones a batch."
    if result.tflops is not None:
        yield f"- Arithmetic: {result.tflops:,.3g} TFLOP/s (2 × parameters of the products, and attention)."
    if result.ceiling_tokens_per_second is not None:
        share = encoder.timed.rate / result.ceiling_tokens_per_second
        yield (
            f"- Ceiling, were there nothing but the matrix products: {_count(result.ceiling_tokens_per_second)} "
            f"tokens/s; the encoder reaches {share:.0%} of it."
        )
    yield f"- Energy: {_energy(result)}."
    yield f"- Start of the encoder: {encoder.start_up_seconds:.1f} s; the whole run: {pipeline.run_seconds:.1f} s."


def _energy(result: Result) -> str:
    encoder = result.encoder.timed.joules_per_million
    pipeline = result.pipeline.timed.joules_per_million
    if encoder is None or pipeline is None:
        return result.energy_note
    return f"{encoder:,.0f} J per million tokens in the encoder alone, {pipeline:,.0f} J in the pipeline"


def _ratio(value: float, base: float | None) -> float | None:
    return value / base if base else None


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _cell(note: str) -> str:
    return note.replace("|", "/")

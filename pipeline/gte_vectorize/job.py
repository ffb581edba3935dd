"""A job: everything that is settled before any work, from a config, a corpus and a model's folder."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

from gte_vectorize.batch import LEAST_CHUNK_TOKENS
from gte_vectorize.config import Config
from gte_vectorize.errors import ConfigError, ModelError
from gte_vectorize.model.folder import ALIASES
from gte_vectorize.model.spec import ModelSpec, load_model
from gte_vectorize.reader.corpus import Corpus, find_corpus
from gte_vectorize.reuse.previous import Previous, find_previous
from gte_vectorize.store.layout import Layout, find_layout, refuse_foreign
from gte_vectorize.store.manifest import finished
from gte_vectorize.store.plan import Plan, make_tasks
from gte_vectorize.tokens.windowing import TRUNCATE, Windowing
from gte_vectorize.writer.part import storage_errors
from gte_vectorize.writer.schema import output_schema, schema_fingerprint

log = logging.getLogger(__name__)


CHUNK_TOKENS = 256

WHOLE_TASK_BYTES = 64 << 20
"""Of a shard's file in a task whose documents are not cut off: some 300 MB of text, minutes on a GPU."""

MOST_WORKERS = 32
"""More tokenizers than feed any one GPU; 14 gave 4 million tokens/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An output to write. `mean`: of a document's windows; else of each passage by itself."""

    output: str | Path
    plan: Plan
    schema: pa.Schema
    mean: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`targets` are one output, or two of the same tasks; `columns` are the names of the input columns that are copied;
    `rows` counts the whole corpus.
    """

    config: Config
    spec: ModelSpec
    device: str
    dtype: str
    windowing: Windowing
    targets: list[Target]
    columns: list[str]
    rows: int
    previous: Previous | None


def prepare(config: Config, *, device: str, dtype: str, machine: str) -> Job:
    """Read the corpus' footers and the model's folder, and plan. `machine` names what decides a vector's bits.

    Raises Refused; nothing has been written then, but for inputs converted to Parquet. The model comes last: its
    weights may have to be fetched, and are read whole to hash them.
    """
    layouts = [find_layout(output, ()) for output in config.output_paths]
    for layout in layouts:
        with storage_errors(layout.output):
            if not layout.files.exists(layout.plan):
                refuse_foreign(layout, overwrite=config.overwrite)
    corpus = find_corpus(
        config.inputs,
        text_column=config.text_column,
        columns=config.columns,
        keep_text=config.keep_text,
        layouts=layouts,
    )
    spec = load_job_model(replace(config, revision=_revision(config, layouts)))
    for name, (value, source) in model_settings(spec).items():
        log.debug("model: %s = %r (%s)", name, value, source)
    if corpus.skipped:
        log.info("%d files beside the corpus are left out, first %r", len(corpus.skipped), corpus.skipped[0])
    compute, modes = _compute(config, spec, machine), windowings(config, spec)
    targets = [
        _target(config, spec, corpus, output, windowing, dtype, compute)
        for output, windowing in zip(config.output_paths, modes, strict=True)
    ]
    return Job(
        config=config,
        spec=spec,
        device=device,
        dtype=dtype,
        windowing=modes[0],
        targets=targets,
        columns=corpus.schema.names,
        rows=sum(shard.num_rows for shard in corpus.shards),
        previous=_previous(config, layouts, targets),
    )


def _previous(config: Config, layouts: list[Layout], targets: list[Target]) -> Previous | None:
    """The output to reuse; None where nothing is left to do: it may be gone by then."""
    if config.reuse is None:
        return None
    with storage_errors(layouts[0].output):
        if all(finished(at, target.plan) for at, target in zip(layouts, targets, strict=True)):
            return None
    return find_previous(config.reuse, targets[0].plan, layouts)


def windowings(config: Config, spec: ModelSpec) -> list[Windowing]:
    """What each output does with long documents.

    ConfigError: windows would overlap by more than half, or chunks be too small. ModelError: it has no vector for a
    chunk.
    """
    if config.long == "late":
        return [_late(config, spec)]
    limit = spec.tokenizer.max_length
    overlap = limit // 8 if config.overlap is None else config.overlap
    if config.long != "truncate" and overlap > limit // 2:
        raise ConfigError(f"--overlap {overlap}: at most half of the limit of {limit} tokens")
    if config.splitter == "semchunk" and find_spec("semchunk") is None:
        raise ConfigError("--splitter semchunk: run `pip install 'gte-vectorize[semchunk]'`, or leave it out")
    return [
        Windowing(mode=mode, overlap=overlap, splitter=config.splitter) if mode != "truncate" else TRUNCATE
        for mode in (("windows", "mean") if config.long == "both" else (config.long,))
    ]


def _late(config: Config, spec: ModelSpec) -> Windowing:
    if spec.pooling != ("mean",):
        raise ModelError(
            f"--long late: the pooling of {spec.name!r} is {', '.join(spec.pooling)}, and only the mean of a chunk's "
            "tokens is a vector of the chunk; choose another model, or --long windows"
        )
    if spec.layout != "packed":
        raise ModelError(
            f"--long late: {spec.architecture!r} models run in padded batches, where a row is one passage; choose a "
            "model of the BERT family, or --long windows"
        )
    chunk_tokens = CHUNK_TOKENS if config.chunk_tokens is None else config.chunk_tokens
    if chunk_tokens < LEAST_CHUNK_TOKENS:
        raise ConfigError(f"--chunk-tokens {chunk_tokens}: at least {LEAST_CHUNK_TOKENS}")
    return Windowing(mode="late", chunk_tokens=chunk_tokens)


def _target(
    config: Config,
    spec: ModelSpec,
    corpus: Corpus,
    output: str | Path,
    windowing: Windowing,
    dtype: str,
    compute: dict[str, Any],
) -> Target:
    long_documents = windowing.description()
    schema = output_schema(
        corpus.schema,
        dim=spec.dim,
        embeddings=description(spec, dtype, long_documents),
        chunked=windowing.chunked,
    )
    plan = Plan(
        fingerprint=spec.fingerprint(dtype=dtype, long_documents=long_documents),
        fingerprint_fields={
            "model": spec.name,
            "revision": spec.revision,
            **spec.fingerprint_fields(dtype=dtype, long_documents=long_documents),
        },
        shards=corpus.shards,
        tasks=make_tasks(
            corpus.shards, task_rows=config.task_rows, task_bytes=WHOLE_TASK_BYTES if windowing.whole else None
        ),
        schema=schema_fingerprint(schema),
        options={"text_column": config.text_column, "columns": corpus.schema.names, "task_rows": config.task_rows},
        compute=compute,
    )
    return Target(output=output, plan=plan, schema=schema, mean=windowing.mode == "mean")


def _compute(config: Config, spec: ModelSpec, machine: str) -> dict[str, Any]:
    """What else decides the bits; a run that differs in it does not continue another."""
    libraries = ["torch", "tokenizers", "pyarrow"]
    compute: dict[str, Any] = {"device": machine}
    if spec.layout == "padded":
        libraries.append("transformers")
        compute["batch_tokens"] = config.batch_tokens
    return compute | {name: version(name) for name in libraries}


def _revision(config: Config, layouts: list[Layout]) -> str | None:
    """The revision that is asked for, or else the one that an earlier run of this output found on the hub.

    A later commit there, to the model's README perhaps, must not make the same command another job.
    """
    if config.revision is None and not config.overwrite:
        for layout in layouts:
            with suppress(OSError, ValueError, KeyError):
                earlier = Plan.from_json(layout.files.read(layout.plan)).fingerprint_fields
                if earlier["model"] == ALIASES.get(config.model, config.model):
                    return str(earlier["revision"]) if earlier["revision"] else None
    return config.revision


def load_job_model(config: Config) -> ModelSpec:
    return load_model(
        config.model,
        revision=config.revision,
        pooling=config.pooling,
        max_length=config.max_length,
        prompt=config.prompt,
        prompt_name=config.prompt_name,
    )


def description(spec: ModelSpec, dtype: str, long_documents: Any = "truncate") -> dict[str, Any]:
    """What the vectors are, for the output's `embeddings` key: no times, hosts or paths, so equal jobs say the same."""
    return {
        "version": "1",
        "producer": "gte-vectorize",
        "primary_column": "embedding",
        "model": spec.name,
        "revision": spec.revision,
        "weights_sha256": spec.weights_sha256,
        "tokenizer_sha256": spec.tokenizer.sha256,
        "dim": spec.dim,
        "dtype": "float32",
        "computed_in": dtype,
        "metric": "cosine",
        "normalized": True,
        "pooling": list(spec.pooling),
        "prompt": spec.tokenizer.prompt,
        "query_prompt": spec.query_prompt,
        "max_tokens": spec.tokenizer.max_length,
        "long_documents": long_documents,
        "sources": dict(spec.sources),
        "fingerprint": spec.fingerprint(dtype=dtype, long_documents=long_documents),
    }


def model_settings(spec: ModelSpec) -> dict[str, tuple[Any, str]]:
    """What the model will run with, and where each value came from."""
    values: dict[str, Any] = {
        "pooling": ", ".join(spec.pooling),
        "max_length": spec.tokenizer.max_length,
        "prompt": spec.tokenizer.prompt,
        "modules": ", ".join(type(module).__name__.lower() for module in spec.head),
        "tokenizer": spec.tokenizer.sha256,
        "weights": spec.weights_sha256,
    }
    return {name: (value, spec.sources.get(name, "model")) for name, value in values.items()}


def worker_count(config: Config, device: str) -> int:
    """Tokenizer processes: few beside an encoder that needs the cores itself, most of the cores beside a GPU."""
    cores = _cores()
    return config.workers or (min(MOST_WORKERS, max(1, cores - 2)) if device == "cuda" else max(1, cores // 8))


def _cores() -> int:
    """Cores this process may use: its affinity, and the quota of its container if there is one."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores

"""A job: everything that is settled before any work, from a config, a corpus and a model's folder."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from gte_vectorize.config import Config
from gte_vectorize.model.folder import ALIASES
from gte_vectorize.model.spec import ModelSpec, load_model
from gte_vectorize.reader.corpus import find_corpus
from gte_vectorize.store.layout import Layout, find_layout, refuse_foreign
from gte_vectorize.store.plan import Plan, make_tasks
from gte_vectorize.writer.part import storage_errors
from gte_vectorize.writer.schema import output_schema, schema_fingerprint

log = logging.getLogger(__name__)


MOST_WORKERS = 32
"""More tokenizers than feed any one GPU; 14 gave 4 million tokens/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`columns` are the names of the input columns that are copied; `rows` counts the whole corpus."""

    config: Config
    spec: ModelSpec
    device: str
    dtype: str
    plan: Plan
    schema: pa.Schema
    columns: list[str]
    rows: int


def prepare(config: Config, *, device: str, dtype: str, machine: str) -> Job:
    """Read the corpus' footers and the model's folder, and plan. `machine` names what decides a vector's bits.

    Raises Refused; nothing has been written then, but for inputs converted to Parquet. The model comes last: its
    weights may have to be fetched, and are read whole to hash them.
    """
    layout = find_layout(config.output_path, ())
    with storage_errors(layout.output):
        if not layout.files.exists(layout.plan):
            refuse_foreign(layout, overwrite=config.overwrite)
    corpus = find_corpus(
        config.inputs,
        text_column=config.text_column,
        columns=config.columns,
        keep_text=config.keep_text,
        layout=layout,
    )
    spec = load_job_model(replace(config, revision=_revision(config, layout)))
    for name, (value, source) in model_settings(spec).items():
        log.debug("model: %s = %r (%s)", name, value, source)
    if corpus.skipped:
        log.info("%d files beside the corpus are left out, first %r", len(corpus.skipped), corpus.skipped[0])
    schema = output_schema(corpus.schema, dim=spec.dim, embeddings=description(spec, dtype))
    plan = Plan(
        fingerprint=spec.fingerprint(dtype=dtype),
        fingerprint_fields={"model": spec.name, "revision": spec.revision, **spec.fingerprint_fields(dtype=dtype)},
        shards=corpus.shards,
        tasks=make_tasks(corpus.shards, task_rows=config.task_rows),
        schema=schema_fingerprint(schema),
        options={"text_column": config.text_column, "columns": corpus.schema.names, "task_rows": config.task_rows},
        compute=_compute(config, spec, machine),
    )
    return Job(
        config=config,
        spec=spec,
        device=device,
        dtype=dtype,
        plan=plan,
        schema=schema,
        columns=corpus.schema.names,
        rows=sum(shard.num_rows for shard in corpus.shards),
    )


def _compute(config: Config, spec: ModelSpec, machine: str) -> dict[str, Any]:
    """What else decides the bits; a run that differs in it does not continue another."""
    libraries = ["torch", "tokenizers", "pyarrow"]
    compute: dict[str, Any] = {"device": machine}
    if spec.layout == "padded":
        libraries.append("transformers")
        compute["batch_tokens"] = config.batch_tokens
    return compute | {name: version(name) for name in libraries}


def _revision(config: Config, layout: Layout) -> str | None:
    """The revision that is asked for, or else the one that an earlier run of this output found on the hub.

    A later commit there, to the model's README perhaps, must not make the same command another job.
    """
    if config.revision is None and not config.overwrite:
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


def description(spec: ModelSpec, dtype: str) -> dict[str, Any]:
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
        "long_documents": "truncate",
        "sources": dict(spec.sources),
        "fingerprint": spec.fingerprint(dtype=dtype),
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

"""Everything a run must know of its model, read from the model's folder before any work; nothing in it is executed.

Precedence, setting by setting: what the caller gives > what the model's folder says > refusal. There is no default that
could make a wrong vector silently. `ModelSpec.sources` tells where each setting came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gte_vectorize.batch import Layout
from gte_vectorize.errors import ModelError
from gte_vectorize.model.architecture import read_architecture, refuse_foreign_code
from gte_vectorize.model.folder import find_model, read_settings
from gte_vectorize.model.modules import Dense, Normalize, read_modules, read_sentence_config, vector_size
from gte_vectorize.model.prompts import read_prompts
from gte_vectorize.model.tokenizer import TokenizerSpec, read_tokenizer
from gte_vectorize.model.weights import find_weights, hash_weights

__all__ = ["Dense", "ModelSpec", "Normalize", "TokenizerSpec", "load_model"]

_FINGERPRINT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model that can be run faithfully.

    name, revision   what is stored with the vectors; the revision is a hub commit, None for a directory
    path             the model's folder
    architecture     model_type of config.json
    position_offset  the position of the first token
    pooling          modes of which the results are concatenated
    head             modules after the pooling, in order
    dim              length of the final vector
    weights_sha256   of the transformer's and the Dense modules' weights together
    sources          setting → where it came from
    """

    name: str
    path: Path
    revision: str | None
    architecture: str
    config: Mapping[str, Any]
    layout: Layout
    position_offset: int
    pooling: tuple[str, ...]
    head: tuple[Dense | Normalize, ...]
    dim: int
    tokenizer: TokenizerSpec
    query_prompt: str
    weights: tuple[Path, ...]
    weights_sha256: str
    sources: Mapping[str, str]

    def fingerprint_fields(self, *, dtype: str, long_documents: Any = "truncate") -> dict[str, Any]:
        """Everything that changes the vectors, so that two runs that differ can say in what."""
        return {
            "version": _FINGERPRINT_VERSION,
            "weights": self.weights_sha256,
            "config": dict(self.config),
            "layout": self.layout,
            "pooling": list(self.pooling),
            "head": [_describe(module) for module in self.head],
            "tokenizer": self.tokenizer.sha256,
            "normalizer": dict(self.tokenizer.normalizer),
            "lower_case": self.tokenizer.lower_case,
            "prompt": self.tokenizer.prompt,
            "max_length": self.tokenizer.max_length,
            "long_documents": long_documents,
            "dtype": dtype,
        }

    def fingerprint(self, *, dtype: str, long_documents: Any = "truncate") -> str:
        """SHA-256 in hex of the fields' canonical JSON."""
        fields = self.fingerprint_fields(dtype=dtype, long_documents=long_documents)
        return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _describe(module: Dense | Normalize) -> list[Any]:
    if isinstance(module, Normalize):
        return ["normalize"]
    return ["dense", module.in_features, module.out_features, module.bias, module.activation]


def load_model(
    name: str,
    *,
    revision: str | None = None,
    pooling: str | None = None,
    max_length: int | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
) -> ModelSpec:
    """Find the model, read its folder and check that it can be run; its weights are hashed but not loaded.

    `name` is a directory or a hub id. Raises ModelError, which says what to change, or ConfigError where two options
    exclude each other.
    """
    folder = find_model(name, revision)
    refuse_foreign_code(folder.path)
    modules = read_modules(folder.path, name=folder.name, pooling=pooling)
    transformer = modules.transformer
    if not (transformer / "config.json").exists():
        raise ModelError(f"{str(transformer)!r} has no config.json: it is not a model's folder")
    config = read_settings(transformer / "config.json")
    architecture = read_architecture(config)
    prompts = read_prompts(folder.path, prompt=prompt, prompt_name=prompt_name)
    if (prompts.document or prompts.query) and not modules.include_prompt:
        raise ModelError("the model's pooling leaves the prompt out (include_prompt false), which cannot be run yet")
    sentence = read_sentence_config(transformer)
    tokenizer, tokenizer_sources = read_tokenizer(
        transformer, config, sentence, architecture, prompt=prompts.document, max_length=max_length
    )
    weights, weights_source = find_weights(transformer)
    dense = tuple(module.weights for module in modules.head if isinstance(module, Dense))
    return ModelSpec(
        name=folder.name,
        path=folder.path,
        revision=folder.revision,
        architecture=architecture.model_type,
        config=config,
        layout=architecture.layout,
        position_offset=architecture.position_offset,
        pooling=modules.pooling,
        head=modules.head,
        dim=vector_size(modules, architecture.hidden_size),
        tokenizer=tokenizer,
        query_prompt=prompts.query,
        weights=weights,
        weights_sha256=hash_weights(folder.path, weights + dense),
        sources={**modules.sources, **tokenizer_sources, "prompt": prompts.source, "weights": weights_source},
    )

"""config_sentence_transformers.json → the prompts that stand before documents and before queries.

For documents: the caller's prompt > the prompt the caller names > the first of document, passage and corpus that the
model has > the model's default prompt, unless that is for queries. Documents never get a query prompt unasked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gte_vectorize.errors import ConfigError, ModelError
from gte_vectorize.model.folder import read_settings

FILE = "config_sentence_transformers.json"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Text put before each document and each query, by plain concatenation; `source` says where document's is from."""

    document: str
    query: str
    source: str


def read_prompts(root: Path, *, prompt: str | None, prompt_name: str | None) -> Prompts:
    """Raises ConfigError if both are given, ModelError for a prompt the model does not have."""
    if prompt is not None and prompt_name is not None:
        raise ConfigError("--prompt and --prompt-name exclude each other: give one")
    settings = read_settings(root / FILE)
    if settings.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        raise ModelError(f"{FILE}: model_type {settings['model_type']!r} does not give one vector for each text")
    prompts, default = _named(settings), settings.get("default_prompt_name")
    if not isinstance(default, str | None):
        raise ModelError(f"{FILE}: default_prompt_name must be a name, found {default!r}")
    query = prompts.get("query", "")
    if prompt is not None:
        return Prompts(prompt, query, "given by the caller")
    name, by = _choose(prompts, default, prompt_name)
    if name is None:
        return Prompts("", query, by)
    if name not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        raise ModelError(f"the model has no prompt {name!r} ({by}); {FILE} has: {known}")
    return Prompts(prompts[name], query, f"{FILE} ({by})")


def _named(settings: dict[str, Any]) -> dict[str, str]:
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ModelError(f"{FILE}: prompts must map names to texts")
    return {name: text or "" for name, text in prompts.items()}


def _choose(prompts: dict[str, str], default: str | None, asked: str | None) -> tuple[str | None, str]:
    """The prompt's name, if there is one, and why."""
    if asked is not None:
        return asked, f"prompt {asked!r}, named by the caller"
    for name in ("document", "passage", "corpus"):
        if name in prompts:
            return name, f"prompt {name!r}"
    if default is None:
        return None, "none: the model has no document prompt"
    if "query" in default.lower():
        return None, f"none: the default prompt {default!r} is for queries"
    return default, f"default prompt {default!r}"

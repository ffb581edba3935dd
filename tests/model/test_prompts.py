from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gte_vectorize.errors import ConfigError, ModelError
from gte_vectorize.model.prompts import FILE, Prompts, read_prompts

E5 = {"query": "query: ", "passage": "passage: "}


def read(root: Path, settings: dict[str, Any], *, prompt: str | None = None, prompt_name: str | None = None) -> Prompts:
    (root / FILE).write_text(json.dumps(settings))
    return read_prompts(root, prompt=prompt, prompt_name=prompt_name)


@pytest.mark.parametrize(
    ("settings", "document", "source"),
    [
        ({}, "", "no document prompt"),
        ({"prompts": None}, "", "no document prompt"),
        ({"prompts": E5}, "passage: ", "'passage'"),
        ({"prompts": {**E5, "document": "d: "}}, "d: ", "'document'"),
        ({"prompts": {"corpus": "c: "}}, "c: ", "'corpus'"),
        ({"prompts": {"query": "q: ", "document": None}}, "", "'document'"),
        ({"prompts": {"query": "q: "}, "default_prompt_name": "query"}, "", "for queries"),
        ({"prompts": {"s2p_query": "q: "}, "default_prompt_name": "s2p_query"}, "", "for queries"),
        ({"prompts": {"cluster": "k: "}, "default_prompt_name": "cluster"}, "k: ", "default prompt 'cluster'"),
    ],
)
def test_documents_get_the_document_prompt_and_never_the_query_prompt(
    tmp_path: Path, settings: dict[str, Any], document: str, source: str
) -> None:
    prompts = read(tmp_path, settings)
    assert prompts.document == document
    assert source in prompts.source


def test_the_caller_decides_first(tmp_path: Path) -> None:
    assert read(tmp_path, {"prompts": E5}, prompt="{law} %s ").document == "{law} %s "
    assert read(tmp_path, {"prompts": E5}, prompt="").document == ""
    assert read(tmp_path, {"prompts": E5}, prompt_name="query").document == "query: "
    assert read(tmp_path, {"prompts": E5}).query == "query: "
    assert read(tmp_path, {}).query == ""


def test_an_unknown_prompt_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'doc'.*'query', 'passage'"):
        read(tmp_path, {"prompts": E5}, prompt_name="doc")
    with pytest.raises(ModelError, match="'other'"):
        read(tmp_path, {"default_prompt_name": "other"})


def test_prompt_and_prompt_name_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompt-name"):
        read(tmp_path, {"prompts": E5}, prompt="x", prompt_name="query")


@pytest.mark.parametrize("settings", [{"prompts": ["a"]}, {"prompts": {"a": 1}}, {"default_prompt_name": 3}])
def test_malformed_prompts_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        read(tmp_path, settings)


def test_a_model_of_many_vectors_a_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="MultiVectorEncoder"):
        read(tmp_path, {"model_type": "MultiVectorEncoder"})

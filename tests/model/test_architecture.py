from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gte_vectorize.errors import ModelError
from gte_vectorize.model.architecture import read_architecture, refuse_foreign_code

SIZES = {"hidden_size": 8, "vocab_size": 20, "max_position_embeddings": 64, "pad_token_id": 1}


@pytest.mark.parametrize(
    ("model_type", "layout", "offset"),
    [
        ("bert", "packed", 0),
        ("roberta", "packed", 2),
        ("xlm-roberta", "packed", 2),
        ("camembert", "packed", 2),
        ("mpnet", "padded", 2),
        ("modernbert", "padded", 0),
    ],
)
def test_layout_and_position_offset_of_a_family(model_type: str, layout: str, offset: int) -> None:
    architecture = read_architecture({"model_type": model_type, **SIZES})
    assert (architecture.layout, architecture.position_offset, architecture.positions) == (layout, offset, 64 - offset)


def test_a_familys_own_key_names_are_understood() -> None:
    stated = {"dim": 16, "n_heads": 2, "vocab_size": 20, "max_position_embeddings": 64}
    architecture = read_architecture({"model_type": "distilbert", **stated})
    assert (architecture.hidden_size, architecture.vocab_size, architecture.positions) == (16, 20, 64)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "no model_type"),
        ({"model_type": "new"}, "unknown architecture 'new'"),
        ({"model_type": "qwen2"}, "'qwen2' is not a bidirectional text encoder"),
        ({"model_type": "llama"}, "'llama' is not"),
        ({"model_type": "vit"}, "'vit' is not"),
        ({"model_type": "bart"}, "'bart' cannot be run: it is an encoder-decoder"),
        ({"model_type": "bert", "is_decoder": True}, "decoder"),
        ({"model_type": "mpnet", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bert", "quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "'relative_key'"),
        ({"model_type": "bert", "max_position_embeddings": None}, "max_position_embeddings"),
        ({"model_type": "bert", "hidden_size": "8"}, "hidden_size"),
        ({"model_type": "roberta", "max_position_embeddings": 2}, "no position"),
        ({"model_type": "roberta", "pad_token_id": None}, "pad_token_id"),
        ({"model_type": "mpnet", "pad_token_id": 20}, "pad_token_id"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_architecture({**SIZES, **config})


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "0_Transformer/config.json"])
def test_a_model_that_asks_for_its_own_code_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"model_type": "bert", "auto_map": {"AutoModel": "modeling.NewModel"}}')
    with pytest.raises(ModelError, match="auto_map"):
        refuse_foreign_code(tmp_path)


@pytest.mark.parametrize("name", ["modeling.py", "1_Pooling/pooling.py"])
def test_code_in_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(ModelError, match=name):
        refuse_foreign_code(tmp_path)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapter"):
        refuse_foreign_code(tmp_path)

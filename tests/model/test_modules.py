from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from toy_model import ToyModel

from gte_vectorize.errors import ModelError
from gte_vectorize.model.modules import Dense, Normalize, read_modules, read_sentence_config

DENSE = {"in_features": 8, "out_features": 4, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
LINEAR = {"linear.weight": np.ones((4, 8), np.float32), "linear.bias": np.ones(4, np.float32)}


def add_dense(toy: ToyModel, tensors: dict[str, Any] | None = None, **settings: Any) -> None:
    toy.modules("Transformer", "Pooling", "Dense", "Dropout", "Normalize")
    toy.write("2_Dense/config.json", **{**DENSE, **settings})
    save_file(LINEAR if tensors is None else tensors, toy.path / "2_Dense/model.safetensors")


def test_a_folders_modules_are_read(toy: ToyModel) -> None:
    spec = toy.load()
    assert (spec.pooling, spec.head, spec.dim) == (("cls",), (Normalize(),), 8)
    assert spec.sources["modules"] == "modules.json"
    assert spec.sources["pooling"] == "1_Pooling/config.json"


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode_weightedmean_tokens": True}, ("weightedmean",)),
        ({"pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({"pooling_mode": ["mean", "max"]}, ("mean", "max")),
        ({"pooling_mode": "mean", "pooling_mode_cls_token": True}, ("mean",)),
    ],
)
def test_pooling_in_the_older_and_the_newer_form(
    toy: ToyModel, settings: dict[str, Any], modes: tuple[str, ...]
) -> None:
    toy.write("1_Pooling/config.json", **settings)
    spec = toy.load()
    assert spec.pooling == modes
    assert spec.dim == 8 * len(modes)


@pytest.mark.parametrize(
    "settings", [{}, {"pooling_mode_mean_tokens": False}, {"pooling_mode": "middle"}, {"pooling_mode": 1}]
)
def test_pooling_is_never_guessed(toy: ToyModel, settings: dict[str, Any]) -> None:
    toy.write("1_Pooling/config.json", **settings)
    with pytest.raises(ModelError, match=r"1_Pooling/config\.json"):
        toy.load()
    assert toy.load(pooling="mean").sources["pooling"] == "given by the caller"


def test_without_a_list_the_pooling_is_the_callers_or_published(toy: ToyModel) -> None:
    (toy.path / "modules.json").unlink()
    with pytest.raises(ModelError, match="--pooling"):
        toy.load()
    assert toy.load(pooling="mean").pooling == ("mean",)
    assert read_modules(toy.path, name="thenlper/gte-large-zh", pooling=None).pooling == ("cls",)
    assert read_modules(toy.path, name="thenlper/gte-base", pooling=None).pooling == ("mean",)


def test_an_unknown_pooling_is_answered_with_the_known_ones(toy: ToyModel) -> None:
    with pytest.raises(ModelError, match="cls, max, mean"):
        toy.load(pooling="middle")


@pytest.mark.parametrize(
    "prefix", ["sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules.pooling."]
)
def test_class_names_of_any_release_are_read(toy: ToyModel, prefix: str) -> None:
    toy.modules("sentence_transformers.base.modules.transformer.Transformer", f"{prefix}Pooling")
    assert toy.load().head == ()


@pytest.mark.parametrize(
    ("types", "named"),
    [
        (("Transformer", "Pooling", "LayerNorm"), "LayerNorm"),
        (("Transformer", "Pooling", "evil.Normalize"), r"evil\.Normalize"),
        (("Transformer", "WeightedLayerPooling"), "WeightedLayerPooling"),
        (("Transformer", "Normalize", "Pooling"), "Transformer, Normalize"),
        (("Transformer", "Pooling", "Pooling"), "second Pooling"),
        ((), "begin with"),
    ],
)
def test_a_module_that_is_not_known_is_refused_by_name(toy: ToyModel, types: tuple[str, ...], named: str) -> None:
    toy.modules(*types)
    with pytest.raises(ModelError, match=named):
        toy.load()


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "a/../../b"])
def test_a_module_outside_the_folder_is_refused(toy: ToyModel, path: str) -> None:
    toy.modules("Transformer", "Pooling", paths={1: path})
    with pytest.raises(ModelError, match="outside"):
        toy.load()


def test_a_transformer_in_a_subfolder(toy: ToyModel) -> None:
    (toy.path / "0_Transformer").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (toy.path / name).rename(toy.path / "0_Transformer" / name)
    toy.modules("Transformer", "Pooling", paths={0: "0_Transformer"})
    spec = toy.load()
    assert spec.weights == (toy.path / "0_Transformer/model.safetensors",)
    assert spec.tokenizer.path == toy.path / "0_Transformer/tokenizer.json"
    assert spec.tokenizer.max_length == 48


@pytest.mark.parametrize(
    ("activation", "short"),
    [("torch.nn.modules.linear.Identity", "identity"), ("torch.nn.modules.activation.GELU", "gelu"), (None, "tanh")],
)
def test_a_dense_module(toy: ToyModel, activation: str | None, short: str) -> None:
    add_dense(toy)
    toy.change("2_Dense/config.json", activation_function=activation or ...)
    spec = toy.load()
    weights = toy.path / "2_Dense/model.safetensors"
    assert spec.head == (Dense(weights, 8, 4, True, short), Normalize())
    assert spec.dim == 4


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"activation_function": "os.system"}, "os.system"),
        ({"activation_function": "torch.hub.load"}, "torch.hub.load"),
        ({"activation_function": "torch.nn.modules.activation.Softmax"}, "Softmax"),
        ({"use_residual": True}, "use_residual"),
        ({"module_input_name": "token_embeddings"}, "token_embeddings"),
        ({"in_features": 9}, "does not fit"),
        ({"bias": False}, "does not fit"),
    ],
)
def test_a_dense_module_that_cannot_be_run_is_refused(toy: ToyModel, settings: dict[str, Any], named: str) -> None:
    add_dense(toy, **settings)
    with pytest.raises(ModelError, match=named):
        toy.load()


def test_a_dense_module_must_fit_the_pooling_and_have_safe_weights(toy: ToyModel) -> None:
    add_dense(toy)
    toy.write("1_Pooling/config.json", pooling_mode=["cls", "mean"])
    with pytest.raises(ModelError, match=r"2_Dense.*16 come in"):
        toy.load()
    (toy.path / "2_Dense/model.safetensors").rename(toy.path / "2_Dense/pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        toy.load()


def test_a_pooling_that_leaves_the_prompt_out_is_refused_when_there_is_one(toy: ToyModel) -> None:
    toy.change("1_Pooling/config.json", include_prompt=False)
    assert toy.load().tokenizer.prompt == ""
    with pytest.raises(ModelError, match="include_prompt"):
        toy.load(prompt="law: ")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"transformer_task": "fill-mask"}, "transformer_task"),
        ({"module_output_name": "scores"}, "module_output_name"),
        ({"modality_config": {"text": {"method": "get_text_features"}}}, "modality_config"),
        ({"processing_kwargs": {"text": {"padding": "max_length"}}}, "processing_kwargs"),
        ({"tokenizer_args": {"use_fast": False}}, "tokenizer_args"),
        ({"tokenizer_name_or_path": "other/model"}, "another tokenizer"),
        ({"processing_kwargs": ["x"]}, "processing_kwargs"),
    ],
)
def test_a_setting_that_is_not_followed_is_refused(toy: ToyModel, settings: dict[str, Any], named: str) -> None:
    toy.change("sentence_bert_config.json", **settings)
    with pytest.raises(ModelError, match=named):
        toy.load()


def test_the_sentence_config_under_its_older_names(toy: ToyModel) -> None:
    toy.write("sentence_roberta_config.json", max_seq_length=16)
    assert read_sentence_config(toy.path)["max_seq_length"] == 32
    (toy.path / "sentence_bert_config.json").unlink()
    assert read_sentence_config(toy.path)["max_seq_length"] == 16

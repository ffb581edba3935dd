"""Vectors against the model's reference class, fp32, one text at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tiny import FAMILIES, MAX_LENGTH, as_passages, random_passages, save_tiny

from gte_vectorize.encoder.encoder import open_encoder
from gte_vectorize.errors import ModelError
from gte_vectorize.model.spec import load_model
from gte_vectorize.tokens.batcher import token_batches

LENGTHS = [3, 48, 17, 4, 17, 30, 9, 48, 3, 21]


def encode(folder: Path, ids: list[np.ndarray], **options: object) -> np.ndarray:
    spec = load_model(str(folder))
    with open_encoder(spec, device="cpu", dtype="fp32", **options) as encoder:  # type: ignore[arg-type]
        batches = token_batches(
            [as_passages(ids)], layout=encoder.layout, budget=encoder.budget, max_rows=encoder.max_rows
        )
        (window,) = encoder.stream(batches)
    return window.vectors


def reference(folder: Path, ids: list[np.ndarray]) -> np.ndarray:
    """sentence-transformers, one text at a time; the words of the tiny tokenizer are w0, w1, …"""
    encoder = SentenceTransformer(str(folder), device="cpu")
    texts = [" ".join(f"w{token - 4}" for token in part[1:-1]) for part in ids]
    return np.vstack([encoder.encode([text]) for text in texts])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_matches_its_reference(tiny_model: Callable[..., Path], family: str) -> None:
    folder = tiny_model(family)
    ids = random_passages(LENGTHS)
    cosine = (encode(folder, ids) * reference(folder, ids)).sum(axis=1)
    assert cosine.min() > 0.999999


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean"])
def test_every_pooling_matches_its_reference(tiny_model: Callable[..., Path], family: str, pooling: str) -> None:
    folder = tiny_model(family, pooling)
    ids = random_passages(LENGTHS)
    vectors = encode(folder, ids)
    assert np.abs(vectors - reference(folder, ids)).max() < 2e-6
    assert np.abs(vectors[0] - vectors[3]).max() > 1e-3  # the check sees a difference where there is one


def test_layouts_follow_the_family(tiny_model: Callable[..., Path]) -> None:
    layouts = {family: load_model(str(tiny_model(family))).layout for family in FAMILIES}
    packed = {family for family, layout in layouts.items() if layout == "packed"}
    assert packed == {"bert", "roberta", "xlm-roberta", "camembert"}


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
@pytest.mark.parametrize("options", [{"batch_tokens": 64}, {"batch_tokens": 500}, {"lanes": 1}, {"lanes": 3}])
def test_packed_vectors_do_not_depend_on_budget_or_lanes(
    tiny_model: Callable[..., Path], family: str, options: dict[str, int]
) -> None:
    ids = random_passages(list(np.random.default_rng(1).integers(3, MAX_LENGTH + 1, 300)))
    assert np.array_equal(encode(tiny_model(family), ids), encode(tiny_model(family), ids, **options))


@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean"])
def test_packed_vectors_do_not_depend_on_neighbours_or_order(tiny_model: Callable[..., Path], pooling: str) -> None:
    folder = tiny_model("bert", pooling)
    ids = random_passages(list(np.random.default_rng(2).integers(3, MAX_LENGTH + 1, 200)))
    together = encode(folder, ids)
    order = np.random.default_rng(3).permutation(len(ids))
    assert np.array_equal(encode(folder, [ids[row] for row in order]), together[order])
    for row in (0, 7, 199):
        assert np.array_equal(encode(folder, [ids[row]])[0], together[row])


def test_padded_vectors_hardly_depend_on_neighbours(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("distilbert")
    ids = random_passages([5, 48, 6])
    alone = np.vstack([encode(folder, [part]) for part in ids])
    assert (encode(folder, ids) * alone).sum(axis=1).min() > 0.999999


def test_modules_after_pooling_are_applied(tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    plain = save_tiny(tmp_path / "plain", "bert")
    torch.manual_seed(1)
    modules = [Transformer(str(plain)), Pooling(64), Dense(64, 24, activation_function=torch.nn.Tanh()), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu")
    model.max_seq_length = MAX_LENGTH
    model.save(str(tmp_path / "dense"))
    ids = random_passages(LENGTHS)
    vectors = encode(tmp_path / "dense", ids)
    assert vectors.shape == (len(ids), 24)
    assert np.abs(vectors - reference(tmp_path / "dense", ids)).max() < 2e-6
    assert np.array_equal(encode(tmp_path / "dense", ids[:1]), vectors[:1])


def test_missing_weights_are_refused_not_invented(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for family, gone in (
        ("bert", "encoder.layer.1.output.dense.weight"),
        ("distilbert", "transformer.layer.1.ffn.lin1.weight"),
    ):
        folder = tmp_path / family
        shutil.copytree(tiny_model(family), folder)
        tensors = load_file(folder / "model.safetensors")
        del tensors[gone]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"layer\.1"):
            encode(folder, random_passages([5]))


def test_an_encoder_that_looks_one_way_is_refused(tmp_path: Path) -> None:
    """A bidirectional configuration that the installed class does not know about would run causally, without a word."""
    from transformers import BertConfig, BertModel

    from gte_vectorize.encoder.padded import _check_bidirectional

    spec = load_model(str(save_tiny(tmp_path / "bert", "bert")))
    causal = BertModel(BertConfig(**FAMILIES["bert"], is_decoder=True)).eval()
    with pytest.raises(ModelError, match="earlier tokens only"):
        _check_bidirectional(causal, spec, torch.device("cpu"))

"""The packed forward of the BERT family: BERT, RoBERTa, XLM-RoBERTa (GTE, e5, MiniLM, bge, …).

Passages lie back to back in one token row, so nothing is padded and no mask exists: every step but attention works on
one token at a time, and attention is handed in, because that is where a CPU and a GPU differ. A matrix product gives a
token the same bits whatever the other tokens are, and attention sees one passage at a time; so a vector depends on its
text alone, bit for bit.

Architecture: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2019), post-LayerNorm encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gte_vectorize.encoder.weights import Weights
from gte_vectorize.errors import ModelError
from gte_vectorize.model.spec import ModelSpec

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Query, key and value of all tokens [tokens, heads, head size] → context of the same shape, passage by passage."""

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer. Query, key and value are one product of 3 × hidden columns."""

    heads: int
    qkv: Linear
    attention_out: Linear
    attention_norm: LayerNorm
    up: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    down: Linear
    norm: LayerNorm

    def __call__(self, hidden: torch.Tensor, attention: Attention) -> torch.Tensor:
        query, key, value = self.qkv(hidden).view(len(hidden), 3, self.heads, -1).unbind(1)
        context = attention(query, key, value).reshape(hidden.shape)
        hidden = self.attention_norm(self.attention_out(context) + hidden)
        return self.norm(self.down(self.activation(self.up(hidden))) + hidden)


@dataclass(frozen=True, slots=True)
class PackedBert:
    """Weights and forward of one encoder; `positions` already has the token type's vector added."""

    words: torch.Tensor
    positions: torch.Tensor
    norm: LayerNorm
    layers: tuple[Layer, ...]

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Token ids and positions, int[tokens] → hidden states [tokens, hidden] of the last layer."""
        hidden = self.norm(F.embedding(ids, self.words) + F.embedding(positions, self.positions))
        for layer in self.layers:
            hidden = layer(hidden, attention)
        return hidden


def load_packed(
    spec: ModelSpec, tensors: dict[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device
) -> PackedBert:
    """The packed encoder of a model whose layout is "packed". Raises ModelError if config and checkpoint disagree."""
    config = spec.config
    get = Weights(tensors, anchor="embeddings.word_embeddings.weight", dtype=dtype, device=device)
    size, eps = int(config["hidden_size"]), float(config.get("layer_norm_eps", 1e-12))

    def norm(name: str) -> LayerNorm:
        return LayerNorm(get(f"{name}.weight", size), get(f"{name}.bias", size), eps)

    positions = get("embeddings.position_embeddings.weight", int(config["max_position_embeddings"]), size)
    token_types = get("embeddings.token_type_embeddings.weight", int(config.get("type_vocab_size", 2)), size)
    return PackedBert(
        words=get("embeddings.word_embeddings.weight", int(config["vocab_size"]), size),
        positions=positions[spec.position_offset :] + token_types[0],
        norm=norm("embeddings.LayerNorm"),
        layers=tuple(_layer(config, get, norm, f"encoder.layer.{i}") for i in range(int(config["num_hidden_layers"]))),
    )


def _layer(config: Any, get: Weights, norm: Callable[[str], LayerNorm], name: str) -> Layer:
    size, inner, heads = (
        int(config["hidden_size"]),
        int(config["intermediate_size"]),
        int(config["num_attention_heads"]),
    )
    activation = ACTIVATIONS.get(config.get("hidden_act", "gelu"))
    if activation is None:
        raise ModelError(f"hidden_act {config['hidden_act']!r} is not one of {', '.join(ACTIVATIONS)}")
    if size % heads:
        raise ModelError(f"hidden_size {size} is not a multiple of num_attention_heads {heads}")

    def linear(part: str, rows: int, columns: int) -> Linear:
        return Linear(get(f"{name}.{part}.weight", rows, columns), get(f"{name}.{part}.bias", rows))

    query, key, value = (linear(f"attention.self.{part}", size, size) for part in ("query", "key", "value"))
    return Layer(
        heads=heads,
        qkv=Linear(torch.cat([query.weight, key.weight, value.weight]), torch.cat([query.bias, key.bias, value.bias])),
        attention_out=linear("attention.output.dense", size, size),
        attention_norm=norm(f"{name}.attention.output.LayerNorm"),
        up=linear("intermediate.dense", inner, size),
        activation=activation,
        down=linear("output.dense", size, inner),
        norm=norm(f"{name}.output.LayerNorm"),
    )

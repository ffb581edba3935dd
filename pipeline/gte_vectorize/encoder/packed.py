"""The packed forward of the BERT family: BERT, RoBERTa, XLM-RoBERTa (GTE, e5, MiniLM, bge, …).

Passages lie back to back in one token row, so nothing is padded and no mask exists: every step but attention works on
one token at a time. A matrix product gives a token the same bits whatever the other tokens are, and attention sees one
passage at a time; so a vector depends on its text alone, bit for bit. The code is the same on CPU and GPU; the few
steps that a device does its own way are handed in as kernels.

Architecture: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2019), post-LayerNorm encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gte_vectorize.encoder.kernels import Attention, Kernels, LayerNorm, Linear, choose_kernels
from gte_vectorize.encoder.weights import Weights
from gte_vectorize.errors import ModelError
from gte_vectorize.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer. Query, key and value are one product of 3 × hidden columns."""

    heads: int
    qkv: Linear
    attention_out: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    norm: LayerNorm

    def __call__(
        self, hidden: torch.Tensor, attention: Attention, kernels: Kernels, only: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states → hidden states; of the tokens `only`, int[count], if given."""
        context = attention(self.qkv(hidden), self.heads)
        if only is not None:
            context, hidden = context[only], hidden[only]
        hidden = kernels.add_norm(self.attention_out(context), hidden, self.attention_norm)
        return kernels.add_norm(self.down(kernels.up(hidden, self.up)), hidden, self.norm)


@dataclass(frozen=True, slots=True)
class PackedBert:
    """Weights and forward of one encoder; `positions` already has the token type's vector added."""

    words: torch.Tensor
    positions: torch.Tensor
    norm: LayerNorm
    layers: tuple[Layer, ...]
    kernels: Kernels

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        bounds: torch.Tensor,
        max_length: int,
        only: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids and positions, int[tokens], bounds of the passages → hidden states [tokens, hidden].

        With `only`, int[count], of just these tokens [count, hidden], without the last layer's work on the others.
        """
        attention = self.kernels.attend(bounds, max_length)
        hidden = self.norm(F.embedding(ids, self.words) + F.embedding(positions, self.positions))
        for layer in self.layers[:-1]:
            hidden = layer(hidden, attention, self.kernels)
        return self.layers[-1](hidden, attention, self.kernels, only)


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
        kernels=choose_kernels(
            str(config.get("hidden_act", "gelu")),
            head_size=size // int(config["num_attention_heads"]),
            device=device,
            dtype=dtype,
        ),
    )


def _layer(config: Any, get: Weights, norm: Callable[[str], LayerNorm], name: str) -> Layer:
    size, inner, heads = (
        int(config["hidden_size"]),
        int(config["intermediate_size"]),
        int(config["num_attention_heads"]),
    )
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
        down=linear("output.dense", size, inner),
        norm=norm(f"{name}.output.LayerNorm"),
    )

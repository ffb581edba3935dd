"""A model's matrix products, read from its weights' headers, and the arithmetic that a token costs."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from safetensors import safe_open

from gte_vectorize.batch import Int32
from gte_vectorize.model.spec import ModelSpec

_WEIGHT = re.compile(r"\blayers?\.(\d+)\.(.+)\.weight$")
_QKV = re.compile(r"\b(query|key|value|[qkv](_lin|_proj)?)$")


@dataclass(frozen=True, slots=True)
class Shape:
    """`products` are the (inputs, outputs) of one layer's matrix products; query, key and value are one."""

    hidden: int
    layers: int
    products: tuple[tuple[int, int], ...]

    def flops(self, lengths: Int32) -> float:
        """Floating-point operations of passages of these lengths, int32[passages].

        A token costs 2 × the parameters of the layers' matrix products, and in every layer 4 × hidden × its passage's
        length for attention (scores and weighted sum, 2 × hidden × length each). Embeddings, norms, activations,
        softmax and pooling are left out, as is usual; what a forward saves in the last layer is not taken off.
        """
        sizes = lengths.astype(np.float64)
        parameters = self.layers * sum(inputs * outputs for inputs, outputs in self.products)
        return float(2 * parameters * sizes.sum() + 4 * self.hidden * self.layers * (sizes**2).sum())


def read_shape(spec: ModelSpec) -> Shape | None:
    """None where the layers are not stored one by one, all alike, as most families do."""
    layers: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for file in spec.weights:
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                size = tensors.get_slice(name).get_shape()
                if (found := _WEIGHT.search(name)) and len(size) == 2:
                    layers[found[1]][found[2]] = (size[1], size[0])
    products = {tuple(_products(weights)) for weights in layers.values()}
    hidden = spec.config.get("hidden_size", spec.config.get("dim"))
    if len(products) != 1 or not isinstance(hidden, int):
        return None
    return Shape(hidden, len(layers), products.pop())


def _products(weights: dict[str, tuple[int, int]]) -> list[tuple[int, int]]:
    fused = [size for name, size in weights.items() if _QKV.search(name)]
    others = sorted(size for name, size in weights.items() if not _QKV.search(name))
    return [(fused[0][0], sum(outputs for _, outputs in fused)), *others] if fused else others

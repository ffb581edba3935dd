"""Checkpoint tensors out of safetensors files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from gte_vectorize.errors import ModelError


class Weights:
    """Named tensors of one checkpoint, whatever prefix (`bert.`, none, …) it gave the encoder's names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, anchor: str, dtype: torch.dtype, device: torch.device):
        prefixes = [name.removesuffix(anchor) for name in tensors if name.endswith(anchor)]
        if len(prefixes) != 1:
            raise ModelError(f"the checkpoint holds {len(prefixes)} tensors named …{anchor}; expected exactly one")
        self._tensors, self._prefix, self._dtype, self._device = tensors, prefixes[0], dtype, device

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `name` in the encoder's dtype, on its device. Raises ModelError if missing or of another shape."""
        tensor = self._tensors.get(self._prefix + name)
        if tensor is None:
            raise ModelError(f"the checkpoint has no tensor {self._prefix + name!r}")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} has shape {tuple(tensor.shape)}, but config.json says {shape}")
        tensor = tensor.to(self._device, self._dtype)
        if not tensor.isfinite().all():
            raise ModelError(f"tensor {self._prefix + name!r} holds values that are not finite in {self._dtype}")
        return tensor


def read_tensors(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """All tensors of the given safetensors files, on the CPU. Raises ModelError for a damaged file."""
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read the weights {file.name!r}: {error}") from error
    return tensors

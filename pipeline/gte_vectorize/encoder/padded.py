"""Any other encoder that transformers has, behind the padded layout."""

from __future__ import annotations

from typing import Any

import torch

from gte_vectorize.errors import ModelError
from gte_vectorize.model.spec import ModelSpec


def load_padded(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The model's transformers class, from safetensors, without custom code and without dropout.

    Raises ModelError if weights are missing (transformers would fill them with noise) or if attention turns out not to
    look both ways.
    """
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, loading = AutoModel.from_pretrained(
            spec.path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelError(f"transformers cannot load the {spec.architecture!r} model {spec.name!r}: {error}") from error
    missing = sorted(name for name in loading["missing_keys"] if "pooler" not in name)
    if missing:
        raise ModelError(f"the checkpoint of {spec.name!r} lacks {len(missing)} tensors, first {missing[0]!r}")
    model = model.eval().to(device)
    _check_bidirectional(model, spec, device)
    return model


def _check_bidirectional(model: Any, spec: ModelSpec, device: torch.device) -> None:
    """Changing the last token must change the first one's state: some classes silently run an encoder causally."""
    vocabulary = int(spec.config["vocab_size"])
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]], device=device) % vocabulary
    with torch.inference_mode():
        first = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[:, 0].float()
    if torch.equal(first[0], first[1]):
        raise ModelError(
            f"the {spec.architecture!r} model {spec.name!r} attends to earlier tokens only; "
            "this version runs bidirectional encoders"
        )

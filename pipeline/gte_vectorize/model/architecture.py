"""config.json → how the encoder is laid out, or a refusal by name of what cannot be run faithfully.

Families we have a forward for are packed. Any other bidirectional text encoder of transformers is padded; transformers
is imported for those alone, because importing it takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gte_vectorize.batch import Layout
from gte_vectorize.errors import ModelError
from gte_vectorize.model.folder import read_settings

_PACKED = {"bert", "roberta", "xlm-roberta", "camembert"}
# Their first token stands at position padding index + 1, so that many rows of the position table are never used.
_OFFSET = _PACKED - {"bert"} | {
    "data2vec-text",
    "ibert",
    "longformer",
    "luke",
    "mpnet",
    "roberta-prelayernorm",
    "xlm-roberta-xl",
    "xmod",
}
_MAY_ASK_FOR_CODE = ("config.json", "tokenizer_config.json", "*/config.json", "*/tokenizer_config.json")
_REFUSED = {
    "is_decoder": "it is a decoder",
    "is_encoder_decoder": "it is an encoder-decoder",
    "quantization_config": "its weights are quantized",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the rest of the model's folder is checked against.

    `positions` is the most tokens the position table can hold, None where config.json states no limit;
    `position_offset` the position of the first token.
    """

    model_type: str
    layout: Layout
    hidden_size: int
    vocab_size: int
    positions: int | None
    position_offset: int


def refuse_foreign_code(root: Path) -> None:
    """Raises ModelError if the folder has or asks for code of its own, or is only an adapter of another model."""
    for path in (found for pattern in _MAY_ASK_FOR_CODE for found in sorted(root.glob(pattern))):
        if read_settings(path).get("auto_map"):
            raise ModelError(
                f"{str(path)!r} asks for code of the model's own (auto_map), which is never run: "
                "choose a model of an architecture that transformers has built in"
            )
    if code := sorted(
        path.relative_to(root).as_posix() for pattern in ("*.py", "*/*.py") for path in root.glob(pattern)
    ):
        raise ModelError(
            f"{str(root)!r} contains code ({code[0]!r}), which is never run: remove it if it is not needed"
        )
    if (root / "adapter_config.json").exists():
        raise ModelError(
            f"{str(root)!r} is an adapter (adapter_config.json): merge it into its base model and save that"
        )


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Raises ModelError for an architecture that is unknown, not a bidirectional text encoder, or incomplete."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError("config.json has no model_type: save the model again with a recent transformers")
    packed = model_type in _PACKED
    stated = config if packed else _registered(model_type, config)
    for key, reason in _REFUSED.items():
        if config.get(key) or stated.get(key):
            raise ModelError(f"model_type {model_type!r} cannot be run: {reason} ({key} in config.json)")
    embedding = config.get("position_embedding_type") or "absolute"
    if packed and embedding != "absolute":
        raise ModelError(f"model_type {model_type!r} with position_embedding_type {embedding!r} cannot be run")
    vocab_size = _size(stated, "vocab_size")
    offset = _position_offset(model_type, stated, vocab_size)
    table = None if stated.get("max_position_embeddings") in (None, -1) else _size(stated, "max_position_embeddings")
    if packed and table is None:
        raise ModelError("config.json has no max_position_embeddings: save the model again with a recent transformers")
    if table is not None and table <= offset:
        raise ModelError(f"config.json: max_position_embeddings {table} leaves no position after the offset {offset}")
    return Architecture(
        model_type=model_type,
        layout="packed" if packed else "padded",
        hidden_size=_size(stated, "hidden_size"),
        vocab_size=vocab_size,
        positions=None if table is None else table - offset,
        position_offset=offset,
    )


def _registered(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers reads it: the family's own key names resolved, its defaults filled in."""
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"unknown architecture {model_type!r} (model_type in config.json): "
            f"transformers {__version__} does not have it; a newer one may"
        )
    # Only encoders are trained to fill masks: a model that is absent reads left to right, or does not read text.
    if model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise ModelError(
            f"model_type {model_type!r} is not a bidirectional text encoder, and this version runs no other kind: "
            "choose an encoder, such as a BERT, RoBERTa, XLM-RoBERTa or ModernBERT model"
        )
    try:
        known = CONFIG_MAPPING[model_type].from_dict(dict(config))
    except Exception as error:  # each family validates in its own way
        raise ModelError(f"transformers {__version__} cannot read config.json: {type(error).__name__}") from error
    keys = ("hidden_size", "vocab_size", "max_position_embeddings", "pad_token_id", *_REFUSED)
    return {key: getattr(known, key, None) for key in keys}


def _position_offset(model_type: str, stated: Mapping[str, Any], vocab_size: int) -> int:
    """Also checks the padding token: the families that count from it and every padded batch need one."""
    if model_type in _PACKED - _OFFSET:
        return 0
    padding = stated.get("pad_token_id", 1)
    if type(padding) is not int or not 0 <= padding < vocab_size:
        raise ModelError(
            f"config.json: model_type {model_type!r} needs a pad_token_id below vocab_size {vocab_size}, "
            f"found {padding!r}"
        )
    return padding + 1 if model_type in _OFFSET else 0


def _size(stated: Mapping[str, Any], key: str) -> int:
    value = stated.get(key)
    if type(value) is not int or value < 1:
        raise ModelError(f"config.json: {key} must be a positive number, found {value!r}")
    return value

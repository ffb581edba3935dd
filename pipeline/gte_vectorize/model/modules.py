"""modules.json → where the transformer lies, how its tokens are pooled, and what follows the pooling.

Sentence-transformers writes the list; its class names are read by their last component only, so that the paths of every
release mean the same. A module that is not known here would change the vectors, so it is refused by name. Nothing is
imported from the names and nothing in the folder is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gte_vectorize.errors import ModelError
from gte_vectorize.model.folder import inside, read_json, read_settings
from gte_vectorize.model.weights import SINGLE, read_shapes

# In the order in which the older boolean keys are concatenated.
_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_MODES = tuple(_POOLING.values())
# What the authors publish for models whose folder may lack modules.json.
_GTE_POOLING = {f"thenlper/gte-{size}": "mean" for size in ("small", "base", "large")}
_GTE_POOLING |= {f"thenlper/gte-{size}-zh": "cls" for size in ("small", "base", "large")}
_ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "sigmoid")
_VECTOR = "sentence_embedding"


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer after the pooling; `weights` holds linear.weight [out, in] and, with a bias, linear.bias [out]."""

    weights: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class Normalize:
    """Scales the vector to length one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """The modules of a model.

    transformer     the folder of config.json, tokenizer and weights
    include_prompt  whether the prompt's tokens are pooled with the others
    head            what follows the pooling, in order
    sources         where `modules` and `pooling` came from
    """

    transformer: Path
    pooling: tuple[str, ...]
    include_prompt: bool
    head: tuple[Dense | Normalize, ...]
    sources: Mapping[str, str]


def read_modules(root: Path, *, name: str, pooling: str | None) -> Modules:
    """The modules of the model, the caller's `pooling` first. Raises ModelError for one that cannot be run."""
    if pooling is not None and pooling not in POOLING_MODES:
        raise ModelError(f"unknown pooling {pooling!r}: give one of {', '.join(POOLING_MODES)}")
    if not (root / "modules.json").exists():
        return _without_list(root, name, pooling)
    listed = [(_kind(entry), entry.get("path")) for entry in _entries(root)]
    kinds = [kind for kind, _ in listed]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise ModelError(f"modules.json must begin with Transformer and Pooling, found {', '.join(kinds[:2])}")
    folders = [inside(root, path) for _, path in listed]
    settings = read_settings(folders[1] / "config.json")
    return Modules(
        transformer=folders[0],
        pooling=_pooling(settings, folders[1].name) if pooling is None else (pooling,),
        include_prompt=settings.get("include_prompt", True) is not False,
        head=tuple(
            module for kind, folder in zip(kinds[2:], folders[2:], strict=True) for module in _head(kind, folder)
        ),
        sources={
            "modules": "modules.json",
            "pooling": f"{folders[1].name}/config.json" if pooling is None else "given by the caller",
        },
    )


def _without_list(root: Path, name: str, pooling: str | None) -> Modules:
    source = "given by the caller"
    if pooling is None:
        pooling, source = _GTE_POOLING.get(name), f"published with {name}"
    if pooling is None:
        raise ModelError(f"{str(root)!r} has no modules.json to say how tokens are pooled: give --pooling")
    return Modules(
        transformer=root,
        pooling=(pooling,),
        include_prompt=True,
        head=(Normalize(),),
        sources={"modules": "none: no modules.json", "pooling": source},
    )


def _entries(root: Path) -> list[dict[str, Any]]:
    entries = read_json(root / "modules.json")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ModelError(f"{str(root / 'modules.json')!r} is not a list of modules: fetch the model again")
    return entries


def _kind(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("type"))
    kind = name.rpartition(".")[2]
    if not name.startswith("sentence_transformers.") or kind not in (
        "Transformer",
        "Pooling",
        "Dense",
        "Normalize",
        "Dropout",
    ):
        raise ModelError(f"modules.json lists {name!r}, which this version cannot run faithfully")
    return kind


def _pooling(settings: Mapping[str, Any], folder: str) -> tuple[str, ...]:
    stated = settings.get("pooling_mode")
    if stated is None:
        stated = [mode for key, mode in _POOLING.items() if settings.get(key)]
    modes = [stated] if isinstance(stated, str) else stated
    if not isinstance(modes, Sequence) or not modes:
        raise ModelError(f"{folder}/config.json names no pooling: give --pooling")
    if unknown := [mode for mode in modes if mode not in POOLING_MODES]:
        raise ModelError(f"{folder}/config.json names the pooling {unknown[0]!r}, which this version does not know")
    return tuple(modes)


def _head(kind: str, folder: Path) -> list[Dense | Normalize]:
    """The module, or nothing for one that does nothing outside training."""
    if kind == "Dropout":
        return []
    settings = read_settings(folder / "config.json")
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key) not in (None, _VECTOR):
            raise ModelError(f"{folder.name}/config.json: {kind} works on {settings[key]!r}, not on {_VECTOR!r}")
    if kind == "Normalize":
        return [Normalize()]
    if kind == "Dense":
        return [_dense(settings, folder)]
    raise ModelError(f"modules.json lists a second {kind}, which this version cannot run faithfully")


def _dense(settings: Mapping[str, Any], folder: Path) -> Dense:
    where = f"{folder.name}/config.json"
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    short = activation.rpartition(".")[2].lower()
    if not activation.startswith("torch.nn.") or short not in _ACTIVATIONS:
        raise ModelError(f"{where}: activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
    if settings.get("use_residual"):
        raise ModelError(f"{where}: Dense with use_residual cannot be run by this version")
    bias = bool(settings.get("bias", True))
    weights = folder / SINGLE
    if not weights.is_file():
        raise ModelError(f"{str(folder)!r} has no {SINGLE!r}: save the model again as safetensors")
    shapes = read_shapes(weights)
    sizes = settings.get("out_features"), settings.get("in_features")
    if shapes.get("linear.weight") != sizes or shapes.get("linear.bias") != (sizes[:1] if bias else None):
        raise ModelError(f"{str(weights)!r} does not fit {where}: fetch the model again")
    return Dense(weights, shapes["linear.weight"][1], shapes["linear.weight"][0], bias, short)


def vector_size(modules: Modules, hidden_size: int) -> int:
    """The length of the final vector. Raises ModelError if a Dense module does not fit what comes before it."""
    size = len(modules.pooling) * hidden_size
    for module in modules.head:
        if isinstance(module, Dense):
            if module.in_features != size:
                raise ModelError(
                    f"{module.weights.parent.name}: Dense takes vectors of {module.in_features}, but {size} come in "
                    f"(pooling {'+'.join(modules.pooling)}, hidden_size {hidden_size})"
                )
            size = module.out_features
    return size


def read_sentence_config(transformer: Path) -> dict[str, Any]:
    """sentence_bert_config.json, also under its older names. Raises ModelError for a setting that is not followed."""
    names = sorted(transformer.glob("sentence_*_config.json"), key=lambda path: (path.name[9:13] != "bert", path.name))
    if not names:
        return {}
    settings = read_settings(names[0])
    text = _section(_section(settings, "modality_config"), "text")
    expected = {
        "transformer_task": (settings.get("transformer_task"), "feature-extraction"),
        "module_output_name": (settings.get("module_output_name"), "token_embeddings"),
        "modality_config (text)": (text.get("method"), "forward"),
        "modality_config (text output)": (text.get("method_output_name"), "last_hidden_state"),
    }
    for key, (value, only) in expected.items():
        if value not in (None, only):
            raise ModelError(f"{names[0].name}: {key} {value!r} cannot be run, only {only!r}")
    for key in ("processing_kwargs", "processor_kwargs", "tokenizer_args", "config_kwargs", "config_args"):
        # trust_remote_code is never granted, so a model that only asks for it asks for nothing.
        if {name: value for name, value in _section(settings, key).items() if name != "trust_remote_code"}:
            raise ModelError(f"{names[0].name}: {key} changes how texts are read and is not followed by this version")
    if settings.get("tokenizer_name_or_path"):
        raise ModelError(f"{names[0].name} points to another tokenizer: copy its files into the model's folder")
    return settings


def _section(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    section = settings.get(key) or {}
    if not isinstance(section, dict):
        raise ModelError(f"sentence_bert_config.json: {key} must be an object, found {section!r}")
    return section

"""The model's tokenizer.json and everything a worker process needs beside it, so that its ids are the reference's.

The reference, transformers' AutoTokenizer, lets the switches of tokenizer_config.json, or their defaults, win over the
BertNormalizer in tokenizer.json; `TokenizerSpec.normalizer` holds what differs. Everything else is taken from
tokenizer.json, which is what the model was trained with. A folder without tokenizer.json is converted once, into a
private folder that is removed at exit.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer

from gte_vectorize.errors import ModelError
from gte_vectorize.model.architecture import Architecture
from gte_vectorize.model.folder import read_settings
from gte_vectorize.model.limits import choose_max_length
from gte_vectorize.model.weights import hash_file

_BERT_CLASSES = {
    f"{family}Tokenizer" for family in ("Bert", "DistilBert", "Electra", "MPNet", "MobileBert", "SqueezeBert")
}
# Families whose tokenizer is one of these classes where neither config names a class.
_BERT_FAMILIES = {
    "bert",
    "convbert",
    "distilbert",
    "electra",
    "ernie",
    "megatron-bert",
    "mobilebert",
    "mpnet",
    "nomic_bert",
}
_SWITCHES = {
    "lowercase": ("do_lower_case", True),
    "strip_accents": ("strip_accents", None),
    "handle_chinese_chars": ("tokenize_chinese_chars", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer.json and how to use it; picklable, and all that a worker process is told of the model.

    max_length  tokens of a passage, special tokens and prompt included
    prompt      put before each text by plain concatenation
    lower_case  whether texts are lower-cased before the tokenizer's own normalisation
    normalizer  fields of its BertNormalizer to replace; empty for any other tokenizer
    """

    path: Path
    sha256: str
    max_length: int
    prompt: str
    lower_case: bool
    normalizer: Mapping[str, bool | None]


def read_tokenizer(
    folder: Path,
    config: Mapping[str, Any],
    sentence: Mapping[str, Any],
    architecture: Architecture,
    *,
    prompt: str,
    max_length: int | None,
) -> tuple[TokenizerSpec, dict[str, str]]:
    """The tokenizer and the sources of `tokenizer` and `max_length`.

    `config` and `sentence` are the contents of config.json and sentence_bert_config.json. Raises ModelError if the
    tokenizer is missing or damaged, if its ids do not fit the model, or for a limit the model cannot hold.
    """
    settings = read_settings(folder / "tokenizer_config.json")
    if settings.get("truncation_side", "right") != "right":
        raise ModelError("tokenizer_config.json: truncation_side 'left' cannot be run, long texts lose their end here")
    path, source = folder / "tokenizer.json", "tokenizer.json"
    replaced: dict[str, bool | None] = {}
    if path.exists():
        tokenizer = _open(path)
        replaced = _replaced_switches(tokenizer, settings, config, architecture.model_type)
    else:
        path, source = _convert(folder)
        tokenizer = _open(path)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= architecture.vocab_size:
        raise ModelError(
            f"{source} has the token id {highest}, but the model has only {architecture.vocab_size} embeddings "
            "(vocab_size in config.json): the tokenizer belongs to another model"
        )
    special = tokenizer.num_special_tokens_to_add(is_pair=False)
    limit, limit_source = choose_max_length(
        requested=max_length,
        sentence=sentence,
        tokenizer=settings,
        positions=architecture.positions,
        least=1 + special + len(tokenizer.encode(prompt, add_special_tokens=False).ids),
    )
    spec = TokenizerSpec(
        path=path,
        sha256=hash_file(path),
        max_length=limit,
        prompt=prompt,
        lower_case=bool(sentence.get("do_lower_case", False)),
        normalizer=replaced,
    )
    if replaced:
        source += f", {' and '.join(replaced)} by tokenizer_config.json"
    return spec, {"tokenizer": source, "max_length": limit_source}


def _open(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"{str(path)!r} is not a tokenizer: fetch the model again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _replaced_switches(
    tokenizer: Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any], model_type: str
) -> dict[str, bool | None]:
    normalizer = tokenizer.normalizer
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    bert = model_type in _BERT_FAMILIES if named is None else str(named).removesuffix("Fast") in _BERT_CLASSES
    if not bert or not isinstance(normalizer, BertNormalizer):
        return {}
    wanted = {field: settings.get(key, default) for field, (key, default) in _SWITCHES.items()}
    for field, (key, default) in _SWITCHES.items():
        if not isinstance(wanted[field], bool) and wanted[field] is not default:
            raise ModelError(f"tokenizer_config.json: {key} must be true or false, found {wanted[field]!r}")
    return {field: value for field, value in wanted.items() if value != getattr(normalizer, field)}


def _convert(folder: Path) -> tuple[Path, str]:
    """A tokenizer.json made by transformers from the family's older vocabulary files, and the names of those."""
    from transformers import AutoTokenizer

    private = Path(tempfile.mkdtemp(prefix="gte-vectorize-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    path = private / "tokenizer.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer.backend_tokenizer.save(str(path))
    except Exception as error:  # each family converts in its own way, some with libraries that may be missing
        raise ModelError(
            f"{str(folder)!r} has no tokenizer.json and none could be made ({type(error).__name__}): "
            "fetch the model again, or save its tokenizer with a recent transformers"
        ) from error
    # Without its files a tokenizer class builds itself an almost empty vocabulary and says nothing.
    files = [name for key, name in tokenizer.vocab_files_names.items() if key != "tokenizer_file"]
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ModelError(f"{str(folder)!r} has neither 'tokenizer.json' nor {missing[0]!r}: fetch the model again")
    return path, f"{' and '.join(files)} (converted)"

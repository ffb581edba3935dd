"""How many tokens of a text the model reads.

The caller's value > sentence_bert_config.json > tokenizer_config.json (model_max_length) > config.json (positions).
Whatever comes first is capped by the positions the model has; values above a million mean "no limit" and are passed
over. What tokenizer.json says about truncation is a leftover of its last use and is not consulted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gte_vectorize.errors import ModelError

_NO_LIMIT = 1_000_000


def choose_max_length(
    *,
    requested: int | None,
    sentence: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    positions: int | None,
    least: int,
) -> tuple[int, str]:
    """The limit in tokens, special tokens and prompt included, and where it came from.

    `sentence` and `tokenizer` are the contents of the two files; `least` is the shortest limit that leaves room for one
    token of text. Raises ModelError for a limit that is above the positions, below `least`, or stated nowhere.
    """
    if requested is not None:
        limit, source = requested, "given by the caller"
        if positions is not None and limit > positions:
            raise ModelError(f"--max-length {limit} is more than the {positions} positions of the model")
    else:
        limit, source = next(_stated(sentence, tokenizer), (0, ""))
        if positions is not None and not 0 < limit <= positions:
            capped = f", capped from {source}" if source else ""
            limit, source = positions, f"config.json ({positions} positions){capped}"
        if not source:
            raise ModelError("the model's folder states no length limit: give --max-length")
    if limit < least:
        raise ModelError(
            f"a length limit of {limit} tokens ({source}) leaves no room for text: at least {least} needed"
        )
    return limit, source


def _stated(sentence: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    for name, settings, key in (
        ("sentence_bert_config.json", sentence, "document_length"),
        ("sentence_bert_config.json", sentence, "max_seq_length"),
        ("tokenizer_config.json", tokenizer, "model_max_length"),
    ):
        value = settings.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
            raise ModelError(f"{name}: {key} must be a positive number, found {value!r}")
        if value <= _NO_LIMIT:
            yield int(value), f"{name} ({key} {int(value)})"

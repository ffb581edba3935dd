from __future__ import annotations

from typing import Any

import pytest

from gte_vectorize.errors import ModelError
from gte_vectorize.model.limits import choose_max_length


def choose(**given: Any) -> tuple[int, str]:
    return choose_max_length(
        **{"requested": None, "sentence": {}, "tokenizer": {}, "positions": 512, "least": 3, **given}
    )


@pytest.mark.parametrize(
    ("given", "limit", "source"),
    [
        ({"requested": 20, "sentence": {"max_seq_length": 30}}, 20, "given by the caller"),
        ({"sentence": {"max_seq_length": 30}, "tokenizer": {"model_max_length": 40}}, 30, "max_seq_length 30"),
        ({"sentence": {"max_seq_length": None}, "tokenizer": {"model_max_length": 40}}, 40, "model_max_length 40"),
        ({"sentence": {"max_seq_length": 30, "document_length": 50}}, 50, "document_length 50"),
        ({}, 512, "config.json (512 positions)"),
        ({"requested": 8000, "positions": None}, 8000, "given by the caller"),
    ],
)
def test_precedence(given: dict[str, Any], limit: int, source: str) -> None:
    chosen, why = choose(**given)
    assert chosen == limit
    assert source in why


def test_a_roberta_that_states_514_reads_512() -> None:
    limit, source = choose(sentence={"max_seq_length": 514}, tokenizer={"model_max_length": 514})
    assert limit == 512
    assert "512 positions" in source
    assert "max_seq_length 514" in source


@pytest.mark.parametrize("sentinel", [int(1e30), 1000000000000000019884624838656, 1e30, float("inf")])
def test_the_sentinel_for_no_limit_is_passed_over(sentinel: float) -> None:
    assert choose(tokenizer={"model_max_length": sentinel})[0] == 512
    with pytest.raises(ModelError, match="--max-length"):
        choose(tokenizer={"model_max_length": sentinel}, positions=None)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"requested": 513}, "512 positions"),
        ({"requested": 2}, "at least 3"),
        ({"requested": 0}, "at least 3"),
        ({"requested": -1}, "at least 3"),
        ({"sentence": {"max_seq_length": 2}}, "at least 3"),
        ({"sentence": {"max_seq_length": 0}}, "max_seq_length"),
        ({"tokenizer": {"model_max_length": "many"}}, "model_max_length"),
        ({"tokenizer": {"model_max_length": float("nan")}}, "model_max_length"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        choose(**given)

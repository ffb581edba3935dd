from __future__ import annotations

import functools
import json
import random
import string
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gte_vectorize.batch import Status
from gte_vectorize.errors import ModelError
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.tokens.tokenizer import Encoded, TextTokenizer

KINDS = ("wordpiece", "unigram", "byte_bpe")
PARTS = [
    "agreement",
    "Liability",
    " ",
    "  ",
    "\n",
    "\u3000",
    "\x00",
    "\x07",
    "é",
    "e\u0301",
    "Σ",
    "甲",
    "合同条款",
    "。",
    "한국",
    "👩\u200d👧",
    "[CLS]",
    "[MASK]",
    "<s>",
    "</s>",
    "<|end|>",
    "▁",
    "##ing",
    "don't",
    "3.14",
    "=",
    "--",
]


@pytest.fixture(scope="module")
def compare(
    tokenizer_files: dict[str, Path], spec_of: Callable[..., TokenizerSpec]
) -> Callable[[str, int, str], tuple[Encoded, Encoded]]:
    """`compare(kind, max_length, text)`: what the room says, and what cutting after tokenizing the whole text says."""

    @functools.cache
    def ours(kind: str, max_length: int) -> TextTokenizer:
        return TextTokenizer(spec_of(tokenizer_files[kind], max_length))

    @functools.cache
    def reference(kind: str) -> Tokenizer:
        return Tokenizer.from_file(str(tokenizer_files[kind]))

    def run(kind: str, max_length: int, text: str) -> tuple[Encoded, Encoded]:
        whole = reference(kind)
        whole.no_padding()
        whole.no_truncation()
        truncated = len(whole.encode(text).ids) > max_length
        whole.enable_truncation(max_length)
        found = ours(kind, max_length).encode([text])[0]
        assert (found.cut > 0) == truncated  # how many they are is an estimate
        return found._replace(cut=0), Encoded(whole.encode(text).ids, truncated, Status.OK)

    return run


@pytest.mark.parametrize("model", ["minilm_dir", "e5_dir"])
def test_ids_are_the_reference_tokenizers(
    model: str, request: pytest.FixtureRequest, spec_of: Callable[..., TokenizerSpec]
) -> None:
    from transformers import AutoTokenizer

    folder = request.getfixturevalue(model)
    reference = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rng = random.Random(0)
    texts = ["a", *PARTS, *("".join(rng.choices(PARTS, k=rng.randint(1, 60))) for _ in range(300))]
    encoded = TextTokenizer(spec_of(folder, 32)).encode(texts)
    assert {row.status for row in encoded} == {Status.OK, Status.EMPTY}
    for text, row in zip(texts, encoded, strict=True):
        if row.status is Status.OK:
            assert row.ids == reference(text, truncation=True, max_length=32).input_ids
            assert row.truncated == (len(reference(text).input_ids) > 32)
        else:
            assert len(reference(text).input_ids) == len(reference("").input_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_limit_is_exact_and_the_end_token_survives(
    kind: str, tokenizer_files: dict[str, Path], spec_of: Callable[..., TokenizerSpec]
) -> None:
    spec = spec_of(tokenizer_files[kind], 24)
    special = Tokenizer.from_file(str(spec.path)).num_special_tokens_to_add(False)
    body = 24 - special
    texts = [" ".join(["a"] * words) for words in (body - 1, body, body + 1, 10 * body)]
    below, exact, above, far_above = TextTokenizer(spec).encode(texts)
    assert [len(row.ids) for row in (below, exact, above, far_above)] == [23, 24, 24, 24]
    assert [row.truncated for row in (below, exact, above, far_above)] == [False, False, True, True]
    assert above.ids == far_above.ids == exact.ids
    assert exact.ids[-1] == below.ids[-1]


def test_limits_written_into_the_file_are_not_used(minilm_dir: str, spec_of: Callable[..., TokenizerSpec]) -> None:
    settings_in_file = json.loads(Path(minilm_dir, "tokenizer.json").read_text())
    assert settings_in_file["truncation"]["max_length"] == settings_in_file["padding"]["strategy"]["Fixed"] == 128
    short, long = TextTokenizer(spec_of(minilm_dir, 256)).encode(["a", "a " * 300])
    assert (len(short.ids), len(long.ids)) == (3, 256)


LONG_TEXTS: dict[str, Callable[[Callable[..., str]], str]] = {
    "latin": lambda make: make(["agreement", "party", "naïve", "café", "don't", "1,000.5", "(a)"], 10_000, " "),
    "lines": lambda make: make(["agreement", "party", "1,000.5", "(a)"], 10_000, "\n"),
    "chinese": lambda make: make("的一是在不了有和人这中大为上个国我以要他时来用们", 30_000),
    "chinese sentences": lambda make: make(["合同的条款", "甲方与乙方", "，", "。"], 12_000),
    "thai": lambda make: make("กขคงจฉชซฌญ", 30_000),
    "base64": lambda make: make(string.ascii_letters + string.digits + "+/", 30_000),
    "digits": lambda make: make(string.digits, 30_000),
    "rule": lambda make: "=" * 30_001,
    "dotted": lambda make: "-=" * 15_000 + "-",
    "laughter": lambda make: "哈哈" * 15_001,
    "combining": lambda make: "a" + "\u0301" * 5_000 + make(["party", "of"], 6_000, " "),
    "special tokens": lambda make: make(["[MASK]", "</s>", "<|end|>"], 6_000),
    "spaces": lambda make: " " * 30_000 + make(["party", "of"], 5_000, " "),
    "long word first": lambda make: "ab" * 20_000 + " " + make(["party", "of"], 5_000, " "),
    "long words": lambda make: make(["ab" * 3_000, "party"], 50, " "),
    "capital sigma": lambda make: make(["ΟΔΟΣ", "ΣΣ"], 6_000, " "),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LONG_TEXTS)
def test_long_text_has_the_ids_of_the_whole(
    kind: str,
    name: str,
    random_text: Callable[..., str],
    compare: Callable[[str, int, str], tuple[Encoded, Encoded]],
) -> None:
    text = LONG_TEXTS[name](random_text)
    for max_length in (16, 512):
        ours, whole = compare(kind, max_length, text)
        assert ours == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    start=st.lists(st.sampled_from(PARTS), max_size=8).map("".join),
    period=st.lists(st.sampled_from([*PARTS, "a", "ab", "."]), min_size=1, max_size=6).map("".join),
    length=st.integers(600, 3_000),
    end=st.sampled_from(["", " end", "a", "。"]),
)
def test_repetitive_text_has_the_ids_of_the_whole(
    kind: str,
    start: str,
    period: str,
    length: int,
    end: str,
    compare: Callable[[str, int, str], tuple[Encoded, Encoded]],
) -> None:
    ours, whole = compare(kind, 16, start + (period * length)[:length] + end)
    assert ours == whole or (ours.status is Status.EMPTY and len(whole.ids) == 2)


@pytest.mark.parametrize("kind", KINDS)
def test_time_does_not_grow_with_the_text(
    kind: str, tokenizer_files: dict[str, Path], spec_of: Callable[..., TokenizerSpec]
) -> None:
    tokenizer = TextTokenizer(spec_of(tokenizer_files[kind], 512))
    latin = "The party of the first part shall indemnify the other. " * 1_000_000
    chinese = "甲方应当赔偿乙方因此受到的全部损失和合理的费用，" * 700_000
    for text in (latin, chinese):
        assert len(text.encode()) > 50e6
        started = time.process_time()
        row = tokenizer.encode([text])[0]
        assert time.process_time() - started < 0.1
        assert row._replace(cut=0) == tokenizer.encode([text[:50_000]])[0]._replace(cut=0)


def test_a_text_without_enough_tokens_within_reach_is_too_large(
    minilm_dir: str, spec_of: Callable[..., TokenizerSpec]
) -> None:
    word = "ab" * 5_000_000
    tokenizer = TextTokenizer(spec_of(minilm_dir, 256))
    started = time.process_time()
    rows = tokenizer.encode([word, "before", word[:500_000]])
    assert time.process_time() - started < 10
    assert [row.status for row in rows] == [Status.TOO_LARGE, Status.OK, Status.OK]
    assert [len(row.ids) for row in rows] == [0, 3, 3]


def test_memory_does_not_grow_with_unique_words(
    byte_bpe: Path, e5_dir: str, spec_of: Callable[..., TokenizerSpec]
) -> None:
    rng = random.Random(0)
    for path in (byte_bpe, e5_dir):
        tokenizer = TextTokenizer(spec_of(path, 128))
        sizes = []
        for _ in range(4):
            for _ in range(20):
                tokenizer.encode(["".join(rng.choices(string.ascii_letters + " ", k=1_000)) for _ in range(100)])
            sizes.append(psutil.Process().memory_info().rss)
        assert sizes[-1] - sizes[0] < 10e6


def test_prompt_comes_first_and_counts(minilm_dir: str, spec_of: Callable[..., TokenizerSpec]) -> None:
    plain = TextTokenizer(spec_of(minilm_dir, 16))
    prompted = TextTokenizer(spec_of(minilm_dir, 16, prompt="{passage}: "))
    texts = ["one two", "{0} %s", "one " * 5_000]
    ours, expected = prompted.encode(texts), plain.encode(["{passage}: " + text for text in texts])
    assert [row._replace(cut=0) for row in ours] == [row._replace(cut=0) for row in expected]


@pytest.mark.parametrize("prompt", ["", "passage: "])
def test_text_of_which_nothing_is_left_is_empty(
    prompt: str, minilm_dir: str, spec_of: Callable[..., TokenizerSpec]
) -> None:
    nothing, something = TextTokenizer(spec_of(minilm_dir, 16, prompt=prompt)).encode(["\u200b\ufeff", "."])
    assert nothing == Encoded([], False, Status.EMPTY)
    assert something.status is Status.OK


def test_switches_of_the_spec_are_applied(minilm_dir: str, spec_of: Callable[..., TokenizerSpec]) -> None:
    texts = ["PARIS", "paris"]
    upper, lower = TextTokenizer(spec_of(minilm_dir, 16)).encode(texts)
    assert upper == lower
    cased = spec_of(minilm_dir, 16, normalizer={"lowercase": False})
    upper, lower = TextTokenizer(cased).encode(texts)
    assert upper != lower
    upper, lower = TextTokenizer(replace(cased, lower_case=True)).encode(texts)
    assert upper == lower


def test_refused(minilm_dir: str, tmp_path: Path, spec_of: Callable[..., TokenizerSpec]) -> None:
    with pytest.raises(ModelError, match="leaves no room for text"):
        TextTokenizer(spec_of(minilm_dir, 2))
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(Path(minilm_dir, "tokenizer.json").read_bytes())
    spec = spec_of(copy, 16)
    copy.write_bytes(copy.read_bytes() + b"\n")
    with pytest.raises(ModelError, match=r"tokenizer\.json' has changed"):
        TextTokenizer(spec)


def test_progress_is_told_at_least_every_mebi_character(minilm_dir, spec_of):
    told = []
    tokenizer = TextTokenizer(spec_of(minilm_dir, 16), on_progress=lambda: told.append(1))
    hard = "x" * (1 << 21)  # one word, of which no head ever settles
    calls = []
    for texts in ([hard], [hard, "one", hard]):
        told.clear()
        tokenizer.encode(texts)
        calls.append(len(told))
    assert calls[1] > calls[0] > 4  # the longest heads alone
    few = [" ".join(["one", "two"] * 20)] * 200
    told.clear()
    expected = [tokenizer.encode([text])[0] for text in few]
    assert len(told) == 200
    told.clear()
    assert tokenizer.encode(few) == expected
    assert len(told) == 1

from __future__ import annotations

import random
import string
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gte_vectorize.batch import Status
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.tokens import document
from gte_vectorize.tokens.document import encode_document
from gte_vectorize.tokens.tokenizer import Document, TextTokenizer

KINDS = ("wordpiece", "unigram", "byte_bpe")
PARTS = [
    "agreement",
    "naïve",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\u3000",
    "\u200b",
    "é",
    "e\u0301",
    "ﬁ",
    "①",
    "İ",
    "甲方",
    "。",
    "한국",
]
PARTS += ["👩\u200d👧", "\u0301", "[MASK]", "<s>", "</s>", "<|end|>", "▁", "##ing", "don't", "3.14", "=", "--", "\x00"]


@pytest.fixture(scope="module")
def tokenizers(tokenizer_files: dict[str, Path]) -> dict[str, Tokenizer]:
    loaded = {kind: Tokenizer.from_file(str(path)) for kind, path in tokenizer_files.items()}
    for tokenizer in loaded.values():
        tokenizer.no_padding()
        tokenizer.no_truncation()
    return loaded


@contextmanager
def small_pieces() -> Iterator[None]:
    """Thousands of characters in place of a million, so that texts of a moment have many cuts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "_PIECE", 1 << 11)
        patch.setattr(document, "_LONGEST_PIECE", 1 << 14)
        yield


def check_whole(tokenizer: Tokenizer, text: str) -> None:
    whole = tokenizer.encode(text, add_special_tokens=False)
    found = encode_document(tokenizer, text)
    assert found is not None
    assert found.ids.dtype == found.offsets.dtype == np.int32
    assert found.ids.tolist() == whole.ids
    assert list(map(tuple, found.offsets.tolist())) == whole.offsets


TEXTS: dict[str, Callable[[Callable[..., str]], str]] = {
    "latin": lambda make: make(["agreement", "party", "naïve", "café", "don't", "1,000.5", "(a)"], 6_000, " "),
    "lines": lambda make: make(["agreement", "party", "1,000.5", "(a)"], 6_000, "\r\n"),
    "chinese": lambda make: make(["合同的条款", "甲方与乙方", "，", "。", "\n", "\u3000\u3000"], 9_000),
    "unbroken chinese": lambda make: make("的一是在不了有和人这中大为上个国我以要他时来用们", 40_000),
    "unbroken base64": lambda make: make(string.ascii_letters + string.digits + "+/", 40_000),
    "mixed": lambda make: make(PARTS, 12_000),
    "emoji": lambda make: make(["👩\u200d👧", "👍🏽", "🇩🇪", " "], 12_000),
    "combining": lambda make: make(["a", "\u0301", "\u0323", " "], 30_000),
    "runs of spaces": lambda make: make(["party", " " * 1_500, "\n" * 500, "of"], 100),
    "special tokens": lambda make: make(["[MASK]", "</s>", "<|end|>", " "], 6_000),
    "repetition": lambda make: "party " * 6_000,
    "long words": lambda make: make(["ab" * 3_000, "party"], 20, " "),
    "nothing": lambda make: "",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEXTS)
def test_pieces_have_the_tokens_of_the_whole(
    kind: str, name: str, random_text: Callable[..., str], tokenizers: dict[str, Tokenizer]
) -> None:
    with small_pieces():
        check_whole(tokenizers[kind], TEXTS[name](random_text))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=12), count=st.integers(1_000, 5_000))
def test_any_text_has_the_tokens_of_the_whole(
    kind: str, parts: list[str], count: int, tokenizers: dict[str, Tokenizer]
) -> None:
    # Never too long for one piece, so that there is always an answer.
    with small_pieces():
        check_whole(tokenizers[kind], "".join(random.Random(0).choices(parts, k=count))[: 1 << 14])


@pytest.mark.parametrize("kind", KINDS)
def test_an_unbroken_megabyte(kind: str, random_text: Callable[..., str], tokenizers: dict[str, Tokenizer]) -> None:
    check_whole(tokenizers[kind], random_text("的一是在不了有和人这中大为上个国我以要他时来用们。，", 350_000))


class Recorder:
    """A tokenizer that notes how long the texts are that it is given."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.model = tokenizer.model
        self.sizes: list[int] = []

    def encode(self, text: str, **options: Any) -> Any:
        self.sizes.append(len(text))
        return self._tokenizer.encode(text, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["latin", "chinese"])
def test_the_library_is_given_little_at_once_and_little_twice(
    kind: str, name: str, random_text: Callable[..., str], tokenizers: dict[str, Tokenizer]
) -> None:
    text = TEXTS[name](random_text) * 10
    told: list[int] = []
    recorder = Recorder(tokenizers[kind])
    encode_document(recorder, text, on_progress=lambda: told.append(1))  # type: ignore[arg-type]
    assert max(recorder.sizes) <= (1 << 16) + 1_000
    assert sum(recorder.sizes) < 1.1 * len(text)
    assert len(told) >= len(text) / (1 << 16)


def test_what_cannot_be_cut_is_refused(tokenizers: dict[str, Tokenizer]) -> None:
    rng = random.Random(0)
    letters = "".join(rng.choices(string.ascii_letters, k=20_000))
    with small_pieces():
        assert encode_document(tokenizers["wordpiece"], letters) is None
        for tokenizer in tokenizers.values():
            assert encode_document(tokenizer, "party " + "=" * 20_000) is None
            assert encode_document(tokenizer, "party " + "=" * 16_000) is not None


def test_words_longer_than_the_model_takes_stay_unknown(minilm_dir: str) -> None:
    tokenizer = Tokenizer.from_file(str(Path(minilm_dir, "tokenizer.json")))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.model.max_input_chars_per_word = 1_000
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_letters, k=rng.choice([900, 1_100]))) for _ in range(30)]
    with small_pieces():
        check_whole(tokenizer, "+".join(words))


NORMALIZED = "ﬁne ① ＡＢＣ e\u0301a naïve Ǆ ½ CAFÉ Ⅷ " * 3


def test_offsets_are_those_of_the_original_text(tokenizers: dict[str, Tokenizer]) -> None:
    words = encode_document(tokenizers["wordpiece"], NORMALIZED)
    pieces = encode_document(tokenizers["unigram"], NORMALIZED)
    assert words is not None
    assert pieces is not None
    for token, (begin, end) in zip(words.ids.tolist(), words.offsets.tolist(), strict=True):
        name = tokenizers["wordpiece"].id_to_token(token)
        letters = unicodedata.normalize("NFD", NORMALIZED[begin:end].lower())
        bare = "".join(char for char in letters if not unicodedata.combining(char))
        assert name == "[UNK]" or name.removeprefix("##") == bare
    composed = [
        (tokenizers["unigram"].id_to_token(token), unicodedata.normalize("NFKC", NORMALIZED[begin:end]))
        for token, (begin, end) in zip(pieces.ids.tolist(), pieces.offsets.tolist(), strict=True)
    ]
    assert sum(name.removeprefix("▁") == text.strip() for name, text in composed) > 0.8 * len(composed)
    assert {"▁fine", "▁1", "▁é"} <= {name for name, _ in composed}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["", "passage: ", "文档："])
@pytest.mark.parametrize("lower_case", [False, True])
def test_a_text_that_fits_is_as_it_would_be_without_chunks(
    kind: str, prompt: str, lower_case: bool, tokenizer_files: dict[str, Path], spec_of: Callable[..., TokenizerSpec]
) -> None:
    tokenizer = TextTokenizer(spec_of(tokenizer_files[kind], 512, prompt=prompt, lower_case=lower_case))
    before = 0 if kind == "byte_bpe" else 1
    rng = random.Random(0)
    for text in ["a", "合同", "ΟΔΟΣ İ", *("".join(rng.choices(PARTS, k=20)) for _ in range(100))]:
        encoded = tokenizer.encode([text])[0]
        found = tokenizer.encode_long(text)
        if isinstance(found, Status):
            assert found is encoded.status is Status.EMPTY
            continue
        assert [*found.prompt, *found.ids.tolist()] == encoded.ids[before:-1]
        assert len(found.ids) == len(found.offsets)
        assert np.all((found.offsets >= 0) & (found.offsets <= len(text)))


def test_the_prompt_is_told_from_the_text(minilm_dir: str, e5_dir: str, spec_of: Callable[..., TokenizerSpec]) -> None:
    for folder in (minilm_dir, e5_dir):
        tokenizer = TextTokenizer(spec_of(folder, 512, prompt="passage: "))
        for text in ("hello there", "合同"):
            found = tokenizer.encode_long(text)
            assert isinstance(found, Document)
            assert found.offsets[0, 0] == 0
            assert found.offsets[-1, 1] == len(text)
            assert 2 <= len(found.prompt) <= 3


def test_offsets_survive_lower_casing(minilm_dir: str, spec_of: Callable[..., TokenizerSpec]) -> None:
    tokenizer = TextTokenizer(spec_of(minilm_dir, 512, prompt="İ: ", lower_case=True))
    text = "İ One İİ two ΣΣ İstanbul three İ"
    found = tokenizer.encode_long(text)
    assert isinstance(found, Document)
    spelled = [text[begin:end].casefold() for begin, end in found.offsets.tolist()]
    assert {"one", "two", "three"} <= set(spelled)
    assert "".join(spelled) == text.casefold().replace(" ", "")

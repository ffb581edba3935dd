"""Windows of long documents: every token and character in one, within the limit, at exact places, whoever cuts."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import semchunk
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gte_vectorize.batch import Int32, Status
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.tokens import semchunk_splitter
from gte_vectorize.tokens.splitter import Chunk
from gte_vectorize.tokens.tokenizer import Document, Encoded, TextTokenizer
from gte_vectorize.tokens.windowing import TRUNCATE, Passage, Windowing, windows_of

LIMIT = 24
SPLITTERS = ["sentence", "semchunk"]
KINDS = [("wordpiece", "", False), ("wordpiece", "", True), ("unigram", "passage: ", False), ("byte_bpe", "", False)]
ODD = {
    "Chinese": "第一条 为了保护公民的合法权益，根据宪法，制定本法。\n第二条 本法所称合同，是指协议；婚姻不适用。\n" * 2,
    "English": "The Supplier shall deliver the goods. The Buyer shall pay, within 30 days.\n\n2.1 Term. It ends. " * 2,
    "emoji": "一家👩\u200d👧\u200d👦 好👍🏽！❤\ufe0f 🇩🇪🇫🇷 ok " * 6,
    "combining": "cafe\u0301 a\u0308o\u0308 ก\u0e31\u0e49 \u1112\u1161\u11ab " * 6,
    "CRLF": "One line.\r\nTwo lines,\r\n\r\nthree.\r" * 6,
    "NUL": "a\x00b word\x00 \x00\x00 another\x07 one. " * 8,
    "İ": "İstanbul'da İKİ taraf, İzmir. İİ iı. " * 6,
    "RTL": "هذا العقد بين الطرفين، ويسري فوراً. חוזה זה בתוקף מיד; \u202eabc\u202c " * 5,
    "white space at the ends": "\n \t\u3000" + "some words of it. " * 20 + " \u2003\n\n ",
    "BOM": "\ufeff" + "The first words, and others. " * 15,
    "specials": "[CLS] one [SEP] </s> two <mask> [MASK]. " * 8,
    "unbroken": "没有空格的一段很长的话而且没有标点" * 8,
    "long word": "x" * 90 + "y" * 90 + " z",
    "surplus": "word" + " " * 300 + "and " * 30 + "\n" * 300 + "end of it",
}


class Reference(NamedTuple):
    """What the library makes of a text in one go: ids before, of and behind it, and where in it each token lies."""

    head: list[int]
    ids: list[int]
    tail: list[int]
    offsets: list[tuple[int, int]]
    characters: int


@dataclass(frozen=True)
class Fixture:
    tokenizer: TextTokenizer = field(repr=False)
    raw: Tokenizer = field(repr=False)
    prompt: str
    lower_case: bool

    def reference(self, text: str) -> Reference:
        letters = self.prompt + text
        # Of the letters here, İ alone becomes two.
        seen = ["i\u0307" if one == "İ" else one.lower() for one in letters] if self.lower_case else [*letters]
        place_of = [place for place, shown in enumerate(seen) for _ in shown]
        found = self.raw.encode("".join(seen), add_special_tokens=False)
        skipped = len(self.prompt)
        offsets = [(place_of[start] - skipped, place_of[end - 1] + 1 - skipped) for start, end in found.offsets]
        first = next((index for index, (_, end) in enumerate(offsets) if end > 0), len(offsets))
        probe = self.raw.encode("a")
        mask = probe.special_tokens_mask
        return Reference(
            [*probe.ids[: mask.index(0)], *found.ids[:first]],
            found.ids[first:],
            probe.ids[len(mask) - mask[::-1].index(0) :],
            [(max(0, start), end) for start, end in offsets[first:]],
            len(text),
        )


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def fixture(
    request: pytest.FixtureRequest, tokenizer_files: dict[str, Path], spec_of: Callable[..., TokenizerSpec]
) -> Fixture:
    kind, prompt, lower_case = request.param
    return fixture_of(tokenizer_files[kind], spec_of, prompt, lower_case)


def fixture_of(path: Path, spec_of: Callable[..., TokenizerSpec], prompt: str, lower_case: bool = False) -> Fixture:
    raw = Tokenizer.from_file(str(path))
    raw.no_padding()
    raw.no_truncation()
    spec = spec_of(path, LIMIT, prompt=prompt, lower_case=lower_case)
    return Fixture(TextTokenizer(spec), raw, prompt, lower_case)


def windowing(splitter: str, overlap: int) -> Windowing:
    return Windowing(mode="windows", overlap=overlap, splitter=splitter)


def spans_of(windows: list[Passage], whole: Reference) -> list[tuple[int, int]]:
    """The slice of the whole tokenization that each window is; each begins behind the one before, and leaves no gap."""
    spans = [(-1, 0)]
    for window in windows:
        ids = list(window.encoded.ids)
        head, tail = len(whole.head), len(whole.tail)
        assert (ids[:head], ids[len(ids) - tail :]) == (whole.head, whole.tail)
        body = ids[head : len(ids) - tail]
        previous, last = spans[-1]
        # Where ids repeat themselves more than one place fits, but one with these characters.
        fits = [at for at in range(previous + 1, last + 1) if whole.ids[at : at + len(body)] == body]
        exact = [at for at in fits if places_of(whole, at, at + len(body)) == (window.char_start, window.char_end)]
        assert len(exact) == 1, (window.char_start, window.char_end, previous, last)
        spans.append((exact[0], exact[0] + len(body)))
    assert spans[-1][1] == len(whole.ids)
    return spans[1:]


def places_of(whole: Reference, first: int, end: int) -> tuple[int, int]:
    """From where the first token begins to where the next one does, or the last one ends if that is further on."""
    behind = [start for start, _ in whole.offsets[end:]]
    start = min(start for start, _ in whole.offsets[first:]) if first else 0
    stop = max(min(behind), *(stop for _, stop in whole.offsets[:end])) if behind else whole.characters
    return start, stop


def check_places(windows: list[Passage], text: str) -> None:
    """Every character is in a window, in order, and the parts of two windows that do not overlap are the text."""
    assert (windows[0].char_start, windows[-1].char_end) == (0, len(text))
    for window, following in pairwise(windows):
        assert window.char_start <= following.char_start <= window.char_end <= following.char_end
    assert all(window.char_start < window.char_end for window in windows)
    assert "".join(text[a.char_start : b.char_start] for a, b in pairwise(windows)) == text[: windows[-1].char_start]


@pytest.mark.parametrize("splitter", SPLITTERS)
@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_windows_are_slices_of_the_whole_tokenization_at_exact_places(
    text: str, splitter: str, fixture: Fixture
) -> None:
    whole = fixture.reference(text)
    room = LIMIT - len(whole.head) - len(whole.tail)
    for overlap in (0, 5, 200):
        windows = windows_of(text, fixture.tokenizer, windowing(splitter, overlap))
        assert all(window.encoded.status is Status.OK and not window.encoded.truncated for window in windows)
        assert max(len(window.encoded.ids) for window in windows) <= LIMIT
        check_places(windows, text)
        spans = spans_of(windows, whole)
        shared = [end - following for (_, end), (following, _) in pairwise(spans)]
        if not overlap:
            assert not any(shared)
        elif splitter == "sentence":
            wanted = min(overlap, room // 2)
            assert all(wanted - wanted // 2 <= tokens <= wanted + wanted // 2 for tokens in shared)
        else:
            assert all(tokens <= room * 3 // 4 for tokens in shared)
            assert not shared or any(shared)


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_a_document_at_the_limit_is_one_window_and_with_one_token_more_two(splitter: str, fixture: Fixture) -> None:
    texts = [" ".join(["word"] * count) for count in range(1, LIMIT)]
    wholes = map(fixture.reference, texts)
    fits = [len(whole.head) + len(whole.ids) + len(whole.tail) <= LIMIT for whole in wholes]
    assert True in fits
    assert False in fits
    windows = [windows_of(text, fixture.tokenizer, windowing(splitter, 4)) for text in texts]
    assert [len(found) == 1 for found in windows] == fits
    assert [len(found) for found in windows][fits.index(False)] == 2


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_a_document_without_tokens_is_a_row_that_says_so(splitter: str, fixture: Fixture) -> None:
    (window,) = windows_of("", fixture.tokenizer, windowing(splitter, 4))
    assert window == Passage(Encoded(window.encoded.ids, False, Status.EMPTY), 0, 0)
    assert not window.encoded.ids


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_a_limit_that_leaves_one_token_makes_windows_of_one(
    splitter: str, minilm_dir: str, spec_of: Callable[..., TokenizerSpec]
) -> None:
    tokenizer = TextTokenizer(spec_of(minilm_dir, 3))
    windows = windows_of("one two three", tokenizer, windowing(splitter, 1))
    assert [len(window.encoded.ids) for window in windows] == [3, 3, 3]
    assert [(window.char_start, window.char_end) for window in windows] == [(0, 4), (4, 8), (8, 13)]


WORDS = ["word", "甲方", "e\u0301", "👩\u200d👧", "\x00", "x" * 30, "3.14", "İ", "[SEP]", "ß", "ﬁ"]
MARKS = [" ", "  ", "\n", "\r\n", "\n\n", "\t", ". ", "。", "; ", "，", "-", "—", "(", "\u2028", "\u3000", ""]


@settings(max_examples=80, deadline=None)
@given(
    parts=st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(MARKS)), min_size=1, max_size=150),
    overlap=st.integers(0, 30),
    splitter=st.sampled_from(SPLITTERS),
    stretch=st.sampled_from([20, 100, 1 << 17]),
)
def test_any_text_is_covered(
    parts: list[tuple[str, str]], overlap: int, splitter: str, stretch: int, fixture: Fixture
) -> None:
    text = "".join(itertools.chain.from_iterable(parts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(semchunk_splitter, "_STRETCH", stretch)
        windows = windows_of(text, fixture.tokenizer, windowing(splitter, overlap))
        again = windows_of(text, fixture.tokenizer, windowing(splitter, overlap))
    assert windows == again
    if windows[0].encoded.status is Status.OK:
        assert max(len(window.encoded.ids) for window in windows) <= LIMIT
        check_places(windows, text)
        spans_of(windows, fixture.reference(text))


# What semchunk decides.


def library_ends(text: str, size: int, count: Callable[[str], int]) -> list[int]:
    """Behind each of its chunks but the last."""
    _, places = semchunk.chunk(text, size, count, memoize=False, offsets=True)
    return [end for _, end in places[:-1]]


@pytest.mark.parametrize("overlap", [0, 8])
def test_windows_end_where_semchunk_ends_its_chunks(
    overlap: int, english_texts: list[str], tokenizer_files: dict[str, Path], spec_of: Callable[..., TokenizerSpec]
) -> None:
    """WordPiece, whose tokens do not depend on what stands beside a word: all counts agree."""
    fixture = fixture_of(tokenizer_files["wordpiece"], spec_of, "")
    text = "\n\n".join(english_texts[:60])
    size = LIMIT - 2 - overlap
    ends = library_ends(text, size, lambda part: len(fixture.raw.encode(part, add_special_tokens=False).ids))
    windows = windows_of(text, fixture.tokenizer, windowing("semchunk", overlap))
    assert len(ends) > 100
    assert len(windows) == len(ends) + 1
    for end, window in zip(ends, windows, strict=False):
        assert end <= window.char_end
        assert text[end : window.char_end].strip() == ""
    whole = fixture.reference(text)
    spans = spans_of(windows, whole)
    shared = [last - first for (_, last), (first, _) in pairwise(spans)]
    if overlap:
        # As much as was asked for, give or take half, wherever the window has room for it and the one before begins
        # early enough.
        free = [LIMIT - 2 - (end - last) for (_, last), (_, end) in pairwise(spans)]
        before = [last - first for first, last in spans]
        for tokens, room, most in zip(shared, free, before, strict=False):
            assert tokens <= min(room, most - 1, overlap * 3 // 2) or tokens == room
            assert tokens >= min(overlap // 2, room, most - 1)
    else:
        assert not any(shared)


def test_semchunk_is_asked_for_stretches_of_a_long_text(
    tokenizer_files: dict[str, Path], spec_of: Callable[..., TokenizerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TextTokenizer(spec_of(tokenizer_files["wordpiece"], LIMIT))
    given: list[int] = []
    library = semchunk_splitter._chunk_ends

    def chunk_ends(text: str, *others: object) -> list[int]:
        given.append(len(text))
        return library(text, *others)

    monkeypatch.setattr(semchunk_splitter, "_chunk_ends", chunk_ends)
    monkeypatch.setattr(semchunk_splitter, "_STRETCH", 2000)
    lines = "".join(f"第{number}条 当事人应当履行义务。\n" for number in range(500))
    windows = windows_of(lines, tokenizer, windowing("semchunk", 0))
    check_places(windows, lines)
    assert len(given) > 3
    assert max(given) <= 2000 + 30
    # Stretches end where lines do, so nothing shows where they met.
    assert {lines[window.char_start] for window in windows} == {"第"}


def test_texts_that_semchunk_cannot_cope_with_are_cut_all_the_same(
    tokenizer_files: dict[str, Path], spec_of: Callable[..., TokenizerSpec]
) -> None:
    """It descends once for every kind of white space, and counts all that is left each time."""
    tokenizer = TextTokenizer(spec_of(tokenizer_files["wordpiece"], 128))
    kinds = ["".join(kind) for kind in itertools.product("\r\n", repeat=11)]
    random.Random(0).shuffle(kinds)
    deep = "".join(f"{kind}word {number}" for number, kind in enumerate(kinds))
    started = time.process_time()
    windows = windows_of(deep, tokenizer, windowing("semchunk", 16))
    assert time.process_time() - started < 10
    check_places(windows, deep)
    assert len(windows) < 2 * len(windows_of(deep, tokenizer, windowing("sentence", 16)))


def test_a_piece_with_more_tokens_in_its_document_than_alone_is_cut_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if semchunk had counted half of what is there."""

    class Half:
        def encode_long(self, text: str) -> Document:
            return Document([], np.zeros(len(text) // 2, np.int32), np.zeros((len(text) // 2, 2), np.int32))

    text = "".join(f"这是第{number:02}句话。" for number in range(50))
    offsets: Int32 = np.array([(place, place + 1) for place in range(len(text))], np.int32)
    document = Document([], np.arange(len(text), dtype=np.int32), offsets)
    for overlap in (0, 6):
        chunks: list[Chunk] = semchunk_splitter.split_by_semchunk(
            text,
            document,
            Half(),
            room=20,
            overlap=overlap,
            tolerance=10,
        )
        assert max(chunk.end_token - chunk.first_token for chunk in chunks) <= 20
        assert (chunks[0].first_token, chunks[-1].end_token) == (0, len(text))
        for chunk, following in pairwise(chunks):
            assert chunk.first_token < following.first_token <= chunk.end_token < following.end_token


# What is said of it.


def test_the_description_names_all_that_moves_a_cut() -> None:
    assert TRUNCATE.description() == "truncate"
    sentence = windowing("sentence", 64).description()
    assert sentence == {"mode": "windows", "overlap": 64, "splitter": "sentence", "version": 1}
    library = windowing("semchunk", 64).description()
    assert library == sentence | {"splitter": "semchunk", "semchunk": version("semchunk")}
    assert Windowing(mode="mean", overlap=64).description() == sentence | {"mode": "mean"}

from __future__ import annotations

import random
import re
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gte_vectorize.batch import Int32
from gte_vectorize.tokens.document import encode_document
from gte_vectorize.tokens.splitter import Chunk, split


def letters(text: str) -> Int32:
    """A token for every character that is no space, as WordPiece has it for Chinese."""
    places = [place for place, char in enumerate(text) if not char.isspace()]
    return np.array([(place, place + 1) for place in places], np.int32).reshape(-1, 2)


def characters(text: str) -> Int32:
    """A token for every character."""
    return np.array([(place, place + 1) for place in range(len(text))], np.int32).reshape(-1, 2)


def words(text: str) -> Int32:
    """A token for every word, with the space before it, as byte-level merges have it."""
    return np.array([match.span() for match in re.finditer(r"\s?\S+|\s", text)], np.int32).reshape(-1, 2)


def check(chunks: list[Chunk], text: str, offsets: Int32, room: int) -> None:
    """Whatever the text: every token and every character in some chunk, in order, within the limit."""
    assert (chunks[0].first_token, chunks[0].char_start) == (0, 0)
    assert (chunks[-1].end_token, chunks[-1].char_end) == (len(offsets), len(text))
    assert all(chunk.end_token - chunk.first_token <= room for chunk in chunks)
    for chunk in chunks:
        held = offsets[chunk.first_token : chunk.end_token]
        assert np.all((held >= chunk.char_start) & (held <= chunk.char_end))
    for chunk, following in pairwise(chunks):
        assert chunk.first_token < following.first_token <= chunk.end_token < following.end_token
        assert chunk.char_start <= following.char_start <= chunk.char_end <= following.char_end


@pytest.mark.parametrize("text", ["", "短", "one two\n", " \n "])
def test_a_document_that_fits_is_one_chunk(text: str) -> None:
    offsets = letters(text)
    assert split(text, offsets, room=6, overlap=2, tolerance=3) == [Chunk(0, len(offsets), 0, len(text))]


# The cut belongs at the bar; the limit is at the end, or at the broken bar.
CUTS = {
    "heading before line": "甲方应当赔偿。\n|第五条 乙方\n应当支付",
    "heading before sentence": "the Supplier.\n|Article 5 Fees. The fees are",
    "chapter": "甲方应当赔偿。\r\n\r\n　　|第十二章　附则\n本法自公布",
    "section": "in full.\n\n|Section 3.2 Term\nThe term",
    "clause": "in full.\n|CLAUSE 7 Term\nThe term",
    "paragraph sign": "in full.\n|§ 5 Kündigung\nDer Vertrag",
    "numbered": "in full.\n|12.3 Term\nThe term",
    "numbered once": "in full.\n|12. Term\nThe term is",
    "enumerated": "如下：\n|一、甲方\n应当支付",
    "no heading within a line": "依照\n|本法第五条 乙方。应当支付",
    "no heading without a line": "in full. |See Article 5 of it, and more",
    "markdown": "in full.\n|## Term\nThe term",
    "wrapped line at the limit": "is due. |Then the fees\n¦are paid in",
    "small letter in the next line": "真的吗？|\nthe fees are",
    "line before sentence": "in full\n|The fees are due. At once",
    "last of several lines": "One\nTwo\n|Three. Four",
    "carriage return": "in full\r|The fees are due. At once",
    "wrapped line": "is due. |Then the fees\nare paid in",
    "sentence": "甲方应当赔偿。|乙方，应当支付、",
    "exclamation": "甲方应当赔偿！|乙方，应当支付",
    "semicolon": "甲方应当赔偿；|乙方，应当支付",
    "last mark of several": "真的吗？！|乙方，应当支付",
    "marks over the limit": "真的。|好吗？¦！其他",
    "quote over the limit": "真的。|好吗？¦”其他",
    "closing quote": "他说：“应当赔偿。”|乙方，应当支付",
    "closing corner and bracket": "（他说「应当赔偿。」）|乙方，应当支付",
    "English sentence": "is due. |Then it is paid, and",
    "English closing": 'said "it is due.") |Then it is paid, and',
    "question": "Is it due? |Then it is paid, and",
    "English semicolon": "it is due; |then it is paid, and",
    "decimal": "is due. |Pay 3.14 of 1,000.50 euros",
    "number sign": "is due. |As in No. 5 or Art. 7 Sec. 12",
    "title": "is due. |As Mr. Smith or Dr. Who said",
    "initial": "is due. |As J. Smith of the U.S. Court",
    "small letter follows": "is due. |As Acme Inc. said e.g. at noon",
    "address": "is due. |See example.com/a.b?c=d",
    "clause mark": "甲方应当赔偿，|乙方应当支付",
    "enumeration comma": "甲方、|乙方应当支付",
    "comma": "it is due, |then it is paid now",
    "thousands": "it is due |then1,000,000x",
    "word": "indemnification |indemnification",
    "nothing": "abcdefgh|",
}


@pytest.mark.parametrize("case", CUTS)
def test_cut_is_at_the_best_place(case: str) -> None:
    filler = "x" * 100
    before, after = (filler + CUTS[case]).split("|")
    within, _, behind = after.partition("¦")
    text = before + within + behind + filler
    for tokens in (letters, characters):
        room = len(tokens(before + within))
        needed = len(tokens(within))
        for tolerance in (needed, needed + 20):
            chunk = split(text, tokens(text), room=room, overlap=0, tolerance=tolerance)[0]
            assert text[: chunk.char_end].rstrip() == before.rstrip()


def test_places_out_of_reach_do_not_count() -> None:
    text = "X" * 50 + "\n" + "Y" * 20 + "。" + "Z" * 100
    ends = [split(text, letters(text), room=80, overlap=0, tolerance=reach)[0].end_token for reach in (0, 8, 9, 29, 30)]
    assert ends == [80, 80, 71, 71, 50]


def test_a_chunk_starts_with_a_sentence_near_the_overlap() -> None:
    text = "".join(f"甲方应当赔偿乙方的第{number:03}笔损失。" for number in range(40))
    chunks = split(text, letters(text), room=100, overlap=20, tolerance=30)
    check(chunks, text, letters(text), 100)
    for chunk, following in pairwise(chunks):
        assert text[following.char_start :].startswith("甲方")
        assert text[: chunk.char_end].endswith("。")
        assert 10 <= chunk.end_token - following.first_token <= 30


def test_whitespace_belongs_to_one_chunk_however_the_tokenizer_has_it() -> None:
    text = "  The fees.\n\n  The terms    "
    kept = characters(text)
    for offsets, room in ((letters(text), 14), (kept, 20), (words(text), 9)):
        first, second = split(text, offsets, room=room, overlap=0, tolerance=room)
        assert text[first.char_start : first.char_end].strip() == "The fees."
        assert text[second.char_start : second.char_end].strip() == "The terms"
        assert text[first.char_start : first.char_end] + text[second.char_start : second.char_end] == text


CLUSTERS = ["e\u0301", "ก\u0e31", "का", "👩\u200d👧\u200d👦", "👍🏽", "❤\ufe0f", "🇩🇪", "\u1112\u1161\u11ab"]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_what_is_read_as_one_character_stays_whole(cluster: str) -> None:
    text = ("x" + cluster) * 40
    for room in range(2 * len(cluster) + 2, 20):
        chunks = split(text, letters(text), room=room, overlap=0, tolerance=room)
        for chunk in chunks[1:]:
            assert chunk.char_start % (1 + len(cluster)) in (0, 1)


def test_a_line_end_of_two_characters_stays_whole() -> None:
    text = "\r\n" * 40
    offsets = characters(text)
    assert all(chunk.char_start % 2 == 0 for chunk in split(text, offsets, room=7, overlap=0, tolerance=3))


def test_tokens_of_one_character_stay_together() -> None:
    text = "𠮷" * 50
    offsets = np.repeat([(place, place + 1) for place in range(50)], 4, axis=0).astype(np.int32)
    chunks = split(text, offsets, room=30, overlap=5, tolerance=10)
    check(chunks, text, offsets, 30)
    assert all(chunk.first_token % 4 == 0 and chunk.end_token % 4 == 0 for chunk in chunks)
    assert all(chunk.char_start * 4 == chunk.first_token for chunk in chunks)


def test_a_character_with_more_tokens_than_fit_is_in_every_chunk_of_it() -> None:
    offsets = np.array([(0, 1), *[(1, 2)] * 50, (2, 3)], np.int32)
    chunks = split("a▒b", offsets, room=8, overlap=0, tolerance=3)
    check(chunks, "a▒b", offsets, 8)
    assert all(chunk.char_start <= 1 and chunk.char_end >= 2 for chunk in chunks)


@pytest.mark.parametrize("overlap", [0, 10, 30])
def test_no_last_chunk_of_a_few_new_tokens(overlap: int) -> None:
    for length in range(41, 200):
        chunks = split("x" * length, letters("x" * length), room=40, overlap=overlap, tolerance=5)
        check(chunks, "x" * length, letters("x" * length), 40)
        assert chunks[-1].end_token - chunks[-2].end_token >= (40 - overlap) // 4


@pytest.mark.parametrize(
    "sizes",
    [
        {"room": 0, "overlap": 0, "tolerance": 0},
        {"room": 5, "overlap": 5, "tolerance": 0},
        {"room": 5, "overlap": -1, "tolerance": 0},
        {"room": 5, "overlap": 0, "tolerance": -1},
    ],
)
def test_sizes_without_sense_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must hold"):
        split("text", letters("text"), **sizes)


MARKS = [" ", "  ", "\n", "\r\n", "\u2028", ". ", "。", "；", "，", ", ", "”", "\n第五条 ", "\nArticle 5 ", "\n1.2 "]
OTHERS = ["a", "word", "3.14", "No. 5", "甲方", "e\u0301", "\u0301", "👩\u200d👧", "\u200d", "🇩🇪", "\x00"]


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, Int32]:
    """A text with tokens of every kind: dropped characters, shared characters, tokens without any, marks reordered."""
    text = "".join(draw(st.lists(st.sampled_from(MARKS + OTHERS), max_size=120)))
    rng = random.Random(draw(st.integers(0, 1000)))
    offsets, place = [], 0
    while place < len(text):
        end = min(len(text), place + rng.choice([1, 1, 1, 2, 5]))
        offsets += [(place, end)] * rng.choice([0, 1, 1, 1, 1, 3])
        place = rng.choice([end, end, end, end - 1 if end - place > 1 else end])
    if len(offsets) > 1 and rng.random() < 0.3:
        swapped = rng.randrange(len(offsets) - 1)
        offsets[swapped : swapped + 2] = reversed(offsets[swapped : swapped + 2])
    return text, np.array(offsets, np.int32).reshape(-1, 2)


@settings(max_examples=300, deadline=None)
@given(document=documents(), room=st.integers(1, 40), overlap=st.integers(0, 39), tolerance=st.integers(0, 50))
def test_every_character_is_in_a_chunk(document: tuple[str, Int32], room: int, overlap: int, tolerance: int) -> None:
    text, offsets = document
    overlap %= room
    chunks = split(text, offsets, room=room, overlap=overlap, tolerance=tolerance)
    check(chunks, text, offsets, room)
    assert chunks == split(text, offsets, room=room, overlap=overlap, tolerance=tolerance)
    for chunk, following in pairwise(chunks):
        assert overlap - overlap // 2 <= chunk.end_token - following.first_token <= overlap + overlap // 2


def is_good(text: str, cut: int) -> bool:
    """Whether a line or a sentence ends before `cut`."""
    before, after = text[:cut].rstrip(), text[cut:].lstrip()
    gap = text[len(before) : len(text) - len(after)]
    return "\n" in gap or bool(re.search(r"[。！？；.!?;][」』”’）)\"'》]*$", before[-9:]))


@pytest.mark.parametrize("model", ["minilm_dir", "e5_dir"])
def test_statutes_are_cut_at_lines_and_sentences(model: str, request: pytest.FixtureRequest, demo_corpus: Path) -> None:
    tokenizer = Tokenizer.from_file(str(Path(request.getfixturevalue(model), "tokenizer.json")))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    cuts, starts = [], []
    for text in pq.read_table(demo_corpus / "statutes.parquet")["text"].to_pylist()[::8]:
        tokens = encode_document(tokenizer, text)
        assert tokens is not None
        chunks = split(text, tokens.offsets, room=510, overlap=64, tolerance=100)
        check(chunks, text, tokens.offsets, 510)
        cuts += [is_good(text, chunk.char_end) for chunk in chunks[:-1]]
        starts += [is_good(text, chunk.char_start) for chunk in chunks[1:]]
    assert len(cuts) > 300
    assert np.mean(cuts) > 0.97
    assert np.mean(starts) > 0.85


def test_time_grows_with_the_tokens_alone() -> None:
    hostile = ["x", " ", "\n", ".", "。", "\n ", ". ", "1.", "”", "第", "\u0301", "e\u0301", "\r\n"]
    size = 300_000
    for period in hostile:
        text = (period * size)[:size]
        for offsets in (letters(text)[:1000], np.array([(place, place + 1) for place in range(size)], np.int32)):
            started = time.process_time()
            chunks = split(text, offsets, room=510, overlap=64, tolerance=100)
            assert time.process_time() - started < 2
            check(chunks, text, offsets, 510)


def test_a_word_as_long_as_the_text_takes_no_longer() -> None:
    text = "x" * 5_000_000 + " y" * 2_000
    offsets = np.array([(0, 5_000_000), *[(place, place + 1) for place in range(5_000_001, len(text), 2)]], np.int32)
    started = time.process_time()
    chunks = split(text, offsets, room=32, overlap=16, tolerance=8)
    assert time.process_time() - started < 2
    check(chunks, text, offsets, 32)

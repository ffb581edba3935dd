"""Chunks of contexts: what is cut, and that nothing cuts a context afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gte_vectorize.batch import LEAST_CHUNK_TOKENS, Passages, Shard, Status, Task, TokenBatch, Window
from gte_vectorize.encoder.bucket import most_chunks
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.tokens.batcher import halves, token_batches
from gte_vectorize.tokens.duplicates import marked
from gte_vectorize.tokens.passages import read_passages
from gte_vectorize.tokens.pieces import crashed, cut, gathered, join
from gte_vectorize.tokens.tokenizer import TextTokenizer
from gte_vectorize.tokens.windowing import TRUNCATE, Windowing

LIMIT = 96
LATE = Windowing(mode="late", chunk_tokens=24)
SENTENCE = "The party of the first part shall indemnify, as § 3.2 says, the other one. "
TEXTS = [
    SENTENCE,
    SENTENCE * 4,
    "第三条 出卖人应当按照约定的期限交付标的物，当事人另有约定的除外。\r\n" * 3,
    "cafe\u0301 👩🏽‍🚀 İstanbul\tna\u00efve\x00 " * 6,
    "  \n white space at both ends, and " * 5 + " \n ",
    SENTENCE * 40,
    "没有空格的一段很长的话" * 60,
]
SPECS = [("wordpiece", "", False), ("unigram", "passage: ", False), ("byte_bpe", "", False), ("unigram", "", True)]


@pytest.fixture(scope="module", params=SPECS, ids=lambda spec: "-".join(map(str, spec)))
def tokenizer(
    request: pytest.FixtureRequest, tokenizer_files: dict[str, Path], spec_of: Callable[..., TokenizerSpec]
) -> TextTokenizer:
    kind, prompt, lower_case = request.param
    return TextTokenizer(spec_of(tokenizer_files[kind], LIMIT, prompt=prompt, lower_case=lower_case))


def window(rows: int, first_row: int = 0, task_rows: int | None = None) -> Window:
    return Window(Task(0, Shard("memory", 1, 0, (1000,)), 0, task_rows or rows), first_row, rows)


def read(texts: list[str | None], tokenizer: TextTokenizer, windowing: Windowing = LATE) -> Passages:
    return read_passages(window(len(texts)), [pa.record_batch({"text": pa.array(texts)})], tokenizer, windowing)


def context_ids(passages: Passages, row: int) -> list[list[int]]:
    """The ids of each context of a document."""
    firsts, tokens = passages.contexts
    ends = np.cumsum(tokens)
    chosen = np.flatnonzero(passages.row[firsts] == row)
    return [passages.ids[ends[one] - tokens[one] : ends[one]].tolist() for one in chosen]


def test_chunks_of_a_document_that_fits_are_the_document(tokenizer: TextTokenizer) -> None:
    passages = read([*TEXTS], tokenizer)
    several = 0
    for row, head in enumerate(tokenizer.encode(TEXTS)):
        if not head.truncated:
            assert context_ids(passages, row) == [list(head.ids)]
            several += int((passages.row == row).sum()) > 1
    assert several


def test_contexts_of_a_longer_document_are_its_tokens_and_within_the_limit(tokenizer: TextTokenizer) -> None:
    passages = read([*TEXTS], tokenizer)
    long = [row for row, head in enumerate(tokenizer.encode(TEXTS)) if head.truncated]
    assert len(long) >= 2
    for row in long:
        document = tokenizer.encode_long(TEXTS[row])
        assert not isinstance(document, Status)
        contexts = context_ids(passages, row)
        alone = tokenizer.passage(document, 0, 0).ids
        head = len(alone) - len(tokenizer._suffix)
        assert len(contexts) > 1
        assert max(map(len, contexts)) <= LIMIT
        for ids in contexts:
            assert [*ids[:head], *ids[len(ids) - len(tokenizer._suffix) :]] == list(alone)
        bodies = [ids[head : len(ids) - len(tokenizer._suffix)] for ids in contexts]
        assert [*chain.from_iterable(bodies)] == document.ids.tolist()


def test_every_character_is_in_a_chunk_and_places_are_exact(tokenizer: TextTokenizer) -> None:
    passages = read([*TEXTS], tokenizer)
    assert passages.chunk is not None
    assert passages.chunk.dtype == np.int32
    for row, text in enumerate(TEXTS):
        chunks = passages.chunk[passages.row == row]
        assert chunks[:, 0].tolist() == list(range(len(chunks)))
        starts, ends = chunks[:, 1].tolist(), chunks[:, 2].tolist()
        assert (starts[0], ends[-1]) == (0, len(text))
        assert all(start < end for start, end in zip(starts, ends, strict=True))
        # Tokens that are parts of one character, as in byte-level BPE, leave it on both sides of a cut.
        assert all(end - 1 <= start <= end for end, start in zip(ends, starts[1:], strict=False))


def test_a_chunk_stands_for_its_own_characters(minilm_dir: str, spec_of: Callable[..., TokenizerSpec]) -> None:
    tokenizer = TextTokenizer(spec_of(minilm_dir, LIMIT))
    passages = read([SENTENCE * 40], tokenizer)
    assert passages.chunk is not None
    ends = np.cumsum(passages.lengths)
    for place, (_, start, end) in enumerate(passages.chunk.tolist()):
        ids = passages.ids[ends[place] - passages.lengths[place] : ends[place]].tolist()
        own = [token for token in ids if token not in tokenizer._prefix + tokenizer._suffix]
        assert own == list(tokenizer.encode([(SENTENCE * 40)[start:end]])[0].ids)[1:-1]


def test_a_document_of_one_chunk_is_the_passage_of_truncate_mode(tokenizer: TextTokenizer) -> None:
    short = ["one", "a few words of it", "短"]
    late, cut_off = read([*short], tokenizer), read([*short], tokenizer, TRUNCATE)
    assert late.ids.tolist() == cut_off.ids.tolist()
    assert late.lengths.tolist() == cut_off.lengths.tolist()
    assert late.continues is not None
    assert not late.continues.any()


@pytest.mark.parametrize("mode", ["windows", "late"])
def test_progress_is_told_while_a_large_document_is_cut(
    mode: str, minilm_dir: str, spec_of: Callable[..., TokenizerSpec]
) -> None:
    """Cutting one may take longer than a worker may be silent."""
    told: list[None] = []
    tokenizer = TextTokenizer(spec_of(minilm_dir, LIMIT), on_progress=lambda: told.append(None))
    tokenizer.encode([SENTENCE * 400])
    tokenizer.encode_long(SENTENCE * 400)
    tokenizing = len(told)
    passages = read([SENTENCE * 400], tokenizer, LATE if mode == "late" else Windowing(mode=mode, overlap=8))
    assert tokenizing < 10
    assert len(told) > len(passages.lengths) > 50


def test_a_row_without_text_is_a_context_of_no_tokens(tokenizer: TextTokenizer) -> None:
    passages = read([None, SENTENCE * 4, "", SENTENCE], tokenizer)
    assert passages.continues is not None
    for row in (0, 2):
        (place,) = np.flatnonzero(passages.row == row)
        assert passages.status[place] in (Status.NULL, Status.EMPTY)
        assert (passages.lengths[place], passages.continues[place]) == (0, False)
    assert sum(map(len, context_ids(passages, 1))) == passages.lengths[passages.row == 1].sum() > LATE.chunk_tokens + 2


@pytest.mark.parametrize("chunk_tokens", [LEAST_CHUNK_TOKENS, 17, 40, 1000])
def test_there_are_never_more_chunks_than_a_bucket_has_places_for(
    minilm_dir: str, spec_of: Callable[..., TokenizerSpec], chunk_tokens: int
) -> None:
    tokenizer = TextTokenizer(spec_of(minilm_dir, LIMIT))
    texts = [*("word, and. " * count for count in range(1, 90)), *("word " * count for count in range(1, 90))]
    passages = read([*texts], tokenizer, Windowing(mode="late", chunk_tokens=chunk_tokens))
    firsts, tokens = passages.contexts
    chunks = np.diff(np.append(firsts, len(passages.lengths)))
    assert (chunks[tokens < chunk_tokens] == 1).all()
    several = [(count, total) for count, total in zip(chunks.tolist(), tokens.tolist(), strict=True) if count > 1]
    assert all(count <= most_chunks(total) for count, total in several)
    assert passages.lengths.max() <= min(LIMIT, chunk_tokens + 2)
    assert bool(several) == (chunk_tokens < LIMIT - 2)


CONTEXTS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), max_size=30)


def late_passages(contexts: list[list[int]], first_row: int = 0, task_rows: int | None = None) -> Passages:
    """A row for each context, of chunks of these lengths; an empty list is a row without text. Ids count upwards."""
    lengths = [length for chunks in contexts for length in chunks or [0]]
    counts = [max(1, len(chunks)) for chunks in contexts]
    span = window(len(contexts), first_row, task_rows)
    total = len(lengths)
    places = np.concatenate([np.zeros(0, int), *(np.arange(count) for count in counts)])
    return Passages(
        window=span,
        ids=np.arange(sum(lengths), dtype=np.int32),
        lengths=np.array(lengths, np.int32),
        status=np.zeros(total, np.uint8),
        truncated=np.zeros(total, np.bool_),
        text_hash=np.zeros((total, 16), np.uint8),
        row=np.repeat(span.rows, counts),
        chunk=np.stack([places, places, places + 1], axis=1).astype(np.int32),
        continues=places > 0,
    )


@settings(deadline=None)
@given(contexts=CONTEXTS, budget=st.integers(1, 60), most=st.integers(1, 7))
def test_a_batch_holds_whole_contexts_longest_first(contexts: list[list[int]], budget: int, most: int) -> None:
    passages = late_passages(contexts)
    batches = list(token_batches([passages], layout="packed", budget=budget, max_rows=lambda longest: most))
    rows = np.concatenate([batch.rows for batch in batches])
    assert sorted(rows.tolist()) == list(range(len(passages.lengths)))
    ends = np.cumsum(passages.lengths)
    spans = chain.from_iterable(batch.spans.tolist() for batch in batches)
    assert [*spans] == sorted((sum(chunks) for chunks in contexts), reverse=True)
    for batch in batches:
        assert len(batch.spans) <= most
        assert len(batch.ids) <= budget or len(batch.spans) == 1
        assert batch.lengths.tolist() == passages.lengths[batch.rows].tolist()
        expected = [np.arange(ends[row] - passages.lengths[row], ends[row]) for row in batch.rows]
        assert batch.ids.tolist() == np.concatenate([batch.ids[:0], *expected]).tolist()
        check_contexts(batch, passages)


def check_contexts(batch: TokenBatch, passages: Passages) -> None:
    assert passages.continues is not None
    opened = np.cumsum(batch.lengths) - batch.lengths
    starts = opened[~passages.continues[batch.rows]].tolist()
    assert starts == (np.cumsum(batch.spans) - batch.spans).tolist()
    assert (len(batch.ids), batch.spans.sum()) == (batch.lengths.sum(), batch.lengths.sum())


@given(contexts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=2, max_size=12))
def test_halves_part_contexts_and_nothing_else(contexts: list[list[int]]) -> None:
    passages = late_passages(contexts)
    (batch,) = token_batches([passages], layout="packed", budget=1000, max_rows=lambda longest: 1000)
    first, second = halves(batch)
    assert abs(len(first.spans) - len(second.spans)) <= 1
    assert (first.last, second.last) == (False, True)
    for half in (first, second):
        check_contexts(half, passages)
    for part in ("ids", "lengths", "rows", "contexts"):
        assert np.array_equal(np.concatenate([getattr(first, part), getattr(second, part)]), getattr(batch, part))


@settings(deadline=None)
@given(contexts=CONTEXTS, most=st.integers(1, 12), pieces=st.integers(1, 4))
def test_windows_never_cut_a_context(contexts: list[list[int]], most: int, pieces: int) -> None:
    bounds = np.linspace(0, len(contexts), pieces + 1).astype(int).tolist()
    given = [late_passages(contexts[first:end], first, len(contexts)) for first, end in pairwise(bounds)]
    made = list(gathered(given, most))
    assert [chunks for one in made for chunks in as_contexts(one)] == contexts
    for one in made:
        assert one.continues is not None
        assert not one.continues[:1].any()
        assert len(one.lengths) <= max(most, len(as_contexts(one)[0]) if as_contexts(one) else 0)
    whole = join(window(len(contexts)), made)
    for part in ("ids", "lengths", "row", "chunk", "continues"):
        assert np.array_equal(getattr(whole, part), np.concatenate([getattr(piece, part) for piece in given]))
    assert sum(one.window.num_rows for one in made) == len(contexts)


def as_contexts(passages: Passages) -> list[list[int]]:
    firsts, _ = passages.contexts
    return [part.tolist() for part in np.split(passages.lengths, firsts[1:])] if len(firsts) else []


def test_a_crash_beside_contexts_leaves_them_whole() -> None:
    pieces = [late_passages([[2, 3]], 0, 2), crashed(window(1, 1, 2))]
    (made,) = gathered(pieces, 10)
    assert made.continues is not None
    assert made.continues.tolist() == [False, True, False]
    assert cut(made, 2, 3).encoded.tolist() == [False]


Context = list[list[int]]


def windows_of(*windows: list[Context]) -> list[Passages]:
    """Windows of one task; a row is a context, which is a list of chunks of tokens."""
    made, first, row = [], 0, 0
    for contexts in windows:
        lengths = [[len(chunk) for chunk in context] for context in contexts]
        passages = late_passages(lengths, row, sum(map(len, windows)))
        ids = [*chain.from_iterable(chain.from_iterable(contexts))]
        made.append(replace(passages, ids=np.array(ids, np.int32), first=first))
        first, row = first + len(passages.lengths), row + len(contexts)
    return made


def test_equal_contexts_are_encoded_once_and_equal_chunks_are_not() -> None:
    windows = windows_of(
        [[[1, 2], [3]], [[1, 2]], [[1, 2], [4]], [[1], [2, 3]]],
        [[[1, 2]], [[1, 2], [3]], [[1, 2, 3]]],
    )
    first, second = marked(windows)
    assert first.same_as is not None
    assert second.same_as is not None
    assert first.same_as.tolist() == [-1] * 7
    assert second.same_as.tolist() == [2, 0, 1, -1]
    assert second.encoded.tolist() == [False, False, False, True]


@given(st.lists(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=2), min_size=1, max_size=3), max_size=12))
def test_a_context_is_encoded_whole_or_not_at_all(contexts: list[Context]) -> None:
    (passages,) = marked(windows_of(contexts))
    firsts, _ = passages.contexts
    parts = np.split(passages.encoded, firsts[1:]) if len(firsts) else []
    assert all(len(set(part.tolist())) == 1 for part in parts)
    assert sum(part[0] for part in parts) == len({str(context) for context in contexts})

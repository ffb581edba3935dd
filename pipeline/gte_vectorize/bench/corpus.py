"""The texts that everything is measured on: the user's, or made from the model's vocabulary; as text and as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from gte_vectorize.batch import Int32, Passages, Shard, Status, Task, Window
from gte_vectorize.errors import ConfigError, InputError
from gte_vectorize.model.spec import ModelSpec
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.reader.corpus import find_corpus
from gte_vectorize.reader.rows import RowCursor
from gte_vectorize.store.plan import make_tasks
from gte_vectorize.tokens.pieces import cut, gathered, pieces_of
from gte_vectorize.tokens.tokenizer import TextTokenizer
from gte_vectorize.tokens.workers import TokenWorkers

TASKS = 5
"""Of the pipeline's run. Its steady state begins with the first one's publication, and ends before the last one's."""

MADE_TEXTS = 16384
MEDIAN, SPREAD, SHORTEST = 128, 0.72, 8
QUERIES = 16

_INPUT_BYTES = 32 << 20
_BYTES_PER_TOKEN = 4
_WORDS_TRIED = 20_000


@dataclass(frozen=True, slots=True)
class BenchCorpus:
    """`texts` and the same as the text column of `path`; `windows` hold their tokens in row order.

    `distinct` of the texts come from the source. They are repeated to be enough, each time turned by one character
    more: a text of n characters comes in at most n ways.
    """

    path: Path
    texts: list[str]
    tasks: tuple[Task, ...]
    windows: list[Passages]
    distinct: int
    source: str

    @property
    def lengths(self) -> Int32:
        """Tokens of each text, int32[rows]."""
        return np.concatenate([passages.lengths for passages in self.windows])

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def made_texts(spec: ModelSpec, count: int, seed: int = 0) -> list[str]:
    """Texts of words that are one token each; their lengths in tokens are lognormal, 8 to the model's limit."""
    words = _single_token_words(spec.tokenizer)
    random = np.random.default_rng(seed)
    (one,) = TextTokenizer(spec.tokenizer).encode(words[:1])
    limit = spec.tokenizer.max_length
    lengths = np.clip(random.lognormal(np.log(MEDIAN), SPREAD, count), min(SHORTEST, limit), limit).astype(int)
    counts = np.maximum(1, lengths - (len(one.ids) - 1))
    chosen = iter(random.integers(0, len(words), int(counts.sum())).tolist())
    return [" ".join(words[index] for index in islice(chosen, int(size))) for size in counts]


def _single_token_words(spec: TokenizerSpec) -> list[str]:
    vocabulary = Tokenizer.from_file(str(spec.path)).get_vocab(with_added_tokens=False)
    named = {token.strip("▁Ġ"): index for token, index in sorted(vocabulary.items())}
    words = sorted(word for word in named if word.isalnum())
    words = np.random.default_rng(0).permutation(np.array(words, dtype=object))[:_WORDS_TRIED].tolist()
    plain = replace(spec, prompt="")
    encoded = TextTokenizer(plain).encode(words)
    shortest = min((len(found.ids) for found in encoded if found.ids), default=0)
    kept = [
        word
        for word, found in zip(words, encoded, strict=True)
        if len(found.ids) == shortest and named[word] in found.ids
    ]
    if not kept:
        raise ConfigError("this model's vocabulary has no words to make texts of: name a corpus")
    return kept


def input_texts(inputs: Sequence[str], text_column: str) -> list[str]:
    """The first usable texts of the inputs, some 32 MiB of them. Raises InputError where there is none."""
    texts: list[str] = []
    room = _INPUT_BYTES
    for shard in find_corpus(inputs, text_column=text_column, columns=()).shards:
        with RowCursor(shard.uri, [text_column]) as cursor:
            for batch in cursor.read(0, shard.num_rows):
                found = [text for value in batch.column(0).to_pylist() if (text := _usable(value))]
                texts += found
                room -= sum(map(len, found))
                if room <= 0:
                    return texts
    if not texts:
        raise InputError(f"no row of column {text_column!r} holds a text: there is nothing to measure with")
    return texts


def _usable(value: object) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return text if isinstance(text, str) and text.strip() else ""


def write_corpus(
    texts: Sequence[str], tokens: int, spec: ModelSpec, folder: Path, *, window_rows: int, workers: int, source: str
) -> BenchCorpus:
    """About `tokens` tokens of `texts`, cut off or repeated, as a Parquet file in `folder`, and tokenized."""
    probe = TextTokenizer(spec.tokenizer).encode(texts[:512])
    mean = max(1.0, sum(len(found.ids) for found in probe) / len(probe))
    rows = max(TASKS * QUERIES, int(tokens / mean))
    repeated = [_turned(text, turn) for text, turn in islice(_repeat(texts), rows)]
    path = folder / "corpus.parquet"
    task_rows = -(-rows // TASKS)
    pq.write_table(pa.table({"text": repeated}), path, row_group_size=task_rows, compression="zstd")
    shards = find_corpus([str(path)], text_column="text").shards
    tasks = make_tasks(shards, task_rows=task_rows)
    with TokenWorkers(workers, spec.tokenizer, "text") as pool:
        windows = list(gathered(pool.stream(pieces_of(tasks, window_rows)), window_rows))
    return BenchCorpus(path, repeated, tasks, windows, min(rows, len(texts)), source)


def _repeat(texts: Sequence[str]) -> Iterable[tuple[str, int]]:
    return ((text, index // len(texts)) for index, text in enumerate(cycle(texts)))


def _turned(text: str, by: int) -> str:
    by %= len(text)
    return text[by:] + text[:by]


def first_tokens(windows: Iterable[Passages], tokens: int) -> list[Passages]:
    """The first rows, of `tokens` tokens or a few more, or all."""
    taken: list[Passages] = []
    for passages in windows:
        ends = np.cumsum(passages.lengths)
        rows = min(len(ends), int(np.searchsorted(ends, tokens)) + 1)
        taken.append(cut(passages, 0, rows))
        tokens -= int(ends[rows - 1])
        if tokens <= 0:
            break
    return taken


def as_passages(ids: Sequence[Sequence[int]]) -> Passages:
    """Passages of these token ids, which come from no file. Raises InputError where there are none."""
    if not ids:
        raise InputError("the model's tokenizer leaves nothing of these texts: there is nothing to measure with")
    count = len(ids)
    window = Window(Task(0, Shard("memory", 0, 0, (count,)), 0, count), 0, count)
    return Passages(
        window=window,
        ids=np.concatenate([np.asarray(one, np.int32) for one in ids]),
        lengths=np.array([len(one) for one in ids], np.int32),
        status=np.full(count, Status.OK, np.uint8),
        truncated=np.zeros(count, np.bool_),
        text_hash=np.zeros((count, 16), np.uint8),
        row=window.rows,
    )


def short_queries(windows: Sequence[Passages]) -> Passages:
    """16 passages of 8 to 32 tokens: the beginnings of a window's longest passages, with their last token."""
    passages = windows[0]
    ends = np.cumsum(passages.lengths)
    longest = np.argsort(-passages.lengths, kind="stable")
    longest = longest[passages.lengths[longest] > 0]
    sizes = np.random.default_rng(0).integers(8, 33, QUERIES)
    queries = []
    for row, size in zip(cycle(longest.tolist()), sizes.tolist(), strict=False):
        ids = passages.ids[ends[row] - passages.lengths[row] : ends[row]]
        queries.append([*ids[:-1][: size - 1].tolist(), int(ids[-1])])
    return as_passages(queries)

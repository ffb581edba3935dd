"""Buckets: the shapes a token batch can take, and which one a batch goes into.

A packed bucket holds `tokens` tokens of at most `rows` contexts no longer than `max_length`, and has slots for them and
for the fillers that make up the rest; its rows are few enough that a kernel's grid over the slots is mostly work, so
they run out only when the contexts are much shorter than the longest. Each context is a passage, unless the bucket has
places for `chunks`, which are passages then. A padded bucket is `rows` × `max_length`. On a GPU every bucket is
captured once and replayed; on a CPU a batch gets a bucket of its own size, or a little more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gte_vectorize.batch import LEAST_CHUNK_TOKENS, TokenBatch

FEWEST_TOKENS = 64
"""Of a packed batch on a CPU: matrix products of fewer than 16 rows round differently."""

TOKEN_STEP = 32
"""Of a packed batch on a CPU: few sizes, so that what one batch frees fits the next, and memory does not creep up."""

SMALLEST_PACKED = 8192
"""Of a packed bucket on a GPU: with fewer tokens the matrix products may take other kernels and round differently."""


@dataclass(frozen=True, slots=True)
class Bucket:
    tokens: int
    max_length: int
    rows: int
    slots: int
    chunks: int = 0

    @property
    def vectors(self) -> int:
        """How many come out of it."""
        return self.chunks or self.slots

    def fits(self, batch: TokenBatch) -> bool:
        spans = batch.spans
        return (
            len(batch.ids) <= self.tokens
            and spans[0] <= self.max_length
            and len(spans) <= self.rows
            and len(batch.rows) <= self.vectors
        )


def exact_bucket(batch: TokenBatch) -> Bucket:
    """A packed bucket of just the batch, filled up to a multiple of TOKEN_STEP tokens and to FEWEST_TOKENS."""
    tokens = max(FEWEST_TOKENS, -(-len(batch.ids) // TOKEN_STEP) * TOKEN_STEP)
    longest, rows = max(int(batch.spans[0]), tokens - len(batch.ids)), len(batch.spans)
    chunks = 0 if batch.contexts is None else len(batch.rows)
    return Bucket(tokens, longest, rows, rows + (tokens > len(batch.ids)), chunks)


def exact_rows(batch: TokenBatch) -> Bucket:
    """A padded bucket of just the batch."""
    rows, longest = len(batch.rows), int(batch.lengths[0])
    return Bucket(rows * longest, longest, rows, rows)


def packed_buckets(budget: int, max_length: int, *, late: bool = False) -> list[Bucket]:
    """Budget, half of it, a quarter …, by maximal length 16, 32, 64 … up to the model's; largest first.

    `late`: with places for chunks.
    """
    sizes = [budget]
    while sizes[-1] // 2 >= max(SMALLEST_PACKED, max_length):
        sizes.append(sizes[-1] // 2)
    return [
        Bucket(tokens, length, rows, rows + tokens // length + 1, rows + most_chunks(tokens) if late else 0)
        for tokens in sizes
        for length in reversed(_lengths(max_length))
        for rows in (max(1, tokens // max(8, length // 4)),)
    ]


def padded_buckets(budget: int, max_length: int) -> list[Bucket]:
    """Lengths 16, 24, 32, 48 … up to the model's, each with the rows of the budget and an eighth of them.

    Largest first.
    """
    lengths = _lengths(max_length)
    lengths = sorted({*lengths, *(min(max_length, length * 3 // 2) for length in lengths)})
    buckets = {
        Bucket(rows * length, length, rows, rows)
        for length in lengths
        for rows in (max(1, budget // length), max(1, budget // length // 8))
    }
    return sorted(buckets, key=lambda bucket: (bucket.tokens, bucket.max_length), reverse=True)


def most_chunks(tokens: int) -> int:
    """How many there can be in contexts of more than one, of `tokens` together."""
    return 2 * tokens // LEAST_CHUNK_TOKENS


def max_rows(buckets: Sequence[Bucket], longest: int) -> int:
    """How many contexts a batch may have whose longest context is `longest` tokens."""
    length = min(bucket.max_length for bucket in buckets if bucket.max_length >= longest)
    return max(bucket.rows for bucket in buckets if bucket.max_length == length)


def choose(buckets: Iterable[Bucket], batch: TokenBatch) -> Bucket | None:
    """The cheapest bucket that holds the batch; None where none is left that does."""
    fitting = (bucket for bucket in buckets if bucket.fits(batch))
    return min(fitting, key=lambda bucket: (bucket.tokens, bucket.max_length), default=None)


def _lengths(longest: int) -> list[int]:
    lengths = [16]
    while lengths[-1] * 2 < longest:
        lengths.append(lengths[-1] * 2)
    return [*lengths, longest] if longest > 16 else [longest]

"""Buckets: the shapes a token batch can take, and which one a batch goes into.

A packed bucket holds `tokens` tokens of at most `rows` passages no longer than `max_length`, and has slots for them and
for the fillers that make up the rest; a padded one is `rows` × `max_length`. On a GPU every bucket is captured once and
replayed; on a CPU a batch gets a bucket of exactly its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gte_vectorize.batch import TokenBatch
from gte_vectorize.encoder.pooling import FEWEST_ROWS

SHORTEST_PASSAGE = 8
"""Passages of a full packed bucket average at least this many tokens; shorter ones fill the slots before the tokens."""

SMALLEST_PACKED = 8192
"""Below this many tokens a GPU's matrix products may take other kernels and round differently."""


@dataclass(frozen=True, slots=True)
class Bucket:
    tokens: int
    max_length: int
    rows: int
    slots: int

    def fits(self, batch: TokenBatch) -> bool:
        return len(batch.rows) <= self.rows and batch.lengths[0] <= self.max_length and len(batch.ids) <= self.tokens


def exact_bucket(batch: TokenBatch) -> Bucket:
    """A packed bucket of just the batch, filled up to the fewest rows a matrix product may have."""
    tokens = max(FEWEST_ROWS, len(batch.ids))
    longest = max(int(batch.lengths[0]), tokens - len(batch.ids))
    return Bucket(tokens, longest, len(batch.rows), len(batch.rows) + (tokens > len(batch.ids)))


def exact_rows(batch: TokenBatch) -> Bucket:
    """A padded bucket of just the batch."""
    rows, longest = len(batch.rows), int(batch.lengths[0])
    return Bucket(rows * longest, longest, rows, rows)


def packed_buckets(budget: int, max_length: int) -> list[Bucket]:
    """Budget, half of it, a quarter …, by maximal length 32, 64, 128 … up to the model's; largest first."""
    sizes = [budget]
    while sizes[-1] // 2 >= max(SMALLEST_PACKED, max_length):
        sizes.append(sizes[-1] // 2)
    return [
        Bucket(tokens, length, tokens // SHORTEST_PASSAGE, tokens // SHORTEST_PASSAGE + tokens // length + 1)
        for tokens in sizes
        for length in reversed(list(_lengths(32, max_length)))
    ]


def padded_buckets(budget: int, max_length: int) -> list[Bucket]:
    """Lengths 16, 24, 32, 48 … up to the model's, each with all the rows a batch can have and an eighth of them.

    A batch keeps rows × its longest passage within the budget, so the most rows come with the shortest longest passage
    that a bucket is chosen for. Largest first.
    """
    lengths = sorted({length for half in _lengths(16, max_length) for length in (half, min(max_length, half * 3 // 2))})
    buckets = {
        Bucket(rows * length, length, rows, rows)
        for shorter, length in pairwise([0, *lengths])
        for most in (max(1, budget // (shorter + 1)),)
        for rows in (most, max(1, most // 8))
    }
    return sorted(buckets, key=lambda bucket: (bucket.tokens, bucket.max_length), reverse=True)


def choose(buckets: Sequence[Bucket], batch: TokenBatch) -> Bucket:
    """The cheapest bucket that holds the batch; one always does, since batches keep within the largest."""
    return min((b for b in buckets if b.fits(batch)), key=lambda bucket: (bucket.tokens, bucket.max_length))


def _lengths(shortest: int, longest: int) -> Iterator[int]:
    length = shortest
    while length < longest:
        yield length
        length *= 2
    yield longest

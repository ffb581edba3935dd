"""As splitter.py, with chunks that end where the library semchunk ends its own.

semchunk descends from blank lines over lines, sentences and clauses to words until a piece fits, and knows the marks of
English. It is asked about some pages at a time, because it holds a list of all characters of a text without such marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from gte_vectorize.batch import Int32
from gte_vectorize.tokens.splitter import Chunk, best_cut, chunk_of, places_of
from gte_vectorize.tokens.tokenizer import Document, TextTokenizer

# Characters that semchunk is given at a time, at most but for one token, and tokens before their end among which is the
# best place for it.
_STRETCH = 1 << 17
_NEAR = 1024
# Characters that semchunk may have counted for each of these. Ordinary texts need six.
_EFFORT = 32
# Counts that are remembered: of some texts semchunk wants them twice, one soon after the other.
_REMEMBERED = 256


def split_by_semchunk(
    text: str, document: Document, tokenizer: TextTokenizer, *, room: int, overlap: int, tolerance: int
) -> list[Chunk]:
    """The chunks of a document, in order: at least one, and every character lies in one.

    semchunk is asked for pieces of `room - overlap` tokens, and a chunk is such a piece and about `overlap` tokens of
    what precedes it, as far as there is room. (semchunk's own overlaps join small parts, and make far more chunks.) It
    counts pieces by themselves; within the document one may have a few tokens more. One that has more than `room` is
    cut as `splitter.split` would cut it, and so is a text that semchunk cannot cope with. What it leaves out, white
    space, belongs to the chunk before, or to the token that begins with it. Parameters are those of `splitter.split`.
    """
    begins, ends = places_of(document.offsets)
    if len(begins) <= room:
        return [chunk_of(text, begins, ends, 0, len(begins))]
    size = room - overlap
    tolerance, slack = min(tolerance, size // 2), min(overlap // 2, size // 4)
    chunks: list[Chunk] = []
    first = last = 0
    for end in _cuts(text, begins, ends, tokenizer, room, size, tolerance):
        if last:
            least = max(first + 1, end - room, last - overlap - slack)
            target, most = (max(least, last - overlap + more) for more in (0, slack))
            first = best_cut(text, begins, ends, range(least, most + 1), target)
        chunks.append(chunk_of(text, begins, ends, first, end))
        last = end
    return chunks


def _cuts(
    text: str, begins: Int32, ends: Int32, tokenizer: TextTokenizer, room: int, size: int, tolerance: int
) -> Iterator[int]:
    """The token behind each piece, of which none has more than `room`."""
    last = 0
    for end in _ends(text, begins, ends, tokenizer, size):
        while end - last > room:
            limit = min(last + size, end - size // 4)
            last = best_cut(text, begins, ends, range(limit - tolerance, limit + 1), limit)
            yield last
        yield end
        last = end


def _ends(text: str, begins: Int32, ends: Int32, tokenizer: TextTokenizer, size: int) -> Iterator[int]:
    """The token behind each of semchunk's chunks."""
    first = 0
    while first < len(begins):
        end = int(np.searchsorted(begins, begins[first] + _STRETCH))
        if end < len(begins):
            end = best_cut(text, begins, ends, range(max(first + 1, end - _NEAR), end + 1), end)
        if end - first > size:
            start, stop = int(begins[first]), int(begins[end]) if end < len(begins) else len(text)
            places = np.array(_chunk_ends(text[start:stop], tokenizer, size), np.int64) + start
            found = np.searchsorted(begins, places)
            yield from np.unique(found[(found > first) & (found < end)]).tolist()
        yield end
        first = end


def _chunk_ends(text: str, tokenizer: TextTokenizer, size: int) -> list[int]:
    """The character behind each of semchunk's chunks of the text; none where it would never come to an end.

    It descends once for every kind of white space: a text may have thousands of them.
    """
    from semchunk.semchunk import chunk  # optional

    left = _EFFORT * len(text)

    @lru_cache(_REMEMBERED)
    def count(piece: str) -> int:
        nonlocal left
        left -= len(piece)
        if left < 0:
            raise RecursionError
        found = tokenizer.encode_long(piece)
        return len(found.ids) if isinstance(found, Document) else 0

    try:
        found: Any = chunk(text, size, count, memoize=False, offsets=True)
    except RecursionError:
        return []
    return [end for _, end in found[1]]

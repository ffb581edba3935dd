"""A document of any length → all its token ids and their places, in time and memory that its length bounds.

The library needs some 300 bytes a character while it works, and what it is given at once is held at once. So a long
text goes through it in pieces, each with a little of its neighbours' text on both sides. Pieces meet where it is seen
that this is enough: where tokens depend neither on what lies further off before them nor on what lies further behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from gte_vectorize.batch import Bool, Int32

# Characters of a piece, and of the longest one that is tried.
_PIECE = 1 << 16
_LONGEST_PIECE = 1 << 20
# Characters that a piece reaches over a cut, at least.
_REACH = 256
_LONGEST_PERIOD = 64
# Places tried for a cut: those nearest to the end of each zone.
_SPACES = 8
_ANYWHERE = 32

_SPACE = re.compile(r"(?<=\S)(?=\s)")


class Tokens(NamedTuple):
    """ids: int32[n]. offsets: int32[n, 2], where each token begins and ends, in characters of the text.

    Characters that a tokenizer drops belong to no token; tokens that are parts of one character share its place.
    """

    ids: Int32
    offsets: Int32

    def before(self, place: int) -> Tokens:
        return self._where(self.offsets[:, 0] < place)

    def since(self, place: int) -> Tokens:
        return self._where(self.offsets[:, 0] >= place)

    def _where(self, chosen: Bool) -> Tokens:
        return Tokens(self.ids[chosen], self.offsets[chosen])


def encode_document(tokenizer: Tokenizer, text: str, on_progress: Callable[[], None] = lambda: None) -> Tokens | None:
    """The tokens of the whole text, without special tokens; None if a mebi-character of it cannot be cut.

    That is one word for WordPiece, or an endless repetition. The tokenizer must neither truncate nor pad. Pieces are
    cut at whitespace, and elsewhere only where a mebi-character has none: there a Unigram model, which adds up scores
    from one whitespace to the next, may decide a tie otherwise than it would in one go. `on_progress` is called before
    each piece.
    """
    longest_word = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    reach = max(_REACH, longest_word + 1)  # what is seen of a word that is too long is too long itself
    pieces: list[Tokens] = []
    start = 0
    while start < len(text) or not pieces:
        on_progress()
        end = _next_cut(tokenizer, text, start, reach)
        if end is None:
            return None
        piece = _encode(tokenizer, text, start - reach, end + reach).since(start)
        pieces.append(piece if end == len(text) else piece.before(end))
        start = end
    return Tokens(*map(np.concatenate, zip(*pieces, strict=True)))


def _next_cut(tokenizer: Tokenizer, text: str, start: int, reach: int) -> int | None:
    for cut in _places(text, start):
        if cut == len(text) or _is_safe(tokenizer, text, cut, reach):
            return cut
    return None


def _places(text: str, start: int) -> Iterator[int]:
    """Where the piece that begins at `start` might end, best first."""
    size = _PIECE
    while size <= _LONGEST_PIECE:
        if len(text) - start <= size:
            yield len(text)
            return
        spaces = [match.start() for match in _SPACE.finditer(text, start + size // 2, start + size)]
        yield from reversed(spaces[-_SPACES:])
        size *= 2
    step = _LONGEST_PIECE // 2 // _ANYWHERE
    for cut in range(start + _LONGEST_PIECE, start + _LONGEST_PIECE // 2, -step):
        if not _repeats(text[cut - _REACH : cut]):
            yield cut


def _repeats(text: str) -> bool:
    """Whether the text is a repetition of a short one: tokens of such a text tell nothing of where it was begun."""
    return any(text[period:] == text[:-period] for period in range(1, _LONGEST_PERIOD + 1))


def _is_safe(tokenizer: Tokenizer, text: str, cut: int, reach: int) -> bool:
    """Whether the tokens before `cut` stay when more text follows, and those behind it when more text precedes them."""
    near = _encode(tokenizer, text, cut - reach, cut + reach)
    followed = _encode(tokenizer, text, cut - reach, cut + 2 * reach)
    preceded = _encode(tokenizer, text, cut - 2 * reach, cut + reach)
    return _equal(near.before(cut), followed.before(cut)) and _equal(near.since(cut), preceded.since(cut))


def _equal(some: Tokens, others: Tokens) -> bool:
    return np.array_equal(some.ids, others.ids) and np.array_equal(some.offsets, others.offsets)


def _encode(tokenizer: Tokenizer, text: str, start: int, end: int) -> Tokens:
    """The tokens of text[start:end], with places in `text`; the two may lie outside it."""
    start = max(0, start)
    found = tokenizer.encode(text[start:end], add_special_tokens=False)
    offsets = np.fromiter(chain.from_iterable(found.offsets), np.int32, 2 * len(found.ids)).reshape(-1, 2)
    return Tokens(np.array(found.ids, np.int32), offsets + np.int32(start))

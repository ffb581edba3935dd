"""One tokenization of a long document → chunks that fit the model, cut where a reader would cut. Pure.

A chunk ends at its hard limit, or a little before it where the text has a better place: a heading, a line, a sentence,
a clause, a word. Only the text near such a place is looked at, so the time does not depend on how long words are.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gte_vectorize.batch import Int32


class Chunk(NamedTuple):
    """Tokens `first_token` to `end_token` of a document, and the characters they stand for; both ends are exclusive."""

    first_token: int
    end_token: int
    char_start: int
    char_end: int


_HEADING = r"""
    第\s?[\d〇零一二两三四五六七八九十百千]{1,9}\s?[编編章节節条條款]
  | [一二三四五六七八九十]{1,3}、
  | (?:Article|ARTICLE|Section|SECTION|Clause|CLAUSE|Chapter|CHAPTER|Part|PART|Schedule|SCHEDULE|Annex|ANNEX
      |Appendix|APPENDIX|Exhibit|EXHIBIT)[ ](?:\d|[IVXLC]+\b|[A-Z]\b)
  | §{1,2}\s?\d
  | \d{1,3}(?:\.\d{1,3}){1,5}[.\s]
  | \d{1,3}[.．、](?!\d)
  | \#{1,6}[ ]
"""
# Behind these a full stop ends no sentence; nor does one before a small letter.
_SHORT = "No|Nos|Art|Arts|Sec|Secs|Cl|Para|Paras|Ch|Pt|Fig|Vol|Mr|Mrs|Ms|Dr|Prof|St|vs|v|cf|p|pp|e\\.g|i\\.e|[A-Z]"
_STOP = r"\.(?!\s+[a-z])" + "".join(rf"(?<!\b{word}\.)" for word in _SHORT.split("|"))
_CLOSING = r"[」』”’）】》〉〕\"')\]]{0,4}"
_LINE_END = r"[\n\r\v\f\x85\u2028\u2029]\s*+"
# Its groups are the spaces between two units of the text, if any; the best place for a cut comes first. Every match
# begins with a mark or takes all spaces, so that runs of either cost no more than their length.
_BOUNDARY = re.compile(
    rf"""
    (?P<heading>{_LINE_END})(?:{_HEADING})
  | (?P<line>{_LINE_END})(?![a-z]{{2}})  # before small letters a line ends, but no sentence does
  | (?:[。！？；](?![。！？；]) | (?:[!?;]|{_STOP})(?={_CLOSING}\s)) {_CLOSING} (?=(?P<sentence>\s*+))
  | (?:[，、：] | [,:](?=\s)) {_CLOSING} (?=(?P<clause>\s*+))
  | (?P<word>\s++)
    """,
    re.VERBOSE,
)
# Characters behind a place that show what it is, and tokens before it that may hold its marks.
_AHEAD = 40
_BEFORE = 6
# What never begins a character of its own, beside marks: the joiner, skin tones, Hangul vowels and finals.
_CONTINUES = re.compile("[\u200d\U0001f3fb-\U0001f3ff\u1160-\u11ff]")
_PAIRS = re.compile("\u200d.|\r\n|[\U0001f1e6-\U0001f1ff]{2}", re.DOTALL)


def split(
    text: str,
    offsets: Int32,
    *,
    room: int,
    overlap: int,
    tolerance: int,
    on_progress: Callable[[], None] = lambda: None,
) -> list[Chunk]:
    """The chunks of a document, in order: at least one, and every character lies in one.

    offsets    int32[n, 2]: where each token begins and ends, in characters of `text`; what belongs to no token goes
               with the token before it
    room       tokens of a chunk, at most
    overlap    tokens that a chunk shares with the one before it, about; 0 for none, less than `room`
    tolerance  tokens by which a chunk may end before its limit for the sake of a better place; no more than half of
               what `room` leaves beside `overlap` is used

    `on_progress` is called before every chunk but the last: of a large document, there are some hundred thousand.

    Among the best places within reach a chunk ends at the last, and begins at the nearest to the overlap asked for. It
    ends early where else a last one with few new tokens would be left. Raises ValueError for sizes without sense.
    """
    if not 0 <= overlap < room or tolerance < 0:
        raise ValueError(f"0 <= overlap {overlap} < room {room} and 0 <= tolerance {tolerance} must hold")
    count = len(offsets)
    begins, ends = places_of(offsets)
    # Within these bounds every chunk adds tokens, the last one a quarter of `spare`.
    spare = room - overlap
    tolerance, slack = min(tolerance, spare // 2), min(overlap // 2, spare // 4)
    chunks = []
    first = 0
    while count - first > room:
        on_progress()
        limit = min(first + room, count - spare // 4)
        cut = best_cut(text, begins, ends, range(limit - tolerance, limit + 1), limit)
        chunks.append(chunk_of(text, begins, ends, first, cut))
        target = cut - overlap
        first = best_cut(text, begins, ends, range(target - slack, target + slack + 1), target) if overlap else cut
    return [*chunks, chunk_of(text, begins, ends, first, count)]


def places_of(offsets: Int32) -> tuple[Int32, Int32]:
    """int32[n] each: where all tokens from one on begin, and where all up to one end.

    That is where each begins and ends itself, unless a normalizer has put marks into another order.
    """
    return np.minimum.accumulate(offsets[::-1, 0])[::-1], np.maximum.accumulate(offsets[:, 1])


def chunk_of(text: str, begins: Int32, ends: Int32, first: int, end: int) -> Chunk:
    """The tokens `first` to `end - 1`, and the characters before the next one."""
    start = int(begins[first]) if first else 0
    # A cut inside a character leaves it on both sides.
    stop = int(max(begins[end], ends[end - 1])) if end < len(begins) else len(text)
    return Chunk(first, end, start, stop)


def best_cut(text: str, begins: Int32, ends: Int32, tokens: range, target: int) -> int:
    """The token of `tokens` before which it is best to cut: the best kind of place, then the nearest to `target`."""
    kinds = _boundaries(text, begins, tokens)
    ranked = sorted(kinds, key=lambda token: (kinds[token], abs(token - target)))
    good = (token for token in ranked if _parts_nothing(text, begins, ends, token))
    if (token := next(good, None)) is not None:
        return token
    nearest = sorted(tokens, key=lambda token: abs(token - target))
    for token in nearest:
        if _parts_nothing(text, begins, ends, token):
            return token
    return next((token for token in nearest if ends[token - 1] <= begins[token]), target)


def _boundaries(text: str, begins: Int32, tokens: range) -> dict[int, int]:
    """The tokens of `tokens` before which a unit of the text ends, each with the group of _BOUNDARY that says so."""
    places = begins[tokens.start : tokens.stop].tolist()
    kinds: dict[int, int] = {}
    begin = int(begins[max(0, tokens.start - _BEFORE)])
    for match in _BOUNDARY.finditer(text, begin, places[-1] + _AHEAD):
        kind = match.lastindex or 0
        # Tokenizers drop the spaces of a boundary, or have a token for them, or put them into the next token. The first
        # token in them, or right behind, begins the chunk, as it would begin the chunk's text tokenized alone.
        start, end = match.span(kind)
        index = bisect_left(places, start)
        if index < len(places) and places[index] <= end:
            token = tokens[index]
            kinds[token] = min(kind, kinds.get(token, kind))
    return kinds


def _parts_nothing(text: str, begins: Int32, ends: Int32, token: int) -> bool:
    """Whether a cut before the token parts neither a character nor what is read as one."""
    return bool(ends[token - 1] <= begins[token]) and not _joined(text, int(begins[token]))


def _joined(text: str, place: int) -> bool:
    """Whether a cut at `place` would part what is read as one character."""
    after = text[place : place + 1]
    return bool(
        _CONTINUES.match(after)
        or _PAIRS.match(text[max(0, place - 1) : place + 1])
        or (after and unicodedata.category(after)[0] == "M")
    )

"""How a document becomes passages: cut off at the model's limit, in windows that cover it, or in chunks of contexts.

Late chunking: a document is encoded in contexts as long as the limit allows, and each chunk's vector is pooled from
those states of its context that are its own. Source: Günther et al., "Late Chunking" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

from gte_vectorize.batch import Status
from gte_vectorize.tokens.semchunk_splitter import split_by_semchunk
from gte_vectorize.tokens.splitter import Chunk, split
from gte_vectorize.tokens.tokenizer import Document, Encoded, TextTokenizer

_VERSION = 1
"""Of how windows are cut; part of the fingerprint, so it grows whenever the same text would be cut elsewhere."""

_TOLERANCE = 4
"""A window may end before its limit by this part of its room, for the sake of a better place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowing:
    """What is done with a document that is longer than the model's limit.

    mode          "truncate": its end is cut off; "windows": one vector per window; "mean": the windows' mean; "late":
                  whatever its length, one vector per chunk of a context
    overlap       tokens that a window shares with the one before it, about
    splitter      what cuts: "sentence" (splitter.py), or the library "semchunk"
    chunk_tokens  of a chunk of a context, at most, beside special tokens and prompt; 0 in the other modes
    """

    mode: str = "truncate"
    overlap: int = 0
    splitter: str = "sentence"
    chunk_tokens: int = 0

    @property
    def whole(self) -> bool:
        """Whether all of a document becomes passages."""
        return self.mode != "truncate"

    @property
    def late(self) -> bool:
        return self.mode == "late"

    @property
    def chunked(self) -> bool:
        """Whether a document may become more than one row."""
        return self.mode in ("windows", "late")

    def cuts(self, head: Encoded) -> bool:
        """Whether the text that begins with these ids may become more than one passage."""
        too_long = head.truncated or head.status == Status.TOO_LARGE
        return self.whole and (too_long or 0 < self.chunk_tokens < len(head.ids))

    def description(self) -> Any:
        """For the fingerprint and the output's metadata."""
        if self.late:
            return {"mode": self.mode, "chunk_tokens": self.chunk_tokens, "version": _VERSION}
        fields = {name: value for name, value in asdict(self).items() if name != "chunk_tokens"}
        if self.splitter == "semchunk":
            fields["semchunk"] = version("semchunk")
        return {**fields, "version": _VERSION} if self.whole else self.mode


TRUNCATE = Windowing()


class Passage(NamedTuple):
    """A passage and the characters of its document that it stands for; 0 and 0 where there are no ids.

    `reused` is its row in an earlier output, or -1; `continues` as in batch.Passages.
    """

    encoded: Encoded
    char_start: int = 0
    char_end: int = 0
    reused: int = -1
    continues: bool = False


def passage_of(encoded: Encoded, text: str) -> Passage:
    """The one passage of a document that fits."""
    return Passage(encoded, 0, len(text)) if encoded.ids else Passage(encoded)


def windows_of(text: str, tokenizer: TextTokenizer, windowing: Windowing) -> list[Passage]:
    """The windows or chunks of a document; one without ids where it has no tokens."""
    document = tokenizer.encode_long(text)
    if isinstance(document, Status):
        return [Passage(Encoded([], False, document))]
    if windowing.late:
        return [*_chunks_of_contexts(text, document, tokenizer, windowing)]
    return [
        Passage(tokenizer.passage(document, chunk.first_token, chunk.end_token), chunk.char_start, chunk.char_end)
        for chunk in _chunks(text, document, tokenizer, windowing)
    ]


def _chunks(text: str, document: Document, tokenizer: TextTokenizer, windowing: Windowing) -> list[Chunk]:
    room = tokenizer.room(document)
    sizes = {"room": room, "overlap": min(windowing.overlap, room // 2), "tolerance": room // _TOLERANCE}
    if windowing.splitter == "semchunk":
        return split_by_semchunk(text, document, tokenizer, **sizes)
    return split(text, document.offsets, **sizes, on_progress=tokenizer.on_progress)


def _chunks_of_contexts(
    text: str, document: Document, tokenizer: TextTokenizer, windowing: Windowing
) -> Iterator[Passage]:
    """Those of a context, back to back, have the ids of the context as one passage."""
    room, chunk_room, tell = tokenizer.room(document), windowing.chunk_tokens, tokenizer.on_progress
    for context in split(text, document.offsets, room=room, overlap=0, tolerance=room // _TOLERANCE, on_progress=tell):
        first, offsets = context.first_token, document.offsets[context.first_token : context.end_token]
        chunks = split(text, offsets, room=chunk_room, overlap=0, tolerance=chunk_room // _TOLERANCE, on_progress=tell)
        for index, chunk in enumerate(chunks):
            opens, closes = index == 0, index == len(chunks) - 1
            yield Passage(
                tokenizer.passage(
                    document, first + chunk.first_token, first + chunk.end_token, opens=opens, closes=closes
                ),
                context.char_start if opens else chunk.char_start,
                context.char_end if closes else chunk.char_end,
                continues=not opens,
            )

"""The text column of a window → passages: each row validated, hashed and tokenized by itself."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from gte_vectorize.batch import Int32, Passages, Status, UInt8, Window
from gte_vectorize.errors import DamagedInput, InputError
from gte_vectorize.reuse.index import TextIndex
from gte_vectorize.tokens.pieces import HASH_BYTES, join
from gte_vectorize.tokens.tokenizer import Encoded, TextTokenizer
from gte_vectorize.tokens.windowing import TRUNCATE, Passage, Windowing, passage_of, windows_of

# Unicode has no whitespace and no control character behind the ideographic space.
_BLANK = "".join(char for char in map(chr, range(0x3001)) if char.isspace() or unicodedata.category(char) == "Cc")

_BINARY = {
    pa.null(): pa.binary(),
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
    pa.binary(): pa.binary(),
    pa.large_binary(): pa.large_binary(),
    pa.binary_view(): pa.binary_view(),
}


def read_passages(
    window: Window,
    batches: Iterable[pa.RecordBatch],
    tokenizer: TextTokenizer,
    windowing: Windowing = TRUNCATE,
    known: TextIndex | None = None,
) -> Passages:
    """Tokenize the rows of `window`; `batches` hold them in order, with the text in their first column.

    One batch at a time is held as text: the reader's batches bound the memory. A null, blank, undecodable or oversized
    text has no tokens and a status that says so; a text that is `known` is not tokenized. Raises DamagedInput when
    there are fewer or more rows than the window has, InputError when the column holds no text.
    """
    pieces: list[Passages] = []
    first, end = window.first_row, window.first_row + window.num_rows
    for batch in batches:
        values = _as_binary(batch.column(0), window.task.shard.uri).to_pylist()
        span = replace(window, first_row=first, num_rows=len(values))
        pieces.append(_passages(span, values, tokenizer, windowing, known))
        first += len(values)
    if first != end:
        raise DamagedInput(
            f"{window.task.shard.uri!r}: {first - window.first_row} rows where {window.num_rows} were planned, from "
            f"row {window.first_row}: the file has changed or is damaged"
        )
    return join(window, pieces or [_passages(window, [], tokenizer, windowing, known)])


def _passages(
    span: Window, values: list[bytes | None], tokenizer: TextTokenizer, windowing: Windowing, known: TextIndex | None
) -> Passages:
    hashes = np.frombuffer(b"".join(map(_hash, values)), np.uint8).reshape(-1, HASH_BYTES)
    documents = _documents(values, hashes, tokenizer, windowing, known)
    counts = [len(document) for document in documents]
    passages = [*chain.from_iterable(documents)]
    encoded = [passage.encoded for passage in passages]
    return Passages(
        window=span,
        ids=np.fromiter(chain.from_iterable(found.ids for found in encoded), np.int32),
        lengths=np.array([len(found.ids) for found in encoded], np.int32),
        status=np.array([found.status for found in encoded], np.uint8),
        truncated=np.array([found.truncated for found in encoded], np.bool_),
        text_hash=np.repeat(hashes, counts, axis=0),
        row=np.repeat(span.rows, counts),
        chunk=_places(documents) if windowing.whole else None,
        continues=np.array([passage.continues for passage in passages], np.bool_) if windowing.late else None,
        cut_tokens=sum(found.cut for found in encoded),
        reused=np.array([passage.reused for passage in passages], np.int64) if known is not None else None,
    )


def _places(documents: list[list[Passage]]) -> Int32:
    places = [(index, *passage[1:3]) for document in documents for index, passage in enumerate(document)]
    return np.array(places, np.int32).reshape(-1, 3)


def _documents(
    values: list[bytes | None], hashes: UInt8, tokenizer: TextTokenizer, windowing: Windowing, known: TextIndex | None
) -> list[list[Passage]]:
    """The passages of each text, at least one."""
    documents = _seen(hashes, known) if known is not None else {}
    texts: dict[int, str] = {}
    for index, value in enumerate(values):
        if index not in documents:
            text = _text(value)
            if isinstance(text, str):
                texts[index] = text
            else:
                documents[index] = [Passage(Encoded([], False, text))]
    for (index, text), head in zip(texts.items(), tokenizer.encode([*texts.values()]), strict=True):
        # Where the head is all of the passage, the places of its tokens need not be known.
        cut = windowing.cuts(head)
        documents[index] = windows_of(text, tokenizer, windowing) if cut else [passage_of(head, text)]
    return [documents[index] for index in range(len(values))]


def _seen(hashes: UInt8, known: TextIndex) -> dict[int, list[Passage]]:
    rows, counts = known.find(hashes)
    nothing = Encoded([], False, Status.OK)
    return {
        index: [Passage(nothing, reused=row + place) for place in range(int(counts[index]))]
        for index, row in enumerate(rows.tolist())
        if row >= 0
    }


def _text(value: bytes | None) -> str | Status:
    """The text, or why there is none to embed."""
    if value is None:
        return Status.NULL
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return Status.UTF8
    # The beginning nearly always decides, and a long text is not copied to see it.
    return text if text[:64].strip(_BLANK) or text.strip(_BLANK) else Status.EMPTY


def _hash(value: bytes | None) -> bytes:
    return bytes(HASH_BYTES) if value is None else hashlib.blake2b(value, digest_size=HASH_BYTES).digest()


def _as_binary(column: Any, uri: str) -> Any:
    """The same values as bytes, undecoded, so that one broken text cannot fail its neighbours."""
    if isinstance(column, pa.ExtensionArray):
        return _as_binary(column.storage, uri)
    if isinstance(column, pa.DictionaryArray):
        # Not decoded: a text that is repeated in every row would be copied for every row.
        return pa.DictionaryArray.from_arrays(column.indices, _as_binary(column.dictionary, uri))
    if column.type not in _BINARY:
        raise InputError(f"{uri!r}: the text column holds {column.type}, not text: choose another column")
    return column.cast(_BINARY[column.type])

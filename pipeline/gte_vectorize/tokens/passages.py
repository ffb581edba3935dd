"""The text column of a window → passages: each row validated, hashed and tokenized by itself."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from gte_vectorize.batch import Int32, Passages, Status, Window
from gte_vectorize.errors import DamagedInput, InputError
from gte_vectorize.tokens.pieces import HASH_BYTES
from gte_vectorize.tokens.tokenizer import Encoded, TextTokenizer

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


def read_passages(window: Window, batches: Iterable[pa.RecordBatch], tokenizer: TextTokenizer) -> Passages:
    """Tokenize the rows of `window`; `batches` hold them in order, with the text in their first column.

    One batch at a time is held as text: the reader's batches bound the memory. A null, blank, undecodable or oversized
    text has no tokens and a status that says so. Raises DamagedInput when there are fewer or more rows than the window
    has, InputError when the column holds no text.
    """
    ids: list[Int32] = []
    lengths: list[int] = []
    status: list[Status] = []
    truncated: list[bool] = []
    hashes = bytearray()
    for batch in batches:
        values = _as_binary(batch.column(0), window.task.shard.uri).to_pylist()
        encoded = _encode(values, tokenizer)
        ids.append(np.fromiter(chain.from_iterable(row.ids for row in encoded), np.int32))
        lengths.extend(len(row.ids) for row in encoded)
        status.extend(row.status for row in encoded)
        truncated.extend(row.truncated for row in encoded)
        hashes += b"".join(map(_hash, values))
    if len(lengths) != window.num_rows:
        raise DamagedInput(
            f"{window.task.shard.uri!r}: {len(lengths)} rows where {window.num_rows} were planned, from row "
            f"{window.first_row}: the file has changed or is damaged"
        )
    return Passages(
        window=window,
        ids=np.concatenate(ids) if ids else np.zeros(0, np.int32),
        lengths=np.array(lengths, np.int32),
        status=np.array(status, np.uint8),
        truncated=np.array(truncated, np.bool_),
        text_hash=np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES),
    )


def _encode(values: list[bytes | None], tokenizer: TextTokenizer) -> list[Encoded]:
    texts = [_text(value) for value in values]
    encoded = iter(tokenizer.encode([text for text in texts if isinstance(text, str)]))
    return [next(encoded) if isinstance(text, str) else Encoded([], False, text) for text in texts]


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

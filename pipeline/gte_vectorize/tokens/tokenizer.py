"""Texts → token ids, exactly as the model's own tokenizer gives them, and no slower for a text of any length.

Of a long text only a head is tokenized: what lies behind it cannot change the ids that are kept. The head is long
enough to make that certain, which `TextTokenizer._settled` decides; one that does not settle is grown.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from gte_vectorize.batch import Int32, Status
from gte_vectorize.errors import ModelError
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.tokens.document import encode_document

# UTF-8 bytes of a first head for every token that is wanted: six Latin letters, or two Chinese characters. Later ones
# have a little more than the last long texts needed. A matter of speed alone.
_BYTES_PER_TOKEN = 6.0
_RESERVE = 1.2
_GROWTH = 2
# Characters. One mebi-character without enough tokens in it takes a few seconds and some hundred MB; no more is tried.
_LONGEST_HEAD = 2**20
# Characters that the library is given at once. It tells nothing while it works, for some seconds at worst.
_CALL = 2**20
# Tokens between the last one kept and the end of a head. A cut changes what stands right before it: a word that is
# halved, a special token's name, a letter whose accent is behind the cut.
_MARGIN = 64
# Characters; the longest piece of SentencePiece's trainer.
_LONGEST_PIECE = 16


class Encoded(NamedTuple):
    """The ids of a text, special tokens and prompt included; none unless the status is OK.

    `cut` estimates the tokens behind the limit, by the bytes that were not tokenized.
    """

    ids: Sequence[int]
    truncated: bool
    status: Status
    cut: int = 0


class Document(NamedTuple):
    """All tokens of a text, whatever the limit, without special tokens: prompt and text were tokenized together.

    prompt   the ids of the prompt, for every chunk of the text
    ids      int32[n], those of the text
    offsets  int32[n, 2], where each of these begins and ends, in characters of the text
    """

    prompt: list[int]
    ids: Int32
    offsets: Int32


class TextTokenizer:
    """The tokenizer of a TokenizerSpec. Raises ModelError if its file has changed or leaves no room for a text.

    `on_progress` is called at least every mebi-character, whatever the texts are, and by whoever cuts these.
    """

    def __init__(self, spec: TokenizerSpec, on_progress: Callable[[], None] = lambda: None):
        self._tokenizer = _load(spec)
        self.on_progress = on_progress
        self._prompt = spec.prompt
        self._lower_case = spec.lower_case
        self._prefix, self._suffix = _special_tokens(self._tokenizer)
        self._limit = spec.max_length - len(self._prefix) - len(self._suffix)
        if self._limit < 1:
            raise ModelError(
                f"a limit of {spec.max_length} tokens leaves no room for text beside the special tokens: raise it"
            )
        # WordPiece makes one unknown token of a word longer than this; half of such a word would make many others.
        longest_word = getattr(self._tokenizer.model, "max_input_chars_per_word", 0)
        self._wanted = self._limit + _MARGIN + longest_word
        self._unigram = isinstance(self._tokenizer.model, Unigram)
        self._nothing = self._tokenize([""])[0]
        self._bytes_per_token = _BYTES_PER_TOKEN

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """One Encoded for each text, in order.

        EMPTY for a text of which the tokenizer leaves nothing, TOO_LARGE for one that has too few tokens in its first
        mebi-character to fill the limit and goes on behind it. The texts must be valid Unicode, without surrogates.
        """
        encoded: dict[int, Encoded] = {}
        needed: list[float] = []
        cuts = {index: self._first_cut(text) for index, text in enumerate(texts)}
        while cuts:
            heads = {index: _head(texts[index], cut) for index, cut in cuts.items()}
            for (index, head), ids in zip(heads.items(), self._tokenize(list(heads.values())), strict=True):
                if len(head) == len(texts[index]):
                    encoded[index] = self._finish(ids, len(ids))
                elif self._settled(texts[index], head, ids):
                    encoded[index] = self._finish(ids, len(ids) * len(texts[index]) // len(head))
                    needed.append(len(head.encode()) / len(ids))
                elif cuts[index] == _LONGEST_HEAD:
                    encoded[index] = Encoded([], False, Status.TOO_LARGE)
                else:
                    cuts[index] = min(cuts[index] * _GROWTH, _LONGEST_HEAD)
                    continue
                del cuts[index]
        if needed:
            self._bytes_per_token = min(_BYTES_PER_TOKEN, _RESERVE * max(needed))
        return [encoded[index] for index in range(len(texts))]

    def encode_long(self, text: str) -> Document | Status:
        """The whole document; EMPTY or TOO_LARGE (see encode_document) if it cannot be had.

        The text must be valid Unicode, without surrogates.
        """
        body = self._prompt + text
        found = encode_document(self._tokenizer, body.lower() if self._lower_case else body, self.on_progress)
        if found is None:
            return Status.TOO_LARGE
        if len(found.ids) <= len(self._nothing) and found.ids.tolist() == self._nothing:
            return Status.EMPTY
        offsets = _before_lowering(found.offsets, body) if self._lower_case else found.offsets
        offsets = offsets - np.int32(len(self._prompt))
        # The prompt's last token may hold the text's first characters; it is the text's then.
        of_text = int(np.count_nonzero((offsets[:, 0] < 0) & (offsets[:, 1] <= 0)))
        return Document(found.ids[:of_text].tolist(), found.ids[of_text:], np.maximum(offsets[of_text:], 0))

    def room(self, document: Document) -> int:
        """Tokens of the document that fit into a passage beside the special tokens and the prompt; at least 1."""
        return max(1, self._limit - len(document.prompt))

    def passage(self, document: Document, first: int, end: int, *, opens: bool = True, closes: bool = True) -> Encoded:
        """The passage of the document's tokens `first` to `end - 1`.

        A chunk of a context has the prompt and the first special tokens where it `opens` it, the last where it `closes`
        it.
        """
        # Four bytes for each, where a list's numbers take 36: a document may have thousands of passages.
        ids = array("i", [*self._prefix, *document.prompt] if opens else [])
        ids.frombytes(document.ids[first:end].tobytes())
        ids.extend(self._suffix if closes else [])
        return Encoded(ids, False, Status.OK)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        bodies = [self._prompt + text for text in texts]
        if self._lower_case:
            bodies = [body.lower() for body in bodies]
        ids: list[list[int]] = []
        for few in _calls(bodies):
            self.on_progress()
            ids += (found.ids for found in self._tokenizer.encode_batch_fast(few, add_special_tokens=False))
        return ids

    def _first_cut(self, text: str) -> int:
        size = min(int(self._wanted * self._bytes_per_token), _LONGEST_HEAD)
        head = text[:size]
        return size * len(head) // max(1, len(head.encode()))

    def _settled(self, text: str, head: str, ids: list[int]) -> bool:
        """Whether the whole text begins with the same ids, as many as are kept and one more.

        WordPiece and byte-pair merges do not reach over the margin. A Unigram model chooses the best of all ways to cut
        a word, and a word may be as long as the text: a run of one letter may have its odd piece at either end. But
        whatever the text goes on with, its best way passes through one of the last `_LONGEST_PIECE` characters of the
        head, so ids that are the same for heads that end there are settled. Ways through a text that does not repeat
        itself meet soon; there, one other head is proof enough.
        """
        if len(ids) < self._wanted:
            return False
        if not self._unigram or text[len(head)] == " ":
            return True
        repetitive = len(set(head[-4 * _LONGEST_PIECE :])) < _LONGEST_PIECE
        shorter = [head[:-less] for less in range(1, _LONGEST_PIECE if repetitive else 2)]
        kept = ids[: self._limit + 1]
        return all(other[: self._limit + 1] == kept for other in self._tokenize(shorter))

    def _finish(self, ids: list[int], total: int) -> Encoded:
        """`total`: the tokens of the whole text, about."""
        if ids == self._nothing:
            return Encoded([], False, Status.EMPTY)
        kept = ids[: self._limit]
        cut = total - len(kept)
        return Encoded([*self._prefix, *kept, *self._suffix], cut > 0, Status.OK, cut)


def _calls(texts: list[str]) -> Iterator[list[str]]:
    """The texts in order, as many together as make no more than `_CALL` characters; a longer one is alone."""
    few: list[str] = []
    size = 0
    for text in texts:
        if few and size + len(text) > _CALL:
            yield few
            few, size = [], 0
        few.append(text)
        size += len(text)
    yield few


def _head(text: str, cut: int) -> str:
    """The first `cut` characters, or up to the last space in the last quarter of them."""
    if cut >= len(text):
        return text
    space = text.rfind(" ", cut * 3 // 4, cut + 1)
    return text[: space if space > 0 else cut]


def _before_lowering(offsets: Int32, text: str) -> Int32:
    """Places in `text` for places in `text.lower()`: İ, and nothing else, becomes two characters."""
    second = np.array([match.start() + 1 for match in re.finditer("İ", text)], np.int32)
    second += np.arange(len(second), dtype=np.int32)
    begins, ends = offsets[:, 0], offsets[:, 1]
    moved = [np.searchsorted(second, begins, side="right"), np.searchsorted(second, ends, side="left")]
    return offsets - np.stack(moved, axis=1).astype(np.int32)


def _load(spec: TokenizerSpec) -> Tokenizer:
    try:
        data = spec.path.read_bytes()
    except OSError as error:
        raise ModelError(f"{str(spec.path)!r} cannot be read any more ({error.strerror}): start again") from error
    if hashlib.sha256(data).hexdigest() != spec.sha256:
        raise ModelError(f"{str(spec.path)!r} has changed since the run began: start again")
    tokenizer = Tokenizer.from_buffer(data)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if spec.normalizer:
        normalizer = tokenizer.normalizer
        for field, value in spec.normalizer.items():
            setattr(normalizer, field, value)
        tokenizer.normalizer = normalizer
    return tokenizer


def _special_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids put before and behind a text."""
    probe = tokenizer.encode("a")
    mask = probe.special_tokens_mask
    if 0 not in mask:
        raise ModelError("the model's tokenizer gives no token for the letter 'a': it cannot be used")
    return probe.ids[: mask.index(0)], probe.ids[len(mask) - mask[::-1].index(0) :]

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pytest

from gte_vectorize.batch import Passages, Shard, Status, Task, Window
from gte_vectorize.errors import InputError
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.tokens.passages import read_passages
from gte_vectorize.tokens.pieces import gathered
from gte_vectorize.tokens.tokenizer import TextTokenizer

TEXTS = ["one", None, "", "a much longer text than the others", "\u3000 \n", "\x00\x1f", "二", "\u200b", "one"]
STATUS = ["OK", "NULL", "EMPTY", "OK", "EMPTY", "EMPTY", "OK", "EMPTY", "OK"]
TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int32(), pa.large_binary()),
]


@pytest.fixture(scope="module")
def tokenizer(minilm_dir: str, spec_of: Callable[..., TokenizerSpec]) -> TextTokenizer:
    return TextTokenizer(spec_of(minilm_dir, 8))


def window(num_rows: int) -> Window:
    task = Task(0, Shard("shard.parquet", 1, 0, (num_rows,)), 0, num_rows)
    return Window(task, 0, num_rows)


def batch(array: pa.Array) -> pa.RecordBatch:
    return pa.record_batch({"text": array})


def column(texts: list[str | None], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return column(texts, kind.value_type).dictionary_encode().cast(kind)
    raw = [None if text is None else text.encode() for text in texts]
    return pa.array(raw, pa.binary()).cast(kind)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_every_kind_of_text_column_gives_the_same(kind: pa.DataType, tokenizer: TextTokenizer) -> None:
    batches = [batch(column(TEXTS[:4], kind)), batch(column([], kind)), batch(column(TEXTS[3:], kind)[1:])]
    passages = read_passages(window(9), batches, tokenizer)
    assert [Status(status).name for status in passages.status] == STATUS
    assert passages.lengths.tolist() == [3, 0, 0, 8, 0, 0, 3, 0, 3]
    assert passages.truncated.tolist() == [False, False, False, True, *[False] * 5]
    usable = tokenizer.encode([text for text, status in zip(TEXTS, STATUS, strict=True) if text and status == "OK"])
    assert passages.ids.tolist() == [token for row in usable for token in row.ids]
    for text, digest in zip(TEXTS, passages.text_hash, strict=True):
        expected = bytes(16) if text is None else hashlib.blake2b(text.encode(), digest_size=16).digest()
        assert digest.tobytes() == expected


def test_arrays_are_as_declared(tokenizer: TextTokenizer) -> None:
    passages = read_passages(window(2), [batch(pa.array(["one", "two"]))], tokenizer)
    arrays = (passages.ids, passages.lengths, passages.status, passages.truncated, passages.text_hash)
    assert [array.dtype for array in arrays] == [np.int32, np.int32, np.uint8, np.bool_, np.uint8]
    assert passages.text_hash.shape == (2, 16)
    none = read_passages(window(0), [], tokenizer)
    assert (len(none.ids), len(none.lengths), none.text_hash.shape) == (0, 0, (0, 16))


def test_column_without_any_text_is_all_null(tokenizer: TextTokenizer) -> None:
    passages = read_passages(window(3), [batch(pa.nulls(3))], tokenizer)
    assert passages.status.tolist() == [Status.NULL] * 3
    assert not passages.text_hash.any()


def test_null_inside_a_dictionary_is_null(tokenizer: TextTokenizer) -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array(["one", None]))
    passages = read_passages(window(3), [batch(array)], tokenizer)
    assert passages.status.tolist() == [Status.OK, Status.NULL, Status.NULL]


@pytest.mark.parametrize(
    "raw",
    [b"\xff", b"good \xe4\xb8", b"\xed\xa0\x80", b"\xed\xa0\xbd\xed\xb8\x80", b"\xc0\x80", b"\xf5\x80\x80\x80"],
    ids=["no start", "cut", "lone surrogate", "CESU-8", "overlong", "beyond Unicode"],
)
def test_broken_text_fails_alone_and_is_not_repaired(raw: bytes, tokenizer: TextTokenizer) -> None:
    texts = pa.array([b"one", raw, b"two"])
    broken = pa.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2])
    passages = read_passages(window(3), [batch(broken)], tokenizer)
    assert passages.status.tolist() == [Status.OK, Status.UTF8, Status.OK]
    assert passages.lengths.tolist() == [3, 0, 3]
    assert passages.text_hash[1].tobytes() == hashlib.blake2b(raw, digest_size=16).digest()


@pytest.mark.parametrize("text", ["\ufeffone", "on\u200be", "\u202eone", "cafe\u0301", "a\x00b", "\x7fone", "[MASK]"])
def test_odd_but_valid_text_is_text(text: str, tokenizer: TextTokenizer) -> None:
    passages = read_passages(window(1), [batch(pa.array([text]))], tokenizer)
    assert passages.status.tolist() == [Status.OK]
    assert passages.ids.tolist() == tokenizer.encode([text])[0].ids


@pytest.mark.parametrize(
    "blank", ["", " \t\r\n", "\u3000", "\x00\x07\x1b", "\x85\x9f", "\u2028\xa0 \x00", " " * 100_000]
)
def test_blank_text_is_empty_whatever_the_prompt(
    blank: str, e5_dir: str, tokenizer: TextTokenizer, spec_of: Callable[..., TokenizerSpec]
) -> None:
    prompted = TextTokenizer(spec_of(e5_dir, 8, prompt="passage: "))
    for each in (tokenizer, prompted):
        passages = read_passages(window(1), [batch(pa.array([blank]))], each)
        assert passages.status.tolist() == [Status.EMPTY]
        assert len(passages.ids) == 0


@pytest.mark.parametrize("rows", [1, 3])
def test_other_number_of_rows_than_planned_is_refused(rows: int, tokenizer: TextTokenizer) -> None:
    with pytest.raises(InputError, match=rf"shard\.parquet': {rows} rows where 2 were planned"):
        read_passages(window(2), [batch(pa.array(["one"] * rows))], tokenizer)


def test_column_of_numbers_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(InputError, match=r"shard\.parquet': the text column holds int64"):
        read_passages(window(1), [batch(pa.array([1]))], tokenizer)


def test_pieces_gather_into_windows_of_their_task() -> None:
    shard = Shard("a", 1, 0, (30,))
    tasks = [Task(0, shard, 0, 9), Task(1, shard, 9, 1), Task(2, shard, 10, 0), Task(3, shard, 10, 4)]
    pieces = [
        piece_of(task, first, rows)
        for task, cuts in zip(tasks, [(4, 4, 1), (1,), (0,), (2, 2)], strict=True)
        for first, rows in zip(accumulate(cuts, initial=task.first_row), cuts, strict=False)
    ]
    for most, expected in (
        (4, [4, 4, 1, 1, 0, 4]),
        (8, [8, 1, 1, 0, 4]),
        (11, [8, 1, 1, 0, 4]),
        (12, [9, 1, 0, 4]),
        (1, [4, 4, 1, 1, 0, 2, 2]),
    ):
        windows = list(gathered(pieces, most))
        assert [window.window.num_rows for window in windows] == expected
        assert [len(window.lengths) for window in windows] == expected
        for part in ("ids", "lengths", "status", "truncated", "text_hash"):
            gathered_part = np.concatenate([getattr(window, part) for window in windows])
            assert np.array_equal(gathered_part, np.concatenate([getattr(piece, part) for piece in pieces]))
        starts = [(window.window.task.index, window.window.first_row) for window in windows]
        assert starts == sorted(starts)
        assert sum(window.num_rows for window in (w.window for w in windows)) == 14
    assert list(gathered([], 4)) == []


def piece_of(task: Task, first_row: int, rows: int) -> Passages:
    lengths = np.arange(first_row, first_row + rows, dtype=np.int32)
    return Passages(
        window=Window(task, first_row, rows),
        ids=np.repeat(lengths, lengths),
        lengths=lengths,
        status=lengths.astype(np.uint8),
        truncated=lengths % 2 == 0,
        text_hash=np.repeat(lengths.astype(np.uint8)[:, None], 16, axis=1),
    )

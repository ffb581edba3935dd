from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import accumulate, groupby, pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gte_vectorize.batch import Passages, Shard, Status, Task, Window
from gte_vectorize.errors import InputError
from gte_vectorize.model.tokenizer import TokenizerSpec
from gte_vectorize.tokens.passages import read_passages
from gte_vectorize.tokens.pieces import crashed, cut, gathered, join, pieces_of
from gte_vectorize.tokens.tokenizer import TextTokenizer
from gte_vectorize.tokens.windowing import TRUNCATE, Windowing

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
        (11, [9, 1, 0, 4]),
        (1, [*[1] * 9, 1, 0, *[1] * 4]),
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
        row=Window(task, first_row, rows).rows,
    )


def documents_of(task: Task, first_row: int, windows: list[int], token: int = 0) -> Passages:
    """A piece of documents of so many windows each; every window has two tokens, and no two windows the same."""
    count = sum(windows)
    index = np.array([place for some in windows for place in range(some)], np.int32)
    numbers = np.arange(token, token + count, dtype=np.int32)
    return Passages(
        window=Window(task, first_row, len(windows)),
        ids=np.repeat(numbers, 2),
        lengths=np.full(count, 2, np.int32),
        status=(numbers % 7).astype(np.uint8),
        truncated=numbers % 2 == 0,
        text_hash=np.repeat((numbers % 251).astype(np.uint8)[:, None], 16, axis=1),
        row=np.repeat(Window(task, first_row, len(windows)).rows, windows),
        chunk=np.stack([index, numbers, numbers + 1], axis=1),
        cut_tokens=len(windows),
        reused=numbers.astype(np.int64) - 5,
    )


TASKS_OF_PIECES = st.lists(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5), min_size=1, max_size=3
)
ARRAYS = ("ids", "lengths", "status", "truncated", "text_hash", "row", "chunk", "reused")


@settings(deadline=None)
@given(tasks=TASKS_OF_PIECES, most=st.integers(1, 12))
def test_documents_of_many_passages_are_spread_over_windows(tasks: list[list[list[int]]], most: int) -> None:
    pieces: list[Passages] = []
    first_row = 100
    for index, cuts in enumerate(tasks):
        task = Task(index, Shard("a", 1, 0, (1000,)), first_row, sum(map(len, cuts)))
        for windows in cuts:
            pieces.append(documents_of(task, first_row, windows, sum(len(piece.lengths) for piece in pieces)))
            first_row += len(windows)

    found = list(gathered(pieces, most))
    for name in ARRAYS:
        together = np.concatenate([getattr(window, name) for window in found])
        assert np.array_equal(together, np.concatenate([getattr(piece, name) for piece in pieces]))
    assert sum(window.cut_tokens for window in found) == sum(piece.cut_tokens for piece in pieces)
    for index, of_task in groupby(found, key=lambda window: window.window.task.index):
        check_windows(list(of_task), sum(map(sum, tasks[index])), most)


def check_windows(windows: list[Passages], count: int, most: int) -> None:
    """Those of a task of `count` passages."""
    task = windows[0].window.task
    sizes = [len(window.lengths) for window in windows]
    assert max(sizes) <= most
    # Not smaller than they must be: no two neighbours and a half would fit into one.
    assert len(windows) <= 1 + 2 * count // most or most == 1
    assert [window.first for window in windows] == [0, *accumulate(sizes)][:-1]
    assert [window.window.ends_task for window in windows] == [False] * (len(windows) - 1) + [True]
    # A row is of the window with its last passage, and begins in that with its first.
    rows = [row for window in windows for row in window.window.rows.tolist()]
    assert rows == list(range(task.num_rows))
    row = np.concatenate([window.row for window in windows])
    last_of = np.searchsorted(row, np.arange(task.num_rows), side="right") - 1
    ended_in = np.searchsorted(np.cumsum(sizes), last_of, side="right")
    counts = np.bincount(ended_in, minlength=len(windows))
    assert [window.window.num_rows for window in windows] == counts.tolist()
    begun = [row for first, count in (window.begun for window in windows) for row in range(first, first + count)]
    assert begun == list(range(task.num_rows))


def test_a_cut_inside_a_document_leaves_its_row_to_the_end_of_it() -> None:
    task = Task(0, Shard("a", 1, 0, (9,)), 4, 5)
    piece = documents_of(task, 6, [2, 4, 1])
    spans = [(0, 1), (1, 3), (3, 5), (5, 6), (6, 7)]
    found = [cut(piece, first, end) for first, end in spans]
    assert [(some.window.first_row, some.window.num_rows) for some in found] == [(6, 0), (6, 1), (7, 0), (7, 1), (8, 1)]
    assert [some.row.tolist() for some in found] == [[2], [2, 3], [3, 3], [3], [4]]
    assert [some.ids.tolist()[::2] for some in found] == [list(range(*span)) for span in spans]
    assert [some.cut_tokens for some in found] == [3, 0, 0, 0, 0]
    whole = join(piece.window, found)
    assert all(np.array_equal(getattr(whole, name), getattr(piece, name)) for name in ARRAYS)


def test_a_crash_is_a_document_of_one_passage_at_no_place() -> None:
    task = Task(0, Shard("a", 1, 0, (9,)), 0, 4)
    pieces = [documents_of(task, 0, [2, 1]), crashed(Window(task, 2, 1)), documents_of(task, 3, [2])]
    joined = join(Window(task, 0, 4), pieces)
    assert joined.row.tolist() == [0, 0, 1, 2, 3, 3]
    assert joined.chunk is not None
    assert joined.chunk[3].tolist() == [0, 0, 0]
    assert (joined.status[3], joined.lengths[3], joined.encoded[3]) == (Status.CRASH, 0, False)


def test_a_piece_of_long_documents_has_as_few_rows_as_it_takes() -> None:
    task = Task(0, Shard("a", 100 << 20, 0, (20,)), 0, 20)
    assert [piece.num_rows for piece in pieces_of([task], 512)] == [20]
    assert [piece.num_rows for piece in pieces_of([task], 512, whole=True)] == [1] * 20
    small = Task(0, Shard("a", 1 << 20, 0, (1100,)), 0, 1100)  # short documents, or long ones that are much alike
    assert [piece.num_rows for piece in pieces_of([small], 16384, whole=True)] == [512, 512, 76]


WINDOWS = Windowing(mode="windows", overlap=2)
LONG = "one two three four. five six seven, eight nine ten. eleven twelve"


def test_a_row_without_usable_text_is_one_passage_at_no_place(tokenizer: TextTokenizer) -> None:
    endless = "x" * (1 << 21)  # a word that ends behind the mebi-character that is tried
    values = [None, b"", b"one", b"\xff", LONG.encode(), b" \n\x00", endless.encode(), b"\xe2\x80\x8b", b"two"]
    texts = pa.array(values, pa.binary())
    passages = read_passages(window(9), [batch(texts[:4]), batch(texts[4:])], tokenizer, WINDOWS)
    assert passages.chunk is not None
    names = {row: {Status(passages.status[place]).name for place in places} for row, places in by_row(passages).items()}
    expected = ["NULL", "EMPTY", "OK", "UTF8", "OK", "EMPTY", "TOO_LARGE", "EMPTY", "OK"]
    assert names == {row: {name} for row, name in enumerate(expected)}
    for row, places in by_row(passages).items():
        assert passages.chunk[places, 0].tolist() == list(range(len(places)))
        digest = bytes(16) if values[row] is None else hashlib.blake2b(values[row], digest_size=16).digest()
        assert {passages.text_hash[place].tobytes() for place in places} == {digest}
        if expected[row] != "OK":
            assert (len(places), passages.lengths[places].tolist(), passages.chunk[places].tolist()) == (
                *(1, [0]),
                [[0, 0, 0]],
            )
    assert len(by_row(passages)[4]) > 1
    assert (passages.chunk[by_row(passages)[2]].tolist(), passages.truncated.any()) == ([[0, 0, 3]], False)


def by_row(passages: Passages) -> dict[int, list[int]]:
    assert all(0 <= following - row <= 1 for row, following in pairwise(passages.row.tolist()))
    return {row: np.flatnonzero(passages.row == row).tolist() for row in range(int(passages.row[-1]) + 1)}


def test_short_documents_are_the_passages_of_truncate_mode(tokenizer: TextTokenizer) -> None:
    texts = ["one", LONG, "two three", "", LONG * 2, "four five six seven"]
    windows, plain = (
        read_passages(window(6), [batch(pa.array(texts))], tokenizer, each) for each in (WINDOWS, TRUNCATE)
    )
    places = {row: found[0] for row, found in by_row(windows).items()}
    ends, plain_ends = np.cumsum(windows.lengths), np.cumsum(plain.lengths)
    for row in (0, 2, 3, 5):
        place = places[row]
        assert windows.row.tolist().count(row) == 1
        ours = windows.ids[ends[place] - windows.lengths[place] : ends[place]]
        assert np.array_equal(ours, plain.ids[plain_ends[row] - plain.lengths[row] : plain_ends[row]])
        assert windows.status[place] == plain.status[row]
    assert (windows.cut_tokens, plain.truncated.tolist()) == (0, [False, True, False, False, True, False])
    assert plain.chunk is None


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_every_kind_of_text_column_gives_the_same_windows(kind: pa.DataType, tokenizer: TextTokenizer) -> None:
    texts = [LONG, None, "一二三四五六七八九十", "", "one"]
    passages = read_passages(window(5), [batch(column(texts, kind))], tokenizer, WINDOWS)
    expected = read_passages(window(5), [batch(pa.array([text], pa.string())) for text in texts], tokenizer, WINDOWS)
    assert all(np.array_equal(getattr(passages, name), getattr(expected, name)) for name in ARRAYS if name != "reused")

import errno
import gc
import hashlib
import resource
import stat

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gte_vectorize.batch import EncodedWindow, Passages, Shard, Status, Task, Window
from gte_vectorize.errors import OutputError, TemporaryError, VectorizeError
from gte_vectorize.tokens.pieces import gathered
from gte_vectorize.writer import part as part_module
from gte_vectorize.writer.part import PartWriter, create_file, group_rows, storage_errors
from gte_vectorize.writer.schema import output_schema

DIM = 16
COLUMNS = pa.schema([("id", pa.int64()), ("title", pa.string()), ("tags", pa.list_(pa.string()))])
SCHEMA = output_schema(COLUMNS, dim=DIM, embeddings={"model": "made/up", "dim": DIM})


def make_task(rows):
    return Task(0, Shard("corpus.parquet", 1, 0, (rows,)), 0, rows)


def make_rows(rows, dim=DIM):
    """Everything of a task at once: status, vectors, …, and the pass-through columns."""
    rng = np.random.default_rng(rows)
    status = rng.choice([Status.OK] * 9 + [Status.NULL, Status.EMPTY, Status.UTF8], rows).astype(np.uint8)
    ok = status == Status.OK
    vectors = rng.standard_normal((rows, dim), np.float32) * ok[:, None]
    hashes = [hashlib.blake2b(str(row).encode(), digest_size=16).digest() for row in range(rows)]
    passages = {
        "lengths": (rng.integers(3, 512, rows) * ok).astype(np.int32),
        "status": status,
        "truncated": rng.random(rows) < 0.1,
        "text_hash": np.frombuffer(b"".join(hashes), np.uint8).reshape(rows, 16),
    }
    columns = pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "title": [None if row % 7 == 0 else f"第{row % 50}条" for row in range(rows)],
            "tags": [None if row % 5 == 0 else ["合同"] * (row % 3) for row in range(rows)],
        }
    ).cast(COLUMNS)
    return vectors, passages, columns


def make_window(task, data, first, end):
    vectors, passages, _ = data
    cut = {name: values[first:end] for name, values in passages.items()}
    window = Window(task, task.first_row + first, end - first)
    return EncodedWindow(
        Passages(window=window, ids=np.zeros(0, np.int32), row=window.rows, **cut),
        vectors[first:end],
        passages["status"][first:end],
    )


def write_part(path, rows, *, window_rows=1000, batch_rows=300, schema=SCHEMA):
    task, data = make_task(rows), make_rows(rows, schema.field("embedding").type.list_size)
    with PartWriter(path, schema, task) as part:
        for first in range(0, rows, window_rows):
            end = min(first + window_rows, rows)
            columns = data[2].slice(first, end - first).to_batches(max_chunksize=batch_rows)
            part.write(make_window(task, data, first, end), columns)
    return data


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(part_module, "GROUP_BYTES", 64 * 4 * DIM)


def test_every_row_comes_back_as_it_was_given(tmp_path, small_groups):
    vectors, passages, columns = write_part(tmp_path / "part.parquet", 1000)

    table = pq.read_table(tmp_path / "part.parquet", page_checksum_verification=True)

    assert table.schema.equals(SCHEMA, check_metadata=True)
    assert table.select(COLUMNS.names).equals(columns.cast(table.select(COLUMNS.names).schema))
    ok = passages["status"] == Status.OK
    assert table["embedding"].combine_chunks().is_valid().to_numpy(zero_copy_only=False).tolist() == ok.tolist()
    stored = table["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, DIM)
    assert stored.tobytes() == vectors[ok].tobytes()
    assert table["status"].to_pylist() == [Status(code).name.lower() for code in passages["status"]]
    assert table["n_tokens"].to_pylist() == passages["lengths"].tolist()
    assert table["truncated"].to_pylist() == passages["truncated"].tolist()
    assert table["text_hash"].to_pylist() == [
        None if code == Status.NULL else digest.tobytes().hex()
        for code, digest in zip(passages["status"], passages["text_hash"], strict=True)
    ]


def test_other_readers_see_the_same_rows_and_the_missing_vectors(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import load_dataset

    path = tmp_path / "part.parquet"
    write_part(path, 50)
    expected = pq.read_table(path)["embedding"].to_pylist()
    assert None in expected

    polars = pl.read_parquet(path)
    assert polars.schema["embedding"] == pl.Array(pl.Float32, DIM)
    seen = {
        "duckdb": [row[0] and list(row[0]) for row in duckdb.sql(f"SELECT embedding FROM '{path}'").fetchall()],
        "polars": polars["embedding"].to_list(),
        "pandas": [None if row is None else row.tolist() for row in pd.read_parquet(path)["embedding"]],
        "datasets": load_dataset("parquet", data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train")[
            "embedding"
        ][:],
    }
    assert seen == dict.fromkeys(seen, expected)


@settings(deadline=None, max_examples=25)
@given(window_rows=st.integers(1, 400), batch_rows=st.integers(1, 400))
def test_bytes_do_not_depend_on_how_the_rows_arrive(tmp_path_factory, window_rows, batch_rows):
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_module, "GROUP_BYTES", 64 * 4 * DIM)
        write_part(folder / "a.parquet", 400, window_rows=400, batch_rows=400)
        write_part(folder / "b.parquet", 400, window_rows=window_rows, batch_rows=batch_rows)

    assert (folder / "a.parquet").read_bytes() == (folder / "b.parquet").read_bytes()
    metadata = pq.read_metadata(folder / "b.parquet")
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [64] * 6 + [16]


def test_pages_do_not_show_the_windows_either(tmp_path):
    """Pages of 1 MiB in one row group of the real size; 1000 because pages are cut between runs of 1024 values."""
    schema = output_schema(COLUMNS, dim=1000, embeddings={})
    write_part(tmp_path / "a.parquet", 2048, window_rows=2048, schema=schema)
    write_part(tmp_path / "b.parquet", 2048, window_rows=333, schema=schema)

    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_row_groups_are_32_to_64_mib_of_vectors_and_never_a_million_rows():
    assert {dim: group_rows(dim) for dim in (8, 384, 768, 1024, 4096)} == {
        8: 131072,
        384: 32768,
        768: 16384,
        1024: 16384,
        4096: 4096,
    }


@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.struct([("page", pa.large_string())]))])
def test_wide_columns_close_a_row_group_early_at_a_row_of_their_own(tmp_path, small_groups, kind):
    """4 KiB a group: the rows of 1 KiB fill it in four, wherever the batches end."""
    schema = output_schema(pa.schema([("wide", kind)]), dim=DIM, embeddings={})
    text = "x" * 1024
    values = pa.array([text if pa.types.is_string(kind) else [{"page": text[:500]}, {"page": text[:524]}]] * 40, kind)
    task, data = make_task(40), make_rows(40)
    for name, batch_rows in (("a", 40), ("b", 3)):
        with PartWriter(tmp_path / name, schema, task) as part:
            part.write(make_window(task, data, 0, 40), pa.table({"wide": values}).to_batches(max_chunksize=batch_rows))

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert pq.read_metadata(tmp_path / "a").num_row_groups == 10


def test_vectors_are_stored_raw_with_checksums_and_without_dictionary_or_statistics(tmp_path):
    schema = output_schema(pa.schema([]), dim=256, embeddings={})
    task, data = make_task(2000), make_rows(2000, 256)
    with PartWriter(tmp_path / "part.parquet", schema, task) as part:
        part.write(make_window(task, data, 0, 2000))

    group = pq.read_metadata(tmp_path / "part.parquet").row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
    vectors = columns["embedding.list.element"]
    assert (vectors.compression, vectors.has_dictionary_page, vectors.is_stats_set) == ("UNCOMPRESSED", False, False)
    raw = 4 * 256 * int((data[1]["status"] == Status.OK).sum())
    assert raw <= vectors.total_compressed_size < 1.02 * raw
    assert (columns["status"].compression, columns["status"].has_dictionary_page) == ("ZSTD", True)
    assert not columns["text_hash"].is_stats_set


def test_long_strings_have_no_statistics(tmp_path):
    write_part(tmp_path / "part.parquet", 100)

    group = pq.read_metadata(tmp_path / "part.parquet").row_group(0)
    with_statistics = {
        group.column(index).path_in_schema for index in range(group.num_columns) if group.column(index).is_stats_set
    }
    assert with_statistics == {"id", "n_tokens", "truncated", "status"}


def test_columns_are_cast_to_the_types_of_the_schema(tmp_path):
    """Shards may hold one column as dictionary, view, narrower or all-null; the output holds one type."""
    schema = output_schema(pa.schema([("name", pa.string()), ("n", pa.int64())]), dim=DIM, embeddings={})
    task, data = make_task(8), make_rows(8)
    names = pa.array(["甲", None])
    variants = [names.dictionary_encode(), names.cast(pa.string_view()), names.cast(pa.large_string()), pa.nulls(2)]
    batches = [pa.record_batch({"n": pa.array([1, 2], pa.int16()), "name": name}) for name in variants]
    with PartWriter(tmp_path / "part.parquet", schema, task) as part:
        part.write(make_window(task, data, 0, 8), batches)

    table = pq.read_table(tmp_path / "part.parquet")
    assert table.schema.equals(schema, check_metadata=True)
    assert table["name"].to_pylist() == ["甲", None] * 3 + [None, None]


def test_metadata_of_the_input_is_not_kept(tmp_path, monkeypatch):
    """A corpus written by `datasets` describes its columns in the footer; ours are others."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import Dataset, load_dataset

    Dataset.from_dict({"id": [1, 2, 3], "text": ["a", "b", "c"]}).to_parquet(str(tmp_path / "corpus.parquet"))
    corpus = pq.read_table(tmp_path / "corpus.parquet").select(["id"])
    assert b"huggingface" in corpus.schema.metadata
    schema = output_schema(corpus.schema, dim=DIM, embeddings={"dim": DIM})
    task, data = make_task(3), make_rows(3)
    with PartWriter(tmp_path / "part.parquet", schema, task) as part:
        part.write(make_window(task, data, 0, 3), corpus.to_batches())

    assert set(pq.read_metadata(tmp_path / "part.parquet").metadata) == {b"ARROW:schema", b"embeddings"}
    loaded = load_dataset(
        "parquet", data_files=str(tmp_path / "part.parquet"), cache_dir=str(tmp_path / "cache"), split="train"
    )
    assert (loaded["id"][:], loaded.features["embedding"].length) == ([1, 2, 3], DIM)


@pytest.mark.parametrize("columns", [COLUMNS, pa.schema([])])
@pytest.mark.parametrize("windows", [0, 1])
def test_a_task_without_rows_is_a_file_with_the_schema(tmp_path, windows, columns):
    schema = output_schema(columns, dim=DIM, embeddings={})
    task, data = make_task(0), make_rows(0)
    with PartWriter(tmp_path / "part.parquet", schema, task) as part:
        for _ in range(windows):
            part.write(make_window(task, data, 0, 0), [])

    table = pq.read_table(tmp_path / "part.parquet")
    assert (table.num_rows, table.schema.equals(schema, check_metadata=True)) == (0, True)


@pytest.mark.parametrize(
    ("given_rows", "column_rows", "first"),
    [(90, 90, 0), (100, 90, 0), (100, 110, 0), (100, 100, 5)],
    ids=["window missing", "columns short", "columns long", "out of order"],
)
def test_a_row_too_few_or_out_of_place_leaves_nothing(tmp_path, given_rows, column_rows, first):
    task, data = make_task(100), make_rows(120)
    window = make_window(task, data, first, first + given_rows)

    with (
        pytest.raises(VectorizeError, match=r"'corpus.parquet', rows 0 to 100"),
        PartWriter(tmp_path / "part.parquet", SCHEMA, task) as part,
    ):
        part.write(window, data[2].slice(0, column_rows).to_batches())
    assert list(tmp_path.iterdir()) == []


def test_fewer_vectors_than_texts_is_an_error(tmp_path):
    task, data = make_task(100), make_rows(100)
    window = make_window(task, data, 0, 100)
    short = EncodedWindow(window.passages, window.vectors[:99], window.status)

    with pytest.raises(VectorizeError), PartWriter(tmp_path / "part.parquet", SCHEMA, task) as part:
        part.write(short, data[2].to_batches())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_between_row_groups_leaves_nothing(tmp_path, small_groups, error):
    task, data = make_task(1000), make_rows(1000)

    def fail_after(part):
        part.write(make_window(task, data, 0, 500), data[2].slice(0, 500).to_batches())
        assert (tmp_path / "part.parquet").stat().st_size > 0
        raise error

    with pytest.raises(error), PartWriter(tmp_path / "part.parquet", SCHEMA, task) as part:
        fail_after(part)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_temporary_and_leaves_nothing(tmp_path, small_groups):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(TemporaryError, match="run the same command again"):
            write_part(tmp_path / "part.parquet", 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "error"),
    [
        *((code, TemporaryError) for code in (errno.ENOSPC, errno.EIO, errno.ENOTCONN)),
        *((code, OutputError) for code in (errno.EACCES, errno.ENOSYS, errno.EXDEV, errno.EISDIR)),
        (errno.EPIPE, OSError),
    ],
)
def test_errors_of_the_storage_say_whether_to_try_again(tmp_path, code, error):
    with pytest.raises(error) as caught, storage_errors(tmp_path):
        raise OSError(code, "told")
    assert type(caught.value) is error or error is OSError
    assert error is OSError or repr(str(tmp_path)) in str(caught.value)


def test_a_new_file_is_private_and_never_follows_a_link(tmp_path):
    with create_file(tmp_path / "new"):
        pass
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600

    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


# Rows that are windows of documents.

TEXT = pa.string()
WIDE = pa.schema(
    [
        *COLUMNS,
        ("meta", pa.struct([("page", pa.int32()), ("of", pa.string())])),
        ("marks", pa.map_(pa.string(), pa.int64())),
        ("code", pa.list_(pa.float32(), 2)),
    ]
)


def make_documents(rows, kind=TEXT, last=0):
    """A task's documents of 1 to 9 windows of 8 characters, some without a usable text; their columns, and texts.

    `last`: windows of the last one, if that matters.
    """
    rng = np.random.default_rng(rows)
    status = rng.choice([Status.OK] * 9 + [Status.NULL, Status.EMPTY, Status.UTF8, Status.CRASH], rows).astype(np.uint8)
    windows = np.where(status == Status.OK, rng.integers(1, 10, rows), 1)
    if last:
        status[-1], windows[-1] = Status.OK, last
    unusable = {Status.NULL: None, Status.EMPTY: b" ", Status.UTF8: b"\xff\xfe", Status.CRASH: b"boom"}
    texts = [
        "".join(f"第{row:02}条\u0301👍🏽\n" for _ in range(count)).encode() if code == Status.OK else unusable[code]
        for row, (code, count) in enumerate(zip(status.tolist(), windows.tolist(), strict=True))
    ]
    index = np.concatenate([np.arange(count) for count in windows.tolist()])
    places = np.stack([index, index * 8, index * 8 + 8], axis=1).astype(np.int32)
    usable = np.repeat(status, windows) == Status.OK
    task = make_task(rows)
    window = Window(task, 0, rows)
    passages = Passages(
        window=window,
        ids=np.zeros(0, np.int32),
        lengths=(rng.integers(3, 512, len(index)) * usable).astype(np.int32),
        status=np.repeat(status, windows),
        truncated=np.zeros(len(index), np.bool_),
        text_hash=np.repeat(rng.integers(0, 256, (rows, 16), np.uint8), windows, axis=0),
        row=np.repeat(window.rows, windows),
        chunk=np.where(usable[:, None], places, 0).astype(np.int32),
    )
    vectors = rng.standard_normal((len(index), DIM), np.float32) * usable[:, None]
    others = {
        "meta": [None if row % 6 == 0 else {"page": row} for row in range(rows)],
        "marks": [[("甲", row)] * (row % 3) for row in range(rows)],
        "code": [None if row % 4 == 0 else [row, 0.5] for row in range(rows)],
    }
    columns = make_rows(rows)[2]
    for name, values in others.items():
        columns = columns.append_column(WIDE.field(name), pa.array(values, WIDE.field(name).type))
    raw = pa.array(texts, pa.binary())
    # Not cast: a text that is no UTF-8 stands in a column of strings all the same.
    columns = columns.append_column("text", raw.view(kind) if kind == pa.string() else raw.cast(kind))
    return passages, vectors, columns, texts


def write_documents(path, made, *, most=10_000, batch_rows=1000, text="text"):
    passages, vectors, columns, _ = made
    schema = output_schema(columns.schema, dim=DIM, embeddings={}, chunked=True)
    with PartWriter(path, schema, passages.window.task, text) as part:
        for some in gathered([passages], most):
            end = some.first + len(some.lengths)
            first, rows = some.begun
            part.write(
                EncodedWindow(some, vectors[some.first : end], some.status),
                columns.slice(first, rows).to_batches(max_chunksize=batch_rows),
            )
    return pq.read_table(path, page_checksum_verification=True)


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_binary()], ids=str)
def test_columns_are_repeated_for_each_window_and_the_text_is_the_windows(tmp_path, small_groups, kind):
    made = make_documents(60, kind)
    passages, vectors, columns, texts = made
    table = write_documents(tmp_path / "part.parquet", made, most=50, batch_rows=7)

    rows = passages.row.tolist()
    repeated = columns.drop_columns(["text"]).take(rows)
    assert table.select(repeated.schema.names).equals(repeated.cast(table.select(repeated.schema.names).schema))
    found = table["text"].combine_chunks().cast(pa.large_binary() if pa.types.is_large_binary(kind) else pa.binary())
    assert table["text"].type == kind
    usable = (passages.lengths > 0).tolist()
    for row, chunk, ok, text in zip(rows, passages.chunk.tolist(), usable, found.to_pylist(), strict=True):
        whole = texts[row]
        assert text == (whole.decode()[chunk[1] : chunk[2]].encode() if ok else whole)
    assert table["chunk_index"].to_pylist() == passages.chunk[:, 0].tolist()
    for place, name in ((1, "char_start"), (2, "char_end")):
        expected = [value if ok else None for value, ok in zip(passages.chunk[:, place].tolist(), usable, strict=True)]
        assert table[name].to_pylist() == expected
    stored = table["embedding"].combine_chunks()
    assert stored.is_valid().to_numpy(zero_copy_only=False).tolist() == usable
    assert stored.flatten().to_numpy().tobytes() == vectors[usable].tobytes()
    names = [Status(code).name.lower() for code in passages.status]
    assert table["status"].to_pylist() == names
    no_hash = [name in ("null", "crash") for name in names]
    assert table["text_hash"].is_null().to_pylist() == no_hash


def test_without_a_text_column_to_cut_nothing_is_cut(tmp_path, small_groups):
    """The column `text` is not the documents' here."""
    made = make_documents(30)
    table = write_documents(tmp_path / "part.parquet", made, text="body")
    assert table["text"].cast(pa.binary()).to_pylist() == [made[3][row] for row in made[0].row]


@settings(deadline=None, max_examples=25)
@given(most=st.integers(1, 120), batch_rows=st.integers(1, 70))
def test_bytes_do_not_depend_on_how_documents_are_spread_over_windows(tmp_path_factory, most, batch_rows):
    folder = tmp_path_factory.mktemp("parts")
    made = make_documents(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_module, "GROUP_BYTES", 64 * 4 * DIM)
        write_documents(folder / "a.parquet", made)
        write_documents(folder / "b.parquet", made, most=most, batch_rows=batch_rows)

    assert (folder / "a.parquet").read_bytes() == (folder / "b.parquet").read_bytes()
    metadata = pq.read_metadata(folder / "b.parquet")
    assert metadata.num_row_groups > metadata.num_rows // 64


def test_a_large_document_is_not_repeated_for_all_its_windows_at_once(tmp_path, monkeypatch):
    """Of 3000 windows, each with 64 KiB of other columns, a row group's worth is in memory: 1 MiB here."""
    monkeypatch.setattr(part_module, "GROUP_BYTES", 1 << 20)
    task, windows = make_task(1), 3000
    index = np.arange(windows, dtype=np.int32)
    passages = Passages(
        window=Window(task, 0, 1),
        ids=np.zeros(0, np.int32),
        lengths=np.ones(windows, np.int32),
        status=np.zeros(windows, np.uint8),
        truncated=np.zeros(windows, np.bool_),
        text_hash=np.zeros((windows, 16), np.uint8),
        row=np.zeros(windows, np.int32),
        chunk=np.stack([index, index, index + 1], axis=1),
    )
    columns = pa.table({"wide": ["x" * (64 << 10)], "text": ["y" * windows]})
    schema = output_schema(columns.schema, dim=DIM, embeddings={}, chunked=True)
    window = EncodedWindow(passages, np.ones((windows, DIM), np.float32), passages.status)
    before = pa.default_memory_pool().bytes_allocated()
    with PartWriter(tmp_path / "part.parquet", schema, task, "text") as part:
        highest = []
        flush = part._flush
        monkeypatch.setattr(part, "_flush", lambda: (highest.append(pa.total_allocated_bytes() - before), flush()))
        part.write(window, columns.to_batches())
    assert len(highest) >= 180
    assert max(highest) < 16 << 20
    table = pq.read_table(tmp_path / "part.parquet")
    assert (table.num_rows, set(table["text"].to_pylist())) == (windows, {"y"})


@pytest.mark.parametrize(
    ("missing", "extra", "shift"), [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["columns short", "columns long", "order"]
)
def test_documents_and_columns_that_do_not_match_leave_nothing(tmp_path, missing, extra, shift):
    passages, vectors, columns, _ = make_documents(20)
    schema = output_schema(columns.schema, dim=DIM, embeddings={}, chunked=True)
    windows = list(gathered([passages], 7))[shift:]

    def write(part):
        for some in windows:
            first, rows = some.begun
            given = columns.slice(first, max(0, rows - missing + extra)).to_batches()
            part.write(EncodedWindow(some, vectors[some.first : some.first + len(some.lengths)], some.status), given)

    with (
        pytest.raises(VectorizeError, match=r"'corpus.parquet', rows 0 to 20"),
        PartWriter(tmp_path / "part.parquet", schema, passages.window.task, "text") as part,
    ):
        write(part)
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_ends_inside_a_document_leaves_nothing(tmp_path):
    passages, vectors, columns, _ = make_documents(20, last=30)
    schema = output_schema(columns.schema, dim=DIM, embeddings={}, chunked=True)
    windows = list(gathered([passages], 7))
    assert windows[-1].begun == (20, 0)

    def write(part):
        for some in windows[:-1]:
            first, rows = some.begun
            part.write(
                EncodedWindow(some, vectors[some.first : some.first + len(some.lengths)], some.status),
                columns.slice(first, rows).to_batches(),
            )

    with (
        pytest.raises(VectorizeError, match="19 rows are complete"),
        PartWriter(tmp_path / "part.parquet", schema, passages.window.task, "text") as part,
    ):
        write(part)
    assert list(tmp_path.iterdir()) == []

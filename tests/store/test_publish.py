import errno
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_run import DIM, make_plan, make_schema, windows

from gte_vectorize.errors import OutputError, TemporaryError, VectorizeError
from gte_vectorize.store.files import Damaged
from gte_vectorize.store.publish import make_folder, publish, publish_bytes, read_back, sha256
from gte_vectorize.writer.part import PartWriter, parquet_writer

SCHEMA = make_schema()
TASK = make_plan().tasks[0]


@pytest.fixture
def part(tmp_path):
    path = tmp_path / "part.parquet"
    with PartWriter(path, SCHEMA, TASK) as writer:
        for window, columns in windows(TASK):
            writer.write(window, columns.to_batches())
    return path


def test_reading_back_counts_what_is_there(part):
    content = read_back(part, SCHEMA, TASK.num_rows)

    table = pq.read_table(part)
    assert (content.bytes, content.sha256) == (part.stat().st_size, sha256(part))
    assert (content.rows, content.tokens) == (TASK.num_rows, sum(table["n_tokens"].to_pylist()))
    assert content.truncated == sum(table["truncated"].to_pylist()) > 0
    assert content.status == {
        "ok": TASK.num_rows - table["embedding"].null_count,
        "empty": table["embedding"].null_count,
    }
    assert content.status["empty"] > 0


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_in_the_data_is_found(part, seed):
    data = bytearray(part.read_bytes())
    group = pq.read_metadata(part).row_group(0)
    chunks = [group.column(index) for index in range(group.num_columns)]
    end = max(chunk.data_page_offset + chunk.total_compressed_size for chunk in chunks)
    data[random.Random(seed).randrange(4, end)] ^= 1 << seed % 8
    part.write_bytes(data)

    with pytest.raises(VectorizeError, match=r"discarded"):
        read_back(part, SCHEMA, TASK.num_rows)


def test_no_bit_of_the_footer_makes_it_a_bug(part):
    """Some have pyarrow raise what it raises for nothing else: ValueError, UnicodeDecodeError."""
    whole, causes = part.read_bytes(), set()
    footer = int.from_bytes(whole[-8:-4], "little")
    for bit in range(8 * (len(whole) - 8 - footer), 8 * len(whole), 3):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        part.write_bytes(damaged)
        try:
            read_back(part, SCHEMA, TASK.num_rows)
        except Damaged as error:
            causes.add(type(error.__cause__))
        except VectorizeError:
            pass
    assert UnicodeDecodeError in causes


def test_a_lack_of_memory_is_no_damage(part, monkeypatch):
    def exhausted(*_: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", exhausted)
    with pytest.raises(TemporaryError, match="memory ran out") as caught:
        read_back(part, SCHEMA, TASK.num_rows)
    assert not isinstance(caught.value, Damaged)


def test_a_truncated_or_foreign_file_is_found(part):
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(TemporaryError):
        read_back(part, SCHEMA, TASK.num_rows)
    part.write_bytes(b"garbage" * 150)
    with pytest.raises(TemporaryError):
        read_back(part, SCHEMA, TASK.num_rows)


def test_other_rows_or_columns_than_planned_are_found(part):
    with pytest.raises(VectorizeError, match="holds 300 rows instead of 301"):
        read_back(part, SCHEMA, TASK.num_rows + 1)
    with pytest.raises(VectorizeError, match="not those of this run"):
        read_back(part, make_schema({"model": "other"}), TASK.num_rows)


@pytest.mark.parametrize("bad", ["nan", "inf", "zero", "missing", "unwanted"])
def test_a_row_whose_vector_does_not_fit_its_status_is_found(tmp_path, bad):
    vectors = np.ones((3, DIM), np.float32)
    vectors[1] = {"nan": np.nan, "inf": np.inf, "zero": 0}.get(bad, 1)
    table = pa.table(
        {
            "id": ["a", "b", "c"],
            "embedding": pa.FixedSizeListArray.from_arrays(
                pa.array(vectors.reshape(-1)),
                type=SCHEMA.field("embedding").type,
                mask=pa.array([False, bad == "missing", False]),
            ),
            "n_tokens": pa.array([3, 3, 3], pa.int32()),
            "truncated": [False] * 3,
            "status": ["ok", "empty" if bad == "unwanted" else "ok", "ok"],
            "text_hash": ["0" * 32] * 3,
        },
        schema=SCHEMA,
    )
    with (tmp_path / "part.parquet").open("wb") as file, parquet_writer(file, SCHEMA) as writer:
        writer.write_table(table)

    with pytest.raises(VectorizeError, match="This is a bug"):
        read_back(tmp_path / "part.parquet", SCHEMA, 3)


def test_the_first_publication_stays(tmp_path):
    final, tmp = tmp_path / "final", tmp_path / "tmp"
    publish_bytes(b"one", final, tmp)
    before = final.stat()
    publish_bytes(b"one", final, tmp)
    with pytest.raises(OutputError, match=r"final.* exists"):
        publish_bytes(b"two", final, tmp)

    assert final.read_bytes() == b"one"
    assert (final.stat().st_mtime_ns, final.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert final.stat().st_mode & 0o777 == 0o600
    assert list(tmp.iterdir()) == []


def test_a_link_at_the_final_name_is_neither_followed_nor_adopted(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"one")
    (tmp_path / "final").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OutputError):
        publish_bytes(b"one", tmp_path / "final", tmp_path / "tmp")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_at_the_final_name_is_refused_without_waiting_for_it(tmp_path, make):
    make(tmp_path / "final")
    with pytest.raises(OutputError, match=r"final.* exists"):
        publish_bytes(b"one", tmp_path / "final", tmp_path / "tmp")


def test_replacing_is_one_step(tmp_path):
    (tmp_path / "final").write_bytes(b"old")
    (tmp_path / "temp").write_bytes(b"new")
    publish(tmp_path / "temp", tmp_path / "final", replace=True)

    assert (tmp_path / "final").read_bytes() == b"new"
    assert not (tmp_path / "temp").exists()


def name_of(descriptor):
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def test_a_failed_sync_discards_the_file_and_is_not_repeated(tmp_path, monkeypatch):
    synced = []

    def failing(descriptor):
        synced.append(name_of(descriptor))
        raise OSError(errno.EIO, "told")

    make_folder(tmp_path / "tmp/any")
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(TemporaryError):
        publish_bytes(b"one", tmp_path / "final", tmp_path / "tmp/any")
    assert len(synced) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]


def test_the_file_is_synced_before_it_is_linked_and_its_folder_after(tmp_path, monkeypatch):
    events = []
    sync, link = os.fsync, os.link

    def watched_sync(descriptor):
        events.append(("sync", name_of(descriptor)))
        sync(descriptor)

    def watched_link(source, target, **options):
        events.append(("link", target))
        link(source, target, **options)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "link", watched_link)
    (tmp_path / "temp").write_bytes(b"one")
    publish(tmp_path / "temp", tmp_path / "final")

    assert events == [("sync", tmp_path / "temp"), ("link", tmp_path / "final"), ("sync", tmp_path)]

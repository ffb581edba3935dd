"""Storage that fails for a moment, for good, or gives other bytes the second time."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from huggingface_hub.errors import HfHubHTTPError
from store.proxy import Proxy

from gte_vectorize.errors import DamagedInput, InputError, TemporaryError
from gte_vectorize.reader import storage
from gte_vectorize.reader.rows import RowCursor
from gte_vectorize.reader.storage import reading, retrying

ROWS = 3000
VALUES = [f"text {row * 7919}" for row in range(ROWS)]
Fault = Callable[[int, int, bytes], bytes]


class Flaky(io.BytesIO):
    """A file whose reads, behind the first few, go through `fault(handle, offset, data)`."""

    def __init__(self, data: bytes, handle: int, fault: Fault):
        super().__init__(data)
        self._handle, self._fault = handle, fault

    def read(self, size: int | None = -1) -> bytes:
        offset = self.tell()
        return self._fault(self._handle, offset, super().read(size))


class FlakyStore:
    """A store of one file; `opened` counts its handles."""

    def __init__(self, path: str, fault: Fault):
        self.path, self.fault, self.opened = path, fault, 0

    def open_input_file(self, path: str) -> pa.PythonFile:
        self.opened += 1
        return pa.PythonFile(Flaky(Path(self.path).read_bytes(), self.opened, self.fault), mode="r")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "RETRY_SECONDS", 3)
    monkeypatch.setattr(storage, "_FIRST_PAUSE", 0.05)


@pytest.fixture
def store(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> FlakyStore:
    path = write("a.parquet", {"text": VALUES}, row_group_size=1000, write_page_checksum=True, compression="none")
    flaky = FlakyStore(path, lambda handle, offset, data: data)
    monkeypatch.setattr("gte_vectorize.reader.rows.open_store", lambda uri: (flaky, uri))
    return flaky


def rows(cursor: RowCursor) -> list[str]:
    return [value for batch in cursor.read(0, ROWS) for value in batch.column(0).to_pylist()]


def is_page(store: FlakyStore, offset: int) -> bool:
    """Whether the offset lies in the second row group, far from the footer."""
    size = Path(store.path).stat().st_size
    return size // 5 < offset < size // 2


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET])
@pytest.mark.parametrize("failing", [1, 3])
def test_an_error_that_passes_leaves_no_trace(store: FlakyStore, number: int, failing: int) -> None:
    def fault(handle: int, offset: int, data: bytes) -> bytes:
        if handle <= failing and is_page(store, offset):
            raise OSError(number, os.strerror(number))
        return data

    store.fault = fault
    with RowCursor("a.parquet", ["text"]) as cursor:
        assert rows(cursor) == VALUES
    assert store.opened == failing + 1


def test_an_error_while_opening_passes(store: FlakyStore) -> None:
    def fault(handle: int, offset: int, data: bytes) -> bytes:
        if handle == 1:
            raise TimeoutError("no answer")
        return data

    store.fault = fault
    with RowCursor("a.parquet", ["text"]) as cursor:
        assert rows(cursor) == VALUES
    assert store.opened == 2


def test_one_that_stays_is_temporary_and_bounded(store: FlakyStore) -> None:
    def fault(handle: int, offset: int, data: bytes) -> bytes:
        if is_page(store, offset):
            raise OSError(errno.EIO, "no")
        return data

    store.fault = fault
    started = time.monotonic()
    with (
        RowCursor("a.parquet", ["text"]) as cursor,
        pytest.raises(TemporaryError, match=r"'a\.parquet': reading rows 0 to 2999 failed: .*run the same command"),
    ):
        rows(cursor)
    assert store.opened > 3
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT])
def test_what_is_not_allowed_or_gone_is_not_tried_again(store: FlakyStore, number: int) -> None:
    def fault(handle: int, offset: int, data: bytes) -> bytes:
        if is_page(store, offset):
            raise OSError(number, os.strerror(number))
        return data

    store.fault = fault
    with RowCursor("a.parquet", ["text"]) as cursor, pytest.raises(TemporaryError, match="removed or changed"):
        rows(cursor)
    assert store.opened == 1


@pytest.mark.parametrize("cut", [False, True])
def test_damage_that_is_not_there_the_second_time_was_none(store: FlakyStore, cut: bool) -> None:
    def fault(handle: int, offset: int, data: bytes) -> bytes:
        if handle == 1 and is_page(store, offset):
            return b"" if cut else bytes(len(data))
        return data

    store.fault = fault
    with RowCursor("a.parquet", ["text"]) as cursor:
        assert rows(cursor) == VALUES
    assert store.opened == 2


def test_damage_that_stays_is_damage(store: FlakyStore) -> None:
    store.fault = lambda handle, offset, data: bytes(len(data)) if is_page(store, offset) else data
    with RowCursor("a.parquet", ["text"]) as cursor, pytest.raises(DamagedInput, match="rows 0 to 2999"):
        rows(cursor)
    assert store.opened == 2


def test_a_file_that_was_exchanged_meanwhile_is_not_read_on(store: FlakyStore, write: Callable[..., str]) -> None:
    def fault(handle: int, offset: int, data: bytes) -> bytes:
        if handle == 1 and is_page(store, offset):
            store.path = write("b.parquet", {"text": VALUES}, row_group_size=999)
            raise OSError(errno.ESTALE, "stale")
        return data

    store.fault = fault
    with RowCursor("a.parquet", ["text"]) as cursor, pytest.raises(TemporaryError, match="other row groups"):
        rows(cursor)


def test_a_lack_of_memory_is_no_damage() -> None:
    with pytest.raises(MemoryError), reading("a.parquet", "reading", DamagedInput):
        raise pa.ArrowMemoryError("realloc of size 210000000000 failed")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(500, TemporaryError), (503, TemporaryError), (429, TemporaryError), (401, InputError), (404, InputError)],
)
def test_the_hub_answers_by_numbers(status: int, kind: type[Exception]) -> None:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    with pytest.raises(kind) as raised, reading("hf://datasets/a/b.parquet", "reading", DamagedInput):
        raise HfHubHTTPError("no", response=response)
    assert not isinstance(raised.value, DamagedInput)


def test_pauses_grow_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    clock = iter(range(1000))
    monkeypatch.setattr(storage, "RETRY_SECONDS", 90)
    monkeypatch.setattr(storage.time, "sleep", paused.append)
    monkeypatch.setattr(storage.time, "monotonic", lambda: float(next(clock)) if not paused else sum(paused))

    def fail(tried: int) -> None:
        raise TemporaryError("no")

    with pytest.raises(TemporaryError):
        retrying(fail)
    assert 60 < sum(paused) <= 90
    assert max(paused) <= 20
    assert paused[5] > 4 * paused[0]
    assert len(set(paused)) == len(paused)


class TestS3:
    @pytest.fixture
    def proxy(self, bucket: Any, s3_server: str, write: Callable[..., str], monkeypatch: Any) -> Iterator[Proxy]:
        bucket.upload_file(write("b.parquet", {"text": VALUES}, row_group_size=1000), "b.parquet")
        with Proxy(s3_server) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            yield proxy

    @pytest.mark.parametrize("fault", ["503", "500", "lose", "cut"])
    @pytest.mark.parametrize("failing", [1, pytest.param(5, marks=pytest.mark.slow)])
    def test_requests_that_fail_for_a_while(self, proxy: Proxy, fault: str, failing: int) -> None:
        left = [fault] * failing
        with RowCursor("s3://corpora/b.parquet", ["text"]) as cursor:
            proxy.fault = lambda request: left.pop() if left and request.method == "GET" else None
            assert rows(cursor) == VALUES
        assert not left

    def test_a_store_that_stalls_is_given_up(self, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(storage, "_REQUEST_TIMEOUT", 1)
        monkeypatch.setattr(storage, "_ATTEMPTS", 2)
        storage._open_store.cache_clear()
        started = time.monotonic()
        with RowCursor("s3://corpora/b.parquet", ["text"]) as cursor:
            proxy.fault = lambda request: "stall"
            with pytest.raises(TemporaryError, match=r"b\.parquet.* failed: .*NETWORK_CONNECTION"):
                rows(cursor)
        assert time.monotonic() - started < 15
        storage._open_store.cache_clear()

    def test_what_is_not_allowed_is_not_tried_again(self, proxy: Proxy) -> None:
        with RowCursor("s3://corpora/b.parquet", ["text"]) as cursor:
            proxy.fault = lambda request: "403" if request.method == "GET" else None
            before = len(proxy.requests)
            with pytest.raises(TemporaryError, match="ACCESS_DENIED"):
                rows(cursor)
        assert len(proxy.requests) == before + 1

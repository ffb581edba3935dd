from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs

from gte_vectorize.errors import InputError, TemporaryError
from gte_vectorize.reader.storage import open_store, reading

SECRET = "wJalrXUtnFEMI"


@pytest.mark.parametrize(
    "name", ["a b.parquet", "%41#?.parquet", "new\nline.parquet", "-x", "_x", ".x", "法律.parquet"]
)
def test_odd_names_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"here")
    store, path = open_store(str(tmp_path / name))
    with store.open_input_file(path) as file:
        assert file.read() == b"here"


def test_file_uri(tmp_path: Path) -> None:
    (tmp_path / "a b.parquet").touch()
    assert open_store((tmp_path / "a b.parquet").as_uri())[1] == str(tmp_path / "a b.parquet")
    with pytest.raises(InputError, match="another host"):
        open_store("file://elsewhere/a.parquet")


def test_no_name_outside_unicode() -> None:
    with pytest.raises(InputError, match="not valid UTF-8"):
        open_store(os.fsdecode(b"/tmp/\xff.parquet"))


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "directory", "loop", "dangling", "missing"])
def test_only_regular_files_and_never_blocked(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.parquet"
    with socket.socket(socket.AF_UNIX) as listener:
        match kind:
            case "fifo":
                os.mkfifo(path)
            case "socket":
                listener.bind(str(path))
            case "device":
                path = Path("/dev/zero")
            case "directory":
                path.mkdir()
            case "loop":
                path.symlink_to(path)
            case "dangling":
                path.symlink_to("nowhere")
        with pytest.raises(InputError) as raised:
            open_store(str(path))
    assert repr(str(path)) in str(raised.value)


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://KEY:{SECRET}@bucket/a.parquet",
        f"s3://KEY:{SECRET} RET@bucket/a.parquet",
        f"s3://KEY:{SECRET}/RET@bucket/a.parquet",
        f"s3://{SECRET}@bucket/a.parquet",
        f"s3://bucket/a.parquet?access_key=a&secret_key={SECRET}",
        f"gs://bucket/a.parquet?X-Goog-Signature={SECRET}",
        f"hf://user:{SECRET}@datasets/a/b",
        f"hdfs://user:{SECRET}@host:8020/a",
        f"https://{SECRET}@host/a.parquet?token={SECRET}",
    ],
)
def test_a_uri_with_a_secret_is_refused_and_never_repeated(uri: str) -> None:
    with pytest.raises(InputError) as raised:
        open_store(uri)
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None


def test_an_unknown_scheme_lists_the_known() -> None:
    with pytest.raises(InputError, match=r"ftp://; known: local paths, file://, gs://, hdfs://, hf://, s3://"):
        open_store("ftp://host/a.parquet")


def test_stores_of_each_scheme() -> None:
    assert isinstance(open_store("gs://bucket/a/b.parquet")[0], fs.GcsFileSystem)
    store, path = open_store("hf://datasets/owner/name/a.parquet")
    assert isinstance(store.handler, fs.FSSpecHandler)
    assert path == "datasets/owner/name/a.parquet"


def test_s3_from_the_environment(bucket: object, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put_object(Key="a?%20.parquet", Body=b"here")  # type: ignore[attr-defined]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server)
    store, path = open_store("s3://corpora/a?%20.parquet")
    with store.open_input_file(path) as file:
        assert file.read() == b"here"


class TestReading:
    """Whether running again may help."""

    @pytest.mark.parametrize(
        "error",
        [
            OSError(errno.EIO, "input/output error"),
            OSError("When reading: AWS Error NETWORK_CONNECTION during HeadObject operation"),
            OSError("google::cloud::Status(UNAVAILABLE: try again)"),
        ],
    )
    def test_temporary(self, error: OSError) -> None:
        with pytest.raises(TemporaryError, match=r"'a\.parquet': opening failed"), reading("a.parquet", "opening"):
            raise error

    @pytest.mark.parametrize(
        "error",
        [
            FileNotFoundError(errno.ENOENT, "no such file"),
            PermissionError(errno.EACCES, "permission denied"),
            OSError("AWS Error ACCESS_DENIED during HeadObject operation"),
            OSError("Corrupt snappy compressed data."),
            pa.ArrowInvalid("not a Parquet file"),
        ],
    )
    def test_for_good(self, error: Exception) -> None:
        with pytest.raises(InputError, match=r"'a\.parquet'"), reading("a.parquet"):
            raise error

    def test_a_signed_url_is_not_repeated(self) -> None:
        error = OSError("403 Forbidden for url 'https://cdn.hf.co/x?Expires=1&Signature=KANARIE&Key=2' (Request ID: 7)")
        with pytest.raises(InputError, match=r"cdn\.hf\.co/x\?…' \(Request ID: 7\)") as raised, reading("hf://a/b"):
            raise error
        assert "KANARIE" not in str(raised.value)

    def test_a_bug_stays_a_bug(self) -> None:
        with pytest.raises(KeyError), reading("hf://datasets/a/b"):
            raise KeyError("x")

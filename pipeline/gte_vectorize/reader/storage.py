"""Where input files lie: local folders, S3, Google Cloud Storage, HDFS and the Hugging Face hub, behind one interface.

Credentials and the endpoint come from the environment (AWS_*, GOOGLE_APPLICATION_CREDENTIALS, HADOOP_*, HF_TOKEN). A
URI that might hold a secret is refused before any library sees it: libraries print URIs in their errors.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from gte_vectorize.errors import DamagedInput, InputError, TemporaryError, VectorizeError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_KNOWN = ("file", "gs", "hdfs", "hf", "s3")
# Bucket, or host and port. Nothing with an @ passes, nor a colon that a port does not follow.
_AUTHORITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]{1,5})?")
_SECRET = re.compile(r"[?&;][^=&;]*(secret|token|passw|credential|signature|sig|access.?key|api.?key)[^=&;]*=", re.I)

_FOR_GOOD = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR}
_DENIED = ("ACCESS_DENIED", "INVALID_ACCESS_KEY", "SIGNATURE", "NO_SUCH_BUCKET", "UNRECOGNIZED_CLIENT", "TOKEN")
_GOOGLE_BUSY = ("Status(UNAVAILABLE", "Status(DEADLINE_EXCEEDED", "Status(RESOURCE_EXHAUSTED", "Status(INTERNAL")


def is_remote(uri: str) -> bool:
    """Whether `uri` names an object store rather than a local path."""
    scheme = _SCHEME.match(uri)
    return scheme is not None and scheme[1].lower() != "file"


def local_path(uri: str) -> Path:
    """The absolute path that a local path or a file:// URI names."""
    if not _SCHEME.match(uri):
        return Path(uri).absolute()
    host, _, path = uri.split("://", 1)[1].partition("/")
    if host not in ("", "localhost"):
        raise InputError(f"{uri!r}: a file:// URI of another host cannot be read; mount its folder and give the path")
    return Path("/" + unquote(path))


def open_store(uri: str) -> tuple[Any, str]:
    """The `pyarrow.fs.FileSystem` that holds the file `uri`, and the file's path there.

    Raises InputError: an unknown scheme, a URI with credentials (never echoed), or a local file that is missing or not
    a regular one, found out without opening it, so that a FIFO does not block.
    """
    if is_remote(uri):
        return _open_remote(uri)
    path = local_path(uri)
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InputError(f"{str(path)!r}: the name is not valid UTF-8; rename it") from None
    with reading(str(path)):
        mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise InputError(f"{str(path)!r} is {kind}, not a regular file; leave it out, or give the files themselves")
    return fs.LocalFileSystem(), str(path)


def _open_remote(uri: str) -> tuple[Any, str]:
    scheme, rest = uri.split("://", 1)
    scheme = scheme.lower()
    if scheme not in _KNOWN:
        raise InputError(f"inputs cannot be read from {scheme}://; known: local paths, {'://, '.join(_KNOWN)}://")
    authority, _, key = rest.partition("/")
    if _SECRET.search(rest) or not (_AUTHORITY.fullmatch(authority) or (scheme == "hdfs" and not authority)):
        raise InputError(
            f"an input that begins with {scheme}:// has no plain bucket or host name, or holds credentials; "
            f"they belong in the environment, never in a URI"
        )
    key = key.rstrip("/")
    if scheme == "hf":
        return _open_hub(), f"{authority}/{key}"
    with reading(uri, "opening the store"):
        store = _open_store(
            scheme, authority, os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL"))
        )
    return store, f"/{key}" if scheme == "hdfs" else f"{authority}/{key}".rstrip("/")


@lru_cache(maxsize=64)
def _open_store(scheme: str, authority: str, endpoint: str | None) -> Any:
    # pyarrow takes the S3 endpoint from the environment itself; here it only tells cached stores apart.
    return fs.FileSystem.from_uri(f"{scheme}://{authority or 'default'}")[0]


@lru_cache(maxsize=1)
def _open_hub() -> Any:
    from huggingface_hub import HfFileSystem

    return fs.PyFileSystem(fs.FSSpecHandler(HfFileSystem()))


@contextmanager
def reading(uri: str, what: str = "reading", refusal: type[InputError] = InputError) -> Iterator[None]:
    """Turn a store's error into InputError (`refusal`), or into TemporaryError where running again may help.

    `what` says what was being done, with rows if it knows them. Errors of the code itself pass unchanged.
    """
    try:
        yield
    except VectorizeError:
        raise
    except Exception as error:
        if not (isinstance(error, (OSError, pa.ArrowException)) or _from_hub_client(error)):
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        message = f"{uri!r}: {what} failed: {lines[0][:300]}"
        if _may_pass(error):
            raise TemporaryError(f"{message}; run the same command again") from error
        raise refusal(f"{message}; check that the file exists, is whole and may be read") from error


@contextmanager
def listed_before() -> Iterator[None]:
    """Turn the InputError of a file that was sound when it was listed, which begins with its name, into TemporaryError.

    Damaged pages stay DamagedInput: listing does not read them.
    """
    try:
        yield
    except DamagedInput:
        raise
    except InputError as error:
        raise TemporaryError(
            f"{error}. When the run began it was sound: it was removed or changed meanwhile; run the same command "
            "again when nothing writes to the corpus"
        ) from error


def _may_pass(error: Exception) -> bool:
    number = getattr(error, "errno", None)
    if number is not None:
        return number not in _FOR_GOOD
    text = str(error)
    aws = "AWS Error" in text and not any(word in text for word in _DENIED)
    return aws or any(word in text for word in _GOOGLE_BUSY) or _from_hub_client(error)


def _from_hub_client(error: Exception) -> bool:
    # The hub's HTTP library, whose connection errors are no OSError, is httpx or a fork of it.
    return type(error).__module__.startswith("httpx")

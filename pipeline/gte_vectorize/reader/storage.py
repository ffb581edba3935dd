"""Where input files lie: local folders, S3, Google Cloud Storage, HDFS and the Hugging Face hub, behind one interface.

Credentials and the endpoint come from the environment (AWS_*, GOOGLE_APPLICATION_CREDENTIALS, HADOOP_*, HF_TOKEN). A
URI that might hold a secret is refused before any library sees it: libraries print URIs in their errors.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from gte_vectorize.errors import DamagedInput, InputError, Refused, TemporaryError, VectorizeError

T = TypeVar("T")
log = logging.getLogger(__name__)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_KNOWN = ("file", "gs", "hdfs", "hf", "s3")
# Bucket, or host and port. Nothing with an @ passes, nor a colon that a port does not follow.
_AUTHORITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]{1,5})?")
_SECRET = re.compile(r"[?&;][^=&;]*(secret|token|passw|credential|signature|sig|access.?key|api.?key)[^=&;]*=", re.I)

RETRY_SECONDS = 90.0
"""How long what may pass is tried again, on top of what the store's own client does."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 20.0
# S3: seconds, seconds without a byte, requests in a row. By default, pyarrow takes minutes to give up one that stalls.
_CONNECT_TIMEOUT, _REQUEST_TIMEOUT, _ATTEMPTS = 10, 10, 3
# Google: seconds; by default a quarter of an hour.
_GOOGLE_RETRIES = 60

_FOR_GOOD = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR}
_TRY_AGAIN = {408, 429}  # of HTTP, besides all from 500 on
_QUERY = re.compile(r"(://[^\s?]*\?)[^\s'\"]*")  # of a URL in a library's words; a signed one is a secret
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


def split_uri(uri: str, what: str, refusal: type[Refused]) -> tuple[str, str, str]:
    """Scheme in lower case, bucket or host, and key. `refusal`: one of them may not be, or there are credentials."""
    scheme, rest = uri.split("://", 1)
    scheme = scheme.lower()
    authority, _, key = rest.partition("/")
    if _SECRET.search(rest) or not (_AUTHORITY.fullmatch(authority) or (scheme == "hdfs" and not authority)):
        raise refusal(
            f"{what} that begins with {scheme}:// has no plain bucket or host name, or holds credentials; "
            f"they belong in the environment, never in a URI"
        )
    return scheme, authority, key.rstrip("/")


def _open_remote(uri: str) -> tuple[Any, str]:
    scheme = uri.split("://", 1)[0].lower()
    if scheme not in _KNOWN:
        raise InputError(f"inputs cannot be read from {scheme}://; known: local paths, {'://, '.join(_KNOWN)}://")
    scheme, authority, key = split_uri(uri, "an input", InputError)
    if scheme == "hf":
        return _open_hub(), f"{authority}/{key}"
    with reading(uri, "opening the store"):
        store = _open_store(
            scheme, authority, os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL"))
        )
    return store, f"/{key}" if scheme == "hdfs" else f"{authority}/{key}".rstrip("/")


@lru_cache(maxsize=64)
def _open_store(scheme: str, authority: str, endpoint: str | None) -> Any:
    if scheme == "hdfs":
        return fs.FileSystem.from_uri(f"hdfs://{authority or 'default'}")[0]
    if scheme == "gs":
        return fs.FileSystem.from_uri(f"gs://{authority}?retry_limit_seconds={_GOOGLE_RETRIES}")[0]
    return fs.S3FileSystem(
        endpoint_override=endpoint,
        region=None if endpoint else fs.resolve_s3_region(authority),
        connect_timeout=_CONNECT_TIMEOUT,
        request_timeout=_REQUEST_TIMEOUT,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
    )


@lru_cache(maxsize=1)
def _open_hub() -> Any:
    from huggingface_hub import HfFileSystem

    return fs.PyFileSystem(fs.FSSpecHandler(HfFileSystem()))


@contextmanager
def reading(uri: str, what: str = "reading", refusal: type[InputError] = InputError) -> Iterator[None]:
    """Turn a store's error into InputError, or into TemporaryError where running again may help.

    `refusal` is raised for what was read and makes no sense; `what` says what was being done, with rows if it knows
    them. Errors of the code itself pass unchanged, and so does a lack of memory, which says nothing of the file.
    """
    try:
        yield
    except (VectorizeError, MemoryError):
        raise
    except Exception as error:
        if not (isinstance(error, (OSError, pa.ArrowException)) or _from_hub_client(error)):
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        said = _QUERY.sub(r"\1…", lines[0])[:300]
        message = f"{uri!r}: {what} failed: {said}"
        if _may_pass(error):
            raise TemporaryError(f"{message}; run the same command again") from error
        kind = InputError if _is_answer(error) else refusal
        raise kind(f"{message}; check that the file exists, is whole and may be read") from error


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


def retrying(attempt: Callable[[int], T]) -> T:
    """`attempt(0)`, and where it fails in a way that may pass `attempt(1)` and so on, for RETRY_SECONDS at most.

    After a TemporaryError with growing pauses, of random length so that many processes do not come back at once. After
    DamagedInput just once, without a pause: what was lost on the way looks damaged too.
    """
    deadline = time.monotonic() + RETRY_SECONDS
    damaged, tried = False, 0
    while True:
        try:
            return attempt(tried)
        except DamagedInput:
            if damaged:
                raise
            damaged = True
        except TemporaryError as error:
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**tried) * random.uniform(0.5, 1)
            if time.monotonic() + pause > deadline:
                raise
            log.warning("%s; trying again in %.0f s", error, pause)
            time.sleep(pause)
        tried += 1


def _may_pass(error: Exception) -> bool:
    number = getattr(error, "errno", None)
    if number is not None:
        return number not in _FOR_GOOD
    if (status := _http_status(error)) is not None:
        return status >= 500 or status in _TRY_AGAIN
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    text = str(error)
    aws = "AWS Error" in text and not any(word in text for word in _DENIED)
    return aws or any(word in text for word in _GOOGLE_BUSY) or _from_hub_client(error)


def _is_answer(error: Exception) -> bool:
    """Whether the store says no, as opposed to bytes that make no sense."""
    text = str(error)
    by_number = getattr(error, "errno", None) is not None or _http_status(error) is not None
    return by_number or "AWS Error" in text or "google::cloud::Status" in text


def _http_status(error: Exception) -> int | None:
    """Of an error of the hub's library."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _from_hub_client(error: Exception) -> bool:
    # The hub's HTTP library, whose connection errors are no OSError, is httpx or a fork of it.
    return type(error).__module__.startswith("httpx")

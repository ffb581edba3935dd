"""An S3 bucket, asked one thing at a time, and its answers in the words of the error tree.

Credentials, region and endpoint are boto3's: environment, profile or the machine's role.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, NamedTuple

from gte_vectorize.errors import ConfigError, OutputError, TemporaryError

ATTEMPTS = 8
CONNECT_TIMEOUT, READ_TIMEOUT = 10, 60  # seconds; of one attempt, while nothing moves
CONNECTIONS = 16
READS = 3

_CHUNK = 1 << 20
_MAY_PASS = {"SlowDown", "RequestTimeout", "ExpiredToken", "TokenRefreshRequired"}


class Key(PosixPath):
    """An object's name, s3://bucket/key. A path in form only: on this machine it names nothing."""

    def __str__(self) -> str:
        return super().__str__().replace("s3:/", "s3://", 1)

    @property
    def bucket(self) -> str:
        return self.parts[1]

    @property
    def key(self) -> str:
        return "/".join(self.parts[2:])


class Conflict(TemporaryError):
    """Another request for the same object was under way."""


class Small(NamedTuple):
    """A small object. `age`: seconds since it was written, by the store's own clock."""

    data: bytes
    etag: str
    age: float


class Bucket:
    """Any thread may call it. Requests are repeated by botocore, with jitter, while what failed may pass."""

    @cached_property
    def _client(self) -> Any:
        return _connect()

    def ask(self, operation: str, about: Path, **asked: Any) -> Any:
        """boto3's answer; `asked` are its parameters but for Bucket and Key.

        FileNotFoundError: there is no such object or upload. FileExistsError: a condition does not hold. Conflict.
        OutputError: refused for good, a missing bucket too. TemporaryError: it failed, or no answer came, to the end.
        """
        key = Key(about)
        if operation != "list_objects_v2":
            asked["Key"] = key.key
        with _told(about):
            return getattr(self._client, operation)(Bucket=key.bucket, **asked)

    def download(self, file: Path, sink: BinaryIO) -> tuple[Any, str]:
        """Fill `sink` with the whole object → the answer and the SHA-256 of what came.

        That it differs from what the metadata say, time and again, is for the caller to judge.
        """
        for attempt in range(READS):
            sink.seek(0)
            sink.truncate()
            answer, digest = self.ask("get_object", file), hashlib.sha256()
            try:
                with _told(file), closing(answer["Body"]) as body:
                    for chunk in body.iter_chunks(_CHUNK):
                        digest.update(chunk)
                        sink.write(chunk)
            except TemporaryError:
                if attempt + 1 == READS:
                    raise
            else:
                if told_sha256(answer) in (None, digest.hexdigest()):
                    break
            pause(attempt)
        return answer, digest.hexdigest()

    def look(self, file: Path) -> Small | None:
        """None: there is no such object."""
        sink = io.BytesIO()
        try:
            answer, _ = self.download(file, sink)
        except FileNotFoundError:
            return None
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return Small(sink.getvalue(), answer["ETag"], (now - answer["LastModified"]).total_seconds())

    def put(self, file: Path, data: bytes, etag: str | None) -> str:
        """Write a small object in place of the one with this ETag (None: where there is none) → its own ETag.

        FileExistsError, FileNotFoundError: it is another by now.
        """
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        new: str = self.ask("put_object", file, Body=data, **condition)["ETag"]
        return new


def _connect() -> Any:
    import boto3
    import botocore.session
    from botocore.config import Config

    session = botocore.session.get_session()
    # As inputs are read: a host of one's own seldom has a name for every bucket. A profile may say otherwise.
    own_host = {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"} & os.environ.keys()
    style = {"addressing_style": "path"} if own_host and "s3" not in session.get_scoped_config() else None
    config = Config(
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=READ_TIMEOUT,
        max_pool_connections=CONNECTIONS + 1,  # and the lease
        # SHA-256 is sent and compared here; what botocore would add, some stores refuse.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3=style,
    )
    return boto3.Session(botocore_session=session).client("s3", config=config)


def told_sha256(answer: Any) -> str | None:
    """What an object's metadata say of its bytes."""
    told: str | None = answer["Metadata"].get("sha256")
    return told


def pause(attempt: int) -> None:
    time.sleep(random.uniform(0, 0.2 * 2**attempt))


@contextmanager
def _told(about: Path) -> Iterator[None]:
    """What went wrong, in our own words: those of the libraries may hold the endpoint's URL, and that a password."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise ConfigError("an output in S3 needs boto3: pip install 'gte-vectorize[s3]'") from error
    try:
        yield
    except ClientError as error:
        raise _answered(error, about) from error
    except (BotoCoreError, ValueError) as error:
        raise _unanswered(error, about) from error


def _answered(error: Any, about: Path) -> Exception:
    status, code = error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
    what = f"{str(about)!r}: {error.operation_name} was answered with {status} {code}"
    if code == "NoSuchBucket":
        return OutputError(f"{str(about)!r}: there is no such bucket; make it, or choose another output")
    if status == 404:
        return FileNotFoundError(errno.ENOENT, code, str(about))
    if status == 412:
        return FileExistsError(errno.EEXIST, code, str(about))
    if status == 409:
        return Conflict(f"{what}; run the same command again")
    if code in _MAY_PASS or status in (408, 429, 500, 502, 503, 504):
        return TemporaryError(f"{what}; what was published is kept: run the same command again")
    return OutputError(
        f"{what}; check that the credentials in the environment are right and allow to list the bucket and to get, "
        "put and delete objects there, or choose another output"
    )


def _unanswered(error: Exception, about: Path) -> Exception:
    from botocore import exceptions as known

    what, kind = repr(str(about)), type(error).__name__
    passing = (known.HTTPClientError, known.ConnectionError, known.IncompleteReadError, known.MetadataRetrievalError)
    if isinstance(error, passing):
        return TemporaryError(
            f"{what}: the store gave no whole answer ({kind}); what was published is kept: check the network and "
            "AWS_ENDPOINT_URL, then run the same command again"
        )
    return OutputError(
        f"{what}: the store cannot be asked ({kind}); check the bucket's name, the credentials and AWS_* variables"
    )

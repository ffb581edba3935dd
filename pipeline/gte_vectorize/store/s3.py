"""Output files as objects in an S3 bucket, published by one conditional request each.

There is no rename and no lock in a bucket. A file is made and read back on this machine, then sent whole under its
final name on the condition that nothing has that name, with its SHA-256 as a checksum for the server and as metadata
for later. By that hash an answer that got lost is told from somebody else's object. Listings are not trusted: what is
done is asked for by name.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from gte_vectorize.errors import TemporaryError
from gte_vectorize.failpoint import failpoint
from gte_vectorize.store.bucket import CONNECTIONS, Bucket, Conflict, Key, pause, told_sha256
from gte_vectorize.store.files import Damaged, R, T
from gte_vectorize.store.lease import Lease, is_settled
from gte_vectorize.store.publish import in_the_way, scratch, sha256
from gte_vectorize.writer.part import create_file, storage_errors

LARGEST_PUT = 1 << 30
PIECE = 64 << 20
MOST_PIECES = 10_000
CONFLICTS = 5


class S3Files:
    """The objects of `output`, whose state lies below `state`; every Path that names one is a `Key`."""

    def __init__(self, output: Path, state: Path) -> None:
        self._output = output
        self._bucket = Bucket()
        self._lease = state / "lease.json"
        self._upload = state / "upload.json"

    def make_folder(self, folder: Path) -> None:
        """There are no folders in a bucket."""

    def exists(self, file: Path) -> bool:
        return self.size(file) is not None

    def size(self, file: Path) -> int | None:
        found = self._head(file)
        return found["ContentLength"] if found else None

    def sha256(self, file: Path) -> str:
        """As its metadata say, or else of its bytes."""
        if told := told_sha256(self._bucket.ask("head_object", file)):
            return told
        with TemporaryFile() as sink:
            return self._bucket.download(file, sink)[1]

    def read(self, file: Path) -> bytes:
        found = self._bucket.look(file)
        if found is None:
            raise FileNotFoundError(str(file))
        return found.data

    def names(self, folder: Path) -> set[str]:
        key = Key(folder).key
        asked = {"Prefix": f"{key}/" if key else "", "Delimiter": "/"}
        found: set[str] = set()
        while True:
            page = self._bucket.ask("list_objects_v2", folder, **asked)
            below = [entry["Key"] for entry in page.get("Contents", ())]
            below += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
            found.update(name.removeprefix(asked["Prefix"]).rstrip("/") for name in below)
            if not page.get("IsTruncated"):
                return found - {""}
            asked["ContinuationToken"] = page["NextContinuationToken"]

    @contextmanager
    def copy(self, file: Path, folder: Path) -> Iterator[Path]:
        with scratch(folder) as own:
            path = own / file.name
            try:
                with storage_errors(path), create_file(path) as sink:
                    answer, digest = self._bucket.download(file, sink)
            except FileNotFoundError as error:
                raise Damaged(f"{str(file)!r} is gone; run the same command again") from error
            if told_sha256(answer) not in (None, digest):
                raise Damaged(f"{str(file)!r} does not hold what was written; run the same command again")
            yield path

    def publish(self, temp: Path, final: Path, *, replace: bool = False) -> None:
        with storage_errors(temp):
            failpoint("publish.link")
            size, digest = temp.stat().st_size, sha256(temp)
            try:
                self._send(temp, final, size, digest, {} if replace else {"IfNoneMatch": "*"})
            except (FileExistsError, FileNotFoundError):
                # It was there, or only the answer got lost and the request was repeated.
                if self._holds(final, size, digest) is False:
                    raise in_the_way(final) from None
            if size > LARGEST_PUT:
                self._abort_upload()
            failpoint("publish.syncdir")
            if not self._holds(final, size, digest):
                raise TemporaryError(f"{str(final)!r} is not what was sent; run the same command again")

    def remove(self, file: Path) -> None:
        with suppress(FileNotFoundError):
            self._bucket.ask("delete_object", file)

    def settle(self, folder: Path) -> None:
        """An answered request is settled."""

    def clear(self, folder: Path) -> None:
        for _ in self.map(lambda name: self.remove(folder / name), self.names(folder)):
            pass

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        asked: deque[Future[R]] = deque()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for item in items:
                asked.append(pool.submit(function, item))
                if len(asked) > 2 * CONNECTIONS:
                    yield asked.popleft().result()
            while asked:
                yield asked.popleft().result()

    def claim(self, local: Path) -> Lease:
        lease = Lease(self._bucket, self._lease, holder=_holder(local), output=self._output)
        lease.take()
        try:
            lease.require_conditions()
            self._abort_upload()
        except BaseException:
            lease.release(settled=False)
            raise
        return lease

    def unsettled(self) -> bool:
        return not is_settled(self._bucket, self._lease)

    def _head(self, file: Path) -> Any:
        try:
            return self._bucket.ask("head_object", file)
        except FileNotFoundError:
            return None

    def _holds(self, file: Path, size: int, digest: str) -> bool | None:
        """Whether these bytes are there; None where nothing is."""
        found = self._head(file)
        if found is None:
            return None
        return found["ContentLength"] == size and (told_sha256(found) or self.sha256(file)) == digest

    def _send(self, temp: Path, final: Path, size: int, digest: str, condition: dict[str, str]) -> None:
        send = self._put if size <= LARGEST_PUT else self._put_pieces
        for attempt in range(CONFLICTS):
            try:
                return send(temp, final, digest, condition)
            except Conflict:
                pause(attempt)
        return send(temp, final, digest, condition)

    def _put(self, temp: Path, final: Path, digest: str, condition: dict[str, str]) -> None:
        metadata, checksum = {"sha256": digest}, _base64(bytes.fromhex(digest))
        with temp.open("rb") as body:
            self._bucket.ask("put_object", final, Body=body, Metadata=metadata, ChecksumSHA256=checksum, **condition)

    def _put_pieces(self, temp: Path, final: Path, digest: str, condition: dict[str, str]) -> None:
        """Nothing has the final name before the last request, which carries the condition."""
        self._abort_upload()
        ask = self._bucket.ask
        asked = {"Metadata": {"sha256": digest}, "ChecksumAlgorithm": "SHA256"}
        upload = ask("create_multipart_upload", final, **asked)["UploadId"]
        note = {"object": str(final), "upload": upload}
        ask("put_object", self._upload, Body=json.dumps(note).encode())
        piece = max(PIECE, -(-temp.stat().st_size // MOST_PIECES))
        parts: list[dict[str, Any]] = []
        with temp.open("rb") as file:
            for number in count(1):
                if not (body := file.read(piece)):
                    break
                part = {"PartNumber": number, "ChecksumSHA256": _base64(hashlib.sha256(body).digest())}
                parts.append({**part, "ETag": ask("upload_part", final, UploadId=upload, Body=body, **part)["ETag"]})
        ask("complete_multipart_upload", final, UploadId=upload, MultipartUpload={"Parts": parts}, **condition)

    def _abort_upload(self) -> None:
        """What an upload of this output that came to no end has left costs money; those of others are not touched."""
        with suppress(FileNotFoundError, ValueError):
            note = json.loads(self.read(self._upload))
            with suppress(FileNotFoundError):
                self._bucket.ask("abort_multipart_upload", Key(note["object"]), UploadId=note["upload"])
            self.remove(self._upload)


def _holder(local: Path) -> str:
    """The name under which this machine's folder `local` holds leases."""
    file = local / "holder"
    with storage_errors(file):
        with suppress(FileExistsError), create_file(file) as new:
            new.write(uuid.uuid4().hex.encode())
        return file.read_text() or uuid.uuid4().hex


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()

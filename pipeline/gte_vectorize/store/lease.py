"""A run's lease on an output in a bucket, so that two runs do not compute the same vectors.

It saves work and nothing else: publication is exclusive without it. Its age is told by the store's clock. A lease that
nobody has renewed for a while is taken over; at once if its holder was this very machine, where a lock has already
shown that its run is dead.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from gte_vectorize.errors import OutputError, TemporaryError, VectorizeError
from gte_vectorize.store.bucket import Bucket

BEAT = 60.0
EXPIRES = 900.0
PATIENCE = 10.0  # seconds, all three

log = logging.getLogger(__name__)


class Lease:
    """The object `file`, held and renewed by this run until `release`."""

    def __init__(self, bucket: Bucket, file: Path, *, holder: str, output: Path) -> None:
        self._bucket = bucket
        self._file = file
        self._holder = holder
        self._output = output
        self._run = uuid.uuid4().hex
        self._beat = 0
        self._etag: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def take(self) -> None:
        """TemporaryError: another run holds it."""
        found = self._bucket.look(self._file)
        said = _read(found.data) if found else {"run": None}
        if found and said.get("run", "") is not None and said.get("holder") != self._holder:
            if found.age < EXPIRES:
                raise TemporaryError(
                    f"another run is writing {str(self._output)!r}: {str(said.get('host'))!r} said so "
                    f"{found.age:.0f} s ago; when it has ended, or been silent for {EXPIRES / 60:.0f} minutes, run the "
                    "same command again"
                )
            log.warning("%r: its run has been silent for %.0f s and is taken for dead", str(self._file), found.age)
        self._etag = self._write(found.etag if found else None, self._claim())
        self.check()
        self._thread.start()

    def require_conditions(self) -> None:
        """OutputError where a second object replaces the first although it must not: the lease itself is there."""
        try:
            self._bucket.put(self._file, b"", None)
        except FileExistsError:
            return
        self._etag = None
        self._bucket.ask("delete_object", self._file)
        raise OutputError(
            f"{str(self._output)!r}: this store ignores If-None-Match, so two runs could overwrite each other's "
            "files there; write locally, then copy"
        )

    def check(self) -> None:
        """TemporaryError: another run has taken the output over."""
        if self._etag is None:
            raise TemporaryError(
                f"another run has taken over {str(self._output)!r}; when it has ended, run the same command again"
            )

    def release(self, *, settled: bool) -> None:
        """Leave the lease to the next run. `settled`: the output is complete and in order."""
        self._ended.set()
        self._thread.join(PATIENCE)
        if self._etag is not None:
            with suppress(VectorizeError):  # nothing depends on it, and the run may end because of an error
                self._write(self._etag, {"run": None, "settled": settled})

    def _renew(self) -> None:
        while self._etag is not None and not self._ended.wait(BEAT):
            with suppress(VectorizeError):
                self._etag = self._write(self._etag, self._claim())

    def _claim(self) -> dict[str, Any]:
        # Another content each time, or the ETag that a rival has seen would still be right.
        self._beat += 1
        return {"run": self._run, "holder": self._holder, "host": socket.gethostname(), "beat": self._beat}

    def _write(self, etag: str | None, says: dict[str, Any]) -> str | None:
        """The new ETag; None: the lease is another run's."""
        data = json.dumps(says).encode()
        for _ in range(2):
            try:
                return self._bucket.put(self._file, data, etag)
            except (FileExistsError, FileNotFoundError):
                # Perhaps an answer got lost: to this request, which was then repeated, or to the last renewal.
                found = self._bucket.look(self._file)
                if found is None or _read(found.data).get("run") != self._run:
                    return None
                if found.data == data:
                    return found.etag
                etag = found.etag
        return None


def is_settled(bucket: Bucket, file: Path) -> bool:
    """Whether the last run under this lease left its output complete and in order, or there was none."""
    found = bucket.look(file)
    return found is None or _read(found.data).get("settled") is True


def _read(data: bytes) -> dict[str, Any]:
    """Nothing, where it is torn: then it expires."""
    with suppress(ValueError):
        said = json.loads(data)
        if isinstance(said, dict):
            return said
    return {}

"""Wrong code, put in place of the right one inside a victim. Each has to turn the harness red."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from gte_vectorize.batch import TokenBatch
from gte_vectorize.store import local, publish, store

_sync = publish._sync


def no_fsync() -> None:
    publish._sync = lambda path: _sync(path) if path.is_dir() else None


def no_folder_fsync() -> None:
    publish._sync = lambda path: None if path.is_dir() else _sync(path)


def fsync_retried() -> None:
    def insist(path: Path) -> None:
        try:
            _sync(path)
        except OSError:
            _sync(path)

    publish._sync = insist


def replace_for_link() -> None:
    def rename(temp: Path, final: Path, **_: Any) -> None:
        temp.replace(final)

    os.link = rename  # type: ignore[assignment]


def lock_only() -> None:
    """Publication that trusts in being alone."""

    def copy(temp: Path, final: Path, **_: Any) -> None:
        shutil.copyfile(temp, final)

    os.link = copy  # type: ignore[assignment]


def record_before_part() -> None:
    part, record = local.publish, store.publish_record
    late: list[tuple[Path, Path]] = []

    def keep(temp: Path, final: Path, **options: Any) -> None:
        if final.name.startswith("part-"):
            kept = temp.parent.with_suffix(".late")
            temp.rename(kept)
            late.append((kept, final))
        else:
            part(temp, final, **options)

    def record_first(*arguments: Any) -> None:
        record(*arguments)
        kept, final = late.pop()
        part(kept, final)
        kept.unlink()

    local.publish, store.publish_record = keep, record_first  # type: ignore[assignment]


def nan_check_off() -> None:
    publish._check_vectors = lambda path, table: None


def page_checksums_off() -> None:
    class Trusting(pq.ParquetFile):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "page_checksum_verification": False})

    pq.ParquetFile = Trusting


def errors_swallowed() -> None:
    """`except Exception` around the publication."""
    original = local.publish

    def swallow(*arguments: Any, **options: Any) -> None:
        try:
            original(*arguments, **options)
        except Exception:
            return

    local.publish = swallow


SMALL: dict[str, Callable[[], None]] = {
    mutant.__name__: mutant
    for mutant in (
        no_fsync,
        no_folder_fsync,
        fsync_retried,
        replace_for_link,
        lock_only,
        record_before_part,
        nan_check_off,
        page_checksums_off,
        errors_swallowed,
    )
}


def unsort_skipped() -> None:
    from gte_vectorize.encoder import encoder

    token_batches = encoder.token_batches

    def sorted_rows(*arguments: Any, **options: Any) -> Iterator[TokenBatch]:
        for batch in token_batches(*arguments, **options):
            yield replace(batch, rows=np.sort(batch.rows))

    encoder.token_batches = sorted_rows


def last_batch_dropped() -> None:
    """A loop that forgets what is left over at the end of a window."""
    from gte_vectorize.encoder import encoder

    token_batches = encoder.token_batches

    def all_but_the_last(*arguments: Any, **options: Any) -> Iterator[TokenBatch]:
        held = None
        for batch in token_batches(*arguments, **options):
            if held is not None:
                yield replace(held, last=batch.last)
            held = None if batch.last else batch

    encoder.token_batches = all_but_the_last


def worker_death_swallowed() -> None:
    """The rows that a dead worker held are given up, rather than given to another."""
    from gte_vectorize.tokens.pieces import crashed
    from gte_vectorize.tokens.workers import Share, TokenWorkers

    if not hasattr(TokenWorkers, "_strike"):
        raise AttributeError("the mutant no longer fits TokenWorkers")

    def give_up(self: TokenWorkers, share: Share, cause: str, **_: Any) -> list[Share]:
        self._finish(share.of, share.of.add(crashed(share.window)))
        return []

    TokenWorkers._strike = give_up  # type: ignore[method-assign]


REAL: dict[str, Callable[[], None]] = {
    mutant.__name__: mutant for mutant in (unsort_skipped, last_batch_dropped, worker_death_swallowed)
}

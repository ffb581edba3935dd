"""Output files on a local file system, or one that is mounted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from gte_vectorize.store.files import R, T
from gte_vectorize.store.publish import file_size, make_folder, publish, settle, sha256


class LocalFiles:
    """Files by their paths. The lock in the state folder is all the claim there is to an output."""

    def make_folder(self, folder: Path) -> None:
        make_folder(folder)

    def exists(self, file: Path) -> bool:
        return os.path.lexists(file)

    def size(self, file: Path) -> int | None:
        return file_size(file)

    def sha256(self, file: Path) -> str:
        return sha256(file)

    def read(self, file: Path) -> bytes:
        return file.read_bytes()

    def names(self, folder: Path) -> set[str]:
        return {path.name for path in folder.iterdir()} if os.path.lexists(folder) else set()

    def copy(self, file: Path, folder: Path) -> AbstractContextManager[Path]:
        return nullcontext(file)

    def publish(self, temp: Path, final: Path, *, replace: bool = False) -> None:
        publish(temp, final, replace=replace)

    def remove(self, file: Path) -> None:
        file.unlink(missing_ok=True)

    def settle(self, folder: Path) -> None:
        settle(folder)

    def clear(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        return map(function, items)

    def claim(self, local: Path) -> None:
        return None

    def unsettled(self) -> bool:
        return False

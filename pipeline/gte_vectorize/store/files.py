"""What publication asks of the place where an output's files stand: a local file system, or an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

from gte_vectorize.errors import TemporaryError

T = TypeVar("T")
R = TypeVar("R")


class Damaged(TemporaryError):
    """A file's bytes are not those that were published."""


class Claim(Protocol):
    """A run's hold on an output that other machines may write to as well."""

    def check(self) -> None:
        """TemporaryError: another run has taken the output over."""

    def release(self, *, settled: bool) -> None:
        """`settled`: the output is complete, and nothing is left that it does not need."""


class Files(Protocol):
    """The files of one output; each is named by a path of its `Layout`.

    Every call may raise TemporaryError (running again may help) or OutputError (refused), or the OSError that becomes
    one of them in `storage_errors`.
    """

    def make_folder(self, folder: Path) -> None: ...

    def exists(self, file: Path) -> bool: ...

    def size(self, file: Path) -> int | None:
        """Bytes; None where there is no such file."""

    def sha256(self, file: Path) -> str: ...

    def read(self, file: Path) -> bytes:
        """FileNotFoundError: there is none."""

    def names(self, folder: Path) -> set[str]:
        """What lies in the folder, which may be missing. NotADirectoryError: it is no folder."""

    def copy(self, file: Path, folder: Path) -> AbstractContextManager[Path]:
        """The file under a name that any library can read, below `folder` if need be. Damaged: as it says."""

    def publish(self, temp: Path, final: Path, *, replace: bool = False) -> None:
        """Give the local file `temp` its final name, atomically and for good.

        What stands there already is adopted if its bytes are the same, replaced if `replace`, and else an OutputError.
        """

    def remove(self, file: Path) -> None:
        """The file may be missing."""

    def settle(self, folder: Path) -> None:
        """What was removed in the folder, which may be missing, stays removed, also after a power loss."""

    def clear(self, folder: Path) -> None:
        """Remove all that lies in the folder, as far as that can be done."""

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Like `map`, but it does not wait for one answer before the next question where answers take long."""

    def claim(self, local: Path) -> Claim | None:
        """Take the output for this run, which alone uses the folder `local` of this machine; None if that is enough.

        TemporaryError: another run holds it. OutputError: this place cannot publish exclusively.
        """

    def unsettled(self) -> bool:
        """Whether a run is under way, or died before it had put the output in order."""

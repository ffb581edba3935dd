"""One input as the user gave it → the files it stands for, in a fixed order.

A path that exists is taken literally, a pattern is tried only otherwise. A folder stands for the Parquet files below
it; markers and side files (names that begin with `_` or `.`, other endings) are left out and said to be. A pattern
stands for the Parquet files among its matches if it has any, else for what it matches. What this run itself writes
into a folder or under a pattern is no part of it.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.utils import glob_translate  # type: ignore[import-untyped]
from pyarrow import fs

from gte_vectorize.errors import InputError
from gte_vectorize.reader.convert import is_convertible
from gte_vectorize.reader.storage import is_remote, local_path, open_store, reading
from gte_vectorize.store.layout import Layout


class Listing(NamedTuple):
    """The files that an input stands for (absolute paths or URIs, sorted), and what lay beside them and was left out.

    `named`: the input is one file's own name, rather than a folder or a pattern.
    """

    files: list[str]
    skipped: list[str]
    named: bool = False


def list_files(given: str, layouts: Sequence[Layout] = ()) -> Listing:
    """What `given` stands for; a folder or a pattern without the outputs and states of `layouts`.

    Raises InputError when there is nothing, or for a file of a state.
    """
    if not given:
        raise InputError("an input is empty; name a file, a pattern or a folder")
    try:
        with reading(given, "listing"):
            files, skipped, named = _list_remote(given) if is_remote(given) else _list_local(given, layouts)
    except ValueError as error:  # of the pattern: ** that is not alone between slashes
        raise InputError(f"{given!r}: {error}") from None
    if not files:
        beside = f"; {len(skipped)} other files were left out" if skipped else ""
        raise InputError(
            f"{given!r}: no such file, and no Parquet file in such a folder or pattern{beside}; check the path"
        )
    return Listing(sorted(files), sorted(skipped), named)


def vectors_description(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any] | None:
    """What a Parquet file's metadata say of its vectors; None if it is no output of gte-vectorize."""
    try:
        description = json.loads((metadata or {}).get(b"embeddings", b"null"))
    except ValueError:
        return None
    ours = isinstance(description, dict) and description.get("producer") == "gte-vectorize"
    return description if ours else None


def refuse_repeats(uris: Iterable[str]) -> None:
    """Raise InputError if two of the files are the same one: named twice, or a link to one another."""
    seen: dict[str | tuple[int, int], str] = {}
    for uri in uris:
        if is_remote(uri):
            identity: str | tuple[int, int] = uri
        else:
            with reading(uri):
                status = Path(uri).stat()
            identity = (status.st_dev, status.st_ino)
        if identity in seen:
            raise InputError(f"{uri!r} is the same file as {seen[identity]!r}; give every file once")
        seen[identity] = uri


def _list_local(given: str, layouts: Sequence[Layout]) -> Listing:
    path = local_path(given)
    if path.is_dir():
        return _walk(path, _written(layouts))
    if path.is_symlink() or path.exists():
        for layout in layouts:
            if _is_below(str(path), [os.path.realpath(layout.state)]):
                raise InputError(
                    f"{given!r} belongs to the state of the output {str(layout.output)!r}; name another input"
                )
        return Listing([str(path)], [], named=True)
    if not glob.has_magic(given):
        return Listing([], [])
    # From what was typed: the current folder's own name may look like a pattern.
    folder, pattern = _split(str(path) if "://" in given else given)
    # At the end, ** means the files below, not the folders.
    matches = Path(folder).absolute().glob(f"{pattern}/*" if pattern.endswith("**") else pattern)
    # A folder that looks like a file is refused when it is opened; under ** its files match by themselves.
    names = [str(match) for match in matches if not match.is_dir() or (_is_parquet(match.name) and "**" not in pattern)]
    # Left out before the choice: an output must not turn a pattern for other formats into one for Parquet.
    written = _written(layouts)
    own = [name for name in names if _is_below(name, written)]
    files, skipped = _choose(list(set(names).difference(own)), str(Path(folder).absolute()), pattern)
    return Listing(files, [*skipped, *own])


def _written(layouts: Iterable[Layout]) -> list[str]:
    """Where the run writes: its states, and its outputs. A foreign file at an output's name stays an input, which the
    output is then refused to lie over.
    """
    written = []
    for layout in layouts:
        ours = not layout.single or (layout.output.is_file() and _is_embedded(layout.output))
        written += [layout.state, layout.output] if ours else [layout.state]
    return [os.path.realpath(path) for path in written]


def _is_embedded(file: Path) -> bool:
    try:
        return vectors_description(pq.read_schema(file).metadata) is not None
    except (OSError, pa.ArrowException):
        return False


def _is_below(name: str, folders: Iterable[str]) -> bool:
    """Whether the file, links resolved, is one of `folders` or lies below one."""
    path = os.path.realpath(name)
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def _walk(folder: Path, written: Sequence[str]) -> Listing:
    """The Parquet files below `folder`. Links to folders are not followed: they may lead in circles."""
    files: list[str] = []
    skipped: list[str] = []
    for root, folders, names in os.walk(folder, onerror=_raise):
        own = {name for name in (*folders, *names) if _is_below(f"{root}/{name}", written)}
        kept = [name for name in folders if not (_is_hidden(name) or name in own or Path(root, name).is_symlink())]
        skipped += [str(Path(root, name)) for name in folders if name not in kept]
        folders[:] = kept
        for name in names:
            chosen = _is_parquet(name) and not _is_hidden(name) and name not in own
            (files if chosen else skipped).append(str(Path(root, name)))
    return Listing(files, skipped)


def _raise(error: OSError) -> NoReturn:
    raise error


def _list_remote(given: str) -> Listing:
    store, path = open_store(given)
    scheme, rest = given.split("://", 1)
    # The paths of a bucket store begin with the bucket; those of HDFS do not begin with the host.
    root = f"{scheme.lower()}://{rest.partition('/')[0] if path.startswith('/') else ''}"
    kind = store.get_file_info(path).type
    if kind == fs.FileType.File:
        return Listing([root + path], [], named=True)
    is_folder = kind == fs.FileType.Directory
    if not is_folder and not glob.has_magic(path):
        return Listing([], [])
    folder, pattern = (path, "") if is_folder else _split(path)
    below = store.get_file_info(fs.FileSelector(folder, recursive=True, allow_not_found=True))
    paths = [info.path for info in below if info.type == fs.FileType.File]
    if is_folder:
        files = [name for name in paths if _is_parquet(name) and not _is_hidden_below(name, folder)]
        skipped = list(set(paths).difference(files))
    else:
        match = re.compile(glob_translate(path)).match
        files, skipped = _choose([name for name in paths if match(name)], folder, pattern)
    return Listing([root + name for name in files], [root + name for name in skipped])


def _choose(names: list[str], folder: str, pattern: str) -> tuple[list[str], list[str]]:
    """Which matches of a pattern are meant: none that is hidden, unless the pattern itself says so; Parquet first."""
    hidden_too = any(map(_is_hidden, pattern.split("/")))
    seen = [name for name in names if hidden_too or not _is_hidden_below(name, folder)]
    chosen = [name for name in seen if _is_parquet(name)] or [name for name in seen if is_convertible(name)] or seen
    return chosen, list(set(names).difference(chosen))


def _split(pattern: str) -> tuple[str, str]:
    """The folder before the first component with a wildcard, and the pattern from there on."""
    parts = PurePosixPath(pattern).parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    return str(PurePosixPath(*parts[:fixed])), "/".join(parts[fixed:])


def _is_hidden_below(name: str, folder: str) -> bool:
    return any(map(_is_hidden, PurePosixPath(name).relative_to(folder).parts))


def _is_hidden(name: str) -> bool:
    return name.startswith(("_", "."))


def _is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")

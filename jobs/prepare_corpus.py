"""Folders of .txt, .md, .html, .docx and .pdf files → Parquet shards, which gte-vectorize embeds.

    python jobs/prepare_corpus.py FOLDER... -o CORPUS

CORPUS becomes a folder of `corpus-00000.parquet`, …, one row a file, ordered by id. `_failures.parquet` lists the files
that cannot be read, and why; the underscore hides it from whoever reads the folder as one corpus. Equal folders give
equal bytes. Needs the extra `prepare`.

A document is foreign data: each one is read in a process of its own, with limits on time and memory, so a file that
hangs, bursts or kills its reader costs that file alone; and which files those are does not depend on the others.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, islice, pairwise, permutations
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, NoReturn

import click
import pyarrow as pa
import pyarrow.parquet as pq
from read_document import FORMATS, LIBRARIES, Row, read_apart

GROUP_CHARACTERS = 64 << 20  # of a row group, whatever its number of rows

FAILURES = "_failures.parquet"
FAILURES_SCHEMA = pa.schema({"id": pa.string(), "format": pa.string(), "reason": pa.string()})
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "text": pa.string(),
        "format": pa.string(),
        "title": pa.string(),
        "pages": pa.int32(),
        "bytes": pa.int64(),
        "sha256": pa.string(),
    }
)

PROCESSES = get_context("forkserver")


@dataclass(frozen=True, slots=True)
class File:
    id: str
    path: str

    @property
    def format(self) -> str:
        return FORMATS[Path(self.path).suffix.lower()]


def list_files(folders: Iterable[Path]) -> tuple[list[File], Counter[str]]:
    """The files to read, by id, and how many others there are of each kind.

    An id is the path below its folder; of several folders, with the folder's name in front. Raises UsageError for
    folders that share files or ids, or cannot be listed.
    """
    roots = [folder.resolve() for folder in folders]
    for inner, outer in permutations(roots, 2):
        if inner.is_relative_to(outer):
            raise click.UsageError(f"{str(inner)!r} lies in {str(outer)!r}; give every folder once")
    files: list[File] = []
    skipped: Counter[str] = Counter()
    for root in roots:
        base = root.parent if len(roots) > 1 else root
        for path in _walk(root, skipped):
            name = path.relative_to(base).as_posix().encode("utf-8", "surrogateescape")
            files.append(File(name.decode("utf-8", "backslashreplace"), str(path)))
    files.sort(key=lambda file: file.id)
    for one, other in pairwise(files):
        if one.id == other.id:
            raise click.UsageError(f"{one.path!r} and {other.path!r} would have the same id; rename one of the folders")
    return files, skipped


def _walk(root: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Links are not followed: they lead out of the folder, or to what is read anyway."""
    for folder, folders, names in os.walk(root, onerror=_refuse):
        for name in [*folders, *names]:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            hidden = name.startswith((".", "~$"))  # Word puts ~$NAME beside what it has open
            if hidden or stat.S_ISLNK(mode):
                skipped["hidden" if hidden else "link"] += 1
            elif stat.S_ISREG(mode) and path.suffix.lower() in FORMATS:
                yield path
            elif not stat.S_ISDIR(mode):
                skipped[path.suffix.lower() or "no extension"] += 1
        folders[:] = [name for name in folders if not name.startswith((".", "~$"))]


def _refuse(error: OSError) -> NoReturn:
    raise click.UsageError(f"cannot list {error.filename!r}: {error.strerror}")


class Reading:
    """A process that reads one file; `outcome` is there once `settle` says so."""

    def __init__(self, file: File, encoding: str | None, timeout: float):
        self.file, self.timeout = file, timeout
        self.outcome: Row | str = ""
        self.pipe, theirs = PROCESSES.Pipe(duplex=False)
        self._process = PROCESSES.Process(target=read_apart, args=(theirs, file.path, encoding, timeout), daemon=True)
        self._process.start()
        theirs.close()
        self.deadline = time.monotonic() + timeout

    def settle(self) -> bool:
        """Whether it is over: there is an answer, the process died, or its time is up."""
        try:
            if self.pipe.poll():
                self.outcome = self.pipe.recv()
            elif time.monotonic() < self.deadline:
                return False
            else:
                self.outcome = f"took longer than {self.timeout:g} s to read"
        except (EOFError, OSError):
            self.outcome = "its reader died, probably of a lack of memory"
        self.end()
        return True

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()


def read_all(
    files: Iterable[File], *, workers: int, encoding: str | None, timeout: float
) -> Generator[tuple[File, Row | str], None, None]:
    """Each file with its row or the reason why it has none, in order; `workers` at a time."""
    coming = iter(files)
    running: list[Reading] = []
    ordered: deque[Reading] = deque()
    try:
        while True:
            room = min(workers - len(running), 4 * workers - len(ordered))
            started = [Reading(file, encoding, timeout) for file in islice(coming, room)]
            running += started
            ordered += started
            if not ordered:
                return
            if running:
                soonest = min(reading.deadline for reading in running) - time.monotonic()
                connection.wait([reading.pipe for reading in running], max(0, soonest))
                running = [reading for reading in running if not reading.settle()]
            while ordered and ordered[0] not in running:
                reading = ordered.popleft()
                yield reading.file, reading.outcome
    finally:
        for reading in running:
            reading.end()


def write_shards(rows: Iterator[Row], folder: Path, rows_per_shard: int, rows_per_group: int) -> int:
    """The number of shards; at least one, so that the columns are there."""
    shards = 0
    while (head := list(islice(rows, 1))) or not shards:
        with _parquet(folder / f"corpus-{shards:05}.parquet", SCHEMA) as shard:
            for group in _groups(chain(head, islice(rows, rows_per_shard - 1)), rows_per_group):
                shard.write_table(pa.Table.from_pylist(group, SCHEMA), row_group_size=rows_per_group)
        shards += 1
    return shards


def _groups(rows: Iterable[Row], most: int) -> Iterator[list[Row]]:
    group: list[Row] = []
    characters = 0
    for row in rows:
        group.append(row)
        characters += len(row["text"])
        if len(group) == most or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


@contextmanager
def _parquet(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    with path.open("wb") as sink:
        with pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True) as writer:
            yield writer
        sink.flush()
        os.fsync(sink.fileno())


def prepare(
    folders: Iterable[Path], output: Path, *, rows_per_shard: int, rows_per_group: int, **reading: Any
) -> dict[str, Any]:
    """Write the corpus, which stands under its name once it is whole → how many there are of what."""
    files, skipped = list_files(folders)
    if not files:
        raise click.UsageError(f"no file in the folders ends in {', '.join(FORMATS)}")
    failures: list[Row] = []

    def rows() -> Generator[Row, None, None]:
        with closing(read_all(files, **reading)) as outcomes:
            for file, outcome in outcomes:
                if isinstance(outcome, str):
                    failures.append({"id": file.id, "format": file.format, "reason": outcome})
                else:
                    yield {"id": file.id, **outcome}

    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch,
        closing(rows()) as coming,
    ):
        corpus = Path(scratch, "corpus")
        corpus.mkdir()
        shards = write_shards(coming, corpus, rows_per_shard, rows_per_group)
        with _parquet(corpus / FAILURES, FAILURES_SCHEMA) as table:
            table.write_table(pa.Table.from_pylist(failures, FAILURES_SCHEMA))
        corpus.rename(output)  # an empty folder may be there, nothing else
    return {
        "documents": len(files) - len(failures),
        "failed": len(failures),
        "shards": shards,
        "skipped": dict(sorted(skipped.items())),
    }


def _check_encoding(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    try:
        "".encode(value or "utf-8")
    except LookupError as error:
        raise click.BadParameter(str(error)) from error
    return value


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The corpus: a new folder.")
@click.option("--rows-per-shard", type=click.IntRange(1), default=100_000, help="Documents per Parquet file.")
@click.option("--rows-per-group", type=click.IntRange(1), default=1_000, help="Documents per row group, at most.")
@click.option("--encoding", callback=_check_encoding, help="Of texts not in UTF-8 that do not say theirs, not guessed.")
@click.option("--workers", type=click.IntRange(1), help="Files to read at a time.  [default: one per core]")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=120.0, help="Seconds per file.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as one JSON object on stdout.")
def main(
    folders: tuple[Path, ...],
    output: Path,
    rows_per_shard: int,
    rows_per_group: int,
    encoding: str | None,
    workers: int | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Write the texts of all .txt, .md, .html, .docx and .pdf files below FOLDERS to Parquet.

    The id of a document is its path below its folder; of several folders, with the folder's name in front. Exit codes:
    0 done; 2 refused before any work; 3 done, and some files could not be read: _failures.parquet says why.
    """
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise click.UsageError(f"{str(output)!r} is in the way; name another output, or remove it")
    try:
        for library in LIBRARIES:
            import_module(library)
    except ImportError as error:
        raise click.UsageError(f"{error}; install them all: pip install 'gte-vectorize[prepare]'") from error
    # What a reader imports, its main module included, is loaded once, before it is forked off.
    PROCESSES.set_forkserver_preload([*LIBRARIES, "click", "multiprocessing.connection", "pyarrow.parquet"])
    counts = prepare(
        folders,
        output,
        rows_per_shard=rows_per_shard,
        rows_per_group=rows_per_group,
        workers=workers or len(os.sched_getaffinity(0)),
        encoding=encoding,
        timeout=timeout,
    )
    skipped = ", ".join(f"{number} {kind}" for kind, number in counts["skipped"].items())
    click.echo(
        f"{counts['documents']} documents in {counts['shards']} shards of {str(output)!r}; {counts['failed']} failed; "
        f"skipped: {skipped or 'none'}",
        err=True,
    )
    if as_json:
        click.echo(json.dumps(counts, ensure_ascii=False))
    sys.exit(3 if counts["failed"] else 0)


if __name__ == "__main__":
    main()

"""The parts of a single-file output, row group by row group, in one file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from gte_vectorize.errors import TemporaryError
from gte_vectorize.failpoint import failpoint
from gte_vectorize.store.files import Damaged, Files
from gte_vectorize.store.publish import Content, read_tables, sha256
from gte_vectorize.writer.part import create_file, parquet_writer, storage_errors


def assemble(files: Files, parts: Iterable[tuple[Path, Content]], file: Path, schema: pa.Schema) -> None:
    """Write the new local file `file` from `parts` of the output, in their order. Memory: a few row groups.

    Equal parts give equal bytes. Leaving by an exception leaves a file that must be thrown away. TemporaryError: the
    storage failed, or a part is no longer what its record says; it is removed, so that the next run makes it anew.
    """
    with storage_errors(file), create_file(file) as sink, parquet_writer(sink, schema) as writer:
        for part, content in parts:
            for table in _row_groups(files, part, content, file.parent):
                failpoint("assemble.write")
                writer.write_table(table, row_group_size=table.num_rows)


def _row_groups(files: Files, part: Path, content: Content, folder: Path) -> Iterator[pa.Table]:
    try:
        with files.copy(part, folder) as path:
            # Page checksums leave page headers and the footer out.
            if sha256(path) != content.sha256:
                raise Damaged(f"{str(part)!r} has other bytes than its record says")
            for table in read_tables(path):
                if table.num_rows:
                    yield table.combine_chunks()
    except Damaged as error:
        files.remove(part)
        raise TemporaryError(
            f"{str(part)!r} was damaged after it was written and is removed; run the same command again to make it anew"
        ) from error

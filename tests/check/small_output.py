"""Small outputs to damage: of made-up unit vectors, or of a tiny model, and forgeries whose checksums are right."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from encoder.tiny import save_tiny
from store import small_run

from gte_vectorize.batch import Shard
from gte_vectorize.check.part import check_file
from gte_vectorize.check.reembed import reembed
from gte_vectorize.check.verify import Verification, files_of, verify
from gte_vectorize.store.inspect import find_output, read_papers
from gte_vectorize.store.manifest import publish_file_manifest, publish_manifest, unpublish_manifest
from gte_vectorize.store.record import publish_record
from gte_vectorize.writer.part import parquet_writer

OUTPUTS = ["out", "out.parquet"]
SHARDS = (Shard("/corpus/a.parquet", 1000, 1, (8, 8)), Shard("/corpus/b.parquet", 0, 2, (8,)))
"""Two tasks, and so two parts: of 16 and of 8 rows."""

ROWS = 40
TASK_ROWS = 8


def unit_windows(*arguments: Any, **options: Any) -> Iterator[Any]:
    for encoded, columns in _windows(*arguments, **options):
        norms = np.linalg.norm(encoded.vectors, axis=1, keepdims=True)
        encoded.vectors[:] /= np.where(norms, norms, 1)
        yield encoded, columns


_windows = small_run.windows


def write_corpus(folder: Path) -> Path:
    """40 rows in the column `text`, of many lengths; one text is null, one blank."""
    texts: list[str | None] = [" ".join(f"w{(row * 7 + at) % 190}" for at in range(1 + row % 9)) for row in range(ROWS)]
    texts[3], texts[21] = None, "  "
    pq.write_table(pa.table({"id": list(range(ROWS)), "text": texts}), folder / "corpus.parquet")
    return folder / "corpus.parquet"


def write_long_corpus(folder: Path) -> Path:
    """24 rows in the column `text`: every third has three words but row 9 has 600; row 4 has none, 22 is null."""
    words = [3 if row % 3 == 0 else 20 + 9 * (row % 7) for row in range(24)]
    words[9] = 600
    texts: list[str | None] = [
        " ".join(f"w{(row * 31 + at * 7) % 190}" for at in range(n)) for row, n in enumerate(words)
    ]
    texts[4], texts[22] = " ", None
    pq.write_table(pa.table({"id": list(range(24)), "text": texts}), folder / "corpus.parquet")
    return folder / "corpus.parquet"


def embed(folder: Path, output: str, **options: Any) -> Path:
    """The output `folder/output` of a run of a tiny model."""
    from gte_vectorize import vectorize

    model = folder / "model"
    if not model.exists():
        save_tiny(model, "bert")
    corpus = folder / "corpus.parquet"
    vectorize(
        corpus if corpus.exists() else write_corpus(folder),
        folder / output,
        **{"model": model, "task_rows": TASK_ROWS, **options},
    )
    return folder / output


def copy_outputs(source: Path, folder: Path, outputs: Sequence[str] = OUTPUTS) -> Path:
    """The outputs, to be damaged; their corpus stays where it is, and a link leads to their model."""
    for output in outputs:
        for path in (source / output, source / f".{output}.state"):
            if path.exists():
                (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    (folder / "model").symlink_to(source / "model")
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, the lock and the model's aside."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_below(folder)}


def files_below(folder: Path) -> list[Path]:
    skipped = ("lock", "corpus.parquet")
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in skipped and "model" not in path.parts
    ]


def flip(path: Path, bit: int) -> bytes:
    """Turn one bit of the file over → the bytes before."""
    before = path.read_bytes()
    data = bytearray(before)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return before


def forge(output: Path, change: Callable[[pa.Table], pa.Table], *, task: int = 0) -> None:
    """Write the file of a task anew with other rows, and make its record, the manifest and _SUCCESS fit."""
    layout, papers = find_output(output), read_papers(find_output(output))
    plan = papers.plan
    assert plan is not None
    files = list(files_of(layout, plan, is_finished=True))
    path, tasks = files[0 if layout.single else task]
    table = pq.read_table(path)
    changed = change(table)
    path.unlink()
    with path.open("xb") as sink, parquet_writer(sink, changed.schema) as writer:
        writer.write_table(changed.combine_chunks())
    content = check_file(path, path.name, tasks, plan.schema).content()
    unpublish_manifest(layout)
    if layout.single:
        publish_file_manifest(layout, plan, content)
    else:
        layout.record(task).unlink()
        publish_record(layout, plan, tasks[0], content)
        publish_manifest(layout, plan, papers.records | {task: content})
    layout.tmp.rmdir()


def again(output: Path, rate: Fraction = Fraction(1), model: Path | None = None) -> Verification:
    """A share of the rows embedded again, of an output that is sound as far as checksums tell."""
    found = verify(output)
    assert found.differences == []
    reembed(found, rate, model=str(model or output.parent / "model"), device="cpu")
    return found


def rows_of(found: Verification) -> dict[str, list[int]]:
    """Rows of the input by what is wrong with them."""
    rows: dict[str, list[int]] = {}
    for item in found.differences:
        assert item.first_row is not None
        assert item.num_rows is not None
        rows.setdefault(item.what.partition(" (")[0], []).extend(range(item.first_row, item.first_row + item.num_rows))
    return {what: sorted(of_what) for what, of_what in rows.items()}


def with_vectors(change: Callable[[np.ndarray[Any, Any]], None]) -> Callable[[pa.Table], pa.Table]:
    """A change of the vectors: float32[rows, dim], in place; those of rows without one are zeros, and stay null."""

    def changed(table: pa.Table) -> pa.Table:
        column = table["embedding"].combine_chunks()
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        vectors = np.zeros((len(column), column.type.list_size), np.float32)
        vectors[valid] = column.drop_null().flatten().to_numpy().reshape(-1, vectors.shape[1])
        change(vectors)
        array = pa.FixedSizeListArray.from_arrays(vectors.reshape(-1), type=column.type, mask=pa.array(~valid))
        return with_column(table, "embedding", array)

    return changed


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))

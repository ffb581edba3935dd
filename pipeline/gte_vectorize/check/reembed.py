"""Is each vector its own text's? A sample of rows is read, tokenized and embedded again, among other neighbours.

On the same kind of device and versions of the libraries, a packed encoder must give the same bits; anywhere else, the
same direction. This finds what no checksum can: rows that were exchanged, and arithmetic that went wrong.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import version
from math import ceil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gte_vectorize.batch import Bool, EncodedWindow, Passages, Shard, Status, Task, Window
from gte_vectorize.check.difference import Ranges
from gte_vectorize.check.restore import restore_config
from gte_vectorize.check.verify import Verification, name_of
from gte_vectorize.encoder.encoder import batches_for, describe_device, open_encoder, resolve_device, resolve_dtype
from gte_vectorize.errors import InputError, ModelError
from gte_vectorize.job import load_job_model
from gte_vectorize.reader.rows import RowCursor
from gte_vectorize.store.plan import Plan
from gte_vectorize.tokens.passages import read_passages
from gte_vectorize.tokens.pieces import join
from gte_vectorize.tokens.tokenizer import TextTokenizer
from gte_vectorize.writer.schema import ADDED_COLUMNS

LEAST_COSINE = 0.9999
MIXED_ROWS = 4096

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows that were drawn.

    task, row  int64[n]   the task of each, and its row within the task
    stored     the added columns, as the output holds them
    passages   the texts, read and tokenized anew
    """

    task: Rows
    row: Rows
    stored: pa.Table
    passages: Passages

    def pick(self, rows: Rows) -> Sample:
        lengths = self.passages.lengths
        ends = np.cumsum(lengths, dtype=np.int64)
        ids = [self.passages.ids[ends[row] - lengths[row] : ends[row]] for row in rows.tolist()]
        passages = Passages(
            window=_window(len(rows)),
            ids=np.concatenate(ids),
            lengths=lengths[rows],
            status=self.passages.status[rows],
            truncated=self.passages.truncated[rows],
            text_hash=self.passages.text_hash[rows],
        )
        return Sample(self.task[rows], self.row[rows], self.stored.take(rows), passages)


def reembed(found: Verification, rate: Fraction, *, model: str | None, device: str) -> None:
    """Embed a share of the rows again, at least one, always the same ones, and add what differs to `found`.

    Left out are rows of broken files, of inputs that are gone, and those that no process can be trusted with. Raises
    ModelError for another model than the output's, InputError where no input is left as it was.
    """
    plan, config = found.plan, restore_config(found, model)
    if plan is None or config is None:
        found.notes.append("nothing was embedded again: no file can be read")
        return
    files = list(found.sound_files())
    uris = {task.shard.uri for _, tasks in files for task in tasks if task.num_rows}
    if uris and uris <= found.gone_inputs:
        raise InputError("no input is there as it was, so nothing can be embedded again; run without --reembed")
    spec, device = load_job_model(config), resolve_device(device)
    if spec.fingerprint(dtype=config.dtype) != plan.fingerprint:
        raise ModelError(
            f"the output was made with {plan.fingerprint_fields['model']!r}, and {spec.name!r} is not the same; "
            "say where the right model is with --model"
        )
    exact = spec.layout == "packed" and _is_alike(plan, device)
    dtype = resolve_dtype(config.dtype if device == "cuda" else "auto", device)
    pending: deque[Sample] = deque()
    wrong: dict[tuple[int, str], list[int]] = defaultdict(list)
    samples = _samples(found, files, rate, config.text_column, TextTokenizer(spec.tokenizer))
    with open_encoder(spec, device=device, dtype=dtype, graphs=False) as encoder:
        for encoded in encoder.stream(batches_for(encoder, _mixed(samples, pending))):
            sample = pending.popleft()
            found.reembedded += len(sample.row)
            for bad, what in _problems(encoded, sample.stored, exact):
                for at in np.flatnonzero(bad).tolist():
                    wrong[int(sample.task[at]), what].append(int(sample.row[at]))
    for (index, what), rows in sorted(wrong.items()):
        path = found.layout.output if found.layout.single and found.finished else found.layout.part(index)
        ranges = Ranges()
        ranges.add(np.sort(rows))
        found.differences += ranges.differences(name_of(path, found.layout), what, plan.tasks[index])


def _is_alike(plan: Plan, device: str) -> bool:
    """Whether what computes here is what computed the output."""
    here = {"device": describe_device(device)} | {name: version(name) for name in ("torch", "tokenizers")}
    return all(plan.compute.get(name) == value for name, value in here.items())


def _samples(
    found: Verification, files: Iterable[tuple[Path, list[Task]]], rate: Fraction, column: str, tokenizer: TextTokenizer
) -> Iterator[Sample]:
    """The rows drawn, in order, as pieces of one task each. A piece holds no text."""
    seed = int(found.plan.sha256[:16], 16) if found.plan else 0
    left = Fraction(0)  # of a row: what was drawn more than the rate asks for
    with ExitStack() as open_shard:
        cursor, uri = None, None
        for path, tasks in files:
            first = 0
            for task in tasks:
                start, first = first, first + task.num_rows
                if task.shard.uri in found.gone_inputs:
                    continue
                count = ceil(task.num_rows * rate - left)
                left += count - task.num_rows * rate
                drawn = np.sort(np.random.default_rng([seed, task.index]).choice(task.num_rows, count, replace=False))
                for at in range(0, count, MIXED_ROWS):
                    if uri != task.shard.uri:
                        open_shard.close()
                        uri, cursor = task.shard.uri, open_shard.enter_context(RowCursor(task.shard.uri, [column]))
                    rows = drawn[at : at + MIXED_ROWS]
                    stored = _stored(path, start + rows)
                    # Such a document has killed the processes that tokenized it.
                    calm = np.flatnonzero(stored["status"].to_numpy() != "crash")
                    if cursor is not None and len(calm):
                        yield _read(task, rows[calm], stored.take(calm), cursor, tokenizer)


def _read(task: Task, rows: Rows, stored: pa.Table, cursor: RowCursor, tokenizer: TextTokenizer) -> Sample:
    batches = (batch for row in rows.tolist() for batch in cursor.read(task.first_row + row, 1))
    passages = read_passages(Window(task, task.first_row, len(rows)), batches, tokenizer)
    return Sample(np.full(len(rows), task.index), rows, stored, passages)


def _stored(path: Path, rows: Rows) -> pa.Table:
    """The added columns of rows of a file, ascending. Memory: a row group of these columns."""
    picked, first = [], 0
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        for group in range(file.num_row_groups):
            end = first + file.metadata.row_group(group).num_rows
            here = rows[(rows >= first) & (rows < end)] - first
            if len(here):
                picked.append(file.read_row_group(group, columns=list(ADDED_COLUMNS)).take(here))
            first = end
    return pa.concat_tables(picked)


def _mixed(samples: Iterable[Sample], pending: deque[Sample]) -> Iterator[Passages]:
    """Shuffled and dealt into two windows or more, so that rows meet others than in the run; `pending` gets each."""
    rng = np.random.default_rng(0)
    for together in _gathered(samples):
        joined = _join(together)
        order = rng.permutation(len(joined.row))
        for rows in np.array_split(order, 2):
            if len(rows):
                pending.append(joined.pick(rows))
                yield pending[-1].passages


def _gathered(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Pieces together, so that a batch is filled."""
    together: list[Sample] = []
    for sample in samples:
        together.append(sample)
        if sum(len(piece.row) for piece in together) >= MIXED_ROWS:
            yield together
            together = []
    if together:
        yield together


def _join(samples: list[Sample]) -> Sample:
    parts = [sample.passages for sample in samples]
    passages = join(_window(sum(len(part.lengths) for part in parts)), parts)
    tasks, rows = (np.concatenate([getattr(sample, name) for sample in samples]) for name in ("task", "row"))
    return Sample(tasks, rows, pa.concat_tables([sample.stored for sample in samples]), passages)


def _window(rows: int) -> Window:
    return Window(Task(0, Shard("sample", 0, 0, (rows,)), 0, rows), 0, rows)


def _problems(encoded: EncodedWindow, stored: pa.Table, exact: bool) -> Iterator[tuple[Bool, str]]:
    passages = encoded.passages
    status = np.array([Status(value).name.lower() for value in encoded.status])
    hashes = np.array([row.tobytes().hex() for row in passages.text_hash])
    names, kept = (stored[name].to_numpy() for name in ("status", "text_hash"))
    yield (passages.status != Status.NULL) & (kept != hashes), "has the text_hash of another text"
    yield names != status, "has another status than its text gives"
    counts = (stored["n_tokens"].to_numpy() == passages.lengths) & (
        stored["truncated"].to_numpy() == passages.truncated
    )
    yield ~counts, "counts other tokens than its text has"
    both = (names == "ok") & (status == "ok")
    vectors = stored["embedding"].combine_chunks().drop_null()
    before = np.zeros_like(encoded.vectors)
    before[names == "ok"] = vectors.flatten().to_numpy(zero_copy_only=False).reshape(-1, before.shape[1])
    if exact:
        same = (before.view(np.uint32) == encoded.vectors.view(np.uint32)).all(axis=1)
    else:
        same = np.einsum("ij,ij->i", before.astype(np.float64), encoded.vectors.astype(np.float64)) >= LEAST_COSINE
    yield both & ~same, f"has a vector that its text does not give ({'bits' if exact else 'cosine'})"

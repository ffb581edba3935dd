"""The nightly run: `--reuse` takes the vectors of unchanged texts, and the bytes are those of a full run."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import VOCABULARY, save_tiny

from gte_vectorize import LimitExceeded, OutputError, vectorize
from gte_vectorize.progress import Progress
from gte_vectorize.report import Report
from gte_vectorize.tokens import workers
from gte_vectorize.tokens.process import Setup, WorkerProcess
from gte_vectorize.tokens.share import Share

ROWS = 1200
CHANGED = 12
Rows = list[tuple[int, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "bert")


def words(count: int, rng: random.Random) -> str:
    return " ".join(f"w{rng.randrange(VOCABULARY - 4)}" for _ in range(count))


@pytest.fixture(scope="module")
def first_night() -> Rows:
    """Short and long documents, texts that occur twice, rows without a usable text."""
    rng = random.Random(1)
    rows: Rows = [(row, words(rng.choice((3, 10, 40, 200)), rng)) for row in range(ROWS)]
    rows[7:10] = [(7, None), (8, " \n"), (9, b"\xff\xfe")]
    return rows + [(ROWS + twin, text) for twin, (_, text) in enumerate(rows[100:160])]


@pytest.fixture(scope="module")
def second_night(first_night: Rows) -> Rows:
    """1 % has changed, some rows are gone, some are new, and all have moved."""
    rng = random.Random(2)
    rows = list(first_night)
    for place in rng.sample(range(200, len(rows)), CHANGED):
        rows[place] = (rows[place][0], words(60, rng))
    del rows[300:330]
    rng.shuffle(rows)
    return rows


def write(folder: Path, rows: Rows, files: int, group: int) -> list[str]:
    """The rows in that many files, with row groups of `group` rows."""
    folder.mkdir()
    names = []
    for number, part in enumerate(np.array_split(np.arange(len(rows)), files)):
        ids, texts = zip(*(rows[row] for row in part), strict=True)
        raw = [text.encode() if isinstance(text, str) else text for text in texts]
        table = pa.table({"id": pa.array(ids), "text": pa.array(raw, pa.binary())})
        names.append(str(folder / f"shard-{number}.parquet"))
        pq.write_table(table, names[-1], row_group_size=group)
    return names


def embed(inputs: list[str], output: Path, model: Path, **options: Any) -> Report:
    options = {"task_rows": 250, "workers": 1, "max_bad_rows": "1%", **options}
    return vectorize(inputs, output, model=model, **options)


def files_of(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(output.glob("part-*.parquet"))}


@pytest.mark.parametrize("long", ["truncate", "windows", "mean", "both"])
def test_the_second_night_computes_what_changed(
    tmp_path: Path, model: Path, first_night: Rows, second_night: Rows, long: str
) -> None:
    """Other tasks, row groups and columns than on the first one."""
    embed(write(tmp_path / "one", first_night, 3, 90), tmp_path / "v1", model, long=long, task_rows=333)
    two = write(tmp_path / "two", second_night, 2, 400)
    full = embed(two, tmp_path / "full", model, long=long, keep_text=True)
    again = embed(two, tmp_path / "v2", model, long=long, keep_text=True, reuse=str(tmp_path / "v1"))
    assert files_of(tmp_path / "v2") == files_of(tmp_path / "full")
    if long == "both":
        assert files_of(tmp_path / "v2.documents") == files_of(tmp_path / "full.documents")
    assert again.computed_tokens * 20 <= full.computed_tokens
    assert (again.rows, again.tokens, again.status) == (full.rows, full.tokens, full.status)
    assert again.reused >= len(second_night) - CHANGED - 3


def test_a_single_file_is_reused_like_a_folder_and_the_other_way(
    tmp_path: Path, model: Path, first_night: Rows, second_night: Rows
) -> None:
    one, two = write(tmp_path / "one", first_night, 1, 500), write(tmp_path / "two", second_night, 1, 500)
    embed(one, tmp_path / "v1.parquet", model)
    embed(two, tmp_path / "v2", model, reuse=tmp_path / "v1.parquet")
    embed(two, tmp_path / "v3.parquet", model, reuse=str(tmp_path / "v2"))
    embed(two, tmp_path / "full.parquet", model)
    assert (tmp_path / "v3.parquet").read_bytes() == (tmp_path / "full.parquet").read_bytes()


def test_an_unchanged_corpus_needs_no_token(tmp_path: Path, model: Path, first_night: Rows) -> None:
    usable = [row for row in first_night if isinstance(row[1], str) and row[1].strip()]
    one = write(tmp_path / "one", usable, 1, 500)
    embed(one, tmp_path / "v1.parquet", model, long="windows")
    report = embed(one, tmp_path / "v2.parquet", model, long="windows", reuse=str(tmp_path / "v1.parquet"))
    assert (report.computed_tokens, report.reused) == (0, report.rows)
    assert (tmp_path / "v2.parquet").read_bytes() == (tmp_path / "v1.parquet").read_bytes()


@pytest.mark.parametrize(("begun", "ended"), [("v1", "v1"), ("v1", None), (None, "v1")])
def test_an_interrupted_night_goes_on_with_or_without_the_other(
    tmp_path: Path, model: Path, first_night: Rows, second_night: Rows, begun: str | None, ended: str | None
) -> None:
    def stop(progress: Progress) -> None:
        if progress.done_rows > 600:
            raise KeyboardInterrupt

    embed(write(tmp_path / "one", first_night, 1, 500), tmp_path / "v1", model)
    two = write(tmp_path / "two", second_night, 1, 500)
    embed(two, tmp_path / "full", model)
    with pytest.raises(KeyboardInterrupt):
        embed(two, tmp_path / "v2", model, reuse=begun and tmp_path / begun, on_progress=stop)
    embed(two, tmp_path / "v2", model, reuse=ended and tmp_path / ended)
    assert files_of(tmp_path / "v2") == files_of(tmp_path / "full")
    assert not (tmp_path / "v2/_gte_vectorize/tmp").exists()


def test_a_worker_that_takes_over_knows_the_other_too(
    tmp_path: Path, model: Path, first_night: Rows, second_night: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[WorkerProcess] = []

    class Mortal(WorkerProcess):
        """The first one dies of its third window."""

        def __init__(self, setup: Setup) -> None:
            started.append(self)
            self.windows = 0
            super().__init__(setup)

        def give(self, share: Share) -> None:
            super().give(share)
            self.windows += 1
            if self is started[0] and self.windows == 3:
                self._process.kill()

    embed(write(tmp_path / "one", first_night, 1, 500), tmp_path / "v1", model)
    two = write(tmp_path / "two", second_night, 1, 500)
    embed(two, tmp_path / "full", model)
    monkeypatch.setattr(workers, "WorkerProcess", Mortal)
    report = embed(two, tmp_path / "v2", model, reuse=str(tmp_path / "v1"))
    assert len(started) > 1
    assert report.reused >= len(second_night) - CHANGED - 3
    assert files_of(tmp_path / "v2") == files_of(tmp_path / "full")


def test_a_finished_night_does_not_ask_for_the_other(tmp_path: Path, model: Path, first_night: Rows) -> None:
    one = write(tmp_path / "one", first_night[:50], 1, 500)
    embed(one, tmp_path / "v1", model)
    embed(one, tmp_path / "v2", model, reuse=str(tmp_path / "v1"))
    shutil.rmtree(tmp_path / "v1")
    assert embed(one, tmp_path / "v2", model, reuse=str(tmp_path / "v1")).computed_tokens == 0


def test_what_has_no_vector_is_tried_again(tmp_path: Path, model: Path, first_night: Rows) -> None:
    """A failed row counts against the limit of every run, whatever an earlier one let pass."""
    one = write(tmp_path / "one", first_night, 1, 500)
    report = embed(one, tmp_path / "v1", model)
    assert report.status["utf8"] == 1
    with pytest.raises(LimitExceeded):
        embed(one, tmp_path / "v2", model, reuse=str(tmp_path / "v1"), max_bad_rows="0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 24}, "max_length: was 48, now 24"),
        ({"long": "windows"}, "long_documents: was 'truncate', now"),
        ({"prompt": "w1 "}, "prompt: was '', now 'w1 '"),
    ],
)
def test_other_vectors_are_not_mixed_in(
    tmp_path: Path, model: Path, first_night: Rows, options: dict[str, Any], message: str
) -> None:
    one = write(tmp_path / "one", first_night[:50], 1, 500)
    embed(one, tmp_path / "v1", model)
    with pytest.raises(OutputError, match="holds other vectors") as caught:
        embed(one, tmp_path / "v2", model, reuse=str(tmp_path / "v1"), **options)
    assert message in str(caught.value)
    assert not (tmp_path / "v2").exists()


def test_the_output_itself_cannot_be_reused(tmp_path: Path, model: Path, first_night: Rows) -> None:
    one = write(tmp_path / "one", first_night[:50], 1, 500)
    embed(one, tmp_path / "v1", model)
    before = files_of(tmp_path / "v1")
    with pytest.raises(OutputError, match="write to another output"):
        embed(one, tmp_path / "v1", model, reuse=str(tmp_path / "v1"), overwrite=True, max_length=24)
    assert files_of(tmp_path / "v1") == before


def test_nor_can_the_one_of_both_that_is_overwritten(tmp_path: Path, model: Path, first_night: Rows) -> None:
    one = write(tmp_path / "one", first_night[:50], 1, 500)
    embed(one, tmp_path / "v1.documents", model, long="windows")
    before = files_of(tmp_path / "v1.documents")
    with pytest.raises(OutputError, match="write to another output"):
        embed(one, tmp_path / "v1", model, long="both", reuse=str(tmp_path / "v1.documents"), overwrite=True)
    assert files_of(tmp_path / "v1.documents") == before
    assert not (tmp_path / "v1").exists()


def test_an_output_whose_state_cannot_be_read_is_refused(tmp_path: Path, model: Path, first_night: Rows) -> None:
    one = write(tmp_path / "one", first_night[:50], 1, 500)
    embed(one, tmp_path / "v1", model)
    (tmp_path / "v2/_manifest.json").mkdir(parents=True)
    (tmp_path / "v2/_gte_vectorize").mkdir()
    shutil.copy(tmp_path / "v1/_gte_vectorize/plan.json", tmp_path / "v2/_gte_vectorize")
    with pytest.raises(OutputError, match="Is a directory"):
        embed(one, tmp_path / "v2", model, reuse=str(tmp_path / "v1"))

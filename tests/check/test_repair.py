"""Damage of real outputs, repaired: the bytes are those of the undisturbed run, and nothing else was touched."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock
from small_output import OUTPUTS, ROWS, TASK_ROWS, embed, files_below, flip, forge, tree, with_vectors

import gte_vectorize.run
from gte_vectorize import InputError, ModelError, OutputError, vectorize
from gte_vectorize.check import repair as room
from gte_vectorize.check.repair import repair
from gte_vectorize.errors import TemporaryError, VerificationFailed

PART = "out/part-000002.parquet"
RECORD = "out/_gte_vectorize/records/000002.json"


def embed_again(folder: Path, output: str, whole: Path) -> None:
    """The output's own command, once more."""
    vectorize(whole / "corpus.parquet", folder / output, model=folder / "model", task_rows=TASK_ROWS)


def mended(folder: Path, output: str = "out") -> None:
    found = repair(folder / output, model=str(folder / "model"))
    assert (found.state, found.differences) == ("finished", [])


def places(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in files_below(folder)}


@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "not a number"])
def test_a_damaged_part_is_made_again_and_no_other(folder, how):
    whole, before = tree(folder), places(folder)
    part = folder / PART
    if how == "flipped":
        flip(part, 1000)
    elif how == "cut":
        part.write_bytes(part.read_bytes()[:-100])
    elif how == "gone":
        part.unlink()
    else:
        forge(folder / "out", with_vectors(lambda vectors: vectors.fill(float("nan"))), task=2)
    mended(folder)
    assert tree(folder) == whole
    after = places(folder)
    assert {path for path in before if after[path] != before[path]} <= {
        folder / name for name in (PART, RECORD, "out/_manifest.json", "out/_SUCCESS")
    }


@pytest.mark.parametrize(
    ("file", "how"),
    [
        (RECORD, "flipped"),
        (RECORD, "gone"),
        ("out/_manifest.json", "flipped"),
        ("out/_manifest.json", "gone"),
        ("out/_SUCCESS", "flipped"),
    ],
)
def test_a_damaged_small_file_is_written_again_without_the_model(folder, file, how, monkeypatch):
    whole, before = tree(folder), places(folder)
    path = folder / file
    flip(path, 8 * 30) if how == "flipped" else path.unlink()
    monkeypatch.delattr(gte_vectorize.run, "run")
    found = repair(folder / "out")
    assert (found.state, found.differences) == ("finished", [])
    assert tree(folder) == whole
    assert {path: place for path, place in places(folder).items() if path.name.startswith("part")} == {
        path: place for path, place in before.items() if path.name.startswith("part")
    }


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_damaged_single_file_is_made_again(folder, whole, how):
    before = tree(folder)
    flip(folder / "out.parquet", 1000) if how == "flipped" else (folder / "out.parquet").unlink()
    if how == "gone":  # and with it what says which options were given
        with pytest.raises(TemporaryError, match="run the original command again"):
            repair(folder / "out.parquet", model=str(folder / "model"))
        embed_again(folder, "out.parquet", whole)
    else:
        mended(folder, "out.parquet")
    assert tree(folder) == before


def test_a_damaged_manifest_of_a_single_file_is_written_again(folder):
    whole, before = tree(folder), places(folder)
    flip(folder / ".out.parquet.state/manifest.json", 8 * 20)
    found = repair(folder / "out.parquet")
    assert (found.differences, tree(folder)) == ([], whole)
    assert places(folder)[folder / "out.parquet"] == before[folder / "out.parquet"]
    assert not (folder / ".out.parquet.state/tmp").exists()


def test_a_file_that_no_manifest_claims_is_not_removed(folder):
    (folder / ".out.parquet.state/manifest.json").unlink()
    whole = tree(folder)
    with pytest.raises(VerificationFailed, match="move the file away"):
        repair(folder / "out.parquet", model=str(folder / "model"))
    assert tree(folder) == whole


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 6, "prompt": "w7 w8 ", "pooling": "max", "columns": []},
        {"prompt_name": "it's", "keep_text": True},
        {"max_bad_rows": "50%"},
    ],
)
def test_options_are_taken_from_the_output(tmp_path, options):
    embed(tmp_path, "first")
    (tmp_path / "model/config_sentence_transformers.json").write_text(json.dumps({"prompts": {"it's": "w9 "}}))
    if "max_bad_rows" in options:
        texts = pa.array([b"w1", b"\xff", b"w2", b"\xfe"] * 5).view(pa.string())
        pq.write_table(pa.table({"text": texts}), tmp_path / "corpus.parquet")
    embed(tmp_path, "out", **options)
    whole = tree(tmp_path / "out")
    flip(tmp_path / "out/part-000001.parquet", 1000)
    mended(tmp_path)
    assert tree(tmp_path / "out") == whole


def test_a_converted_input_is_found_again(tmp_path, whole):
    (tmp_path / "model").symlink_to(whole / "model")
    lines = tmp_path / "corpus.jsonl"
    lines.write_text("".join(json.dumps({"text": f"w{row} w{row + 1}"}) + "\n" for row in range(ROWS)))
    vectorize(lines, tmp_path / "out", model=tmp_path / "model", task_rows=TASK_ROWS)
    before = tree(tmp_path)
    (tmp_path / PART).unlink()
    mended(tmp_path)
    assert tree(tmp_path) == before


def test_a_whole_output_is_left_alone(folder):
    before = places(folder)
    assert repair(folder / "out").differences == []
    assert places(folder) == before


def test_of_an_unfinished_output_what_is_damaged_is_removed(folder, whole):
    before = tree(folder)
    for name in ("out/_SUCCESS", "out/_manifest.json", "out/part-000004.parquet", f"{RECORD[:-6]}4.json"):
        (folder / name).unlink()
    flip(folder / PART, 1000)
    with pytest.raises(TemporaryError, match="run the original command again"):
        repair(folder / "out")
    assert not (folder / PART).exists()
    assert not (folder / RECORD).exists()
    embed_again(folder, "out", whole)
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("output", "step"),
    [
        *((output, step) for output in OUTPUTS for step in ("forget", "unpublish_manifest")),
        ("out", "publish_record"),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_repair_that_is_stopped_leaves_what_a_run_takes_up(folder, whole, output, step, before, monkeypatch):
    bytes_before = tree(folder)
    flip(folder / (PART if output == "out" else output), 1000)
    if output == "out":
        flip(folder / RECORD.replace("2", "1"), 8 * 30)
    original = getattr(room, step)

    def stop(*arguments):
        if not before:
            original(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(room, step, stop)
    with pytest.raises(KeyboardInterrupt):
        repair(folder / output, model=str(folder / "model"))
    monkeypatch.undo()
    if step == "forget" and before:  # nothing has happened yet
        repair(folder / output, model=str(folder / "model"))
    embed_again(folder, output, whole)
    assert tree(folder) == bytes_before


@pytest.mark.parametrize("why", ["input", "model", "software", "running"])
def test_nothing_is_removed_that_cannot_be_made_again(folder, whole, why, monkeypatch):
    flip(folder / PART, 1000)
    before, model = tree(folder), str(folder / "model")
    if why == "input":
        corpus = whole / "corpus.parquet"
        corpus.rename(whole / "aside")
        with pytest.raises(InputError, match=r"corpus\.parquet"):
            repair(folder / "out", model=model)
        (whole / "aside").rename(corpus)
    elif why == "model":
        with pytest.raises(ModelError, match="say where it is with --model"):
            repair(folder / "out")
    elif why == "software":
        monkeypatch.setattr("gte_vectorize.job.version", lambda name: "9.9")
        with pytest.raises(OutputError, match=r"nothing was removed(.|\n)*torch: was '.*', now '9\.9'"):
            repair(folder / "out", model=model)
    else:
        with FileLock(folder / "out/_gte_vectorize/lock"), pytest.raises(TemporaryError, match="a run is writing"):
            repair(folder / "out", model=model)
    assert tree(folder) == before


def test_a_foreign_file_is_left_and_named(folder):
    (folder / "out/part-000009.parquet").write_bytes(b"mine")
    (folder / PART).unlink()
    found = repair(folder / "out", model=str(folder / "model"))
    assert [difference.file for difference in found.differences] == ["part-000009.parquet"]
    assert (folder / "out/part-000009.parquet").read_bytes() == b"mine"


def test_what_is_no_file_is_not_removed(folder):
    part = folder / PART
    part.unlink()
    part.mkdir()
    with pytest.raises(OutputError, match="not a regular file"):
        repair(folder / "out", model=str(folder / "model"))


def test_a_damaged_plan_cannot_be_repaired(folder):
    flip(folder / "out/_gte_vectorize/plan.json", 80)
    before = tree(folder)
    with pytest.raises(VerificationFailed, match="--overwrite"):
        repair(folder / "out", model=str(folder / "model"))
    assert tree(folder) == before


def test_what_a_run_has_made_meanwhile_is_left_alone(folder, whole, monkeypatch):
    flip(folder / PART, 1000)
    hold, stamps = room.hold, {}

    def late(layout):
        if not stamps:
            (folder / PART).unlink()
            embed_again(folder, "out", whole)
            stamps.update(places(folder))
        return hold(layout)

    monkeypatch.setattr(room, "hold", late)
    mended(folder)
    assert stamps == places(folder)

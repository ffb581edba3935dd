"""--long both beside what lies around: the outputs keep out of each other's way, and a finished one is only read."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from encoder.tiny import save_tiny

from gte_vectorize import ConfigError, vectorize
from gte_vectorize.config import Config
from gte_vectorize.encoder.canary import Canary
from gte_vectorize.progress import Progress
from gte_vectorize.report import Report

NAMES = [("out", "out.documents"), ("out.parquet", "out.documents.parquet")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "bert")


def write(path: Path) -> Path:
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(190)}" for _ in range(length)) for length in (100, 5, 60, 200)]
    path.write_text("".join(json.dumps({"id": row, "text": text}) + "\n" for row, text in enumerate(texts)))
    return path


def embed(inputs: str | Path, output: str | Path, model: Path, **options: Any) -> Report:
    options = {"long": "both", "device": "cpu", "workers": 1, "task_rows": 2, **options}
    return vectorize(inputs, output, model=model, **options)


def remove(output: Path) -> None:
    """With its state."""
    if output.is_file():
        shutil.rmtree(state_of(output))
        output.unlink()
    else:
        shutil.rmtree(output)


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def state_of(output: Path) -> Path:
    return output.with_name(f".{output.name}.state") if output.suffix == ".parquet" else output / "_gte_vectorize"


@pytest.mark.parametrize("names", NAMES)
def test_neither_output_is_an_input_of_the_next_run(names: tuple[str, str], model: Path, tmp_path: Path) -> None:
    """Parquet among the files of a pattern would be all that is read."""
    write(tmp_path / "corpus.jsonl")
    first = embed(str(tmp_path / "**"), tmp_path / names[0], model)
    before = files_below(tmp_path)
    again = embed(str(tmp_path / "**"), tmp_path / names[0], model)
    assert (again.rows, again.computed_tokens) == (first.rows, 0)
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("reuse", [False, True])
def test_a_finished_output_stays_as_it_is_while_the_other_is_made(
    names: tuple[str, str], kept: int, reuse: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write(tmp_path / "corpus.jsonl")
    (tmp_path / "here").mkdir()
    outputs = [tmp_path / "here" / name for name in names]
    embed(corpus, outputs[0], model)
    options = {}
    if reuse:
        embed(corpus, tmp_path / "previous.parquet", model, long="windows")
        options["reuse"] = str(tmp_path / "previous.parquet")
    made = pq.read_table(outputs[1 - kept], partitioning=None)
    remove(outputs[1 - kept])
    before = files_below(tmp_path / "here")
    if not reuse:  # what another device says of itself is for the output that it makes
        monkeypatch.setattr(Canary, "digest", property(lambda canary: "another"))
    embed(corpus, outputs[0], model, **options)
    assert before.items() <= files_below(tmp_path / "here").items()
    assert not (state_of(outputs[kept]) / "tmp").exists()
    assert pq.read_table(outputs[1 - kept], partitioning=None).equals(made)


@pytest.mark.parametrize("output", ["s3://bucket", "s3://bucket/", ".", "..", "/"])
def test_an_output_without_a_name_is_refused(output: str) -> None:
    """The documents of s3://bucket would go into another bucket."""
    assert Config(inputs=("a",), output=output).output_paths
    with pytest.raises(ConfigError, match="name a folder in it"):
        _ = Config(inputs=("a",), output=output, long="both").output_paths


@pytest.mark.parametrize("names", NAMES)
def test_both_go_to_a_bucket(
    names: tuple[str, str], bucket: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    corpus = write(tmp_path / "corpus.jsonl")
    local = embed(corpus, tmp_path / "local" / names[0], model)

    def stop(progress: Progress) -> None:
        if progress.done_rows > 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        embed(corpus, f"s3://corpora/{names[0]}", model, on_progress=stop)
    report = embed(corpus, f"s3://corpora/{names[0]}", model)
    assert (report.rows, report.status) == (local.rows, local.status)
    written = files_below(tmp_path / "local").items()
    files = {path: data for path, data in written if path.suffix == ".parquet" and path.parent.name != "spool"}
    assert {path.relative_to(tmp_path / "local").parts[0] for path in files} == set(names)
    for path, data in files.items():
        key = str(path.relative_to(tmp_path / "local"))
        assert bucket.Object(key).get()["Body"].read() == data

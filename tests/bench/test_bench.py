"""The command as a user meets it, on a small corpus and a tiny model, with every figure it promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import save_tiny

from gte_vectorize import cli
from gte_vectorize.bench.bench import bench
from gte_vectorize.bench.page import best, to_dict

RUNGS = ["1", "1b", "2", "3", "4", "5", "6", "7", "8", "TensorRT"]
ON_A_GPU = {"3", "6", "TensorRT"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and a corpus of 40 texts, a null and an empty one among them."""
    folder = tmp_path_factory.mktemp("bench")
    save_tiny(folder / "model", "bert")
    texts = [None, " ", *(" ".join(f"w{i * j % 190}" for j in range(1, 3 + i)) for i in range(38))]
    pq.write_table(pa.table({"body": texts}), folder / "corpus.parquet")
    pq.write_table(pa.table({"text": [None, " "]}), folder / "blank.parquet")
    return folder


def run(*arguments: object) -> int:
    """The command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gte-vectorize", *map(str, arguments)])
        return cli._run_command()


@pytest.fixture(scope="module")
def everything(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """The page, the JSON line and the folder with the trace, of one run of all there is on a CPU."""
    out = tmp_path_factory.mktemp("out")
    options = ["--model", folder / "model", "--text-column", "body", "--device", "cpu", "--seconds", "0.05"]
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr(cli.click, "echo", printed.append)
        code = run("bench", folder / "corpus.parquet", *options, "--trace", out / "trace.json", "-o", out / "page.md")
    assert code == 0
    page, line = printed
    assert (out / "page.md").read_text() == page
    return page, json.loads(line), out


def test_the_ladder_has_every_rung_in_order(everything: tuple[str, dict[str, Any], Path]) -> None:
    _, result, _ = everything
    assert [rung["rung"] for rung in result["ladder"]] == RUNGS
    for rung in result["ladder"]:
        if rung["rung"] in ON_A_GPU:
            assert (rung["note"], rung["tokens_per_second"]) == ("needs a GPU", None)
        else:
            assert rung["note"] == ""
            assert rung["tokens_per_second"] > 0
        if rung["p50_ms"] is not None:
            assert 0 < rung["p50_ms"] <= rung["p99_ms"]
        assert (rung["p50_ms"] is None) == (rung["rung"] in ON_A_GPU | {"8"})
        assert rung["memory_gib"] is None


def test_the_stages_say_what_limits_the_pipeline(everything: tuple[str, dict[str, Any], Path]) -> None:
    _, result, _ = everything
    rates = {stage["name"]: stage["tokens_per_second"] for stage in result["stages"]}
    assert list(rates) == ["read", "tokenize", "encode", "write"]
    assert min(rates.values()) > 0
    assert rates[result["limited_by"]] == min(rates.values())
    assert result["pipeline_share"] == pytest.approx(result["pipeline_tokens_per_second"] / min(rates.values()))
    assert 0 <= result["encoder"]["padding"] < 1
    assert result["tflops"] > 0
    assert result["energy_note"] == "needs a GPU"


def test_the_peers_are_measured_at_each_batch_size(everything: tuple[str, dict[str, Any], Path]) -> None:
    _, result, _ = everything
    sizes = {peer["name"]: [] for peer in result["peers"]}
    for peer in result["peers"]:
        assert peer["tokens_per_second"] > 0
        sizes[peer["name"]].append(peer["batch_size"])
    assert list(sizes.values()) == [[32, 128, 512], [32, 128]]


def test_the_texts_are_those_of_the_column_repeated(everything: tuple[str, dict[str, Any], Path]) -> None:
    _, result, _ = everything
    corpus = result["corpus"]
    assert corpus["distinct"] == 38
    assert corpus["rows"] >= 80
    assert corpus["longest_tokens"] == 41
    assert result["pipeline"]["timed"]["tokens"] < corpus["tokens"]


def test_the_page_names_the_machine_the_versions_and_the_command(
    everything: tuple[str, dict[str, Any], Path],
) -> None:
    page, result, _ = everything
    for heading in ("# model on ", "## Ladder", "## Peers", "## Stages"):
        assert heading in page
    assert result["hardware"] in page
    assert f"torch {result['versions']['torch']}" in page
    assert f"    {result['command']}\n" in page
    assert f"Limited by: {result['limited_by']}" in page
    baseline = next(rung for rung in result["ladder"] if rung["rung"] == "1b")
    assert f"| {baseline['tokens_per_second']:,.0f} |" in page


def test_the_trace_shows_the_encoder_at_work(everything: tuple[str, dict[str, Any], Path]) -> None:
    _, _, out = everything
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {"stream", "aten::linear"} <= {event.get("name") for event in events}


def test_parts_can_be_left_out(folder: Path) -> None:
    result = bench((), model=str(folder / "model"), device="cpu", seconds=0.02, peers=False, ladder=False)
    assert (result.peers, result.ladder) == ((), ())
    assert result.stages
    assert result.corpus.source == "made from the model's vocabulary"
    assert to_dict(result, "command")["limited_by"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "./missing"], "is not a directory"),
        (["--model", "{model}", "{corpus}"], "no column 'text'"),
        (["--model", "{model}", "{blank}"], "no row of column 'text' holds a text"),
        (["--model", "{model}", "missing.parquet"], "missing.parquet"),
        (["--model", "{model}", "--seconds", "0"], "--seconds"),
        (["--model", "{model}", "-o", "missing/page.md"], "no such folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    folder: Path, arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    places = {"model": folder / "model", "corpus": folder / "corpus.parquet", "blank": folder / "blank.parquet"}
    cli.set_up_logging("text")
    assert run("bench", *(argument.format(**places) for argument in arguments), "--device", "cpu") == 2
    assert said in capfd.readouterr().err


def test_help_says_what_it_does(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--help") == 0
    assert "--no-ladder" in capfd.readouterr().out


@pytest.mark.gpu
def test_every_rung_runs_on_a_gpu(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = bench((), model=str(folder / "model"), device="cuda", seconds=0.3, trace=trace)
    figures = to_dict(result, "command")
    for rung in result.ladder:
        if rung.rung != "TensorRT":
            assert rung.note == ""
            assert rung.tokens_per_second > 0
            assert rung.memory_gib > 0
    assert [stage.name for stage in result.stages] == ["read", "tokenize", "copy-in", "encode", "copy-out", "write"]
    assert 0 < figures["ceiling_share"] < 1
    assert all(best(result.peers, peer.name).tokens_per_second for peer in result.peers)
    if not result.energy_note:
        assert figures["encoder_joules_per_million_tokens"] > 0
    kernels = [event for event in json.loads(trace.read_text())["traceEvents"] if "stream" in event.get("args", {})]
    assert len({event["args"]["stream"] for event in kernels}) >= 3

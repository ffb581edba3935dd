"""Rows embedded again by a real model: what no checksum can tell is told."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from encoder.tiny import save_tiny
from small_output import OUTPUTS, ROWS, again, embed, forge, rows_of, tree, with_column, with_vectors

from gte_vectorize import InputError, ModelError
from gte_vectorize.check import reembed as room
from gte_vectorize.check.reembed import reembed
from gte_vectorize.check.verify import verify
from gte_vectorize.cli import cli

ALL = Fraction(1)
WRONG = "has a vector that its text does not give"


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("rate", "rows"), [(ALL, ROWS), (Fraction(1, 10), 4), (Fraction(1, 10**9), 1)])
def test_every_row_comes_out_the_same(folder, output, rate, rows):
    before = tree(folder)
    found = again(folder / output, rate)
    assert (found.reembedded, found.differences, found.notes) == (rows, [], [])
    assert tree(folder) == before


@pytest.mark.parametrize("output", OUTPUTS)
def test_vectors_of_each_others_rows_are_found(folder, output):
    def change(vectors):
        vectors[[4, 6]] = vectors[[6, 4]]

    forge(folder / output, with_vectors(change))
    assert rows_of(again(folder / output)) == {WRONG: [4, 6]}


@pytest.mark.parametrize("output", OUTPUTS)
def test_one_bit_of_a_vector_is_found_where_bits_are_promised(folder, output, monkeypatch):
    def change(vectors):
        vectors.view(np.uint32)[5, 7] ^= 1

    forge(folder / output, with_vectors(change), task=0)
    assert rows_of(again(folder / output)) == {WRONG: [5]}
    # On another device or with other libraries it is the direction that counts.
    monkeypatch.setattr(room, "version", lambda name: "another")
    assert again(folder / output).differences == []
    forge(folder / output, with_vectors(lambda vectors: vectors.__imul__(np.roll([-1] + [1] * 63, 9))))
    assert set(rows_of(again(folder / output))) == {WRONG}


def test_what_is_said_of_another_text_is_found(folder):
    def change(table):
        hashes, tokens = table["text_hash"].to_pylist(), table["n_tokens"].to_pylist()
        hashes[1], hashes[2], tokens[6] = hashes[2], hashes[1], tokens[6] + 1
        return with_column(with_column(table, "text_hash", hashes), "n_tokens", tokens)

    forge(folder / "out", change, task=1)
    assert rows_of(again(folder / "out")) == {
        "has the text_hash of another text": [9, 10],
        "counts other tokens than its text has": [14],
    }


@pytest.mark.parametrize("status", ["empty", "crash"])
def test_a_text_that_was_left_out_is_found_unless_it_kills_processes(folder, status):
    def change(table):
        names, vectors = table["status"].to_pylist(), table["embedding"].to_pylist()
        names[2], vectors[2] = status, None
        return with_column(with_column(table, "status", names), "embedding", vectors)

    forge(folder / "out", change, task=1)
    found = again(folder / "out")
    assert (found.reembedded, rows_of(found)) == (
        (ROWS, {"has another status than its text gives": [10]}) if status == "empty" else (ROWS - 1, {})
    )


def test_an_unfinished_output_is_embedded_again_as_far_as_it_is(folder):
    (folder / "out/_SUCCESS").unlink()
    (folder / "out/part-000002.parquet").unlink()
    (folder / "out/_gte_vectorize/records/000002.json").unlink()
    found = again(folder / "out")
    assert (found.state, found.reembedded, found.differences) == ("interrupted", 32, [])


def test_options_that_the_caller_gave_are_taken_from_the_output(tmp_path):
    embed(tmp_path, "out", max_length=6, prompt="w7 w8 ", pooling="max", columns=[])
    assert again(tmp_path / "out").reembedded == ROWS


def test_inputs_that_are_gone_are_left_out(tmp_path):
    for name in "ab":
        pq.write_table(pa.table({"text": [f"{name} w{row}" for row in range(10)]}), tmp_path / f"{name}.parquet")
    (tmp_path / "corpus.parquet").mkdir()
    for name in "ab":
        (tmp_path / f"{name}.parquet").rename(tmp_path / f"corpus.parquet/{name}.parquet")
    embed(tmp_path, "out")
    (tmp_path / "corpus.parquet/a.parquet").unlink()
    found = again(tmp_path / "out")
    assert (found.reembedded, len(found.notes), found.differences) == (10, 1, [])
    (tmp_path / "corpus.parquet/b.parquet").unlink()
    with pytest.raises(InputError, match="no input is there as it was"):
        again(tmp_path / "out")


def test_another_model_is_refused(folder, tmp_path_factory):
    other = save_tiny(tmp_path_factory.mktemp("other") / "model", "bert", "cls")
    with pytest.raises(ModelError, match="'model' is not the same"):
        again(folder / "out", model=other)
    found = verify(folder / "out")
    with pytest.raises(ModelError, match="model directory 'model'; say where it is with --model"):
        reembed(found, ALL, model=None, device="cpu")


def test_the_command_says_what_it_found(folder):
    arguments = ["verify", str(folder / "out"), "--reembed", "100%", "--model", str(folder / "model"), "--json"]
    end = CliRunner().invoke(cli, arguments)
    assert (end.exit_code, json.loads(end.stdout)["reembedded_rows"]) == (0, ROWS)

    def change(vectors):
        vectors[[4, 6]] = vectors[[6, 4]]

    forge(folder / "out", with_vectors(change))
    end = CliRunner().invoke(cli, arguments)
    assert end.exception.exit_code == 5
    assert [item["first_row"] for item in json.loads(end.stdout)["differences"]] == [4, 6]

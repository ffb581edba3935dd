"""What the figures are made of: texts of the promised lengths, the arithmetic, contenders that compute the same."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from encoder.tiny import save_tiny
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from gte_vectorize.bench.corpus import BenchCorpus, first_tokens, made_texts, short_queries, write_corpus
from gte_vectorize.bench.gpu import Card, growing, latency, sustained
from gte_vectorize.bench.ours import batches_of, measure_pipeline
from gte_vectorize.bench.padded import by_length, encode_rows, in_order, open_padded
from gte_vectorize.bench.peers import _by_hand, _sentence_transformers
from gte_vectorize.bench.shape import Shape, read_shape
from gte_vectorize.encoder.encoder import open_encoder
from gte_vectorize.model.spec import ModelSpec, load_model
from gte_vectorize.tokens.tokenizer import TextTokenizer

JOB = Path(__file__).parents[2] / "jobs/bench/gpu.py"


@pytest.fixture(scope="module")
def minilm(minilm_dir: str) -> ModelSpec:
    return load_model(minilm_dir)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return load_model(str(save_tiny(tmp_path_factory.mktemp("tiny"), "bert")))


def corpus_of(texts: list[str], tokens: int, spec: ModelSpec, folder: Path) -> BenchCorpus:
    return write_corpus(texts, tokens, spec, folder, window_rows=32, workers=1, source="a test")


def ours(spec: ModelSpec, corpus: BenchCorpus) -> np.ndarray:
    with open_encoder(spec, device="cpu", dtype="fp32") as encoder:
        return np.concatenate([w.vectors for w in encoder.stream(batches_of(encoder, corpus.windows))])


@pytest.mark.parametrize("model", ["minilm_dir", pytest.param("e5_dir", marks=pytest.mark.slow)])
def test_made_texts_have_the_promised_lengths(model: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    spec = load_model(request.getfixturevalue(model))
    texts = made_texts(spec, 400)
    assert texts == made_texts(spec, 400)
    lengths = np.array([len(found.ids) for found in TextTokenizer(spec.tokenizer).encode(texts)])
    assert lengths.min() >= 8
    assert lengths.max() <= spec.tokenizer.max_length
    assert 110 < np.median(lengths) < 146


def test_a_corpus_repeats_its_texts_without_making_two_equal(tiny: ModelSpec, tmp_path: Path) -> None:
    texts = ["w1 w2 w3 w4", "w5 w6 w7"]
    corpus = corpus_of(texts, 0, tiny, tmp_path)
    assert corpus.texts[:2] == texts
    assert len(corpus.texts) == len(corpus.lengths) == sum(task.num_rows for task in corpus.tasks) == 80
    assert len(set(corpus.texts[:14])) == 14
    assert corpus.distinct == 2
    assert len(corpus.tasks) == 5


def test_queries_are_short_and_of_the_corpus(tiny: ModelSpec, tmp_path: Path) -> None:
    corpus = corpus_of(made_texts(tiny, 64), 4000, tiny, tmp_path)
    queries = short_queries(corpus.windows)
    assert len(queries.lengths) == 16
    assert queries.lengths.min() >= 8
    assert queries.lengths.max() <= 32
    assert queries.ids[0] == 0
    assert set(queries.ids[np.cumsum(queries.lengths) - 1]) == {2}


def test_the_first_tokens_are_whole_rows(tiny: ModelSpec, tmp_path: Path) -> None:
    corpus = corpus_of(made_texts(tiny, 64), 4000, tiny, tmp_path)
    some = first_tokens(corpus.windows, 1000)
    lengths = np.concatenate([passages.lengths for passages in some])
    assert lengths.tolist() == corpus.lengths[: len(lengths)].tolist()
    assert 1000 <= lengths.sum() < 1000 + tiny.tokenizer.max_length
    assert sum(len(passages.ids) for passages in some) == lengths.sum()
    everything = first_tokens(corpus.windows, 10**9)
    assert sum(len(passages.ids) for passages in everything) == corpus.tokens


def test_the_arithmetic_of_a_token_counted_by_hand(tiny: ModelSpec) -> None:
    shape = read_shape(tiny)
    assert shape == Shape(hidden=64, layers=3, products=((64, 192), (64, 64), (64, 96), (96, 64)))
    linear = 2 * 3 * (4 * 64 * 64 + 2 * 64 * 96) * (10 + 20)
    attention = 3 * 4 * 64 * (10 * 10 + 20 * 20)
    assert shape.flops(np.array([10, 20], np.int32)) == linear + attention


def test_layers_that_are_not_stored_one_by_one_have_no_shape(tiny: ModelSpec, tmp_path: Path) -> None:
    file = tmp_path / "shared.safetensors"
    save_file({"encoder.albert_layers.0.ffn.weight": np.zeros((4, 4), np.float32)}, file)
    assert read_shape(replace(tiny, weights=(file,))) is None


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["limit", "longest", "sorted"])
def test_every_rung_computes_the_same_vectors(tiny: ModelSpec, tmp_path: Path, attention: str, padding: str) -> None:
    corpus = corpus_of(made_texts(tiny, 80), 3000, tiny, tmp_path)
    forward = open_padded(tiny, attention=attention, dtype="fp32", device="cpu")
    assert forward.model.config._attn_implementation == attention
    width = tiny.tokenizer.max_length if padding == "limit" else None
    batches = by_length(corpus.windows, 512) if padding == "sorted" else list(in_order(corpus.windows, 16, width))
    assert sum(len(rows.ids) for rows in batches) == corpus.tokens
    found = np.concatenate([encode_rows(forward, rows, "cpu") for rows in batches])
    expected = ours(tiny, corpus)
    if padding == "sorted":
        found, expected = (vectors[np.lexsort(vectors.T)] for vectors in (found.round(4), expected.round(4)))
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_the_peers_compute_the_same_vectors(minilm: ModelSpec, tmp_path: Path) -> None:
    corpus = corpus_of(
        ["A contract binds both parties.", "Force majeure.", "The seller delivers " * 40], 0, minilm, tmp_path
    )
    texts, expected = corpus.texts[:12], ours(minilm, corpus)[:12]
    for open_peer in (_sentence_transformers, _by_hand):
        np.testing.assert_allclose(open_peer(minilm, "cpu")(texts, 5), expected, atol=1e-5)


def test_rates_count_what_was_done_in_the_time_it_took() -> None:
    def work() -> int:
        time.sleep(0.01)
        return 100

    timed = sustained(work, 0.1, Card("cpu"))
    assert timed.tokens % 100 == 0
    assert 0.1 <= timed.seconds < 1
    assert timed.rate == timed.tokens / timed.seconds <= 10_000
    assert timed.joules_per_million is None


def test_a_list_grows_until_it_takes_the_time_or_is_all() -> None:
    counts: list[int] = []

    def work(count: int) -> int:
        counts.append(count)
        time.sleep(count * 1e-4)
        return count

    timed = growing(work, 10_000, 0.1, Card("cpu"))
    assert counts == sorted(counts)
    assert timed.tokens == counts[-1] < 10_000
    assert timed.seconds >= 0.07
    counts.clear()
    assert growing(work, 40, 10, Card("cpu")).tokens == 40
    assert counts[-1] == 40


def test_latencies_are_those_of_the_calls() -> None:
    found = latency(lambda: time.sleep(0.002), 0.2)
    assert 2 <= found.p50_ms <= found.p99_ms
    assert found.repeats >= 50


@pytest.fixture(scope="module")
def job() -> ModuleType:
    pytest.importorskip("triton")
    spec = importlib.util.spec_from_file_location("gpu_job", JOB)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_job_cuts_real_text_to_length(job: ModuleType, english_texts: list[str]) -> None:
    texts = english_texts[:200]
    tokenizer = job.train_tokenizer(texts)
    assert isinstance(tokenizer, Tokenizer)
    wanted = job.lengths("short", 500)
    pieces = job.recut(texts, tokenizer, wanted)
    assert len(pieces) > 100
    assert "".join(f"{text}\n" for text in texts).startswith("".join(pieces))
    found = np.array([len(encoded.ids) for encoded in tokenizer.encode_batch(pieces)])
    assert np.abs(found - wanted[: len(pieces)]).max() <= 3
    assert (found == wanted[: len(pieces)]).mean() > 0.7


def test_the_job_makes_a_model_that_all_contenders_read(
    job: ModuleType, english_texts: list[str], tmp_path: Path
) -> None:
    texts = english_texts[:100]
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    folder = job.random_model(tmp_path / "model", shape, job.train_tokenizer(texts), "cpu")
    spec = load_model(str(folder))
    assert spec.pooling == ("cls",)
    assert spec.tokenizer.max_length == 512
    corpus = corpus_of(texts, 0, spec, tmp_path)
    found = _sentence_transformers(spec, "cpu")(corpus.texts, 32)
    np.testing.assert_allclose(found, ours(spec, corpus), atol=1e-5)


def test_the_steady_state_begins_behind_the_first_task(tiny: ModelSpec, tmp_path: Path) -> None:
    corpus = corpus_of([f"w{i % 180} w{i // 180}" for i in range(3000)], 12_000, tiny, tmp_path)
    assert corpus.tasks[0].num_rows > 512  # so that it has several windows
    with Card("cpu") as card:
        rate = measure_pipeline(corpus, card, model=str(tiny.path), output=tmp_path / "out")
    assert rate.timed.tokens == corpus.lengths[corpus.tasks[0].num_rows :].sum()
    assert 0 < rate.timed.seconds < rate.run_seconds

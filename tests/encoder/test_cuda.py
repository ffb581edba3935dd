"""The encoder on a GPU: captured buckets equal eager ones, vectors depend on their text alone, fp16 stays faithful."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import MAX_LENGTH, as_passages, random_passages, save_tiny

from gte_vectorize.batch import TokenBatch
from gte_vectorize.encoder.cuda import CudaEncoder
from gte_vectorize.encoder.encoder import Encoder, open_encoder
from gte_vectorize.model.spec import ModelSpec, load_model
from gte_vectorize.tokens.batcher import token_batches
from gte_vectorize.writer.scatter import encoded_windows

pytestmark = pytest.mark.gpu


def vectors(encoder: Encoder, ids: list[np.ndarray]) -> np.ndarray:
    batches = token_batches([as_passages(ids)], layout=encoder.layout, budget=encoder.budget, max_rows=encoder.max_rows)
    (window,) = encoded_windows(encoder.stream(batches), encoder.dim)
    return window.vectors


def encode(spec: ModelSpec, ids: list[np.ndarray], **options: object) -> np.ndarray:
    with open_encoder(spec, **({"device": "cuda", "dtype": "fp16"} | options)) as encoder:  # type: ignore[arg-type]
        return vectors(encoder, ids)


@pytest.fixture(scope="module")
def minilm(minilm_dir: str) -> ModelSpec:
    return load_model(minilm_dir)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """The shape of a large BERT in width and heads, few layers: other matrix kernels than a small model's."""
    shape = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 512}
    folder = save_tiny(tmp_path_factory.mktemp("large"), "bert", "cls", std=0.03, limit=512, **shape)
    return load_model(str(folder))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """The shape of a base BERT (gte-base, bge-base), few layers."""
    shape = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512}
    folder = save_tiny(tmp_path_factory.mktemp("base"), "bert", "cls", std=0.03, limit=512, **shape)
    return load_model(str(folder))


def mixed(count: int, longest: int, seed: int = 0) -> list[np.ndarray]:
    lengths = np.clip(np.random.default_rng(seed).lognormal(np.log(longest / 4), 0.7, count), 3, longest)
    return random_passages(list(lengths.astype(int)), seed)


@pytest.mark.parametrize("shape", ["minilm", "base", "large"])
@pytest.mark.parametrize("how", [{"graphs": False}, {"batch_tokens": 16384}, {"batch_tokens": 8192}])
def test_packed_vectors_do_not_depend_on_graphs_or_budget(
    request: pytest.FixtureRequest, shape: str, how: dict[str, object]
) -> None:
    spec = request.getfixturevalue(shape)
    ids = mixed(3000, spec.tokenizer.max_length)
    assert np.array_equal(encode(spec, ids), encode(spec, ids, **how))


@pytest.mark.parametrize("shape", ["minilm", "base", "large"])
def test_packed_vectors_do_not_depend_on_neighbours_or_order(request: pytest.FixtureRequest, shape: str) -> None:
    spec = request.getfixturevalue(shape)
    ids = mixed(3000, spec.tokenizer.max_length)
    with open_encoder(spec, device="cuda", dtype="fp16") as encoder:
        together = vectors(encoder, ids)
        order = np.random.default_rng(1).permutation(len(ids))
        assert np.array_equal(vectors(encoder, [ids[row] for row in order]), together[order])
        for row in range(0, len(ids), 500):
            assert np.array_equal(vectors(encoder, [ids[row]])[0], together[row])


def bucket_batches(encoder: CudaEncoder) -> Iterator[TokenBatch]:
    """For every bucket: one passage of length 1, of its length − 1 and of its length, and as many as it holds."""
    for bucket in encoder._buckets:
        for length in (1, bucket.max_length - 1, bucket.max_length):
            for count in (1, min(bucket.rows, bucket.tokens // length)):
                random = np.random.default_rng(length)
                ids = [random.integers(4, 100, length).astype(np.int32) for _ in range(count)]
                (batch,) = token_batches(
                    [as_passages(ids)], layout=encoder.layout, budget=1 << 30, max_rows=lambda longest: 1 << 30
                )
                yield batch


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "distilbert"])
def test_replay_in_any_order_equals_eager(tiny_model: Callable[..., Path], family: str) -> None:
    spec = load_model(str(tiny_model(family)))
    with (
        open_encoder(spec, device="cuda", dtype="fp16") as captured,
        open_encoder(spec, device="cuda", dtype="fp16", graphs=False) as eager,
    ):
        assert isinstance(captured, CudaEncoder)
        assert set(captured._graphs) == set(captured._buckets)
        batches = list(bucket_batches(captured))
        batches += batches[::-1]
        for ours, theirs in zip(captured.stream(batches), eager.stream(batches), strict=True):
            assert np.isfinite(ours.vectors).all()
            assert np.array_equal(ours.vectors, theirs.vectors)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "distilbert", "modernbert"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "weightedmean"])
def test_fp16_is_faithful_to_fp32(tiny_model: Callable[..., Path], family: str, pooling: str) -> None:
    spec = load_model(str(tiny_model(family, pooling)))
    ids = random_passages(list(np.random.default_rng(4).integers(3, MAX_LENGTH + 1, 400)))
    cosine = (encode(spec, ids) * encode(spec, ids, device="cpu", dtype="fp32")).sum(axis=1)
    assert np.median(cosine) >= 0.99999
    assert cosine.min() >= 0.9999


def test_fp16_is_faithful_on_real_weights(minilm: ModelSpec) -> None:
    ids = mixed(500, minilm.tokenizer.max_length)
    cosine = (encode(minilm, ids) * encode(minilm, ids, device="cpu", dtype="fp32")).sum(axis=1)
    assert np.median(cosine) >= 0.99999
    assert cosine.min() >= 0.9999


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_other_dtypes_run(tiny_model: Callable[..., Path], dtype: str) -> None:
    spec = load_model(str(tiny_model("bert")))
    ids = random_passages([3, 48, 17, 4])
    cosine = (encode(spec, ids, dtype=dtype) * encode(spec, ids, device="cpu", dtype="fp32")).sum(axis=1)
    assert cosine.min() >= (0.999999 if dtype == "fp32" else 0.999)


def test_a_window_without_passages_keeps_its_turn(tiny_model: Callable[..., Path]) -> None:
    spec = load_model(str(tiny_model("bert")))
    with open_encoder(spec, device="cuda", dtype="fp16") as encoder:
        windows = [as_passages(random_passages([9])), as_passages([]), as_passages(random_passages([5, 7]))]
        batches = token_batches(windows, layout=encoder.layout, budget=encoder.budget, max_rows=encoder.max_rows)
        done = list(encoded_windows(encoder.stream(batches), encoder.dim))
    assert [len(window.vectors) for window in done] == [1, 0, 2]


def test_a_bucket_that_cannot_be_captured_runs_eagerly(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = load_model(str(tiny_model("bert")))
    ids = random_passages([3, 48, 17, 4])
    expected = encode(spec, ids)

    class Uncapturable(torch.cuda.CUDAGraph):
        def capture_begin(self, *args: object, **kwargs: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Uncapturable)
    assert np.array_equal(encode(spec, ids), expected)
    assert "runs without a graph" in caplog.text

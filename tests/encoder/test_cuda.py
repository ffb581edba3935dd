"""The encoder on a GPU: captured buckets equal eager ones, vectors depend on their text alone, fp16 stays faithful."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import MAX_LENGTH, as_passages, random_passages, save_tiny

from gte_vectorize.batch import Status, TokenBatch
from gte_vectorize.encoder import budget, cuda
from gte_vectorize.encoder.bucket import Bucket
from gte_vectorize.encoder.budget import BUDGETS, RESERVE, activation_bytes
from gte_vectorize.encoder.canary import Canary, ask, checked
from gte_vectorize.encoder.cuda import CudaEncoder
from gte_vectorize.encoder.encoder import Encoder, open_encoder
from gte_vectorize.encoder.forward import PackedForward
from gte_vectorize.errors import DeviceError, TemporaryError
from gte_vectorize.model.spec import ModelSpec, load_model
from gte_vectorize.tokens.batcher import token_batches

pytestmark = pytest.mark.gpu


def vectors(encoder: Encoder, ids: list[np.ndarray]) -> np.ndarray:
    batches = token_batches([as_passages(ids)], layout=encoder.layout, budget=encoder.budget, max_rows=encoder.max_rows)
    (window,) = encoder.stream(batches)
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
        done = list(encoder.stream(batches))
    assert [len(window.vectors) for window in done] == [1, 0, 2]


def test_vectors_find_their_rows_over_many_windows(tiny_model: Callable[..., Path]) -> None:
    spec = load_model(str(tiny_model("bert")))
    ids = random_passages(list(np.random.default_rng(5).integers(3, MAX_LENGTH + 1, 900)))
    together = encode(spec, ids)
    with open_encoder(spec, device="cuda", dtype="fp16") as encoder:
        windows = [as_passages(ids[start : start + 90]) for start in range(0, 900, 90)]
        windows[3].status[7], windows[3].lengths[7] = Status.EMPTY, 0
        windows[3] = replace(windows[3], ids=np.concatenate([ids[270 + row] for row in range(90) if row != 7]))
        batches = token_batches(windows, layout=encoder.layout, budget=encoder.budget, max_rows=encoder.max_rows)
        done = list(encoder.stream(batches))
    assert [window.passages for window in done] == windows
    found = np.concatenate([window.vectors for window in done])
    assert not found[277].any()
    assert np.concatenate([window.status for window in done]).tolist() == [2 * (row == 277) for row in range(900)]
    assert np.array_equal(np.delete(found, 277, axis=0), np.delete(together, 277, axis=0))


class Cramped:
    """A forward for which the GPU's memory holds at most so many tokens."""

    def __init__(self, forward: Any, most: int) -> None:
        self.forward, self.most, self.layout, self.refused = forward, most, forward.layout, 0

    def lay_out(self, *arguments: Any) -> Any:
        return self.forward.lay_out(*arguments)

    def __call__(self, inputs: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        if bucket.tokens > self.most:
            self.refused += 1
            raise torch.OutOfMemoryError("no more")
        result: torch.Tensor = self.forward(inputs, bucket)
        return result


def test_memory_that_runs_out_during_a_run_splits_batches_from_then_on(
    minilm: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    ids = mixed(3000, minilm.tokenizer.max_length)
    expected = encode(minilm, ids)
    with open_encoder(minilm, device="cuda", dtype="fp16", graphs=False, batch_tokens=32768) as encoder:
        assert isinstance(encoder, CudaEncoder)
        cramped = Cramped(encoder._forward, 8192)
        encoder._forward = cramped
        assert np.array_equal(vectors(encoder, ids), expected)
        assert (encoder.budget, cramped.refused) == (8192, 2)
        assert np.array_equal(vectors(encoder, ids), expected)
        assert cramped.refused == 2
        cramped.most = 0
        with pytest.raises(TemporaryError, match="smallest there are"):
            vectors(encoder, ids)
    assert "batches of 8192 tokens from now on" in caplog.text


def test_memory_that_does_not_suffice_at_the_start_makes_smaller_buckets(
    minilm: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = mixed(3000, minilm.tokenizer.max_length)
    expected = encode(minilm, ids)
    forward = PackedForward.__call__

    def cramped(self: PackedForward, inputs: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        if bucket.tokens > 16384:
            raise torch.OutOfMemoryError("no more")
        return forward(self, inputs, bucket)

    monkeypatch.setattr(PackedForward, "__call__", cramped)
    with open_encoder(minilm, device="cuda", dtype="fp16", batch_tokens=32768) as encoder:
        assert isinstance(encoder, CudaEncoder)
        assert encoder.budget == 16384
        assert set(encoder._graphs) == set(encoder._buckets)
        assert np.array_equal(vectors(encoder, ids), expected)


def test_a_card_with_little_memory_left_gets_a_budget_that_fits(
    large: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(budget, "BIG_CARD", 1 << 60)
    with open_encoder(large, device="cuda", dtype="fp16") as encoder:
        expected = vectors(encoder, mixed(2000, 512))
    curves = json.loads((tmp_path / "gte-vectorize" / "budgets.json").read_text())
    assert [set(curve) for curve in curves.values()] == [set(map(str, BUDGETS))]

    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    room = activation_bytes(large, 16384, 2) + RESERVE + (200 << 20)  # the weights and a bucket
    occupied = torch.empty(free - room, dtype=torch.uint8, device="cuda")
    with open_encoder(large, device="cuda", dtype="fp16") as encoder:
        assert encoder.budget in (8192, 16384)
        assert np.array_equal(vectors(encoder, mixed(2000, 512)), expected)
    del occupied
    torch.cuda.empty_cache()


def test_a_vector_that_overflows_in_fp16_is_computed_in_fp32(tiny_model: Callable[..., Path]) -> None:
    spec = load_model(str(tiny_model("bert", "cls")))
    ids = random_passages([3, 48, 17, 4, 30])
    with open_encoder(spec, device="cuda", dtype="fp16") as encoder:
        assert isinstance(encoder, CudaEncoder)
        sound = vectors(encoder, ids)
        # Word 100 overflows in half precision, and nothing else does.
        forward = encoder._forward
        assert isinstance(forward, PackedForward)
        forward.bert.words[100] = torch.inf
        for passage in ids:
            passage[passage == 100] = 101
        ids[2][5] = 100
        expected = encode(spec, ids, device="cpu", dtype="fp32")
        found = vectors(encoder, ids)
    assert np.allclose(found[2], expected[2], atol=1e-5)
    assert np.array_equal(found[[0, 1, 3, 4]], encode(spec, ids)[[0, 1, 3, 4]])
    assert np.isfinite(sound).all()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_canary_knows_a_healthy_gpu_and_a_flipped_bit(minilm: ModelSpec, dtype: str) -> None:
    with open_encoder(minilm, device="cuda", dtype=dtype) as encoder:
        canary = ask(encoder, minilm, device="cuda", dtype=dtype)
        again = ask(encoder, minilm, device="cuda", dtype=dtype)
        assert np.array_equal(canary.vectors, again.vectors)
        assert isinstance(encoder, CudaEncoder)
        assert isinstance(encoder._forward, PackedForward)
        weight = encoder._forward.bert.layers[1].up.weight
        weight.view(torch.int16 if dtype != "fp32" else torch.int32)[7, 11] ^= 1 << (13 if dtype != "fp32" else 29)
        with pytest.raises(DeviceError):
            list(checked(encoder.stream(canary_batches(encoder, canary)), encoder, canary))


def canary_batches(encoder: Encoder, canary: Canary) -> Iterator[TokenBatch]:
    return token_batches([canary.passages], layout=encoder.layout, budget=encoder.budget, max_rows=encoder.max_rows)


def test_a_gpu_that_hangs_is_noticed(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_model(str(tiny_model("bert")))
    with open_encoder(spec, device="cuda", dtype="fp16") as encoder:
        assert isinstance(encoder, CudaEncoder)
        with torch.cuda.stream(encoder._compute):
            torch.cuda._sleep(4_000_000_000)  # cycles, about two seconds
        monkeypatch.setattr(cuda, "PATIENCE", 0.5)
        with pytest.raises(DeviceError, match="not answered"):
            vectors(encoder, random_passages([9]))
        torch.cuda.synchronize()
        assert len(vectors(encoder, random_passages([9]))) == 1


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

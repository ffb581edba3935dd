"""Late chunking: a chunk's vector is the mean of its tokens' states in the whole context, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny import MAX_LENGTH, as_passages, random_passages, save_tiny
from transformers import AutoModel, AutoTokenizer

from gte_vectorize import ConfigError, ModelError, OutputError, run, vectorize
from gte_vectorize.batch import EncodedWindow, Float32, Passages, Status, TokenBatch
from gte_vectorize.encoder.bucket import Bucket, choose, exact_bucket, max_rows, packed_buckets
from gte_vectorize.encoder.cuda import CudaEncoder
from gte_vectorize.encoder.encoder import batches_for, in_fp32, open_encoder
from gte_vectorize.encoder.forward import PackedForward, PaddedForward
from gte_vectorize.encoder.rescue import rescued
from gte_vectorize.model.spec import ModelSpec, load_model
from gte_vectorize.tokens.batcher import token_batches

CUTS = [[48], [16, 16, 16], [3], [5, 12], [20, 3, 9, 16], [17], [2, 1], [40, 8]]
TEXTS = ["w1 w2 w3", " ".join(f"w{n}" for n in range(40)), "", " ".join(f"w{n % 190}" for n in range(150)), "w1 w2 w3"]


def contexts(cuts: list[list[int]], seed: int = 0, longest: int = MAX_LENGTH) -> Passages:
    """Random contexts of chunks of the given lengths."""
    whole = [len(ids) for ids in random_passages([max(3, min(longest, sum(chunks))) for chunks in cuts], seed)]
    ids = np.concatenate(random_passages(whole, seed))
    made = as_passages(np.split(ids, np.cumsum([length for chunks in cuts for length in chunks])[:-1]))
    continues = np.array([place > 0 for chunks in cuts for place in range(len(chunks))])
    return replace(made, continues=continues)


def random_cuts(count: int, longest: int, seed: int = 0, least: int = 8) -> list[list[int]]:
    random = np.random.default_rng(seed)
    cuts = []
    for total in random.integers(3, longest + 1, count).tolist():
        places = random.choice(np.arange(1, total), size=int(random.integers(0, total // least + 1)), replace=False)
        cuts.append(np.diff([0, *np.sort(places), total]).tolist())
    return cuts


def encode(spec: ModelSpec, passages: Passages, **options: Any) -> Float32:
    with open_encoder(spec, late=True, **({"device": "cpu", "dtype": "fp32"} | options)) as encoder:
        (window,) = encoder.stream(batches_for(encoder, [passages]))
    return window.vectors


def reference(folder: Path, passages: Passages) -> Float32:
    """transformers' class, fp32, one context at a time; the mean over each chunk's tokens, of length 1."""
    model = AutoModel.from_pretrained(folder).eval()
    firsts, tokens = passages.contexts
    vectors = []
    for first, end, ids in zip(
        firsts, [*firsts[1:], len(passages.lengths)], np.split(passages.ids, np.cumsum(tokens)[:-1]), strict=True
    ):
        with torch.inference_mode():
            states = model(input_ids=torch.from_numpy(ids).long()[None]).last_hidden_state[0]
        for chunk in states.split(passages.lengths[first:end].tolist()):
            vectors.append(torch.nn.functional.normalize(chunk.mean(dim=0), dim=0).numpy())
    return np.stack(vectors)


@pytest.fixture
def bert(tiny_model: Callable[..., Path]) -> ModelSpec:
    return load_model(str(tiny_model("bert")))


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_chunks_match_the_reference(tiny_model: Callable[..., Path], family: str) -> None:
    folder, passages = tiny_model(family), contexts(CUTS)
    vectors = encode(load_model(str(folder)), passages)
    assert (vectors * reference(folder, passages)).sum(axis=1).min() > 0.999999
    alone = encode(load_model(str(folder)), replace(passages, continues=None))
    assert (vectors * alone).sum(axis=1)[1] < 0.999  # the check sees a difference where there is one


@pytest.mark.parametrize("options", [{"batch_tokens": 64}, {"batch_tokens": 500}, {"lanes": 1}, {"lanes": 3}])
def test_bits_do_not_depend_on_budget_or_lanes(bert: ModelSpec, options: dict[str, int]) -> None:
    passages = contexts(random_cuts(200, MAX_LENGTH))
    assert len(passages.lengths) > 400
    assert np.array_equal(encode(bert, passages), encode(bert, passages, **options))


def test_bits_do_not_depend_on_neighbours_or_order(bert: ModelSpec) -> None:
    passages = contexts(random_cuts(120, MAX_LENGTH))
    together = encode(bert, passages)
    firsts, _ = passages.contexts
    edges = [*firsts.tolist(), len(passages.lengths)]
    order = np.random.default_rng(1).permutation(len(firsts))
    rows = np.concatenate([np.arange(edges[one], edges[one + 1]) for one in order])
    assert np.array_equal(encode(bert, pick(passages, rows)), together[rows])
    for one in (0, 7, 119):
        rows = np.arange(edges[one], edges[one + 1])
        assert np.array_equal(encode(bert, pick(passages, rows)), together[rows])


def pick(passages: Passages, rows: np.ndarray) -> Passages:
    ids = np.split(passages.ids, np.cumsum(passages.lengths)[:-1])
    assert passages.continues is not None
    return replace(as_passages([ids[row] for row in rows]), continues=passages.continues[rows])


def test_a_context_of_one_chunk_has_the_bits_of_a_passage(bert: ModelSpec) -> None:
    cuts = [chunks if number % 3 else [sum(chunks)] for number, chunks in enumerate(random_cuts(100, MAX_LENGTH))]
    passages = contexts(cuts)
    single = np.array([len(chunks) == 1 for chunks in cuts])
    whole = contexts([[sum(chunks)] for chunks in cuts])
    assert np.array_equal(whole.ids, passages.ids)
    assert single.sum() > 30
    expected = encode(bert, replace(whole, continues=None))
    assert np.array_equal(encode(bert, passages)[passages.contexts[0][single]], expected[single])


@pytest.mark.parametrize("budget", [512, 16384])
def test_every_batch_fits_a_captured_shape_and_keeps_its_bits(bert: ModelSpec, budget: int) -> None:
    """The shapes that a GPU captures, computed here."""
    buckets = packed_buckets(budget, MAX_LENGTH, late=True)
    assert all(bucket.chunks > bucket.rows for bucket in buckets)
    passages = contexts(random_cuts(60, MAX_LENGTH))
    exact, seen = in_fp32(bert, torch.device("cpu")), set[Bucket]()
    with open_encoder(bert, device="cpu", dtype="fp32") as encoder:
        forward = encoder._forward  # type: ignore[attr-defined]
    for batch in token_batches([passages], layout="packed", budget=budget, max_rows=partial(max_rows, buckets)):
        fitting = [bucket for bucket in buckets if bucket.fits(batch)]
        assert choose(buckets, batch) in fitting
        for bucket in fitting[-2:]:
            inputs = torch.from_numpy(forward.lay_out(batch.ids, batch.lengths, bucket, batch.contexts))
            assert len(inputs) == len(forward.lay_out(batch.ids[:0], batch.lengths[:0], bucket))
            with torch.inference_mode():
                vectors = forward(inputs, bucket)
            assert len(vectors) == bucket.vectors
            assert np.array_equal(vectors[: len(batch.rows)].numpy(), exact(batch))
            seen.add(bucket)
    assert len(seen) >= 2


def test_the_least_chunks_fill_their_places_and_no_more() -> None:
    """Contexts of chunks as small as they come fit wherever their tokens do."""
    buckets = packed_buckets(1024, 128, late=True)
    for cuts in ([[8] * 16] * 8, [[8, 9]] * 30, [[3]] * 128 + [[8] * 16] * 5, [[8] * 12] * 10 + [[5]] * 10):
        passages = contexts(cuts, longest=128)
        for batch in token_batches([passages], layout="packed", budget=1024, max_rows=partial(max_rows, buckets)):
            bucket = choose(buckets, batch)
            assert bucket is not None
            assert len(batch.rows) <= bucket.chunks
            assert exact_bucket(batch).fits(batch)
            # What a context is cut into does not decide where it goes.
            whole = replace(batch, contexts=None, lengths=batch.spans, rows=batch.rows[: len(batch.spans)])
            assert choose(packed_buckets(1024, 128), whole) == replace(bucket, chunks=0)


def test_what_has_no_places_for_chunks_refuses_contexts() -> None:
    (batch,) = token_batches([contexts(CUTS)], layout="packed", budget=10_000, max_rows=lambda longest: 100)
    packed = PackedForward(None, ("mean",), lambda pooled: pooled)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no places for chunks"):
        packed.lay_out(batch.ids, batch.lengths, Bucket(512, 48, 40, 60), batch.contexts)
    padded = PaddedForward(None, ("mean",), lambda pooled: pooled, 1)
    with pytest.raises(ValueError, match="one passage"):
        padded.lay_out(batch.ids, batch.lengths, Bucket(512, 48, 40, 40), batch.contexts)


def test_a_chunk_that_is_not_finite_is_computed_again_in_its_context(bert: ModelSpec) -> None:
    passages = contexts(CUTS)
    expected = encode(bert, passages)
    exact = in_fp32(bert, torch.device("cpu"))
    asked: list[TokenBatch] = []

    def again(batch: TokenBatch) -> Float32:
        """The other way round, and only the first chunk of a context comes out at all."""
        asked.append(batch)
        vectors = -exact(batch)
        vectors[1:] = np.nan
        return vectors

    status = np.full(len(expected), Status.OK, np.uint8)
    bad = [1, 2, 3, 7, 8]
    status[bad] = Status.NONFINITE
    vectors = expected.copy()
    vectors[bad] = 0
    (done,) = rescued([EncodedWindow(passages, vectors, status)], (again, exact))
    first = np.isin(np.arange(len(expected)), [1, 7])
    assert np.array_equal(done.vectors, np.where(first[:, None], -expected, expected))
    assert not done.status.any()
    assert [batch.rows.tolist() for batch in asked] == [[1, 2, 3], [7, 8, 9, 10]]
    assert [batch.spans.tolist() for batch in asked] == [[48], [48]]


@pytest.mark.parametrize("name", ["minilm_dir", "e5_dir"])
def test_an_output_matches_what_its_places_say(
    request: pytest.FixtureRequest, name: str, english_texts: list[str], tmp_path: Path
) -> None:
    """A chunk's tokens are those that begin in its characters, of the document as transformers tokenizes it."""
    folder = request.getfixturevalue(name)
    texts = [text for text in english_texts if 300 < len(text) < 800][:4]
    pq.write_table(pa.table({"text": texts}), tmp_path / "corpus.parquet")
    vectorize(tmp_path / "corpus.parquet", model=folder, long="late", chunk_tokens=32)
    table = pq.read_table(tmp_path / "corpus.embeddings.parquet")
    spec, tokenizer = load_model(folder), AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    documents = np.split(np.arange(len(table)), np.flatnonzero(table["chunk_index"].to_numpy() == 0)[1:])
    for text, rows in zip(texts, documents, strict=True):
        found = tokenizer(spec.tokenizer.prompt + text, return_offsets_mapping=True)
        with torch.inference_mode():
            states = model(input_ids=torch.tensor([found["input_ids"]])).last_hidden_state[0]
        begins = np.array([begin for begin, _ in found["offset_mapping"][1:-1]]) - len(spec.tokenizer.prompt)
        starts = table["char_start"].to_numpy()[rows]
        chunk = np.maximum(np.searchsorted(starts, begins, side="right") - 1, 0)
        chunk = np.array([0, *chunk, len(rows) - 1])
        assert np.bincount(chunk).tolist() == table["n_tokens"].to_numpy()[rows].tolist()
        for number, row in enumerate(rows.tolist()):
            mean = states[torch.from_numpy(chunk == number)].mean(dim=0).numpy()
            assert table["embedding"][row].values.to_numpy() @ mean / np.linalg.norm(mean) >= 0.99999
    assert len(table) > 2 * len(texts)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), "corpus.parquet")
    return tmp_path / "corpus.parquet"


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("bert")


def test_documents_become_rows_of_chunks(corpus: Path, model: Path) -> None:
    report = vectorize(corpus, "late.parquet", model=model, long="late", chunk_tokens=16, keep_text=True)
    table = pq.read_table("late.parquet")
    assert report.rows == len(table)
    counts = np.bincount(table["id"].to_numpy())
    assert counts[[0, 2, 4]].tolist() == [1, 1, 1]
    assert counts[1] >= 3
    assert counts[3] >= 10
    assert table["id"].to_pylist() == sorted(table["id"].to_pylist())
    for row, text in enumerate(TEXTS):
        chunks = table.filter(pa.array(table["id"].to_numpy() == row))
        assert chunks["chunk_index"].to_pylist() == list(range(len(chunks)))
        places = list(zip(chunks["char_start"].to_pylist(), chunks["char_end"].to_pylist(), strict=True))
        if text:
            assert chunks["text"].to_pylist() == [text[start:end] for start, end in places]
            assert "".join(chunks["text"].to_pylist()) == text
            assert chunks["n_tokens"].to_numpy().max() <= 16 + 2
        else:
            assert (places, chunks["status"].to_pylist()) == ([(None, None)], ["empty"])
    vectorize(corpus, "truncated.parquet", model=model)
    cut_off = pq.read_table("truncated.parquet")
    single = pa.array(np.isin(table["id"].to_numpy(), [0, 2, 4]))
    for name in ("embedding", "n_tokens", "status", "text_hash"):
        assert table.filter(single)[name].to_pylist() == cut_off.take([0, 2, 4])[name].to_pylist()


def test_windows_tasks_budgets_and_duplicates_leave_no_trace(
    corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [" ".join(f"w{(number + n) % 190}" for n in range(number * 7 % 130)) for number in range(40)]
    pq.write_table(pa.table({"text": [*texts, *texts[::-1]]}), "many.parquet")
    late: dict[str, Any] = {"model": model, "long": "late", "chunk_tokens": 16}
    report = vectorize("many.parquet", "a.parquet", **late)
    assert report.duplicates > 100
    monkeypatch.setattr("gte_vectorize.encoder.cpu.WINDOW_ROWS", 4)
    vectorize("many.parquet", "b.parquet", **late, batch_tokens=64)
    monkeypatch.setattr(run, "marked", lambda windows: windows)
    vectorize("many.parquet", "c.parquet", **late, workers=2)
    assert Path("a.parquet").read_bytes() == Path("b.parquet").read_bytes() == Path("c.parquet").read_bytes()


def test_unchanged_documents_are_reused(corpus: Path, model: Path) -> None:
    late: dict[str, Any] = {"model": model, "long": "late", "chunk_tokens": 16}
    vectorize(corpus, "first.parquet", **late)
    pq.write_table(pa.table({"id": range(4), "text": [TEXTS[3], "w7 w8", TEXTS[1], TEXTS[0]]}), "next.parquet")
    report = vectorize("next.parquet", "reused.parquet", reuse="first.parquet", **late)
    vectorize("next.parquet", "full.parquet", **late)
    assert report.reused > 10
    assert Path("reused.parquet").read_bytes() == Path("full.parquet").read_bytes()
    with pytest.raises(OutputError, match="long_documents"):
        vectorize("next.parquet", "other.parquet", reuse="first.parquet", **late | {"chunk_tokens": 17})


@pytest.mark.parametrize(("family", "pooling", "said"), [("bert", "cls", "cls"), ("distilbert", "mean", "padded")])
def test_a_model_without_vectors_for_chunks_is_refused(
    corpus: Path, tiny_model: Callable[..., Path], family: str, pooling: str, said: str
) -> None:
    with pytest.raises(ModelError, match=f"--long late: .*{said}"):
        vectorize(corpus, "out.parquet", model=tiny_model(family, pooling), long="late")
    assert not Path("out.parquet").exists()


def test_a_device_that_runs_padded_batches_is_refused(tiny_model: Callable[..., Path]) -> None:
    spec = load_model(str(tiny_model("distilbert")))
    with pytest.raises(ModelError, match="--long late"), open_encoder(spec, device="cpu", dtype="fp32", late=True):
        pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"long": "late", "chunk_tokens": 15}, "--chunk-tokens 15: at least 16"),
        ({"long": "windows", "chunk_tokens": 32}, "--chunk-tokens"),
        ({"long": "late", "overlap": 3}, "--overlap"),
        ({"long": "late", "splitter": "semchunk"}, "--splitter"),
    ],
)
def test_options_that_do_not_fit_are_refused(corpus: Path, model: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        vectorize(corpus, "out.parquet", model=model, **options)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """The shape of a large BERT in width and heads, few layers."""
    shape = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 512}
    return load_model(str(save_tiny(tmp_path_factory.mktemp("large"), "bert", std=0.03, limit=512, **shape)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["minilm_dir", "large"])
def test_a_gpu_keeps_bits_and_is_faithful(request: pytest.FixtureRequest, name: str) -> None:
    given = request.getfixturevalue(name)
    spec = given if isinstance(given, ModelSpec) else load_model(given)
    cuts = random_cuts(400, spec.tokenizer.max_length)
    passages = contexts(cuts, longest=512)
    gpu = {"device": "cuda", "dtype": "fp16"}
    vectors = encode(spec, passages, **gpu)
    for options in ({"graphs": False}, {"batch_tokens": 8192}, {"batch_tokens": 32768}):
        assert np.array_equal(encode(spec, passages, **gpu, **options), vectors)
    cosine = (vectors * encode(spec, passages)).sum(axis=1)
    assert np.median(cosine) >= 0.99999
    assert cosine.min() >= 0.9999
    firsts, _ = passages.contexts
    single = np.array([len(chunks) == 1 for chunks in cuts])
    whole = replace(contexts([[sum(chunks)] for chunks in cuts], longest=512), continues=None)
    with open_encoder(spec, **gpu) as plain:  # type: ignore[arg-type]
        (window,) = plain.stream(batches_for(plain, [whole]))
    assert np.array_equal(window.vectors[single], vectors[firsts[single]])
    edges = [*firsts.tolist(), len(passages.lengths)]
    for one in range(0, len(firsts), 50):
        rows = np.arange(edges[one], edges[one + 1])
        assert np.array_equal(encode(spec, pick(passages, rows), **gpu, graphs=False), vectors[rows])


@pytest.mark.gpu
def test_every_captured_bucket_replays_as_it_runs(tiny_model: Callable[..., Path]) -> None:
    spec = load_model(str(tiny_model("bert")))
    with (
        open_encoder(spec, device="cuda", dtype="fp16", late=True) as captured,
        open_encoder(spec, device="cuda", dtype="fp16", late=True, graphs=False) as eager,
    ):
        assert isinstance(captured, CudaEncoder)
        assert set(captured._graphs) == set(captured._buckets)
        batches = []
        for bucket in captured._buckets:
            third = bucket.max_length // 3
            for count in (1, min(bucket.rows, bucket.tokens // bucket.max_length)):
                passages = contexts([[bucket.max_length - third, third]] * count, seed=bucket.tokens + count)
                batches += token_batches([passages], layout="packed", budget=1 << 30, max_rows=lambda longest: 1 << 30)
        batches += batches[::-1]
        for ours, theirs in zip(captured.stream(batches), eager.stream(batches), strict=True):
            assert np.isfinite(ours.vectors).all()
            assert np.array_equal(ours.vectors, theirs.vectors)

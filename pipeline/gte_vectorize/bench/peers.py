"""Peers on the same texts, in memory → vectors in numpy: sentence-transformers, and transformers by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gte_vectorize.batch import Float32
from gte_vectorize.bench.corpus import BenchCorpus
from gte_vectorize.bench.gpu import Card, growing
from gte_vectorize.bench.ladder import reason
from gte_vectorize.bench.padded import Rows, encode_rows, open_padded
from gte_vectorize.errors import ModelError
from gte_vectorize.model.spec import ModelSpec

SENTENCE_TRANSFORMERS = (32, 128, 512)
BY_HAND = (32, 128)

Encode = Callable[[list[str], int], Float32]
"""Texts and a batch size → vectors, float32[texts, dim]."""


@dataclass(frozen=True, slots=True)
class Peer:
    """`note` says why there is no rate."""

    name: str
    batch_size: int
    tokens_per_second: float | None = None
    note: str = ""


def measure_peers(spec: ModelSpec, corpus: BenchCorpus, card: Card, *, seconds: float) -> Iterator[Peer]:
    """Each peer at each of its batch sizes, in fp16 on a GPU and fp32 on a CPU."""
    for name, open_peer, sizes in (
        ("sentence-transformers", _sentence_transformers, SENTENCE_TRANSFORMERS),
        ("transformers by hand, sorted by length", _by_hand, BY_HAND),
    ):
        card.fresh()
        try:
            encode = open_peer(spec, card.device)
        except ImportError:
            yield Peer(name, 0, note="not installed")
            continue
        except (ValueError, OSError, ModelError, RuntimeError) as error:
            yield Peer(name, 0, note=reason(error))
            continue
        for size in sizes:
            yield _measure(name, encode, size, corpus, card, seconds)
        del encode


def _measure(name: str, encode: Encode, size: int, corpus: BenchCorpus, card: Card, seconds: float) -> Peer:
    ends = np.cumsum(corpus.lengths)

    def work(count: int) -> int:
        vectors = encode(corpus.texts[:count], size)
        if len(vectors) != count:
            raise RuntimeError(f"{len(vectors)} vectors for {count} texts")
        return int(ends[count - 1])

    try:
        return Peer(name, size, growing(work, len(corpus.texts), seconds, card).rate)
    except RuntimeError as error:
        return Peer(name, size, note=reason(error))


def _sentence_transformers(spec: ModelSpec, device: str) -> Encode:
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(spec.path), device=device, local_files_only=True)
    model.max_seq_length = spec.tokenizer.max_length
    model.to(torch.float16 if device == "cuda" else torch.float32)

    def encode(texts: list[str], batch_size: int) -> Float32:
        vectors: Float32 = model.encode(
            texts,
            prompt=spec.tokenizer.prompt or None,
            batch_size=batch_size,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return vectors

    return encode


def _by_hand(spec: ModelSpec, device: str) -> Encode:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spec.path, local_files_only=True, trust_remote_code=False)
    forward = open_padded(spec, attention="sdpa", dtype="fp16" if device == "cuda" else "fp32", device=device)

    def encode(texts: list[str], batch_size: int) -> Float32:
        prompted = [spec.tokenizer.prompt + text for text in texts]
        ids = tokenizer(prompted, truncation=True, max_length=spec.tokenizer.max_length)["input_ids"]
        lengths = np.array([len(one) for one in ids], np.int32)
        order = np.argsort(-lengths, kind="stable")
        vectors = np.empty((len(texts), spec.dim), np.float32)
        for first, end in pairwise([*range(0, len(order), batch_size), len(order)]):
            batch = order[first:end]
            flat = np.concatenate([np.asarray(ids[row], np.int32) for row in batch])
            vectors[batch] = encode_rows(forward, Rows(flat, lengths[batch], int(lengths[batch[0]])), device)
        return vectors

    return encode

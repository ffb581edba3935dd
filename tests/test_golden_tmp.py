"""Parity with the reference: sentence-transformers in fp32, one text at a time, and the lengths of AutoTokenizer.

The parts are compared in their own rooms; here the whole way from Parquet to Parquet is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import VOCABULARY, save_tiny
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from gte_vectorize import vectorize


def embed(texts: Sequence[str], model: str | Path, folder: Path, **options: Any) -> pa.Table:
    pq.write_table(pa.table({"text": texts}), folder / "corpus.parquet")
    vectorize(folder / "corpus.parquet", folder / "vectors.parquet", model=model, device="cpu", **options)
    table = pq.read_table(folder / "vectors.parquet")
    assert set(table["status"].to_pylist()) == {"ok"}
    return table


def vectors(table: pa.Table) -> npt.NDArray[np.float64]:
    return np.array(table["embedding"].to_pylist())


def cosines(
    table: pa.Table, texts: Sequence[str], model: str | Path, *, prompt: str = "", limit: int | None = None
) -> npt.NDArray[np.float64]:
    encoder = SentenceTransformer(str(model), device="cpu")
    if limit is not None:
        encoder.max_seq_length = limit
    reference = np.vstack([encoder.encode([text], prompt=prompt) for text in texts]).astype(np.float64)
    ours = vectors(table)
    return (ours * reference).sum(axis=1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(reference, axis=1)


def check_lengths(table: pa.Table, texts: Sequence[str], model: str, *, prompt: str, limit: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, model_max_length=1 << 30)
    lengths = [len(tokenizer(prompt + text)["input_ids"]) for text in texts]
    assert table["n_tokens"].to_pylist() == [min(length, limit) for length in lengths]
    assert table["truncated"].to_pylist() == [length > limit for length in lengths]
    assert 0 < sum(table["truncated"].to_pylist()) < len(texts)  # both kinds are there


def test_english_texts_on_minilm(minilm_dir: str, english_texts: list[str], tmp_path: Path) -> None:
    texts = [*english_texts[:96], *sorted(english_texts, key=len)[-4:]]
    table = embed(texts, minilm_dir, tmp_path)
    check_lengths(table, texts, minilm_dir, prompt="", limit=256)
    cosine = cosines(table, texts, minilm_dir)
    print("COS", np.median(cosine), cosine.min())
    assert np.median(cosine) >= 0.999999
    assert cosine.min() >= 0.99999


def test_chinese_statutes_on_e5(e5_dir: str, demo_corpus: Path, tmp_path: Path) -> None:
    articles = sorted(pq.read_table(demo_corpus / "contracts.parquet")["text"].to_pylist(), key=len)
    statutes = sorted(pq.read_table(demo_corpus / "statutes.parquet")["text"].to_pylist(), key=len)
    texts = [*articles[::10], *statutes[:3], *statutes[-4:]]
    table = embed(texts, e5_dir, tmp_path, prompt_name="passage")
    check_lengths(table, texts, e5_dir, prompt="passage: ", limit=512)
    cosine = cosines(table, texts, e5_dir, prompt="passage: ")
    print("COS", np.median(cosine), cosine.min())
    assert np.median(cosine) >= 0.999999
    assert cosine.min() >= 0.99999


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


POSITIONS_ALONE = {"sentence_bert_config.json": {"max_seq_length": None}}
BAKED_IN = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize(
    ("family", "files", "options", "limit", "source"),
    [
        ("bert", {}, {}, 48, "sentence_bert_config.json"),
        ("bert", {}, {"max_length": 20}, 20, "given by the caller"),
        (
            "bert",
            POSITIONS_ALONE | {"tokenizer_config.json": {"model_max_length": 24}},
            {},
            24,
            "tokenizer_config.json",
        ),
        # A tokenizer's "no limit" is no limit.
        ("bert", POSITIONS_ALONE | {"tokenizer_config.json": {"model_max_length": int(1e30)}}, {}, 64, "config.json"),
        # What a tokenizer was last truncated to does not win over what the model says.
        ("bert", {"tokenizer.json": {"truncation": BAKED_IN}}, {}, 48, "sentence_bert_config.json"),
        # Of 66 positions the first two are never a token's.
        ("xlm-roberta", POSITIONS_ALONE, {}, 64, "config.json"),
        ("xlm-roberta", {"sentence_bert_config.json": {"max_seq_length": 66}}, {}, 64, "config.json"),
    ],
)
def test_the_limit_of_every_source_is_kept_to_the_token(
    tmp_path: Path, family: str, files: dict[str, Any], options: dict[str, int], limit: int, source: str
) -> None:
    # Pooling of the last token shows that the end token outlives the cut.
    model = save_tiny(tmp_path / "model", family, "lasttoken")
    for name, values in files.items():
        change(model / name, **values)
    words = [f"w{number % (VOCABULARY - 4)}" for number in range(0, 7000, 7)]
    texts = [" ".join(words[: length - 2]) for length in (limit - 1, limit, limit + 1, 1000)]
    table = embed(texts, model, tmp_path, **options)

    assert table["n_tokens"].to_pylist() == [limit - 1, limit, limit, limit]
    assert table["truncated"].to_pylist() == [False, False, True, True]
    assert cosines(table, texts, model, limit=limit).min() >= 0.99999
    ours = vectors(table)
    assert np.array_equal(ours[1], ours[2])
    assert np.array_equal(ours[1], ours[3])
    assert ours[0] @ ours[1] < 0.999

    description = json.loads(table.schema.metadata[b"embeddings"])
    assert description["max_tokens"] == limit
    assert description["sources"]["max_length"].startswith(source)

"""An NVIDIA GPU with the shapes of a large and of a small model, on real text: all that `gte-vectorize bench` measures.

    python jobs/bench/gpu.py --corpus ARTICLES.parquet [--statutes WHOLE.parquet] [--seconds 3] [--output RESULT.md]

Random weights in fp16, a BERT-large shape (gte-large-zh's) and MiniLM's, with a WordPiece vocabulary trained on the
corpus. Its text, end to end, is cut again so that lengths are *mixed* (lognormal, median 128, clipped to 8..512),
*short* (8 to 63) or *full* (512); the statutes are taken as they are. Mixed lengths get the whole page, the others the
encoder and the pipeline. Last comes attention alone, and one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from gte_vectorize.bench.bench import Result, measure
from gte_vectorize.bench.page import render, to_dict
from gte_vectorize.encoder.fused import attention
from gte_vectorize.encoder.kernels import varlen_attention
from gte_vectorize.model.spec import load_model

TOKENS = 32768
VOCABULARY = 21128
LIMIT = 512
MOST_TEXTS = 16384
SHAPES = {
    "BERT-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "MiniLM": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ATTENTION = {
    "4 × 8192": [8192] * 4,
    "64 × 512": [512] * 64,
    "139 × 235": [235] * 139,
    "250 × 131": [131] * 250,
    "256 × 128": [128] * 256,
    "512 × 64": [64] * 512,
    "1024 × 32": [32] * 1024,
    "2048 × 16": [16] * 2048,
    "4096 × 8": [8] * 4096,
}


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A BERT tokenizer: WordPiece, every Chinese character a token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


def random_model(folder: Path, shape: dict[str, int], tokenizer: Tokenizer, device: str) -> Path:
    """A BERT with CLS pooling, as an ordinary folder that sentence-transformers reads too."""
    folder.mkdir()
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LIMIT, **shape)
    with torch.device(device):
        model = transformers.BertModel(config, add_pooling_layer=False)
    model.half().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    parts = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    files = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LIMIT, **special},
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(parts.items())
        ],
        "sentence_bert_config.json": {"max_seq_length": LIMIT},
        "1_Pooling/config.json": {
            "word_embedding_dimension": shape["hidden_size"],
            "pooling_mode_cls_token": True,
            "pooling_mode_mean_tokens": False,
        },
    }
    for path in parts:
        (folder / path).mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def lengths(kind: str, count: int) -> np.ndarray:
    """Tokens of each text, special ones included."""
    random = np.random.default_rng(0)
    if kind == "mixed":
        return np.clip(random.lognormal(np.log(128), 0.72, count), 8, LIMIT).astype(int)
    return random.integers(8, 64, count) if kind == "short" else np.full(count, LIMIT)


def recut(texts: list[str], tokenizer: Tokenizer, wanted: np.ndarray) -> list[str]:
    """The texts end to end, cut at tokens so that each piece has the wanted number, until the text is used up.

    A piece may have a token more or less where a cut halves a word.
    """
    whole = "".join(f"{text}\n" for text in texts)
    begins, first = [], 0
    for text, encoded in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
        begins.append(first + np.array([begin for begin, _ in encoded.offsets], np.int64))
        first += len(text) + 1
    at = np.concatenate(begins)
    ends = np.cumsum(wanted - 2)
    ends = ends[: np.searchsorted(ends, len(at))]
    edges = [0, *at[ends].tolist()]
    return [whole[begin:end] for begin, end in pairwise(edges)]


def attention_rows() -> Iterator[tuple[str, float, float]]:
    """Lengths, microseconds of ours and of PyTorch's varlen_attn, with as many slots as the bucket would have."""
    import triton

    for name, sizes in ATTENTION.items():
        longest = 16 if sizes[0] <= 16 else 1 << (sizes[0] - 1).bit_length()
        slots = TOKENS // max(8, longest // 4) + TOKENS // longest + 1
        ends = np.cumsum(sizes)
        bounds = np.concatenate([[0], ends, np.full(max(0, slots - len(sizes)), ends[-1])])
        on_gpu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        qkv = torch.randn(int(ends[-1]), 3 * 1024, device="cuda").half()
        theirs = varlen_attention(on_gpu, longest)
        times = [
            triton.testing.do_bench(work, return_mode="median") * 1e3
            for work in (lambda: attention(qkv, on_gpu, 16, longest), lambda: theirs(qkv, 16))  # noqa: B023
        ]
        yield name, times[0], times[1]


def measure_shape(folder: Path, sets: dict[str, list[str]], seconds: float) -> Iterator[tuple[str, Result]]:
    """Everything on the mixed set, the encoder and the pipeline on the others."""
    spec = load_model(str(folder))
    for kind, texts in sets.items():
        wanted = dict.fromkeys(("peers", "ladder", "stages"), kind == "mixed")
        source = f"{kind}, of the corpus"
        own = seconds if kind == "mixed" else seconds / 2
        yield kind, measure(spec, texts, model=str(folder), source=source, device="cuda", seconds=own, **wanted)


def render_sets(results: dict[str, dict[str, Result]]) -> Iterator[str]:
    yield from ("# Encoder and pipeline by length", "")
    yield "| | | rows | tokens | encoder, thousand tokens/s | pipeline | padding | GiB | J per million tokens |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for shape, sets in results.items():
        for kind, r in sets.items():
            rates = " | ".join(f"{timed.rate / 1e3:,.0f}" for timed in (r.encoder.timed, r.pipeline.timed))
            memory = r.encoder.memory_gib
            joules = r.pipeline.timed.joules_per_million
            others = f"{r.encoder.padding:.1%} | {'–' if memory is None else f'{memory:.1f}'}"
            energy = "–" if joules is None else f"{joules:,.0f}"
            yield f"| {shape} | {kind} | {r.corpus.rows:,} | {r.corpus.tokens:,} | {rates} | {others} | {energy} |"
    yield ""


def render_attention(rows: list[tuple[str, float, float]]) -> Iterator[str]:
    yield from ("# Attention alone", "", "| 16 heads × 64 | ours µs | varlen_attn µs | × |", "|---|---:|---:|---:|")
    yield from (f"| {name} | {ours:.0f} | {theirs:.0f} | {theirs / ours:.1f} |" for name, ours, theirs in rows)
    yield ""


def read_texts(file: Path) -> list[str]:
    return [text for text in pq.read_table(file, columns=["text"])["text"].to_pylist() if text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="Parquet, column text")
    parser.add_argument("--statutes", type=Path, help="Parquet, column text: a second set, taken as it is")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    command = shlex.join(["python", *sys.argv])
    real = read_texts(arguments.corpus)
    tokenizer = train_tokenizer(real)
    sets = {kind: recut(real, tokenizer, lengths(kind, MOST_TEXTS)) for kind in ("mixed", "short", "full")}
    if arguments.statutes:
        sets["statutes"] = read_texts(arguments.statutes)
    pages, results = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.shapes:
            model = random_model(Path(folder) / name, SHAPES[name], tokenizer, "cuda")
            results[name] = dict(measure_shape(model, sets, arguments.seconds))
            pages.append(render(results[name]["mixed"], command))
    rows = list(attention_rows())
    page = "\n".join([*pages, *render_sets(results), *render_attention(rows)])
    print(page)
    if arguments.output:
        arguments.output.write_text(page)
    figures = {name: {kind: to_dict(result, command) for kind, result in s.items()} for name, s in results.items()}
    print(json.dumps({"results": figures, "attention_us": rows}, ensure_ascii=False))


if __name__ == "__main__":
    main()

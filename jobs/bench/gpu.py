"""The packed encoder on this machine's GPU: attention, forward rates beside the ceiling of the matrix products.

    python jobs/bench/gpu.py [--seconds 4] [--output RESULT.md]

Random weights and random lengths; a BERT-large shape (gte-large-zh's) and MiniLM's, fp16. *mixed* lengths are
lognormal with median 128, clipped to 8..512; *short* uniform 8..63; *full* all 512. Rates count real tokens. Every
figure is sustained over some seconds, because the card slows down when it draws its full power. Prints tables, and one
JSON object last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, processors

from gte_vectorize.batch import Passages, Shard, Task, TokenBatch, Window
from gte_vectorize.encoder.encoder import Encoder, open_encoder
from gte_vectorize.encoder.fused import attention
from gte_vectorize.encoder.kernels import varlen_attention
from gte_vectorize.model.spec import ModelSpec, load_model
from gte_vectorize.tokens.batcher import token_batches

TOKENS = 32768
VOCABULARY = 21128
SHAPES = {
    "BERT-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "MiniLM": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
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


def lengths(kind: str, tokens: int = 3_000_000) -> np.ndarray:
    random = np.random.default_rng(0)
    count = tokens // 8
    drawn = {
        "mixed": lambda: np.clip(random.lognormal(np.log(128), 0.72, count), 8, 512).astype(int),
        "short": lambda: random.integers(8, 64, count),
        "full": lambda: np.full(count, 512),
    }[kind]()
    return drawn[: np.searchsorted(np.cumsum(drawn), tokens)]


def random_model(folder: Path, shape: dict[str, int]) -> ModelSpec:
    """A BERT with CLS pooling, as an ordinary folder."""
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=512, **shape)
    transformers.BertModel(config, add_pooling_layer=False).half().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_model(str(folder), pooling="cls", max_length=512)


def passages(sizes: np.ndarray) -> Passages:
    count = len(sizes)
    window = Window(Task(0, Shard("random", 0, 0, (count,)), 0, count), 0, count)
    ids = np.random.default_rng(1).integers(0, VOCABULARY, int(sizes.sum()), dtype=np.int32)
    nothing = np.zeros(count, np.uint8)
    return Passages(window, ids, sizes.astype(np.int32), nothing, nothing.astype(bool), np.zeros((count, 16), np.uint8))


def batches_of(encoder: Encoder, sizes: np.ndarray) -> list[TokenBatch]:
    windows = [
        passages(sizes[start : start + encoder.window_rows]) for start in range(0, len(sizes), encoder.window_rows)
    ]
    return list(token_batches(windows, layout=encoder.layout, budget=encoder.budget, max_rows=encoder.max_rows))


def sustained(work: Callable[[], object], seconds: float) -> float:
    """Seconds per call, once the card has settled."""
    for timed in (False, True):
        torch.cuda.synchronize()
        started, calls = time.monotonic(), 0
        while time.monotonic() - started < (seconds if timed else seconds / 2):
            work()
            torch.cuda.synchronize()
            calls += 1
    return (time.monotonic() - started) / calls


def ceiling(shape: dict[str, int], seconds: float) -> float:
    """Tokens per second if nothing but the matrix products of the layers ran, biases included."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    products = [(hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden)]
    operands = [
        tuple(torch.randn(*size, device="cuda").half() * 0.03 for size in ((TOKENS, k), (n, k), (n,)))
        for k, n in products
    ]

    def layers() -> None:
        for _ in range(shape["num_hidden_layers"]):
            for states, weight, bias in operands:
                torch.nn.functional.linear(states, weight, bias)

    return TOKENS / sustained(layers, seconds)


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


def measure_shape(shape: dict[str, int], seconds: float) -> dict[str, float]:
    result = {"ceiling": ceiling(shape, seconds)}
    with tempfile.TemporaryDirectory() as folder:
        spec = random_model(Path(folder), shape)
        torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        with open_encoder(spec, device="cuda", dtype="fp16") as encoder:
            result["start_up_seconds"] = time.monotonic() - started
            for kind in ("mixed", "short", "full"):
                batches = batches_of(encoder, lengths(kind))
                tokens = sum(len(batch.ids) for batch in batches)
                result[kind] = tokens / sustained(lambda: list(encoder.stream(batches)), seconds)  # noqa: B023
            result["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def render(shapes: dict[str, dict[str, float]], rows: list[tuple[str, float, float]]) -> str:
    lines = [
        f"# Packed encoder, {torch.cuda.get_device_name()}, {date.today().isoformat()}",
        "",
        f"torch {torch.__version__}, transformers {transformers.__version__}, fp16, random weights; "
        "`python jobs/bench/gpu.py`. Token ids in host memory → vectors in host memory, copies included.",
        "",
        "| thousand tokens/s | mixed | short | full | products alone | mixed / products | start-up s | GiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, r in shapes.items():
        rates = " | ".join(f"{r[kind] / 1e3:,.0f}" for kind in ("mixed", "short", "full", "ceiling"))
        share = r["mixed"] / r["ceiling"]
        lines.append(f"| {name} | {rates} | {share:.0%} | {r['start_up_seconds']:.1f} | {r['memory_gib']:.1f} |")
    lines += ["", "| attention, 16 heads × 64 | ours µs | varlen_attn µs | × |", "|---|---:|---:|---:|"]
    lines += [f"| {name} | {ours:.0f} | {theirs:.0f} | {theirs / ours:.1f} |" for name, ours, theirs in rows]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = list(attention_rows())
    shapes = {name: measure_shape(shape, arguments.seconds) for name, shape in SHAPES.items()}
    page = render(shapes, rows)
    print(page)
    if arguments.output:
        arguments.output.write_text(page)
    print(json.dumps({"device": torch.cuda.get_device_name(), "shapes": shapes, "attention_us": rows}))


if __name__ == "__main__":
    main()

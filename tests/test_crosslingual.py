"""Vectors that make sense: a page of a handbook finds its translation among all the others."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gte_vectorize import vectorize

CACHE = Path(__file__).parents[1] / ".cache/deb"


@pytest.fixture(scope="module")
def handbook() -> Path:
    """The unpacked Debian package debian-handbook, kept in .cache/."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        pytest.skip("the handbook is a Debian package: apt-get and dpkg-deb are needed")
    CACHE.mkdir(parents=True, exist_ok=True)
    if not list(CACHE.glob("debian-handbook_*.deb")):
        fetch = ["apt-get", "download", "debian-handbook"]
        fetched = subprocess.run(fetch, cwd=CACHE, capture_output=True, text=True, timeout=300)
        if fetched.returncode:
            pytest.skip(f"{' '.join(fetch)}: {fetched.stderr.strip()}")
    (package,) = CACHE.glob("debian-handbook_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, CACHE / package.stem], check=True)
    return CACHE / package.stem


def test_a_page_finds_its_translation(handbook: Path, run_job: Callable[..., Any], e5_dir: str, tmp_path: Path) -> None:
    pairs, output = tmp_path / "pairs.parquet", tmp_path / "vectors.parquet"
    run_job("make_handbook_pairs.py", "--deb-dir", handbook, pairs).check_returncode()
    vectorize(pairs, output, model=e5_dir, prompt_name="passage", device="cpu")

    rows = pq.read_table(output).to_pylist()
    pages, vectors = {}, {}
    for lang in ("en", "zh"):
        pages[lang] = [row["page"] for row in rows if row["lang"] == lang]
        vectors[lang] = np.array([row["embedding"] for row in rows if row["lang"] == lang])
    assert pages["en"] == pages["zh"]
    assert len(pages["en"]) >= 30

    found = vectors["zh"] @ vectors["en"].T
    wanted = np.arange(len(found))
    recall = {"zh → en": np.mean(found.argmax(axis=1) == wanted), "en → zh": np.mean(found.argmax(axis=0) == wanted)}
    assert min(recall.values()) >= 0.9, recall

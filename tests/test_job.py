"""What is settled before any work."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import save_tiny

from gte_vectorize import OutputError, vectorize


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A hub with one model in two commits of equal data; `hub["newest"]` is what an unpinned fetch gets."""
    first = save_tiny(tmp_path / "snapshots/aaaa", "bert")
    shutil.copytree(first, tmp_path / "snapshots/bbbb")
    state = {"newest": "aaaa"}

    def download(name: str, revision: str | None, **options: Any) -> str:
        return str(tmp_path / "snapshots" / (revision or state["newest"]))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": ["w1 w2", "w3"]}), "corpus.parquet")
    return state


def test_a_commit_on_the_hub_does_not_make_the_same_command_another_job(hub: dict[str, str]) -> None:
    vectorize("corpus.parquet", model="org/tiny")
    written = Path("corpus.embeddings.parquet").stat()
    hub["newest"] = "bbbb"
    assert vectorize("corpus.parquet", model="org/tiny").computed_tokens == 0
    assert Path("corpus.embeddings.parquet").stat() == written
    with pytest.raises(OutputError, match="revision: was 'aaaa', now 'bbbb'"):
        vectorize("corpus.parquet", model="org/tiny", revision="bbbb")
    assert vectorize("corpus.parquet", model="org/tiny", overwrite=True).computed_tokens > 0
    assert b"bbbb" in pq.read_schema("corpus.embeddings.parquet").metadata[b"embeddings"]


def test_nor_does_it_part_two_outputs(hub: dict[str, str]) -> None:
    vectorize("corpus.parquet", model="org/tiny", long="both")
    Path("corpus.embeddings.parquet").unlink()
    shutil.rmtree(".corpus.embeddings.parquet.state")
    hub["newest"] = "bbbb"
    assert vectorize("corpus.parquet", model="org/tiny", long="both").computed_tokens > 0
    assert b"aaaa" in pq.read_schema("corpus.embeddings.parquet").metadata[b"embeddings"]

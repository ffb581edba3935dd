"""A toy model's folder, complete and valid, for tests to spoil one thing at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from gte_vectorize.model.spec import ModelSpec, load_model

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "law", "Law", "cafe", "café", "Cafe", "法", "律", "法律", "of"]


class ToyModel:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.write(
            "config.json", model_type="bert", hidden_size=8, vocab_size=20, max_position_embeddings=64, pad_token_id=0
        )
        self.write("tokenizer_config.json", tokenizer_class="BertTokenizer", do_lower_case=True, model_max_length=48)
        self.write("sentence_bert_config.json", max_seq_length=32, do_lower_case=False)
        self.modules("Transformer", "Pooling", "Normalize")
        self.write("1_Pooling/config.json", word_embedding_dimension=8, pooling_mode_cls_token=True)
        save_file({"embeddings.word_embeddings.weight": np.ones((20, 8), np.float32)}, path / "model.safetensors")
        tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        tokenizer.add_special_tokens(WORDS[:5])
        tokenizer.save(str(path / "tokenizer.json"))

    def write(self, name: str, **settings: Any) -> None:
        """Replace a JSON file."""
        (self.path / name).parent.mkdir(exist_ok=True)
        (self.path / name).write_text(json.dumps(settings))

    def change(self, name: str, **settings: Any) -> None:
        """Change some keys of a JSON file; `...` removes the key."""
        merged = {**json.loads((self.path / name).read_text()), **settings}
        self.write(name, **{key: value for key, value in merged.items() if value is not ...})

    def modules(self, *types: str, paths: dict[int, str] | None = None) -> None:
        entries = [
            {
                "idx": index,
                "name": str(index),
                "path": (paths or {}).get(index, f"{index}_{kind.rpartition('.')[2]}" if index else ""),
                "type": kind if "." in kind else f"sentence_transformers.models.{kind}",
            }
            for index, kind in enumerate(types)
        ]
        (self.path / "modules.json").write_text(json.dumps(entries))

    def load(self, **options: Any) -> ModelSpec:
        return load_model(str(self.path), **options)

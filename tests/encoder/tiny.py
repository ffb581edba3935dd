"""Tiny random models, saved as ordinary Hugging Face folders with sentence-transformers modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from gte_vectorize.batch import Passages, Shard, Task, TokenBatch, Window

VOCABULARY = 200
MAX_LENGTH = 48

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "roberta": SMALL | {"max_position_embeddings": 66, "type_vocab_size": 1},
    "xlm-roberta": SMALL | {"max_position_embeddings": 66, "type_vocab_size": 1, "hidden_act": "gelu_new"},
    "camembert": SMALL | {"max_position_embeddings": 66, "type_vocab_size": 1},
    "electra": SMALL | {"embedding_size": 64},
    "mpnet": SMALL | {"max_position_embeddings": 66},
    "distilbert": {
        "vocab_size": VOCABULARY,
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 96,
        "max_position_embeddings": 64,
    },
    "modernbert": SMALL | {"pad_token_id": 1, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 16},
}


def save_tiny(
    folder: Path, family: str, pooling: str = "mean", *, std: float = 0.2, limit: int = MAX_LENGTH, **overrides: Any
) -> Path:
    """A randomly initialised model of a family, with a word-level tokenizer of the same vocabulary.

    `std` spreads the weights (the usual 0.02 makes every text look alike), `limit` is the length limit in tokens.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family] | overrides)
    model = AutoModel.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder)
    words = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    tokenizer.add_special_tokens(words[:4])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"},
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
        "sentence_bert_config.json": {"max_seq_length": limit},
        "1_Pooling/config.json": {
            "word_embedding_dimension": model.config.hidden_size,
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_max_tokens": pooling == "max",
            "pooling_mode_lasttoken": pooling == "lasttoken",
            "pooling_mode_mean_sqrt_len_tokens": pooling == "mean_sqrt_len_tokens",
            "pooling_mode_weightedmean_tokens": pooling == "weightedmean",
        },
    }
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "2_Normalize").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def random_passages(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    """Token ids of passages of the given lengths, special tokens at both ends."""
    random = np.random.default_rng(seed)
    return [
        np.concatenate([[0], random.integers(4, VOCABULARY, length - 2), [2]]).astype(np.int32) for length in lengths
    ]


def as_passages(ids: list[np.ndarray]) -> Passages:
    count = len(ids)
    window = Window(Task(0, Shard("memory", 0, 0, (count,)), 0, count), 0, count)
    return Passages(
        window=window,
        ids=np.concatenate(ids) if ids else np.empty(0, np.int32),
        lengths=np.array([len(part) for part in ids], np.int32),
        status=np.zeros(count, np.uint8),
        truncated=np.zeros(count, np.bool_),
        text_hash=np.zeros((count, 16), np.uint8),
        row=window.rows,
    )


def as_batch(ids: list[np.ndarray]) -> TokenBatch:
    passages = as_passages(ids)
    return TokenBatch(passages, passages.ids, passages.lengths, np.arange(len(ids), dtype=np.int32), True)

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from gte_vectorize.model.tokenizer import TokenizerSpec

WORDS = ["a", "agreement", "party", "shall", "indemnify", "claim", "café", "naïve", "3,141.59", "(b)", "§", "don't"]
CHINESE = "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种"


@pytest.fixture(scope="session")
def random_text() -> Callable[..., str]:
    """`random_text(alphabet, count, separator)`: the same text for the same arguments."""

    def make(alphabet: list[str] | str, count: int, separator: str = "") -> str:
        return separator.join(random.Random(count).choices(alphabet, k=count))

    return make


@pytest.fixture(scope="session")
def byte_bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json with byte-level merges and an end token, as decoder families have it."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=40)) for _ in range(200)]
    texts += ["".join(rng.choices(CHINESE, k=40)) for _ in range(200)] + ["=" * n for n in range(1, 64)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 0)])
    path = tmp_path_factory.mktemp("byte_bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def spec_of() -> Callable[..., TokenizerSpec]:
    """`spec_of(path, max_length, …)`: the TokenizerSpec of a tokenizer.json, or of the one in a folder."""

    def make(
        path: Path | str,
        max_length: int,
        *,
        prompt: str = "",
        lower_case: bool = False,
        normalizer: dict[str, bool | None] | None = None,
    ) -> TokenizerSpec:
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        return TokenizerSpec(
            path=path,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            max_length=max_length,
            prompt=prompt,
            lower_case=lower_case,
            normalizer=normalizer or {},
        )

    return make


@pytest.fixture(scope="session")
def tokenizer_files(minilm_dir: str, e5_dir: str, byte_bpe: Path) -> dict[str, Path]:
    """One tokenizer.json of each kind; they differ in what a text's end may do to its beginning."""
    return {
        "wordpiece": Path(minilm_dir, "tokenizer.json"),
        "unigram": Path(e5_dir, "tokenizer.json"),
        "byte_bpe": byte_bpe,
    }

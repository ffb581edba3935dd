"""gte-vectorize: the text column of a Parquet corpus → embeddings in Parquet.

>>> from gte_vectorize import vectorize
>>> report = vectorize("corpus.parquet", output="vectors.parquet", model="path/to/model")
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gte_vectorize.errors import (
    ConfigError,
    DamagedInput,
    InputError,
    LimitExceeded,
    ModelError,
    OutputError,
    Refused,
    TemporaryError,
    VectorizeError,
    WorkerError,
)

try:
    __version__ = version("gte-vectorize")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "ConfigError",
    "DamagedInput",
    "InputError",
    "LimitExceeded",
    "ModelError",
    "OutputError",
    "Refused",
    "TemporaryError",
    "VectorizeError",
    "WorkerError",
    "__version__",
    "vectorize",
]


def __getattr__(name: str) -> Any:
    """`vectorize` on first use: importing the package alone must not load what it needs."""
    if name == "vectorize":
        from gte_vectorize.run import vectorize

        return vectorize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

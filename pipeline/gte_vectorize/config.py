"""The configuration of a run, and where each value came from.

Precedence: command line > `GTE_VECTORIZE_*` environment > config file > what the model's folder says > default. A value
of None means that the next one in this order decides. Every option is described once, here: the command line, the
environment and the TOML file all follow from these fields. Nothing heavy is imported: `--help` reads this module.

Relative paths are relative to the working directory wherever they are said, a config file included: one file then
serves many folders, and `--print-config` of one run is the config file of the next.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any

from gte_vectorize import failpoint
from gte_vectorize.errors import ConfigError
from gte_vectorize.model.folder import DEFAULT_MODEL
from gte_vectorize.option import (
    Limit,
    Option,
    flag,
    limit,
    names,
    number,
    number_or_zero,
    one_of,
    paths,
    text,
    text_or_empty,
)

ENVIRONMENT = "GTE_VECTORIZE_"
MAX_CONFIG_BYTES = 1 << 20
LONG = ("truncate", "windows", "mean", "both", "late")


def _option(
    default: Any,
    help: str,
    read: Callable[[Any], Any] = text,
    metavar: str | None = None,
    short: str | None = None,
) -> Any:
    return field(default=default, metadata={"option": Option(help, read, metavar, short)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One runnable job."""

    inputs: tuple[str, ...] = _option((), "Files, globs, directories or object-store URIs.", paths)
    output: str | None = _option(
        None, "NAME.parquet for one file, else a directory. [default: INPUT.embeddings.parquet]", text, "PATH", "-o"
    )
    model: str = _option(
        DEFAULT_MODEL, f"Hub id or local directory of the model. [default: {DEFAULT_MODEL}]", text, "ID|DIR"
    )
    revision: str | None = _option(None, "Revision of a hub model.", text, "REV")
    text_column: str = _option("text", "Column that holds the documents. [default: text]", text, "NAME")
    columns: tuple[str, ...] | None = _option(
        None, "Input columns to copy, separated by commas. [default: all but the text]", names, "A,B"
    )
    keep_text: bool = _option(False, "Copy the text column too.", flag)
    pooling: str | None = _option(None, "Pooling, where the model's folder does not say.", text, "MODE")
    max_length: int | None = _option(None, "Tokens per passage. [default: the model's limit]", number, "N")
    prompt: str | None = _option(
        None, "Text put before every document. [default: what the model says]", text_or_empty, "TEXT"
    )
    prompt_name: str | None = _option(None, "Which of the model's prompts to put before documents.", text, "NAME")
    long: str = _option(
        "truncate",
        "Documents beyond the limit: cut off, one row per window, the windows' mean, or both. late: one row per chunk, "
        "embedded in its context. [default: truncate]",
        one_of(*LONG),
        "|".join(LONG),
    )
    overlap: int | None = _option(
        None, "Tokens that a window shares with the one before. [default: an eighth of the limit]", number_or_zero, "N"
    )
    splitter: str = _option(
        "sentence", "What cuts windows. [default: sentence]", one_of("sentence", "semchunk"), "sentence|semchunk"
    )
    chunk_tokens: int | None = _option(None, "Tokens of a chunk of --long late. [default: 256]", number, "N")
    reuse: str | None = _option(None, "Take the vectors of unchanged texts from this earlier output.", text, "OUTPUT")
    device: str = _option(
        "auto", "auto is cuda where there is a GPU. [default: auto]", one_of("auto", "cpu", "cuda"), "auto|cpu|cuda"
    )
    dtype: str = _option(
        "auto",
        "auto is fp16 on a GPU, and fp32 on a CPU. [default: auto]",
        one_of("auto", "fp16", "bf16", "fp32"),
        "auto|fp16|bf16|fp32",
    )
    batch_tokens: int | None = _option(None, "Token budget of a batch. [default: by device]", number, "N")
    graphs: bool = _option(True, "Capture CUDA Graphs; --no-graphs is the escape hatch.", flag)
    workers: int | None = _option(None, "Tokenizer processes. [default: by cores]", number, "N")
    task_rows: int = _option(65536, "Rows per task, and so per part of a directory. [default: 65536]", number, "N")
    max_bad_rows: Limit = _option(  # noqa: RUF009 - a field, like its neighbours
        Limit(percent=Decimal("0.1")), "Failed rows allowed, a number or a percentage. [default: 0.1%]", limit, "N|P%"
    )
    overwrite: bool = _option(False, "Replace an output that is there.", flag)

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ConfigError("no input: name a file, a glob, a directory or a URI")
        if self.prompt is not None and self.prompt_name is not None:
            raise ConfigError("--prompt and --prompt-name exclude each other")
        if self.long in ("truncate", "late") and (self.overlap is not None or self.splitter != "sentence"):
            raise ConfigError("--overlap and --splitter say how windows are cut: choose --long windows, mean or both")
        if self.long != "late" and self.chunk_tokens is not None:
            raise ConfigError("--chunk-tokens says how --long late cuts: choose that, or leave it out")

    @property
    def output_paths(self) -> list[str | Path]:
        """The output, and with --long both beside that of the windows the documents': NAME.documents[.parquet].

        ConfigError: it has no name of its own, so nothing can stand beside it.
        """
        output = self.output_path
        if self.long != "both":
            return [output]
        name = str(output).rstrip("/")
        if name.rpartition("/")[2] in ("", ".", "..") or ("://" in name and name.count("/") < 3):
            raise ConfigError(f"--long both: {str(output)!r} gives no name to the second output; name a folder in it")
        stem = name[: -len(".parquet")] if name.lower().endswith(".parquet") else name
        other = f"{stem}.documents{name[len(stem) :]}"
        return [output, other if isinstance(output, str) else Path(other)]

    @property
    def output_path(self) -> str | Path:
        """Where the vectors go: a URI as it is. Raises ConfigError when it has to be said and is not."""
        if self.output is not None:
            return self.output if "://" in self.output else Path(self.output)
        source = Path(self.inputs[0])
        if len(self.inputs) > 1 or "://" in self.inputs[0] or not source.is_file():
            raise ConfigError("-o/--output is required unless the input is one local file")
        return source.with_name(f"{source.stem}.embeddings.parquet")


OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in fields(Config)}


def resolve(
    given: Mapping[str, Any], *, environment: Mapping[str, str], file: Path | None, caller: str = "command line"
) -> tuple[Config, dict[str, str]]:
    """Merge what the `caller` gives, the environment and a TOML file → the config and each value's source.

    None stands for "not said". Raises ConfigError for an unknown key, naming the nearest one, or a value that cannot be
    read.
    """
    values: dict[str, Any] = {}
    sources = dict.fromkeys(OPTIONS, "default")
    layers = [
        (f"config file {file.name!r}" if file else "", _read_file(file) if file else {}),
        ("environment", _from_environment(environment)),
        (caller, {key: value for key, value in given.items() if value is not None}),
    ]
    for source, layer in layers:
        for key, value in layer.items():
            values[key] = _read(key, value, source)
            sources[key] = source
    return Config(**values), sources


def _read(key: str, value: Any, source: str) -> Any:
    if key not in OPTIONS:
        raise ConfigError(f"unknown key {key!r} in {source}{_nearest(key, OPTIONS)}")
    try:
        return OPTIONS[key].read(value)
    except ValueError as error:
        said = {"environment": ENVIRONMENT + key.upper(), "command line": f"--{key.replace('_', '-')}"}
        raise ConfigError(f"{said.get(source, f'{key} in {source}')}: {error}") from error


def _read_file(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:  # a pipe or a device does not say its size
            data = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read config file {file.name!r}: {error.strerror}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"config file {file.name!r} is larger than {MAX_CONFIG_BYTES} bytes: it is no config file")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config file {file.name!r} is not valid TOML: {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    known = {ENVIRONMENT + name.upper(): name for name in OPTIONS}
    said = {name: value for name, value in environment.items() if name.startswith(ENVIRONMENT)}
    failpoint.parse(said.pop(failpoint.VARIABLE, ""))  # no option; refused as early as one, if it cannot be read
    for name in said:
        if name not in known:
            raise ConfigError(f"unknown environment variable {name}{_nearest(name, known)}")
    return {known[name]: value for name, value in said.items()}


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

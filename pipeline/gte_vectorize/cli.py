"""The command line. Thin: it reads options, sets up logging and signals, and calls the library.

Heavy modules are imported inside the commands, so that `--help` and usage errors answer in a fraction of a second.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from gte_vectorize import __version__
from gte_vectorize.config import OPTIONS, Config, resolve
from gte_vectorize.errors import VectorizeError
from gte_vectorize.option import Option
from gte_vectorize.progress import Progress, ProgressDisplay, set_up_logging

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
# Read by the Hugging Face libraries when they are imported; what the user has set stays.
QUIET_LIBRARIES = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
}

# Commands to come, which must not be taken for files meanwhile.
NOT_BUILT = ("plan", "status", "verify", "repair", "report", "bench")

log = logging.getLogger("gte_vectorize")


class Stopped(BaseException):
    """A signal asked the run to end."""


# The signal, once there was one. A library that `Stopped` passes through may turn it into an error, or swallow it.
_asked: list[signal.Signals] = []


class DefaultToRun(click.Group):
    """`gte-vectorize corpus.parquet` means `gte-vectorize run corpus.parquet`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in NOT_BUILT:
            raise click.UsageError(
                f"{args[0]!r} is not a command of this version; for a file of that name say ./{args[0]}"
            )
        own = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        if args and args[0] not in self.commands and args[0] not in own:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=DefaultToRun, context_settings=CONTEXT, no_args_is_help=True)
@click.version_option(__version__, package_name="gte-vectorize", prog_name="gte-vectorize")
def cli() -> None:
    """Turn the text column of a Parquet corpus into embeddings in Parquet.

    \b
      gte-vectorize corpus.parquet                  embed; "run" is the default command
      gte-vectorize run --help                      its options
      gte-vectorize search OUTPUT "a question"      the nearest documents

    Exit codes: 0 done; 1 a bug; 2 refused before any work; 3 done, and some rows failed within the limit; 4 too many
    rows failed; 75 run the same command again; 130 or 143 interrupted, the same command goes on.
    """


def config_options(command: Any) -> Any:
    """One option per field of Config. None stands for "not said", so that the other sources can speak."""
    for name, option in reversed(OPTIONS.items()):
        if name != "inputs":
            command = _click_option(name, option)(command)
    return command


def _click_option(name: str, option: Option) -> Any:
    dashed = name.replace("_", "-")
    if option.is_flag:
        return click.option(f"--{dashed}/--no-{dashed}", name, default=None, help=option.help)
    flags = [option.short] if option.short else []
    return click.option(*flags, f"--{dashed}", name, metavar=option.metavar, help=option.help)


@cli.command(context_settings=CONTEXT)
@click.argument("inputs", nargs=-1)
@config_options
@click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="TOML file to read.")
@click.option("--print-config", is_flag=True, help="Show every value and where it came from; do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Only warnings and errors.")
@click.option("-v", "--verbose", is_flag=True, help="More detail.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def run(
    inputs: tuple[str, ...],
    config_file: Path | None,
    print_config: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    log_format: str,
    **options: Any,
) -> int:
    """Embed the documents of INPUTS (the default command).

    INPUTS and the options down to --overwrite can also be said in the environment (--max-length as
    GTE_VECTORIZE_MAX_LENGTH) and in the config file (max_length = 512). The command line wins over the environment, the
    environment over the file. Relative paths are relative to the working directory, in the file too.
    """
    set_up_logging(log_format, quiet=quiet, verbose=verbose)
    config, sources = resolve({**options, "inputs": inputs or None}, environment=os.environ, file=config_file)
    if print_config:
        _print_config(config, sources)
        return 0
    _ = config.output_path  # refused now rather than after the heavy imports
    from gte_vectorize.run import run as run_job

    with ProgressDisplay(quiet=quiet, log_format=log_format) as display:
        report = run_job(config, partial(_go_on, display))
    if as_json:
        click.echo(json.dumps(report.to_dict(), sort_keys=True))
    return report.exit_code


def _go_on(display: ProgressDisplay, progress: Progress) -> None:
    if _asked:
        raise Stopped
    display.update(progress)


def _print_config(config: Config, sources: dict[str, str]) -> None:
    """A config file of this very run, each value with its source, and in comments what the model's folder says."""
    from gte_vectorize.job import load_job_model, model_settings

    for name in OPTIONS:
        value = getattr(config, name)
        line = f"# {name} is not set" if value is None else f"{name} = {_toml(value)}"
        click.echo(f"{line}  # {sources[name]}")
    for name, (value, source) in model_settings(load_job_model(config)).items():
        click.echo(f"# the model's {name} = {_toml(value)}  # {source}")


def _toml(value: Any) -> str:
    """JSON, of which TOML reads all but a bare DEL."""
    plain = list(value) if isinstance(value, tuple) else value if isinstance(value, str | int) else str(value)
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")


@cli.command(context_settings=CONTEXT)
@click.argument("output", type=click.Path(exists=True, path_type=Path))
@click.argument("queries", nargs=-1, required=True)
@click.option("-k", "--top", type=click.IntRange(1), default=5, show_default=True, help="Documents per query.")
@click.option("--model", metavar="ID|DIR", help="Where the output's model is. [default: the hub]")
@click.option("--prompt", metavar="TEXT", help="Text put before the query. [default: the model's query prompt]")
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per hit.")
def search(
    output: Path,
    queries: tuple[str, ...],
    top: int,
    model: str | None,
    prompt: str | None,
    device: str,
    as_json: bool,
) -> None:
    """The documents of OUTPUT nearest to each query, by cosine."""
    from gte_vectorize.search import search as find

    for query, hits in find(output, queries, top=top, model=model, prompt=prompt, device=device):
        if not as_json:
            click.echo(f"\n{query}")
        for hit in hits:
            click.echo(json.dumps(hit.to_dict(query), ensure_ascii=False, default=str) if as_json else hit.line())


def _stop(number: int, frame: object) -> NoReturn:
    """Leave through every open context, so that nothing stays behind; a second signal ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    _asked.append(signal.Signals(number))
    raise Stopped


def main() -> NoReturn:
    """Entry point: files for their owner alone, no core dumps, quiet libraries, and the promised exit codes."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.environ.update(QUIET_LIBRARIES | os.environ)
    set_up_logging("text")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    sys.exit(_run_command())


def _run_command() -> int:
    """Whatever ends the command becomes one message and one exit code."""
    try:
        return cli.main(prog_name="gte-vectorize", standalone_mode=False) or 0
    except (Exception, Stopped) as error:
        if _asked:
            log.error("stopped by %s; run the same command again to go on", _asked[0].name)
            return 128 + _asked[0]
        return _tell(error)


def _tell(error: BaseException) -> int:
    if isinstance(error, click.ClickException):
        error.show()
        return 2
    if isinstance(error, VectorizeError):
        log.error("%s", error)
        return error.exit_code
    log.critical("this should not happen: a bug, or a file of a kind nobody thought of", exc_info=error)
    return 1

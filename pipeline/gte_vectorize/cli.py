"""The command line. Thin: it reads options, sets up logging and signals, and calls the library.

Heavy modules are imported inside the commands, so that `--help` and usage errors answer in a fraction of a second.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import click

from gte_vectorize import __version__
from gte_vectorize.config import OPTIONS, Config, Option, resolve
from gte_vectorize.errors import VectorizeError
from gte_vectorize.progress import ProgressDisplay, set_up_logging

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class DefaultToRun(click.Group):
    """`gte-vectorize corpus.parquet` means `gte-vectorize run corpus.parquet`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file with any of these options.")
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
) -> None:
    """Embed the documents of INPUTS (the default command).

    Every option can also be said as GTE_VECTORIZE_NAME in the environment or in the config file; the command line wins.
    """
    set_up_logging(log_format, quiet=quiet, verbose=verbose)
    given = {name: value for name, value in options.items() if value is not None}
    if inputs:
        given["inputs"] = inputs
    config, sources = resolve(given, environment=os.environ, file=config_file)
    if print_config:
        _print_config(config, sources)
        return
    from gte_vectorize.run import run as run_job

    with ProgressDisplay(quiet=quiet) as display:
        report = run_job(config, display.update)
    if as_json:
        click.echo(json.dumps(report.to_dict(), ensure_ascii=False, sort_keys=True))
    sys.exit(report.exit_code)


def _print_config(config: Config, sources: dict[str, str]) -> None:
    """`name = value  # source`, with what the model's folder says for the values nobody gave."""
    from gte_vectorize.job import load_job_model, model_settings

    for name in OPTIONS:
        value, source = getattr(config, name), sources[name]
        click.echo(f"{name} = {_shown(value)}  # {source}")
    click.echo("# what the model runs with")
    for name, (value, source) in model_settings(load_job_model(config)).items():
        click.echo(f"{name} = {_shown(value)}  # {source}")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    return json.dumps(value if isinstance(value, list | str | int | bool | None) else str(value), ensure_ascii=False)


@cli.command(context_settings=CONTEXT)
@click.argument("output", type=click.Path(exists=True, path_type=Path))
@click.argument("queries", nargs=-1, required=True)
@click.option("-k", "--top", type=click.IntRange(1), default=5, show_default=True, help="Documents per query.")
@click.option("--model", metavar="ID|DIR", help="Where the output's model is. [default: where the run found it]")
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
    set_up_logging("text", quiet=False, verbose=False)
    from gte_vectorize.search import search as find

    for query, hits in find(output, queries, top=top, model=model, prompt=prompt, device=device):
        if not as_json:
            click.echo(f"\n{query}")
        for hit in hits:
            click.echo(json.dumps(hit.to_dict(query), ensure_ascii=False, default=str) if as_json else hit.line())


def _stop(number: int, frame: object) -> None:
    """Leave through every open context, so that nothing stays behind; a second signal ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    click.echo("gte-vectorize: stopped; run the same command again to go on", err=True)
    sys.exit(128 + number)


def main() -> None:
    """Entry point: files for their owner alone, no core dumps, and the promised exit codes."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        cli.main(prog_name="gte-vectorize", standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except VectorizeError as error:
        click.echo(f"gte-vectorize: {error}", err=True)
        sys.exit(error.exit_code)

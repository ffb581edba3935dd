"""The command line. Thin: it reads options, sets up logging and signals, and calls the library.

Heavy modules are imported inside the commands, so that `--help` and usage errors answer in a fraction of a second.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shlex
import signal
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from gte_vectorize import __version__
from gte_vectorize.config import OPTIONS, Config, resolve
from gte_vectorize.errors import DeviceError, TemporaryError, VectorizeError
from gte_vectorize.model.folder import DEFAULT_MODEL
from gte_vectorize.option import Option, share
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

FAILURES = "_GTE_VECTORIZE_DEVICE_FAILURES"
"""Which device failed, and when, for the process that follows."""

DEVICE_FAILURES = 3

# Commands to come, which must not be taken for files meanwhile.
NOT_BUILT = ("plan", "report")

_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)

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
      gte-vectorize status OUTPUT                   how far a job is
      gte-vectorize verify OUTPUT                   whether every byte, row and vector is right
      gte-vectorize repair OUTPUT                   make again what is damaged
      gte-vectorize search OUTPUT "a question"      the nearest documents
      gte-vectorize bench                           throughput of this machine

    Exit codes: 0 done; 1 a bug; 2 refused before any work; 3 done, and some rows failed within the limit; 4 too many
    rows failed; 5 verification found differences; 75 run the same command again; 130 or 143 interrupted, the same
    command goes on.
    """
    _refuse_to_go_on_without_gpu()


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


@cli.command(context_settings=CONTEXT)
@click.argument("inputs", nargs=-1)
@click.option("--model", metavar="ID|DIR", default=DEFAULT_MODEL, show_default=True, help="Model to measure with.")
@click.option("--text-column", metavar="NAME", default="text", show_default=True, help="Column that holds the texts.")
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]))
@click.option(
    "--seconds",
    metavar="S",
    type=click.FloatRange(0, min_open=True),
    default=3.0,
    show_default=True,
    help="Per figure.",
)
@click.option("--no-peers", is_flag=True, help="Leave sentence-transformers and transformers out.")
@click.option("--no-ladder", is_flag=True, help="Leave the steps out that lead to this encoder.")
@click.option("--trace", metavar="FILE", type=_NEW_FILE, help="Write a Chrome trace of the encoder at work, as JSON.")
@click.option("-o", "--output", metavar="FILE", type=_NEW_FILE, help="Write the page to a file too.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line alone.")
def bench(
    inputs: tuple[str, ...],
    model: str,
    text_column: str,
    device: str,
    seconds: float,
    no_peers: bool,
    no_ladder: bool,
    trace: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Throughput of this machine with a model, step by step, stage by stage, and beside its peers.

    The texts come from INPUTS, Parquet, or are made from the model's vocabulary. Prints one Markdown page, and one JSON
    object as the last line.
    """
    for file in (trace, output):
        if file is not None and not file.absolute().parent.is_dir():
            raise click.UsageError(f"{str(file)!r}: there is no such folder to write into")
    from gte_vectorize.bench.bench import bench as measure
    from gte_vectorize.bench.page import render, to_dict

    result = measure(
        inputs,
        model=model,
        text_column=text_column,
        device=device,
        seconds=seconds,
        peers=not no_peers,
        ladder=not no_ladder,
        trace=trace,
    )
    command = shlex.join(["gte-vectorize", *sys.argv[1:]])
    page = render(result, command)
    if output is not None:
        output.write_text(page, encoding="utf-8")
    if not as_json:
        click.echo(page)
    click.echo(json.dumps(to_dict(result, command), ensure_ascii=False))


@cli.command(context_settings=CONTEXT)
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(output: str, as_json: bool) -> int:
    """How far the job that writes OUTPUT is, and whether running it again would help.

    Ends with 0 if the output is finished, 75 if it is not yet, 5 if it is damaged.
    """
    from gte_vectorize.check.status import job_status

    found = job_status(output)
    click.echo(json.dumps(found.to_dict(), sort_keys=True) if as_json else "\n".join(found.lines()))
    return found.exit_code


def _read_share(_: click.Context, __: click.Parameter, value: str | None) -> Fraction | None:
    try:
        return None if value is None else share(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@cli.command(context_settings=CONTEXT)
@click.argument("output")
@click.option(
    "--reembed", "rate", metavar="RATE", callback=_read_share, help="Embed so many rows again: 0.1% or 0.001."
)
@click.option("--model", metavar="ID|DIR", help="Where the output's model is. [default: the hub]")
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]))
@click.option("--json", "as_json", is_flag=True, help="Print what was found as one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Only warnings and errors.")
def verify(output: str, rate: Fraction | None, model: str | None, device: str, as_json: bool, quiet: bool) -> None:
    """Whether OUTPUT is what its run published: bytes, checksums, columns, counts, norms.

    With --reembed, a sample of rows is embedded again from the inputs, among other neighbours, and must come out the
    same. Nothing is written. Ends with 5 where something differs, and 75 where the output is sound but not finished.
    """
    set_up_logging("text", quiet=quiet)
    from gte_vectorize.check.verify import verify as check

    found = check(output)
    if rate is not None and not found.differences:
        from gte_vectorize.check.reembed import reembed

        reembed(found, rate, model=model, device=device)
    if as_json:
        click.echo(json.dumps(found.to_dict(), sort_keys=True))
    found.conclude()


@cli.command(context_settings=CONTEXT)
@click.argument("output")
@click.option("--model", metavar="DIR", help="Where the model is, if it was a directory.")
@click.option("-q", "--quiet", is_flag=True, help="Only warnings and errors.")
def repair(output: str, model: str | None, quiet: bool) -> None:
    """Verify OUTPUT, remove what is damaged, and make it again: the bytes are those of an undisturbed run."""
    set_up_logging("text", quiet=quiet)
    from gte_vectorize.check.repair import repair as mend

    with ProgressDisplay(quiet=quiet, log_format="text") as display:
        found = mend(output, model=model, on_progress=partial(_go_on, display))
    found.conclude()


def _start_afresh(error: DeviceError) -> None:
    """Become a new process of the same command, which goes on from what is published; a lost GPU serves no old one.

    Returns after the third failure within an hour: then the GPU is not to be used again.
    """
    now = time.monotonic()  # of the machine, so it goes on across processes
    failures = [float(at) for at in os.environ.get(FAILURES, "").split()[1:] if now - float(at) < 3600]
    if len(failures) < DEVICE_FAILURES - 1:
        log.warning("%s. Going on in a fresh process", error)
        torch = sys.modules.get("torch")
        device = "cuda" if torch and torch.cuda.is_initialized() else "cpu"
        os.environ[FAILURES] = " ".join(map(str, [device, *failures, now]))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _refuse_to_go_on_without_gpu() -> None:
    """Where a GPU failed and is gone, `auto` would mean the CPU: another run, which may not go on with this output."""
    if os.environ.get(FAILURES, "").startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            raise TemporaryError(
                "the GPU failed, and PyTorch does not find it any more; what was published is kept: see to the "
                "machine, then run the same command again"
            )


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
    sys.exit(_run_command(_start_afresh))


def _run_command(after_device_error: Callable[[DeviceError], None] = lambda error: None) -> int:
    """Whatever ends the command becomes one message and one exit code."""
    try:
        return cli.main(prog_name="gte-vectorize", standalone_mode=False) or 0
    except (Exception, Stopped) as error:
        if _asked:
            log.error("stopped by %s; run the same command again to go on", _asked[0].name)
            return 128 + _asked[0]
        if isinstance(error, DeviceError):
            after_device_error(error)
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

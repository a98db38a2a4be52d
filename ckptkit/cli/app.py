"""The command line itself: the typer app that commands register with, the options they share, and their output.

What does not live here: the commands (their own files), errors and exit codes (`run.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ckptkit import __version__
from ckptkit.errors import ResourceError
from ckptkit.report import Report
from ckptkit.settings import SETTINGS_FILE

app = typer.Typer(
    name="ckptkit",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Move large-model weights between HuggingFace / PyTorch and MindSpore, exactly.",
    epilog=f"Defaults for any option, SRC and DST included, can stand in `{SETTINGS_FILE}` in the working folder.",
)

Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="Show no progress bar.")]
Table = Annotated[
    list[Path] | None, typer.Option("--table", help="A mapping table of your own (TOML); can be repeated.")
]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Hold the options of ckptkit itself."""
    if version:
        typer.echo(f"ckptkit {__version__}")
        raise typer.Exit


def from_settings(context: typer.Context) -> list[str]:
    """Return the names of the parameters whose values come from `ckptkit.toml`, and were not typed."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "DEFAULT_MAP"]


def emit(report: Report, as_json: bool) -> None:
    """Print a report to stdout and leave with its exit code; ResourceError when it cannot be written.

    Whoever reads stdout may stop at any line, as `head` does: that is no error.
    """
    error = say(report.to_json() if as_json else report.to_text())
    if error is not None and not isinstance(error, BrokenPipeError):
        raise ResourceError(
            f"the report cannot be written to stdout: {(error.strerror or str(error)).lower()}",
            why="the command itself is complete, only the report is lost",
            hint="send stdout elsewhere",
        )
    raise typer.Exit(report.exit_code)


def say(text: str, *, stream: str = "stdout") -> OSError | None:
    """Print a text to `stdout` or `stderr`; return what went wrong, and leave that stream alone from then on."""
    try:
        print(text, file=getattr(sys, stream), flush=True)
    except OSError as error:
        setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 - else python tries again at its end
        return error
    return None


def progress_bar(wanted: bool) -> Callable[[int, int], Callable[[int], None]] | None:
    """Return a factory of progress bars on stderr; None when none is wanted or stderr is no terminal."""
    if not wanted or not sys.stderr.isatty():
        return None

    def start(total: int, done: int) -> Callable[[int], None]:
        from tqdm import tqdm

        width = shutil.get_terminal_size().columns  # 80 where a terminal does not say
        bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, file=sys.stderr, leave=False, ncols=width)

        def advance(count: int) -> None:
            bar.update(count)
            if bar.n >= total:
                bar.close()

        return advance

    return start


def step_bar(wanted: bool) -> Callable[[int], Callable[[str], None]] | None:
    """Return a factory of bars on stderr that count steps, each with a word; None as for `progress_bar`."""
    if not wanted or not sys.stderr.isatty():
        return None

    def start(total: int) -> Callable[[str], None]:
        from tqdm import tqdm

        bar = tqdm(total=total, unit="input", file=sys.stderr, leave=False, ncols=shutil.get_terminal_size().columns)

        def advance(what: str) -> None:
            bar.set_description(what, refresh=False)
            bar.update(1)
            if bar.n >= total:
                bar.close()

        return advance

    return start

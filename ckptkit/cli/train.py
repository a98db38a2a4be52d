"""`ckptkit resume-train` and `ckptkit runs` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.app import Json, NoProgress, app, emit, progress_bar, say
from ckptkit.errors import UsageError

runs = typer.Typer(
    no_args_is_help=True, help="List and prune the checkpoints of a training run.", rich_markup_mode=None
)
app.add_typer(runs, name="runs")


@app.command("resume-train")
def resume_train_command(
    config: Annotated[
        Path | None, typer.Argument(help="The run's YAML file; docs/training.md has its keys.", metavar="CONFIG")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Set a key over the file: `optimizer.lr=1e-4`; can be repeated.", metavar="KEY=VALUE"
        ),
    ] = None,
    stop_at_step: Annotated[
        int | None, typer.Option("--stop-at-step", min=0, help="Save and end at this step; the schedule stays.")
    ] = None,
    log: Annotated[Path | None, typer.Option("--log", help="The JSONL log, in place of `log.file`.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="A small trial first: 1 % of the rows, 100 updates, nothing kept.")
    ] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on although settings that alter the maths were changed.")
    ] = False,
    without_optimizer: Annotated[
        bool, typer.Option("--without-optimizer", help="Go on although moments are lost: they begin at zero.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the log of a run's folder as `plot.png` in it; nothing is trained."),
    ] = None,
    as_json: Json = False,
    no_progress: NoProgress = False,
) -> None:
    """Train as CONFIG says; run again after any crash, it goes on exactly where it was.

    Checkpoints are ordinary HuggingFace folders, which `convert`, `reshard` and `verify` take.
    """
    from ckptkit.commands.resume_train import plot_run, resume_train

    if plot is not None and config is not None:
        raise UsageError("`--plot` draws a run that is there, and takes no config", hint="leave one of the two out")
    if plot is not None:
        emit(plot_run(plot), as_json)
    if config is None:
        raise UsageError("no config is named", hint="`ckptkit resume-train CONFIG`, or `--plot RUN`")
    told = [*(sets or []), *([log_setting(log)] if log is not None else [])]
    report = resume_train(
        config, sets=told, stop_at_step=stop_at_step, smoke=smoke, accept_changes=accept_changes,
        without_optimizer=without_optimizer, progress=progress_bar(not no_progress),
        say=lambda text: _say(text, as_json),
    )  # fmt: skip
    emit(report, as_json)


def log_setting(log: Path) -> str:
    """Return `--log` as what `--set` takes: the name is quoted, for `7` is a number and `a #b` is `a` in YAML."""
    return f"log.file={json.dumps(str(log), ensure_ascii=False)}"


def _say(text: str, as_json: bool) -> None:
    """Print a line at once: to stdout, but where that is for JSON alone."""
    say(text, stream="stderr" if as_json else "stdout")


@runs.command("ls")
def runs_ls_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="DIR")],
    digests: Annotated[bool, typer.Option("--digests", help="Read every byte, too.")] = False,
    as_json: Json = False,
) -> None:
    """List a run's checkpoints: step, date, size, loss, and which are whole."""
    from ckptkit.commands.runs import list_runs

    emit(list_runs(folder, digests=digests), as_json)


@runs.command("prune")
def runs_prune_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="DIR")],
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="Newest whole checkpoints that stay.")] = 2,
    keep_best: Annotated[bool, typer.Option("--keep-best", help="The one with the lowest held-out loss, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Remove all but the newest checkpoints of a run. What is no whole checkpoint stays where it is."""
    from ckptkit.commands.runs import prune_runs

    emit(prune_runs(folder, keep_last=keep_last, keep_best=keep_best, dry_run=dry_run), as_json)

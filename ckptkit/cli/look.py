"""`ckptkit inspect` and `check` on the command line: they look at checkpoints and change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.app import Json, NoProgress, Table, app, emit, progress_bar


@app.command("inspect")
def inspect_command(
    path: Annotated[Path, typer.Argument(help="A checkpoint: folder or file.", metavar="PATH")],
    expect: Annotated[
        Path | None, typer.Option("--expect", help="JSON list of names, or {name: shape}, that must be there.")
    ] = None,
    table: Table = None,
    all_tensors: Annotated[bool, typer.Option("--all", help="List every tensor.")] = False,
    step: Annotated[int | None, typer.Option("--step", help="The step to take when rank folders hold several.")] = None,
    as_json: Json = False,
) -> None:
    """Say what a checkpoint holds, from its headers alone."""
    from ckptkit.commands.inspect import inspect

    emit(inspect(path, expect=expect, table=table or (), all_tensors=all_tensors, step=step), as_json)


@app.command("check")
def check_command(
    path: Annotated[Path, typer.Argument(help="A folder that ckptkit wrote.", metavar="DIR")],
    as_json: Json = False,
    no_progress: NoProgress = False,
) -> None:
    """Read everything again and compare it with the digests in ckptkit.json."""
    from ckptkit.commands.check import check

    emit(check(path, progress=progress_bar(not no_progress)), as_json)

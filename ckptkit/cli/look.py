"""`ckptkit inspect`, `check` and `diff` on the command line: they look at checkpoints and change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.app import Json, NoProgress, Table, app, emit, progress_bar
from ckptkit.cli.side_options import (
    DialectA,
    DialectB,
    Model,
    StepA,
    StepB,
    StrategyA,
    StrategyB,
    VariantA,
    VariantB,
    Workers,
)


@app.command("inspect")
def inspect_command(
    path: Annotated[Path, typer.Argument(help="A checkpoint: folder or file.", metavar="PATH")],
    expect: Annotated[
        Path | None, typer.Option("--expect", help="JSON list of names, or {name: shape}, that must be there.")
    ] = None,
    table: Table = None,
    all_tensors: Annotated[bool, typer.Option("--all", help="List every tensor.")] = False,
    step: Annotated[int | None, typer.Option("--step", help="The step to take when ranks hold several.")] = None,
    as_json: Json = False,
) -> None:
    """Say what a checkpoint holds, from its headers."""
    from ckptkit.commands.inspect import inspect

    emit(inspect(path, expect=expect, table=table or (), all_tensors=all_tensors, step=step), as_json)


@app.command("check")
def check_command(
    path: Annotated[Path, typer.Argument(help="A folder that ckptkit wrote or adopted.", metavar="DIR")],
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Write a ckptkit.json with digests beside a foreign checkpoint.")
    ] = False,
    as_json: Json = False,
    no_progress: NoProgress = False,
) -> None:
    """Compare every byte with the digests in ckptkit.json."""
    from ckptkit.commands.check import check

    emit(check(path, adopt=adopt, progress=progress_bar(not no_progress)), as_json)


@app.command("diff")
def diff_command(
    a: Annotated[Path, typer.Argument(help="A checkpoint: folder or file, of any format and naming.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="Another one.", metavar="B")],
    model: Model = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Folder or config.json of the model, when none is beside A or B.")
    ] = None,
    table: Table = None,
    dialect_a: DialectA = None,
    dialect_b: DialectB = None,
    variant_a: VariantA = None,
    variant_b: VariantB = None,
    strategy_a: StrategyA = None,
    strategy_b: StrategyB = None,
    step_a: StepA = None,
    step_b: StepB = None,
    workers: Workers = 2,
    as_json: Json = False,
    no_progress: NoProgress = False,
) -> None:
    """Compare two checkpoints, of any format and naming."""
    from ckptkit.commands.diff import diff

    emit(
        diff(
            a, b, model=model, config=config, table=table or (), dialect_a=dialect_a, dialect_b=dialect_b,
            variant_a=variant_a, variant_b=variant_b, strategy_a=strategy_a, strategy_b=strategy_b,
            step_a=step_a, step_b=step_b, workers=workers, progress=progress_bar(not no_progress),
        ),
        as_json,
    )  # fmt: skip

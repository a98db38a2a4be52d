"""`ckptkit verify` on the command line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from ckptkit.cli.app import Json, NoProgress, Table, app, emit, from_settings, progress_bar, say, step_bar
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
from ckptkit.errors import CkptkitError
from ckptkit.report import Report

_DEVICE = "`cpu`, `cuda`, `ascend`, or one with its number (`cuda:1`)"


@app.command("verify")
def verify_command(
    context: typer.Context,
    a: Annotated[Path, typer.Argument(help="The checkpoint that is right: of any format and naming.", metavar="A")],
    b: Annotated[
        Path | None,
        typer.Argument(help="The one to be verified; left out with --dump and --against.", metavar="[B]"),
    ] = None,
    level: Annotated[
        Literal["files", "weights", "forward", "layers"],
        typer.Option("--level", help="How far to go: each level includes those before it."),
    ] = "forward",
    runner: Annotated[
        Literal["auto", "builtin", "mindformers"],
        typer.Option("--runner", help="What runs MindSpore's side; auto: MindFormers where it can express the model."),
    ] = "auto",
    device: Annotated[str, typer.Option("--device", help=f"Device of both sides: {_DEVICE}.")] = "cpu",
    device_a: Annotated[str | None, typer.Option("--device-a", help="Device of A alone.")] = None,
    device_b: Annotated[str | None, typer.Option("--device-b", help="Device of B alone.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of the longest input.")] = 512,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Try every level, whatever one found.")] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Load, run and free one layer at a time, for models larger than memory.")
    ] = False,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Run these layers alone: `0,1,40-43`.", metavar="LAYERS")
    ] = None,
    compute: Annotated[
        Literal["fp16", "bf16"] | None,
        typer.Option(
            "--compute", help="At level layers, run both sides in this dtype, too: its error and its overflows."
        ),
    ] = None,
    dump: Annotated[
        Path | None, typer.Option("--dump", help="Run A alone and keep inputs and logits in this folder.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="Run A alone and compare with such a folder, of any machine.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older --dump folder.")] = False,
    sanity: Annotated[
        Path | None,
        typer.Option("--sanity", help="Loss on this text (JSON lines) and statistics of every weight, of A and of B."),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", min=1, help="Lines of the --sanity text that are taken.")] = 8,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report to this page, too.")] = None,
    model: Model = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Folder or config.json of the model, for both sides.")
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
    """Prove that a checkpoint is right: its files, its weights, and what it computes in its framework."""
    from ckptkit.commands.verify import verify

    read = [path for path in (a, b, dump, against, config, sanity, strategy_a, strategy_b, *(table or ())) if path]
    if html is not None:
        from ckptkit.verification.page import check_page

        check_page(html, read=read)
    report = verify(
        a, b, level=level, runner=runner, device=device, device_a=device_a, device_b=device_b, max_tokens=max_tokens,
        keep_going=keep_going, stream=stream, layers=layers, compute=compute, dump=dump, against=against,
        overwrite=overwrite, sanity=sanity, lines=lines, model=model,
        config=config, table=table or (), dialect_a=dialect_a, dialect_b=dialect_b, variant_a=variant_a,
        variant_b=variant_b, strategy_a=strategy_a, strategy_b=strategy_b, step_a=step_a, step_b=step_b,
        workers=workers, progress=progress_bar(not no_progress), steps=step_bar(not no_progress),
        defaults=from_settings(context),
    )  # fmt: skip
    lost = None if html is None else _write_page(report, html, read)
    try:
        emit(report, as_json)
    except typer.Exit as done:
        if lost is None:
            raise
        say(f"error: {lost}", stream="stderr")
        raise typer.Exit(done.exit_code or lost.exit_code) from None


def _write_page(report: Report, html: Path, read: Sequence[Path]) -> CkptkitError | None:
    """Write the page; return what went wrong, for the report is to be printed before that is said."""
    from ckptkit.verification.page import write_page

    try:
        write_page(report.data, html, shlex.join(["ckptkit", *sys.argv[1:]]), read=read)
    except CkptkitError as error:
        return error
    return None

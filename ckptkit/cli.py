"""The command line: parse, call one command function, print its report, set the exit code.

stdout carries the report (or its JSON), stderr the progress bar and errors. Exit codes: 0 done; 1 a difference was
found; 2 bad usage; 3 coverage; 4 space, memory or disk; 5 corrupt or unsafe input; 70 an internal error; 130 Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ckptkit import __version__
from ckptkit.errors import CkptkitError, InternalError, ResourceError, UsageError
from ckptkit.report import REPORT_SCHEMA, Report
from ckptkit.settings import SETTINGS_FILE, default_map

INTERRUPTED = 130
# typer carries its own copy of click, or uses the installed one; its errors' base class is found through typer
ClickError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

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


@app.command("convert")
def convert_command(
    src: Annotated[Path, typer.Argument(help="A HuggingFace folder, a MindSpore folder, or a file.", metavar="SRC")],
    dst: Annotated[Path, typer.Argument(help="The folder to make. It appears when it is complete.", metavar="DST")],
    model: Annotated[
        str | None, typer.Option("--model", help="Family or alias (llama2, ...); config.json decides without it.")
    ] = None,
    from_dialect: Annotated[
        str | None, typer.Option("--from", help="Naming of SRC: hf, mindformers, ...; found by its names without it.")
    ] = None,
    to_dialect: Annotated[
        str | None, typer.Option("--to", help="Naming of DST: hf, mindformers, ...; the other side without it.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option("--variant", help="Layout of fused tensors on the MindSpore side (qkv_concat, ...).")
    ] = None,
    from_variant: Annotated[
        str | None, typer.Option("--from-variant", help="Layout of fused tensors in SRC, when both sides have one.")
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="MindSpore output: safetensors (default) or ckpt.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Largest safetensors file: 5GB, 500MB, 2GiB.")
    ] = "5GB",
    table: Table = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Folder or config.json of the model, when SRC has none beside it.")
    ] = None,
    tie_embeddings: Annotated[
        bool, typer.Option("--tie-embeddings", help="A head that is not stored is the embedding.")
    ] = False,
    allow_unmapped: Annotated[
        bool, typer.Option("--allow-unmapped", help="Leave out tensors that match no row, and report them.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; write nothing.")] = False,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Write the plan as JSON to this file.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST, once the new result is complete.")
    ] = False,
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Threads that read and write.")] = 2,
    no_digest: Annotated[
        bool, typer.Option("--no-digest", help="Compute no digests: a little faster, and `check` cannot help.")
    ] = False,
    as_json: Json = False,
    no_progress: NoProgress = False,
) -> None:
    """Convert weights between HuggingFace and MindSpore, both ways, exactly."""
    from ckptkit.commands.convert import convert

    emit(
        convert(
            src, dst, model=model, from_dialect=from_dialect, to_dialect=to_dialect, variant=variant,
            from_variant=from_variant, format=format, max_shard_size=max_shard_size, table=table or (),
            config=config, tie_embeddings=tie_embeddings, allow_unmapped=allow_unmapped, dry_run=dry_run,
            overwrite=overwrite, workers=workers, digests=not no_digest, plan_file=plan_file,
            progress=progress_bar(not no_progress),
        ),
        as_json,
    )  # fmt: skip


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


def emit(report: Report, as_json: bool) -> None:
    """Print a report to stdout and leave with its exit code."""
    typer.echo(report.to_json() if as_json else report.to_text())
    raise typer.Exit(report.exit_code)


def progress_bar(wanted: bool) -> Callable[[int, int], Callable[[int], None]] | None:
    """Return a factory of progress bars on stderr; None when none is wanted or stderr is no terminal."""
    if not wanted or not sys.stderr.isatty():
        return None

    def start(total: int, done: int) -> Callable[[int], None]:
        from tqdm import tqdm

        bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, file=sys.stderr, leave=False)

        def advance(count: int) -> None:
            bar.update(count)
            if bar.n >= total:
                bar.close()

        return advance

    return start


def run(args: Sequence[str]) -> int:
    """Run the command line on `args` and return the exit code; every error is printed here, and nowhere else."""
    try:
        command = typer.main.get_command(app)
        defaults = default_map(Path(SETTINGS_FILE), command)
        result = command.main(list(args), prog_name="ckptkit", standalone_mode=False, default_map=defaults)
        return result if isinstance(result, int) else 0
    except CkptkitError as error:
        return _fail(error, args)
    except ClickError as error:
        return _fail_usage(error, args)
    except (KeyboardInterrupt, typer.Abort):
        print("\ninterrupted: nothing was given its final name; the same command continues", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    except MemoryError:
        return _fail(ResourceError("memory ran out", hint="use fewer `--workers`"), args)
    except OSError as error:
        return _fail(ResourceError(f"the system reports: {error}", hint="check the disk and the permissions"), args)
    except Exception as error:
        if os.environ.get("CKPTKIT_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = "this is a bug in ckptkit: please report it; CKPTKIT_DEBUG=1 shows where it happened"
        return _fail(InternalError(f"internal error: {what}", hint=hint), args)


def _fail_usage(error: Any, args: Sequence[str]) -> int:
    """Print an error of the option parser: the help itself when there were no arguments at all."""
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
        return UsageError.exit_code
    context = getattr(error, "ctx", None)
    what = message[:1].lower() + message[1:].rstrip(".")
    return _fail(UsageError(what, hint=context.get_usage() if context else ""), args)


def _fail(error: CkptkitError, args: Sequence[str]) -> int:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"{red}error:{plain} {error}", file=sys.stderr)
    if "--json" in args:
        print(json.dumps(_error_data(error, args), indent=1, ensure_ascii=False))
    return error.exit_code


def _error_data(error: CkptkitError, args: Sequence[str]) -> dict[str, Any]:
    command = next((arg for arg in args if not arg.startswith("-")), "")
    details = {"what": error.what, "items": list(error.items), "why": error.why, "hint": error.hint}
    kind = {"type": type(error).__name__, "exit_code": error.exit_code}
    return {"schema": REPORT_SCHEMA, "command": command, "ok": False, "error": kind | details}


def main() -> NoReturn:
    """Run the command line on this process's arguments."""
    sys.exit(run(sys.argv[1:]))

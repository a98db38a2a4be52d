"""`ckptkit tables list`, `show` and `check` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.app import Json, Table, app, emit

tables = typer.Typer(no_args_is_help=True, help="List, show or check the mapping tables.", rich_markup_mode=None)
app.add_typer(tables, name="tables")

Config = Annotated[Path | None, typer.Option("--config", help="A folder or config.json: shapes become numbers.")]


@tables.command("list")
def list_command(table: Table = None, as_json: Json = False) -> None:
    """List the families: aliases, model_types, dialects, variants."""
    from ckptkit.commands.tables import list_tables

    emit(list_tables(table=table or ()), as_json)


@tables.command("show")
def show_command(
    family: Annotated[str, typer.Argument(help="A family or an alias.", metavar="FAMILY")],
    dialect: Annotated[str | None, typer.Option("--dialect", help="hf, mindformers, or a dialect's own name.")] = None,
    variant: Annotated[str | None, typer.Option("--variant", help="A variant of the dialect.")] = None,
    config: Config = None,
    table: Table = None,
    as_json: Json = False,
) -> None:
    """Show a table's rows: target, HuggingFace tensors, ops, shapes."""
    from ckptkit.commands.tables import show_table

    emit(show_table(family, dialect=dialect, variant=variant, config=config, table=table or ()), as_json)


@tables.command("check")
def check_command(
    files: Annotated[list[Path] | None, typer.Argument(help="Tables of your own (TOML).", metavar="[FILE]...")] = None,
    config: Config = None,
    table: Table = None,
    as_json: Json = False,
) -> None:
    """Check all tables, with those of your own; exit code 2 names the file and the row of a fault."""
    from ckptkit.commands.tables import check_tables

    emit(check_tables(files or (), config=config, table=table or ()), as_json)

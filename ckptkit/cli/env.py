"""`ckptkit env` on the command line."""

from __future__ import annotations

from ckptkit.cli.app import Json, app, emit


@app.command("env")
def env_command(as_json: Json = False) -> None:
    """Show versions, traps that apply here, and devices."""
    from ckptkit.commands.env import env

    emit(env(), as_json)

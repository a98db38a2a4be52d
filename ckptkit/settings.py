"""`ckptkit.toml` in the working folder: defaults for options, so that a runbook is a few short commands.

    [convert]
    src = "hub/Llama-2-7b-hf"
    dst = "ms/llama2-7b"
    variant = "qkv_concat"
    max-shard-size = "2GB"

A table for each command (`[tables.show]` for one of a group); keys are the long options without dashes, and `src`,
`dst`, `path` for the arguments. What is typed on the command line wins. A default that does nothing in a conversion
is passed over with a note (`commands/defaults.py`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.formats.files import look, regular_file

SETTINGS_FILE = "ckptkit.toml"


def default_map(path: Path, root: Any) -> dict[str, dict[str, Any]]:
    """Return a default map for typer's command `root`, {} without a file; UsageError names a key that no option has."""
    if look(path) is None:
        return {}
    try:
        settings = tomllib.loads(regular_file(path, "defaults for options").read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"`{path}` is not valid TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"`{path}` is nested too deeply", hint="one table a command is all that it needs") from None
    return _group_defaults(path, "", settings, root)


def _group_defaults(path: Path, prefix: str, settings: dict[str, Any], group: Any) -> dict[str, dict[str, Any]]:
    """Return the defaults of a group's commands; a group in a group, as `tables`, has sub-tables: `[tables.show]`."""
    found = {}
    for key, table in settings.items():
        name, command = f"{prefix}{key}", group.commands.get(key)
        if hasattr(command, "commands") and isinstance(table, dict):
            found[key] = _group_defaults(path, f"{name}.", table, command)
        else:
            found[key] = _command_defaults(path, name, table, command)
    return found


def _command_defaults(path: Path, name: str, table: object, command: Any) -> dict[str, Any]:
    if command is None or not isinstance(table, dict):
        raise UsageError(
            f"`{path}`: `{name}` is not a command", hint="write a table for each command: `[convert]` and so on"
        )
    table = {key.replace("_", "-"): value for key, value in table.items()}
    known = {}
    for parameter in command.params:
        words = [o.lstrip("-") for o in parameter.opts] if parameter.param_type_name == "option" else [parameter.name]
        known.update({word: parameter for word in words if word})
    unknown = [key for key in table if key not in known]
    if unknown:
        raise UsageError(
            f"`{path}`: `[{name}]` has keys that `ckptkit {name.replace('.', ' ')}` does not know",
            items=unknown,
            hint="known keys: " + ", ".join(sorted(known)),
        )
    for key, value in table.items():
        expected, fits = _expected(known[key])
        if not fits(value):
            raise UsageError(f"`{path}`: `{key}` must be {expected}, and is {value!r}", hint=f"look at `[{name}]`")
    return {str(known[key].name): value for key, value in table.items()}


def _expected(parameter: Any) -> tuple[str, Callable[[object], bool]]:
    """Return what an option's value must be: in words, and as a test. What may be in it, its own parser says."""
    if getattr(parameter, "is_flag", False):
        return "true or false", lambda value: isinstance(value, bool)
    if getattr(parameter, "multiple", False) or parameter.nargs == -1:
        return "a list of texts", lambda value: isinstance(value, list) and all(map(_is_text, value))
    if parameter.type.name.startswith("int"):
        return "a whole number", lambda value: type(value) is int
    return "a text", _is_text


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value

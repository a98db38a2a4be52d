"""Bring in a framework by name when a runner starts: no file of ckptkit imports one when it is itself imported."""

from __future__ import annotations

import importlib
from typing import Any

from ckptkit.errors import UsageError


def framework(name: str, *, extra: str = "verify", asked_by: str = "", instead: str = "") -> Any:
    """Import a package, or a module of it; UsageError, with what to install, when that fails.

    `extra` is ours to install, `asked_by` says what needs it (`a plot`), and `instead` how to do without.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UsageError(
            f"{asked_by} needs the package `{package}`, which cannot be imported"
            if asked_by
            else f"the package `{package}` cannot be imported",
            why=str(error).partition("\n")[0],
            hint=f'pip install "ckptkit-mindspore[{extra}]"' + (f", or {instead}" if instead else ""),
        ) from error

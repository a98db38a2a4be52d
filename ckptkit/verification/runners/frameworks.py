"""Bring in a framework by name when a runner starts: no file of ckptkit imports one when it is itself imported."""

from __future__ import annotations

import importlib
from typing import Any

from ckptkit.errors import UsageError


def framework(name: str, *, extra: str = "verify") -> Any:
    """Import the package `name`; UsageError, with what to install, when that fails."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"the package `{name}` cannot be imported",
            why=str(error).partition("\n")[0],
            hint=f'pip install "ckptkit-mindspore[{extra}]"',
        ) from error

"""Move large-model weights between HuggingFace / PyTorch and MindSpore, exactly and in bounded memory.

The public names are those of docs/api.md: `convert`, `reshard` and `Parallel`, `inspect`, `check`, `diff`, `verify`,
`resume_train`, `env`, `list_tables`, `show_table`, `check_tables`, `open_checkpoint`, and the errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptkit.errors import (
    CkptkitError,
    CorruptError,
    CoverageError,
    InternalError,
    ResourceError,
    UnsafeError,
    UsageError,
)

if TYPE_CHECKING:
    from ckptkit.commands.check import check
    from ckptkit.commands.convert import convert
    from ckptkit.commands.diff import diff
    from ckptkit.commands.env import env
    from ckptkit.commands.inspect import inspect
    from ckptkit.commands.parallel import Parallel
    from ckptkit.commands.reshard import reshard
    from ckptkit.commands.resume_train import resume_train
    from ckptkit.commands.tables import check_tables, list_tables, show_table
    from ckptkit.commands.verify import verify
    from ckptkit.formats.registry import open_checkpoint

__version__ = "0.1.0"

_LAZY = {
    "Parallel": "ckptkit.commands.parallel",
    "check": "ckptkit.commands.check",
    "check_tables": "ckptkit.commands.tables",
    "convert": "ckptkit.commands.convert",
    "diff": "ckptkit.commands.diff",
    "env": "ckptkit.commands.env",
    "inspect": "ckptkit.commands.inspect",
    "list_tables": "ckptkit.commands.tables",
    "reshard": "ckptkit.commands.reshard",
    "resume_train": "ckptkit.commands.resume_train",
    "show_table": "ckptkit.commands.tables",
    "open_checkpoint": "ckptkit.formats.registry",
    "verify": "ckptkit.commands.verify",
}

__all__ = [
    "CkptkitError",
    "CorruptError",
    "CoverageError",
    "InternalError",
    "Parallel",
    "ResourceError",
    "UnsafeError",
    "UsageError",
    "__version__",
    "check",
    "check_tables",
    "convert",
    "diff",
    "env",
    "inspect",
    "list_tables",
    "open_checkpoint",
    "reshard",
    "resume_train",
    "show_table",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public function when it is first used, so that `import ckptkit` costs nothing."""
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module `ckptkit` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted(__all__)

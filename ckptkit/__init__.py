"""Move large-model weights between HuggingFace / PyTorch and MindSpore, exactly and in bounded memory.

The public names are those of docs/api.md: `convert`, `inspect`, `check`, `open_checkpoint`, and the errors.
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
    from ckptkit.commands.inspect import inspect
    from ckptkit.formats.registry import open_checkpoint

__version__ = "0.1.0"

_LAZY = {
    "check": "ckptkit.commands.check",
    "convert": "ckptkit.commands.convert",
    "inspect": "ckptkit.commands.inspect",
    "open_checkpoint": "ckptkit.formats.registry",
}

__all__ = [
    "CkptkitError",
    "CorruptError",
    "CoverageError",
    "InternalError",
    "ResourceError",
    "UnsafeError",
    "UsageError",
    "__version__",
    "check",
    "convert",
    "inspect",
    "open_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Import a public function when it is first used, so that `import ckptkit` costs nothing."""
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module `ckptkit` has no attribute `{name}`")

"""Where a result may go: never into its own input, never over what is not to be replaced, never where it cannot fit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ckptkit.errors import ResourceError, UsageError

_SPARE_BYTES = 16 << 20


def check_target(target: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Raise UsageError when `target` is, holds, or lies inside a source, or is in use and not to be replaced."""
    real = Path(os.path.realpath(target))
    for source in sources:
        origin = Path(os.path.realpath(source))
        if real == origin or origin in real.parents or real in origin.parents:
            raise UsageError(
                f"the output `{target}` is the same as, inside, or around the input `{source}`",
                why="writing there could destroy the input while it is being read",
                hint="choose an output folder outside the input",
            )
    if real.exists() and not real.is_dir():
        raise UsageError(f"the output `{target}` is a file", hint="name a folder: it will hold the result")
    if _is_mount(real):
        raise UsageError(
            f"the output `{target}` is where a file system is mounted",
            why="the finished folder gets its name by a rename, and such a folder cannot be renamed",
            hint="name a folder inside it",
        )
    if not overwrite and real.is_dir() and any(real.iterdir()):
        raise UsageError(
            f"the output folder `{target}` is not empty",
            why="files of two results would be mixed",
            hint="choose another folder, or pass `--overwrite` to replace it when the new result is complete",
        )


def check_space(target: Path, needed_bytes: int) -> None:
    """Raise ResourceError when the disk of `target` cannot take `needed_bytes` more, or cannot be written."""
    parent = _existing_parent(target)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ResourceError(
            f"`{parent}` cannot be written",
            why="it is read-only, or belongs to another user",
            hint="choose an output folder where you may write",
        )
    stat = os.statvfs(parent)
    free = stat.f_bavail * stat.f_frsize
    if needed_bytes + _SPARE_BYTES > free:
        raise ResourceError(
            f"the result needs {needed_bytes:,} bytes and `{parent}` has {free:,} free",
            why="a conversion that runs out of space in the middle helps nobody",
            hint=f"free {needed_bytes + _SPARE_BYTES - free:,} bytes, or choose another disk",
        )


def _is_mount(folder: Path) -> bool:
    if folder.is_mount():
        return True
    try:  # a folder that is bound to another place of the same file system
        rows = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    name = re.sub(r"[ \t\n\\]", lambda match: f"\\{ord(match[0]):03o}", str(folder))
    return any(row.split(" ")[4] == name for row in rows)


def _existing_parent(target: Path) -> Path:
    parent = Path(os.path.realpath(target)).parent
    while not parent.exists():
        parent = parent.parent
    return parent

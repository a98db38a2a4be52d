"""Durable small writes, and disk errors said in words."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ckptkit.errors import ResourceError

_WHY = {
    errno.ENOSPC: ("no space is left on the disk", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or ask for a larger quota"),
    errno.EFBIG: (
        "the file would exceed the size limit of this process or file system",
        "raise the limit (`ulimit -f`)",
    ),
    errno.EROFS: ("the file system is read-only", "choose an output folder where you may write"),
    errno.EACCES: ("permission is denied", "choose an output folder where you may write"),
    errno.EPERM: ("the operation is not permitted", "choose an output folder where you may write"),
    errno.EIO: ("the disk reports an input/output error", "check the disk"),
}


def disk_error(error: OSError, path: Path) -> ResourceError:
    """Return the ResourceError that says what `error` means for `path`."""
    why, remedy = _WHY.get(error.errno or 0, (str(error.strerror or error).lower(), "check the disk and the path"))
    return ResourceError(
        f"cannot write `{path.name}`: {why}",
        why="the result is incomplete and has not been given its name",
        hint=f"{remedy}, then run the same command again: finished files are kept",
    )


def write_file(path: Path, data: bytes) -> None:
    """Write a whole small file and wait until it is on disk; ResourceError when that fails."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, path) from error


def fsync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

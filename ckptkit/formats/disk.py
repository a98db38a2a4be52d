"""What a disk can promise: small files and names that are on it, folders that change places, locks; errors in words."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from ckptkit.errors import CkptkitError, ResourceError
from ckptkit.formats import files

COPY_BYTES = 1 << 20
OTHER_FILES = 128  # that a process has open besides those that it writes: sources, streams, locks

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
    errno.EMFILE: ("this process has too many files open", "raise the limit (`ulimit -n`)"),
    errno.ENFILE: ("the system has too many files open", "end what holds them"),
}

# what a failure means for a result and what to do then; others than results say it in words of their own
_UNNAMED = "the result is incomplete and has not been given its name"
_AGAIN = "then run the same command again: finished files are kept"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def disk_error(error: OSError, path: Path, *, why: str = _UNNAMED, then: str = _AGAIN) -> CkptkitError:
    """Return what `error` means for `path`: a ResourceError, or a UsageError for a path that cannot be.

    `why` says what is lost by it; `then` follows the remedy in the hint.
    """
    odd = files.name_error(path, error)
    if odd is not None:
        return odd
    what, remedy = _WHY.get(error.errno or 0, (str(error.strerror or error).lower(), "check the disk and the path"))
    return ResourceError(f"cannot write `{path.name}`: {what}", why=why, hint=f"{remedy}, {then}")


def allow_open_files(count: int) -> None:
    """Raise this process's limit so that it may write `count` files at once; ResourceError where it may not."""
    needed = count + OTHER_FILES
    allowed = files.raise_open_files(needed)
    if allowed >= needed:
        return
    some = ", or write some `--ranks` at a time, into the same folder" if count > 1 else ""
    raise ResourceError(
        f"the result has {f'{count} files that are' if count > 1 else '1 file that is'} written at once, "
        f"and this process may open {allowed}",
        why="a tensor that is cut over all ranks goes into all of their files" if count > 1 else "",
        hint=f"raise the limit to {needed} (`ulimit -Hn`){some}",
    )


def write_file(path: Path, data: bytes, *, why: str = _UNNAMED, then: str = _AGAIN) -> None:
    """Write a whole small file and wait until it is on disk; when that fails, ResourceError with `why` and `then`."""
    try:
        path.unlink(missing_ok=True)  # never through a link that took its place
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, path, why=why, then=then) from error


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data` to an open file: one call of the kernel may take a part of it. OSError when that fails."""
    while data:
        data = data[os.write(fd, data) :]


@contextmanager
def appended(path: Path, *, why: str, then: str) -> Iterator[int]:
    """Open a file to read it and to add to its end, made if need be, and give its descriptor.

    It is closed when the block fails, and left open otherwise. When the disk fails, here or in the block,
    ResourceError with `why` and `then`.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            yield fd
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise disk_error(error, path, why=why, then=then) from error


@contextmanager
def folder_beside(place: Path, suffix: str, *, why: str = _UNNAMED, then: str = _AGAIN) -> Iterator[Path]:
    """Give a new hidden folder beside `place`, which is gone afterwards unless it was renamed.

    When the disk does not let it be made, ResourceError with `why` and `then`.
    """
    beside = place.absolute().parent
    try:
        make_folder(beside)
        made = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=suffix, dir=beside))
        made.chmod(0o755)
    except OSError as error:
        raise disk_error(error, place, why=why, then=then) from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def copy_file(source: Path, target: Path) -> str:
    """Copy a file through a small buffer, wait until it is on disk, and return the xxh3-128 of its bytes."""
    state = xxhash.xxh3_128()
    try:
        data = source.open("rb")
    except OSError as error:
        raise _lost(source, error) from error
    with data:
        try:
            target.unlink(missing_ok=True)
            with target.open("xb") as file:
                while block := data.read(COPY_BYTES):
                    state.update(block)
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise disk_error(error, target) from error
    return state.hexdigest()


def file_digest(path: Path) -> str:
    """Return the xxh3-128 of a file's bytes; ResourceError when it cannot be read."""
    state = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while block := file.read(COPY_BYTES):
                state.update(block)
    except OSError as error:
        raise files.read_error(path, error) from error
    return state.hexdigest()


def _lost(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"cannot read `{path}`: {(error.strerror or str(error)).lower()}",
        why="it was there when the conversion began, and the result should have a copy of it",
        hint="put it back, then run the same command again: finished files are kept",
    )


def fsync_file(path: Path) -> None:
    """Wait until the bytes of a file are on disk; OSError when that fails."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk, where the file system knows how to."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def fsync_tree(folder: Path) -> None:
    """Wait until all names in `folder` and in the folders below it are on disk."""
    for path, _, _ in os.walk(folder, topdown=False):
        fsync_folder(Path(path))


def make_folder(folder: Path) -> None:
    """Make `folder` and its parents where they are missing, and wait until their names are on disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync_folder(path.parent)


def exchange(one: Path, two: Path) -> bool:
    """Swap two folders in one step; False where the kernel or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    done = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(two), _RENAME_EXCHANGE)
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(two))


def lock(fd: int, *, wait: bool = False) -> bool:
    """Lock an open file for this process alone; False when another has it. Where locks are unknown, all is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF, errno.EINVAL):
            raise
    return True


class Turn:
    """One process's turn to change the names in a folder; the others wait for theirs. Held for moments only.

    It is a lock on the folder itself, so that a crash leaves nothing behind.
    """

    def __init__(self) -> None:
        self._fd = -1

    def take(self, folder: Path) -> None:
        """Wait for the turn; does nothing when it is held already."""
        if self._fd < 0:
            self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            lock(self._fd, wait=True)

    def end(self) -> None:
        """Let the next one have it; does nothing when it is not held."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

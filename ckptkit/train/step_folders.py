"""Names in the folder of a run, and what is there under them.

    step-00000008/            a checkpoint after 8 updates; eight digits, more where the number has more
    LATEST                    the name of the newest one: a hint for people and scripts, never relied on
    .tmp-step-00000008-P-R/   one being written, by process P; R is random, so that no two writers meet
    .del-step-00000004-P-R/   one being removed

Steps are numbers: a folder is found whatever its zeros; one of ours also as `8` or `checkpoint-8`, as people and other
tools call them. What else lies there is passed over. What does not live here: whether a folder is a whole checkpoint
(`step_read.py`), how one gets its name (`step_write.py`), which ones go (`prune.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptkit.formats import files
from ckptkit.formats.disk import lock
from ckptkit.formats.manifest import MANIFEST

LATEST = "LATEST"
_STEP = re.compile(r"(step-|checkpoint-)?([0-9]+)")
_BEING_WRITTEN = re.compile(r"\.tmp-.+-([0-9]+)-[0-9a-f]{8}")
_BEING_REMOVED = re.compile(r"\.del-.+-[0-9]+-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class StepFolder:
    """A folder whose name says a step: `step` updates were done when it was written."""

    step: int
    path: Path


def folder_of(run: Path, step: int) -> Path:
    """Return where the checkpoint after `step` updates lies."""
    return run / f"step-{step:08d}"


def scan(run: Path) -> list[StepFolder]:
    """Return the step folders of a run, newest first; none where there is no such run. UsageError for a file."""
    try:
        paths = list(run.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise files.open_error(run, error) from error
    found = [(match, path) for path in paths if (match := _STEP.fullmatch(path.name)) and path.is_dir()]
    folders = [
        StepFolder(int(match[2]), path) for match, path in found if match[1] == "step-" or (path / MANIFEST).is_file()
    ]
    return sorted(folders, key=lambda f: (-f.step, f.path != folder_of(run, f.step), f.path.name))


def latest_hint(run: Path) -> str | None:
    """Return what LATEST says: a name, nothing, or None where it is not there or no text."""
    try:
        return (run / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def name_being_written(name: str) -> str:
    """Return a name that nobody else takes, for what will be called `name`."""
    return f".tmp-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def name_being_removed(name: str) -> str:
    return f".del-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def leftovers(run: Path) -> Iterator[Path]:
    """Yield what killed processes left: what was being removed, and what nobody is writing any more."""
    for path in sorted(run.iterdir()):
        writer = _BEING_WRITTEN.fullmatch(path.name)
        if _BEING_REMOVED.fullmatch(path.name) or (writer is not None and _is_abandoned(path, int(writer[1]))):
            yield path


def hold(folder: Path) -> int:
    """Lock a folder that is being written, for as long as the descriptor that is returned is open."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    lock(fd)
    return fd


def _is_abandoned(path: Path, pid: int) -> bool:
    """Say whether the writer of `path` is gone: its lock tells; where locks are unknown, its process does."""
    if not path.is_dir() or path.is_symlink():
        return not _is_alive(pid)
    try:
        first = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it got its name just now, or nobody may look
        return False
    try:
        if not lock(first):
            return False
        second = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return not lock(second) or not _is_alive(pid)
        finally:
            os.close(second)
    except OSError:
        return False
    finally:
        os.close(first)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it, read-only ones too; OSError when that fails.

    What somebody else removes meanwhile is no error.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    _open_up(path)
    for folder, names, _ in os.walk(path):
        for name in names:
            _open_up(Path(folder) / name)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _open_up(folder: Path) -> None:
    """Let the owner change the names in a folder, where that is possible."""
    if folder.is_symlink():
        return
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            folder.chmod(mode | stat.S_IRWXU)

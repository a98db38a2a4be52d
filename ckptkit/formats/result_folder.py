"""A result that appears all at once: built in `DST.partial-<plan digest>/`, then renamed to `DST`.

The protocol, and what a crash at each point leaves:

1. the partial folder is made, its journal is created and locked       -> a rerun starts over
2. each finished file is fsynced, then noted in the journal            -> a rerun keeps the noted files
3. small files and the manifest are written and fsynced                -> a rerun writes them again
4. the journal is removed, the folder fsynced                          -> a rerun finds the whole result, goes to 5
5. one rename to `DST` (with `overwrite`, an exchange), parent fsynced -> done; or the old result is still there
6. with `overwrite`: the old result is removed                         -> the next start removes it

What does not live here: the bytes of tensors (`file_sink.py`) and the manifest's content (`manifest.py`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.errors import ResourceError, UsageError
from ckptkit.formats.disk import disk_error, fsync_folder, write_file
from ckptkit.formats.manifest import MANIFEST, read_manifest

JOURNAL = "journal.jsonl"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
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


def _existing_parent(target: Path) -> Path:
    parent = Path(os.path.realpath(target)).parent
    while not parent.exists():
        parent = parent.parent
    return parent


@dataclass(slots=True)
class ResultFolder:
    """The folder under construction. `finished` holds what the journal of an earlier run says is done."""

    target: Path
    digest: str
    overwrite: bool = False
    finished: dict[str, dict[str, str]] = field(default_factory=dict)
    complete: bool = False
    _journal: int = -1

    @property
    def partial(self) -> Path:
        return self.target.with_name(f"{self.target.name}.partial-{self.digest}")

    @property
    def _old(self) -> Path:
        return self.target.with_name(f"{self.target.name}.old-{self.digest}")

    def open(self) -> None:
        """Make or take over the partial folder; afterwards `finished` and `complete` say what is already there."""
        self.target = Path(os.path.realpath(self.target))
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            repair(self.target)
            self._refuse_others()
            self._take_over()
        except OSError as error:
            raise disk_error(error, self.partial) from error

    def _refuse_others(self) -> None:
        others = [path for path in siblings(self.target, "partial") if path != self.partial]
        if others and not self.overwrite:
            raise UsageError(
                f"an unfinished result of another plan lies beside `{self.target.name}`",
                items=[path.name for path in others],
                why="the source, the options or the tables have changed since that run, so it cannot be continued",
                hint="remove it, or pass `--overwrite`",
            )
        for path in others:
            with _locked_journal(path):
                shutil.rmtree(path)

    def _take_over(self) -> None:
        journal = self.partial / JOURNAL
        if self.partial.is_dir() and not journal.exists():
            manifest = read_manifest(self.partial)
            if manifest is not None and manifest.get("plan") == self.digest:
                self.complete = True
                return
            shutil.rmtree(self.partial)
        self.partial.mkdir(exist_ok=True)
        self._journal = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        _lock(self._journal, self.partial)
        self.finished = _read_journal(journal, self.digest)
        if not self.finished:
            os.ftruncate(self._journal, 0)
            self._note({"plan": self.digest})

    def note_finished(self, file: str, digests: Mapping[str, str]) -> None:
        """Write down that `file` is complete and on disk; `digests` are those of its tensors."""
        self._note({"file": file, "digests": dict(digests)})

    def _note(self, entry: Mapping[str, object]) -> None:
        os.write(self._journal, (json.dumps(entry) + "\n").encode())
        os.fsync(self._journal)

    def add(self, name: str, data: bytes) -> None:
        """Write a small file from memory."""
        write_file(self.partial / name, data)

    def copy(self, source: Path, name: str) -> None:
        """Copy a side file, its bytes unchanged."""
        write_file(self.partial / name, source.read_bytes())

    def commit(self) -> None:
        """Give the finished folder its name; either the old result or the new one is there at any moment."""
        try:
            if not self.complete:
                (self.partial / JOURNAL).unlink()
                fsync_folder(self.partial)
            self._rename()
            fsync_folder(self.target.parent)
            if self._old.exists():
                shutil.rmtree(self._old)
        except OSError as error:
            raise disk_error(error, self.target) from error
        finally:
            self.close()

    def _rename(self) -> None:
        if not self.target.exists() or not any(self.target.iterdir()):
            self.partial.rename(self.target)
        elif not self.overwrite:
            raise UsageError(f"`{self.target}` was filled by somebody else while this result was being made")
        elif _exchange(self.partial, self.target):
            self.partial.rename(self._old)
        else:
            self.target.rename(self._old)
            self.partial.rename(self.target)

    def close(self) -> None:
        """Let go of the lock; what is unfinished stays for the next run of the same plan."""
        if self._journal >= 0:
            os.close(self._journal)
            self._journal = -1


def siblings(target: Path, word: str) -> list[Path]:
    """Return the folders `DST.<word>-<digest>` beside `target`, sorted."""
    prefix = f"{target.name}.{word}-"
    parent = target.parent
    return sorted(p for p in parent.iterdir() if p.name.startswith(prefix) and p.is_dir()) if parent.is_dir() else []


def repair(target: Path) -> None:
    """Finish what a crash between the two renames of an overwrite, or before the removal of the old, left."""
    for old in siblings(target, "old"):
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)


def _read_journal(journal: Path, digest: str) -> dict[str, dict[str, str]]:
    """Return the finished files of a journal; a torn last line counts for nothing."""
    finished: dict[str, dict[str, str]] = {}
    for number, line in enumerate(journal.read_text(errors="replace").splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if number == 0 and entry.get("plan") != digest:
            return {}
        if "file" in entry:
            finished[entry["file"]] = entry["digests"]
    return finished


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UsageError(
            f"another process is writing `{folder.name}`",
            why="two runs of one conversion would overwrite each other",
            hint="wait for it to end",
        ) from None
    if not (folder / JOURNAL).exists() or os.fstat(fd).st_ino != (folder / JOURNAL).stat().st_ino:
        os.close(fd)
        raise UsageError(f"another process has just finished `{folder.name}`", hint="run the command again")


class _locked_journal:  # noqa: N801
    """Hold the lock of another run's partial folder, if it has one, for the length of a `with`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = -1

    def __enter__(self) -> None:
        if (self._folder / JOURNAL).exists():
            self._fd = os.open(self._folder / JOURNAL, os.O_RDWR)
            _lock(self._fd, self._folder)

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _exchange(one: Path, two: Path) -> bool:
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


__all__ = ["JOURNAL", "MANIFEST", "ResultFolder", "check_space", "check_target", "repair", "siblings"]

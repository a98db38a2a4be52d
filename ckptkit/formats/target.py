"""Where a result may go: never into its own input, never over what is not to be replaced, never where it cannot fit.

With `overwrite` a folder is replaced that holds nothing but what its own `ckptkit.json` names: a result of ckptkit.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from ckptkit.errors import SHOWN_ITEMS, CorruptError, ResourceError, UsageError
from ckptkit.formats import files
from ckptkit.formats.manifest import MANIFEST, named_files, read_manifest

_SPARE_BYTES = 16 << 20
_NAME_BYTES = 255  # of one name, on the file systems of Linux
_DIGEST = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = re.compile(r"(.+)\.(?:partial|old)-[0-9a-f]{32}")
_LONGEST_SUFFIX = len(".partial-") + 32


def check_target(target: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Raise UsageError when `target` is no place for a result, or is in use and not to be replaced."""
    check_place(target, sources)
    check_replaceable(target, overwrite=overwrite)


def check_place(target: Path, sources: Iterable[Path]) -> None:
    """Raise UsageError when `target` is, holds, or lies inside a source, or can be no result's folder.

    A source under a name that ckptkit gives to unfinished and to replaced results of `target` counts as inside it.
    """
    real = Path(os.path.realpath(target))
    for source in sources:
        if overlap(real, source):
            raise UsageError(
                f"the output `{target}` is the same as, inside, or around the input `{source}`",
                why="writing there could destroy the input while it is being read",
                hint="choose an output folder outside the input",
            )
    _check_name(target, real)
    if real.exists() and not real.is_dir():
        raise UsageError(f"the output `{target}` is a file", hint="name a folder: it will hold the result")
    if _holds_working_folder(real):
        raise UsageError(
            f"the output `{target}` is the folder that you are in, or around it",
            why="the finished folder takes the place of the old one, and you would be left in the old one",
            hint="name a folder inside it",
        )
    if _is_mount(real):
        raise UsageError(
            f"the output `{target}` is where a file system is mounted",
            why="the finished folder gets its name by a rename, and such a folder cannot be renamed",
            hint="name a folder inside it",
        )


def check_replaceable(target: Path, *, overwrite: bool) -> None:
    """Raise UsageError for a filled folder; with `overwrite`, only when it is not wholly a result of ckptkit."""
    real = Path(os.path.realpath(target))
    if not real.is_dir() or not any(real.iterdir()):
        return
    if not overwrite:
        raise UsageError(
            f"the output folder `{target}` is not empty",
            why="files of two results would be mixed",
            hint="choose another folder, or pass `--overwrite` to replace it, if it is a result of ckptkit and no more",
        )
    try:
        manifest = read_manifest(real)
        why = "" if manifest else f"it holds no {MANIFEST}, so it is no result of ckptkit"
        if manifest and manifest.get("adopted"):
            manifest, why = None, f"its {MANIFEST} was written by `check --adopt`, for a checkpoint of somebody else"
    except CorruptError as error:
        manifest, why = None, f"what ckptkit wrote there cannot be told: {error.what}"
    if foreign := list(islice(_files_without(real, named_files(manifest) if manifest else set()), SHOWN_ITEMS)):
        raise UsageError(
            f"`--overwrite` would remove files from `{target}` that ckptkit did not write, such as",
            items=foreign,
            why=why or f"its {MANIFEST} does not name them, and the whole folder would be replaced",
            hint="move them away, or choose another folder",
        )


def _files_without(folder: Path, names: set[str]) -> Iterator[str]:
    """Yield the files below `folder` whose names (`a/b`) are not among `names`; links count as files."""
    waiting = [folder]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            if path.is_dir() and not path.is_symlink():
                waiting.append(path)
            elif (name := path.relative_to(folder).as_posix()) not in names:
                yield name


def siblings(target: Path, word: str) -> list[Path]:
    """Return the folders `DST.<word>-<digest>` beside `target`, sorted; other names are the user's own."""
    prefix = f"{target.name}.{word}-"
    return sorted(
        path
        for path in target.parent.iterdir()
        if path.name.startswith(prefix) and _DIGEST.fullmatch(path.name.removeprefix(prefix)) and path.is_dir()
    )


def remove_replaced(old: Path) -> None:
    """Remove what a new result took the place of; ResourceError when that fails."""
    try:
        shutil.rmtree(old)
    except OSError as error:
        raise ResourceError(
            f"the new result is in place, but the old one, now `{old.name}`, could not be removed",
            why=f"the system reports: {error}",
            hint="remove it by hand",
        ) from error


def overlap(target: Path, source: Path) -> bool:
    """Say whether a source is, holds, or lies inside `target` (a real path), or a folder that belongs to `target`."""
    origin = Path(os.path.realpath(source))
    if target == origin or origin in target.parents or target in origin.parents:
        return True
    places = [path for path in (origin, *origin.parents) if path.parent == target.parent]
    return any(match[1] == target.name for path in places if (match := _UNFINISHED.fullmatch(path.name)))


def _check_name(target: Path, real: Path) -> None:
    """Raise UsageError for a name that the result, or its folder under construction, cannot have."""
    files.look(target)  # a loop of links has no real path
    if len(os.fsencode(real.name)) + _LONGEST_SUFFIX > _NAME_BYTES:
        raise UsageError(
            f"the name of the output, `{real.name[: files.SHOWN_CHARACTERS]}`, is too long",
            why=f"with the {_LONGEST_SUFFIX} bytes that mark an unfinished result it has more than {_NAME_BYTES}",
            hint="choose a shorter name",
        )
    parent = next((path for path in real.parents if files.look(path)), real)
    if not parent.is_dir():
        raise UsageError(f"the output `{target}` is inside `{parent}`, a file", hint="choose another folder")
    if _UNFINISHED.fullmatch(real.name):
        raise UsageError(
            f"`{target}` is a name that ckptkit gives to unfinished and to replaced results",
            why="it is removed when the result that it belongs to is made again",
            hint="choose another name",
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


def _holds_working_folder(folder: Path) -> bool:
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return False
    return folder == here or folder in here.parents


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

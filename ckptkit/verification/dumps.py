"""The folder of a dump: made beside its place, and renamed when it is complete.

With `overwrite` it replaces a dump and nothing else: a folder with a sealed report that names all other files in it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CorruptError, UsageError
from ckptkit.formats import files
from ckptkit.formats.disk import exchange, folder_beside, fsync_file, fsync_folder
from ckptkit.formats.target import check_place
from ckptkit.verification.inputs import INPUTS
from ckptkit.verification.runners.job import REPORT, SCHEMA, SEAL, seal_of

_WHY = "the dump could not be made there"
_THEN = "or name another folder"


@dataclass(frozen=True, slots=True)
class DumpFolder:
    """Where a dump is to appear; `overwrite` lets it replace another dump."""

    path: Path
    overwrite: bool = False

    def partial(self) -> AbstractContextManager[Path]:
        """Give a new folder beside the place, which is gone afterwards unless `finish` was called."""
        return folder_beside(self.path, ".partial-dump", why=_WHY, then=_THEN)

    def finish(self, made: Path) -> None:
        """Let the dump in the folder of `partial` appear, whole; UsageError when something else has come there."""
        _check_replaceable(self)
        for file in made.iterdir():
            fsync_file(file)
        fsync_folder(made)
        if not self.path.exists():
            made.rename(self.path)
        elif not exchange(made, self.path):
            shutil.rmtree(self.path)  # a dump can be made again
            made.rename(self.path)
        fsync_folder(self.path.absolute().parent)


def check_dump_target(target: DumpFolder, sources: Sequence[Path]) -> None:
    """Raise UsageError when no dump may go there: it would hide a checkpoint, or replace what is no dump."""
    check_place(target.path, sources)
    _check_replaceable(target)


def _check_replaceable(target: DumpFolder) -> None:
    path = target.path
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise UsageError(f"`{path}` exists, and is no folder", hint="name another folder")
    own, why = _files_of_dump(path)
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in own or not _is_plain_file(entry))
    if foreign:
        raise UsageError(
            f"`{path}` exists, and is no dump of a forward pass, or not that alone",
            items=foreign,
            why=why or f"`{REPORT}` in it does not name these, and the whole folder would be replaced",
            hint="name another folder, or move them away",
        )
    if not target.overwrite:
        raise UsageError(f"`{path}` exists", hint="pass `--overwrite` to replace it")


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _files_of_dump(folder: Path) -> tuple[set[str], str]:
    """Return the names of the files that are of the dump in a folder, and why there are none if it has no dump."""
    if not _is_plain_file(folder / REPORT):
        return set(), f"it has no `{REPORT}`"
    try:
        found = files.read_json_object(folder / REPORT)
    except CorruptError as error:
        return set(), error.what
    if found.get("schema") != SCHEMA or found.get(SEAL) != seal_of(found):
        return set(), f"`{REPORT}` in it is none that a run wrote and sealed"
    rows = [*found.get("inputs", ()), *found.get("taps", ())]
    return {INPUTS, REPORT, *(str(row.get("file")) for row in rows)}, ""

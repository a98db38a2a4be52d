"""The folder of a dump: made beside its place, and renamed when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import UsageError
from ckptkit.formats.disk import exchange, fsync_folder, make_folder
from ckptkit.formats.target import check_place
from ckptkit.verification.runners.job import REPORT


@dataclass(frozen=True, slots=True)
class DumpFolder:
    """Where a dump is to appear; `overwrite` lets it replace another dump."""

    path: Path
    overwrite: bool = False

    @property
    def _made(self) -> Path:
        return self.path.with_name(f"{self.path.name}.partial-dump")

    @contextmanager
    def partial(self) -> Iterator[Path]:
        """Give an empty folder beside the place, which is gone afterwards unless `finish` was called."""
        shutil.rmtree(self._made, ignore_errors=True)
        make_folder(self._made)
        try:
            yield self._made
        finally:
            shutil.rmtree(self._made, ignore_errors=True)

    def finish(self) -> None:
        """Let the dump appear, whole; called inside of `partial`."""
        for file in self._made.iterdir():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
        fsync_folder(self._made)
        if not self.path.exists():
            self._made.rename(self.path)
        elif not exchange(self._made, self.path):
            shutil.rmtree(self.path)  # a dump can be made again
            self._made.rename(self.path)
        fsync_folder(self.path.absolute().parent)


def check_dump_target(target: DumpFolder, sources: Sequence[Path]) -> None:
    """Raise UsageError when no dump may go there: it would hide a checkpoint, or replace what is no dump."""
    check_place(target.path, sources)
    path = target.path
    if not path.exists():
        return
    is_dump = path.is_dir() and ((path / REPORT).is_file() or not any(path.iterdir()))
    if not is_dump or not target.overwrite:
        raise UsageError(
            f"`{path}` exists" + ("" if is_dump else ", and is no dump of a forward pass"),
            hint="pass `--overwrite` to replace it" if is_dump else "name another folder",
        )

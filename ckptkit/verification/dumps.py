"""The folder of a dump: made beside its place, and renamed when it is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import UsageError
from ckptkit.formats.disk import disk_error, exchange, fsync_folder, make_folder
from ckptkit.formats.target import check_place
from ckptkit.verification.runners.job import REPORT


@dataclass(frozen=True, slots=True)
class DumpFolder:
    """Where a dump is to appear; `overwrite` lets it replace another dump."""

    path: Path
    overwrite: bool = False

    @contextmanager
    def partial(self) -> Iterator[Path]:
        """Give a new folder beside the place, which is gone afterwards unless `finish` was called."""
        beside = self.path.absolute().parent
        make_folder(beside)
        try:
            made = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".partial-dump", dir=beside))
            made.chmod(0o755)
        except OSError as error:
            raise disk_error(error, self.path) from error
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def finish(self, made: Path) -> None:
        """Let the dump in the folder of `partial` appear, whole."""
        for file in made.iterdir():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
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
    path = target.path
    if not path.exists():
        return
    is_dump = path.is_dir() and ((path / REPORT).is_file() or not any(path.iterdir()))
    if not is_dump or not target.overwrite:
        raise UsageError(
            f"`{path}` exists" + ("" if is_dump else ", and is no dump of a forward pass"),
            hint="pass `--overwrite` to replace it" if is_dump else "name another folder",
        )

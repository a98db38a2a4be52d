"""What a checkpoint takes over from the one before: the files of frozen tensors, by hard links.

A linked file is one file with two names, so a damage of it hits both checkpoints: it is read, and linked only while its
bytes are those that the new checkpoint asks for. Nothing that training alters is linked, and no side file, so that a
damage of any other file leaves the checkpoint before as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptkitError
from ckptkit.formats.disk import fsync_file
from ckptkit.formats.file_pool import FilePool
from ckptkit.formats.io import extents_digest
from ckptkit.formats.manifest import read_manifest
from ckptkit.train.step_files import StepFile
from ckptkit.types import Extent


@dataclass(frozen=True, slots=True)
class Before:
    """The checkpoint before; without one, or with a damaged manifest, there is nothing to take over."""

    folder: Path | None = None
    manifest: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, folder: Path | None) -> Before:
        if folder is not None:
            with contextlib.suppress(CkptkitError, OSError):
                return cls(folder, read_manifest(folder))
        return cls()

    def link(self, file: StepFile, digests: Mapping[str, str], path: Path) -> bool:
        """Link `path` to the file here that holds the tensors of `file`, which have `digests`, and wait until it is on
        disk; False where there is none, or no link can be made."""
        if self.folder is None or self.manifest is None:
            return False
        source = self.folder / file.layout.name
        try:
            if not _holds(source, file, digests, self.manifest):
                return False
            path.hardlink_to(source)
            fsync_file(path)
        except (OSError, CkptkitError):
            path.unlink(missing_ok=True)
            return False
        return True


def _holds(source: Path, file: StepFile, digests: Mapping[str, str], manifest: Mapping[str, Any]) -> bool:
    """Say whether `source` has the bytes of `file`, by its manifest and by themselves; errors are those of reading."""
    rows, layout = manifest["tensors"], file.layout
    if file.row not in manifest["files"]:
        return False
    if any(rows.get(name, {}).get("xxh3_128") != digest for name, digest in digests.items()):
        return False
    if source.stat().st_size != layout.size:
        return False
    header = [Extent(offset, len(data)) for offset, data in sorted(layout.fixed)]
    with FilePool(1) as pool:
        if extents_digest(source, header, pool) != file.row["header"]:
            return False
        return all(extents_digest(source, layout.extents[name], pool) == digest for name, digest in digests.items())

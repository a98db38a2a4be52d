"""`.ckptkit-journal.jsonl` in a folder under construction: what is finished; its lock says that somebody is at work.

The first line is `{"plan": digest}`; each other line is `{"file": name, "digests": {tensor: digest}}`, written when
the file is on disk. A crash may tear the last line: what does not read is cut off before anything is added.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.formats.disk import disk_error, lock, write_all

JOURNAL = ".ckptkit-journal.jsonl"  # hidden, so that no side file has this name


@dataclass(slots=True)
class Journal:
    """The open and locked journal of `folder`; closing it lets go of the lock."""

    folder: Path
    fd: int

    @classmethod
    def take(cls, folder: Path) -> Journal:
        """Open the journal of `folder`, making it if need be; UsageError when another process holds it."""
        fd = os.open(folder / JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if not lock(fd):
            os.close(fd)
            raise UsageError(
                f"another process is writing `{folder.name}`",
                why="two runs with one output would overwrite each other",
                hint="wait for it to end, or choose another output folder",
            )
        return cls(folder, fd)

    def resume(self, plan: str) -> dict[str, dict[str, str]]:
        """Return the tensor digests of each finished file by its name, and cut off what does not read.

        A journal of no plan or another one is emptied and begun anew.
        """
        finished: dict[str, dict[str, str]] = {}
        data = os.pread(self.fd, os.fstat(self.fd).st_size, 0)
        sound = 0
        for number, line in enumerate(data.splitlines(keepends=True)):
            entry = _entry(line)
            if entry is None or (number == 0) != ("plan" in entry) or entry.get("plan", plan) != plan:
                break
            if number:
                finished[entry["file"]] = entry["digests"]
            sound += len(line)
        if sound < len(data):
            os.ftruncate(self.fd, sound)
        if not sound:
            self._note({"plan": plan})
        return finished

    def note_finished(self, file: str, digests: Mapping[str, str]) -> None:
        """Write down that `file` is complete and on disk; ResourceError when that fails."""
        try:
            self._note({"file": file, "digests": dict(digests)})
        except OSError as error:
            raise disk_error(error, self.folder / JOURNAL) from error

    def _note(self, entry: Mapping[str, object]) -> None:
        line = (json.dumps(entry) + "\n").encode()
        write_all(self.fd, line)
        os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return a line of the journal as a dict of the known keys, or None for anything else."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    known = isinstance(entry.get("plan"), str) or (
        isinstance(entry.get("file"), str) and isinstance(entry.get("digests"), dict)
    )
    return entry if known else None

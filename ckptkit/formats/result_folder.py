"""A result that appears all at once: built in `DST.partial-<plan digest>/`, then renamed to `DST`.

The protocol, and what a crash at each point leaves:

1. the partial folder is made, its journal is created and locked       -> a rerun starts over
2. each finished file is fsynced, then noted in the journal            -> a rerun keeps the noted files
3. small files and the manifest are written and fsynced                -> a rerun writes them again
4. the journal is removed, the folder fsynced                          -> a rerun finds the whole result, goes to 5
5. one rename to `DST` (with `overwrite`, an exchange), parent fsynced -> done; or the old result is still there
6. with `overwrite`: the old result is removed                         -> the next start removes it

A part of a result, the folders of some ranks, is built in the same way and joined in step 5 (`parts.py`); its journal
stays until then, so that whoever looks at a part knows whether somebody is at work.

Where folders cannot be exchanged, 5 is two renames: the old result to `DST.old-<plan digest>`, the new one to `DST`.
A crash between them leaves nothing under `DST`; the next start puts the old result back. Only a folder that holds
nothing but a result of ckptkit is ever replaced, and this is looked at again just before 5.

Names are only changed by the process whose turn it is (a lock on the parent folder), in `open` and in `commit`;
between them the lock on the journal says that somebody is at work. What does not live here: the bytes of tensors
(`file_sink.py`), the journal's lines (`journal.py`), the manifest's content (`manifest.py`), how parts are joined, and
what an output may be (`target.py`).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.errors import UsageError
from ckptkit.formats.disk import (
    Turn,
    copy_file,
    disk_error,
    exchange,
    fsync_folder,
    fsync_tree,
    make_folder,
    write_file,
)
from ckptkit.formats.journal import JOURNAL, Journal
from ckptkit.formats.manifest import MANIFEST, plan_of, read_manifest
from ckptkit.formats.parts import (
    check_part,
    finish_mate,
    is_filled,
    join_part,
    mates,
    part_name,
    same_plan,
    set_aside,
    stands,
)
from ckptkit.formats.target import check_replaceable, check_space, check_target, remove_replaced, siblings


@dataclass(slots=True)
class ResultFolder:
    """The folder under construction. `finished` holds what the journal of an earlier run says is done.

    `digest` is the plan's; `ranks` are those of a part of it, None for all that there is.
    """

    target: Path
    digest: str
    overwrite: bool = False
    ranks: tuple[int, ...] | None = None
    finished: dict[str, dict[str, str]] = field(default_factory=dict)
    complete: bool = False
    _turn: Turn = field(default_factory=Turn)
    _journal: Journal | None = None

    def __post_init__(self) -> None:
        self.target = Path(os.path.realpath(self.target))

    @property
    def partial(self) -> Path:
        return self.target.with_name(f"{self.target.name}.partial-{part_name(self.digest, self.ranks)}")

    @property
    def _old(self) -> Path:
        return self.target.with_name(f"{self.target.name}.old-{part_name(self.digest, self.ranks)}")

    def check(self) -> None:
        """Put in order what earlier runs left, and raise UsageError when the target is in use after that."""
        if self.ranks is None:
            check_target(self.target, [], overwrite=self.overwrite)
            return
        try:
            make_folder(self.target.parent)
            self._turn.take(self.target.parent)
            self._make_room()
        except OSError as error:
            raise disk_error(error, self.partial) from error
        finally:
            self._turn.end()

    def open(self) -> None:
        """Make or take over the partial folder; afterwards `finished` and `complete` say what is already there.

        Raises UsageError when another process is at work on `target`, when an unfinished result of another plan is
        in the way, or when the target is in use after what a crash left has been repaired.
        """
        try:
            make_folder(self.target.parent)
            self._turn.take(self.target.parent)
            self._make_room()
            self._clear_others()
            self._take_over()
        except OSError as error:
            raise disk_error(error, self.partial) from error
        finally:
            if not self.complete:  # a whole result is committed in the same turn
                self._turn.end()

    def _make_room(self) -> None:
        repair(self.target)
        if self.ranks is None:
            check_target(self.target, [], overwrite=self.overwrite)
            return
        for mate in mates(self.target, self.digest, self.partial):
            finish_mate(mate, self.target, self.digest)
        if not stands(self.partial, self.target, self.digest):
            check_part(self.target, self.digest, self.ranks, overwrite=self.overwrite)

    def _clear_others(self) -> None:
        known = [self.partial]
        if self.ranks is not None:
            known += mates(self.target, self.digest, self.partial)
        others = [path for path in siblings(self.target, "partial") if path not in known]
        for path in others:
            if (path / JOURNAL).exists():
                Journal.take(path).close()
        if others and not self.overwrite:
            raise UsageError(
                f"an unfinished result of another plan lies beside `{self.target.name}`",
                items=[path.name for path in others],
                why="the source, the options or the tables have changed since that run, so it cannot be continued",
                hint="remove it, or pass `--overwrite`",
            )
        for path in others:
            shutil.rmtree(path)

    def _take_over(self) -> None:
        if self.ranks is not None and stands(self.partial, self.target, self.digest):
            self._journal = Journal.take(self.partial)
            self.complete = True
            return
        if self.partial.is_dir() and not (self.partial / JOURNAL).exists():
            if _is_whole(self.partial, self.digest):
                self.complete = True
                return
            shutil.rmtree(self.partial)
        self.partial.mkdir(exist_ok=True)
        self._journal = Journal.take(self.partial)
        self.finished = self._journal.resume(self.digest)
        if not self.finished:
            _empty(self.partial)

    def note_finished(self, file: str, digests: Mapping[str, str]) -> None:
        """Write down that `file` is complete and on disk; `digests` are those of its tensors."""
        assert self._journal is not None
        self._journal.note_finished(file, digests)

    def add(self, name: str, data: bytes) -> None:
        """Write a small file from memory."""
        path = self.partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)

    def link(self, name: str, file: str) -> None:
        """Give a finished file of the result a second name; a copy, where the disk has no hard links."""
        path = self.partial / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.hardlink_to(self.partial / file)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
                raise disk_error(error, path) from error
            copy_file(self.partial / file, path)

    def copy(self, source: Path, name: str) -> str:
        """Copy a side file, its bytes unchanged, and return their digest; ResourceError when it cannot be read."""
        return copy_file(source, self.partial / name)

    def commit(self) -> None:
        """Give the finished folder its name; either the old result or the new one is there at any moment."""
        try:
            self._turn.take(self.target.parent)
            if self.ranks is not None:
                join_part(self.partial, self.target, overwrite=self.overwrite)
                set_aside(self.partial)
                return
            if not self.complete:
                (self.partial / JOURNAL).unlink()
                fsync_tree(self.partial)
            self._rename()
            fsync_folder(self.target.parent)
        except OSError as error:
            raise disk_error(error, self.target) from error
        else:
            if self._old.exists():
                remove_replaced(self._old)
        finally:
            self.close()

    def _rename(self) -> None:
        if not is_filled(self.target):
            self.partial.rename(self.target)
            return
        if not self.overwrite:
            raise UsageError(
                f"`{self.target}` was filled by somebody else while this result was being made",
                hint="choose another output folder, or pass `--overwrite`: the finished files are kept",
            )
        check_replaceable(self.target, overwrite=True)
        if exchange(self.partial, self.target):
            self.partial.rename(self._old)
        else:
            self.target.rename(self._old)
            try:
                self.partial.rename(self.target)
            except OSError:
                self._old.rename(self.target)
                raise

    def close(self) -> None:
        """Let go of the locks; what is unfinished stays for the next run of the same plan."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._turn.end()


def repair(target: Path) -> None:
    """Finish what a crash between the two renames of an overwrite, or before the removal of the old, left.

    Raises UsageError when a result that was set aside is neither replaced nor about to be.
    """
    for old in siblings(target, "old"):
        digest = old.name[-32:]
        if same_plan(plan_of(target), digest):
            remove_replaced(old)
        elif not is_filled(target) and target.with_name(f"{target.name}.partial-{digest}").is_dir():
            old.rename(target)
        else:
            raise UsageError(
                f"`{old.name}` is a result that an unfinished `--overwrite` set aside",
                why=f"`{target.name}` is not what replaced it, so it may be the only one",
                hint=f"rename it to `{target.name}`, or remove it",
            )


def _is_whole(partial: Path, digest: str) -> bool:
    """Say whether a folder without journal is plan `digest`'s whole result, and no rest of one being removed."""
    if plan_of(partial) != digest:
        return False
    manifest = read_manifest(partial) or {}
    sizes = {row["name"]: row["bytes"] for row in manifest["files"]}
    names = [*sizes, *manifest.get("side_files", {})]
    return all((partial / name).is_file() for name in names) and all(
        (partial / name).stat().st_size == size for name, size in sizes.items()
    )


def _empty(folder: Path) -> None:
    """Remove all but the journal: what lies in a folder whose journal names no file is nobody's."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != JOURNAL:
            path.unlink()


__all__ = ["JOURNAL", "MANIFEST", "ResultFolder", "check_space", "check_target", "repair", "siblings"]

"""Which checkpoints of a run stay, and how the others go.

Those that stay are the newest `last` whole ones, the best one if it is kept, and those that are protected, such as the
one that the run went on from: a set, so that no rule takes another's place. The newest whole one always stays. A folder
that is not a whole checkpoint of ours neither counts nor goes. One that goes gets a hidden name first, so that nobody
takes what is half removed for a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CkptkitError, UsageError
from ckptkit.formats.disk import Turn, disk_error, fsync_folder
from ckptkit.train.step_folders import leftovers, name_being_removed, remove, scan
from ckptkit.train.step_read import StepContent, open_step


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays: the `last` (1 or more) newest whole checkpoints, the step `best`, and the steps `protect`."""

    last: int = 2
    best: int | None = None
    protect: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.last < 1:
            raise UsageError(
                f"{self.last} checkpoints cannot be kept",
                why="the newest whole one is what a run goes on from",
                hint="keep 1 or more; with 2, a damage of the newest costs one interval",
            )


@dataclass(frozen=True, slots=True)
class Pruned:
    """Names of folders, newest first, and what went wrong, in sentences.

    `left` says what is no whole checkpoint; `freed_bytes` counts no file that has another name too.
    """

    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    freed_bytes: int = 0


def kept_steps(whole: Sequence[int], keep: Keep) -> set[int]:
    """Return which of the steps `whole`, newest first, stay."""
    protected = keep.protect if keep.best is None else keep.protect | {keep.best}
    return {*whole[: keep.last], *protected} & {*whole}


def prune(run: Path, keep: Keep, *, verify_newest: bool = False, dry_run: bool = False) -> Pruned:
    """Remove the checkpoints that are not to be kept; with `dry_run`, say which these are.

    `verify_newest` compares every digest of the newest whole one before any other goes: one that is damaged does not
    count. What cannot be removed is told in `failures`.
    """
    turn = Turn()
    try:
        turn.take(run)
        if not dry_run:
            remove_leftovers(run)
        whole, left = _look(run, verify_newest=verify_newest)
        going = _going(whole, keep)
        freed = sum(_own_bytes(path) for path in going)
        aside, failures = ([], []) if dry_run else _set_aside(going)
    except OSError as error:
        raise disk_error(error, run) from error
    finally:
        turn.end()
    failures += [failure for path in aside if (failure := _remove(path))]
    refused = {path.name for path, _ in failures}
    kept = [content.path.name for content in whole if content.path not in going]
    removed = [path.name for path in going if path.name not in refused]
    return Pruned(tuple(removed), tuple(kept), tuple(left), tuple(text for _, text in failures), freed)


def remove_leftovers(run: Path) -> None:
    """Remove what killed processes left, as far as that is possible now."""
    for path in leftovers(run):
        with contextlib.suppress(OSError):
            remove(path)


def _look(run: Path, *, verify_newest: bool) -> tuple[list[StepContent], list[str]]:
    """Return the whole checkpoints, newest first, and what is wrong with the other folders."""
    whole: list[StepContent] = []
    left = []
    for folder in scan(run):
        try:
            whole.append(open_step(folder, digests=verify_newest and not whole))
        except CkptkitError as error:
            left.append(error.what)
    return whole, left


def _going(whole: Sequence[StepContent], keep: Keep) -> list[Path]:
    """Return the folders that do not stay; links to folders elsewhere are the user's own."""
    stay = kept_steps([content.state.step for content in whole], keep)
    return [c.path for c in whole if c.state.step not in stay and not c.path.is_symlink()]


def _set_aside(going: Sequence[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Give folders hidden names and wait until these are on disk; return them, and those where that failed."""
    aside, failures = [], []
    for path in going:
        hidden = path.with_name(name_being_removed(path.name))
        try:
            path.rename(hidden)
        except OSError as error:
            failures.append((path, _failure(path, error)))
        else:
            aside.append(hidden)
    if aside:
        fsync_folder(aside[0].parent)
    return aside, failures


def _remove(path: Path) -> tuple[Path, str] | None:
    try:
        remove(path)
    except OSError as error:
        return path, _failure(path, error)
    return None


def _failure(path: Path, error: OSError) -> str:
    return f"`{path.name}` could not be removed: {(error.strerror or str(error)).lower()}"


def _own_bytes(folder: Path) -> int:
    """Return the bytes that go with a folder: its files, but for those that have another name too."""
    found = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum(stat.st_size for stat in found if stat.st_nlink == 1)

"""The checkpoint that a run goes on from: the newest whole one, told by the folders themselves and never by LATEST.

What is not whole is passed over with a message, and an older one is taken; when none is whole that is an error, for a
start from zero would throw the run away. A checkpoint that cannot be read for another reason than damage (no
permission, too many open files) is an error too: an older one would be taken for nothing. What does not live here: what
makes one whole (`step_read.py`).
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CkptkitError, CorruptError, CoverageError, ResourceError, UsageError
from ckptkit.train.state import RunState
from ckptkit.train.step_folders import LATEST, StepFolder, latest_hint, scan
from ckptkit.train.step_read import StepContent, open_step
from ckptkit.types import Shape


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint to go on from; `notes` say what was passed over, and why, one line each."""

    content: StepContent
    notes: tuple[str, ...]

    @property
    def state(self) -> RunState:
        return self.content.state

    @property
    def folder(self) -> Path:
        return self.content.path


def load_newest(run: Path, *, verify: bool = True, without_optimizer: bool = False) -> Loaded | None:
    """Return the newest whole checkpoint of a run; None where there is none of any kind.

    `verify` compares every digest; `without_optimizer` lets one count whose moments are damaged or gone. Raises
    CorruptError when no checkpoint is whole, UsageError when LATEST names one and there is none at all, ResourceError
    when one cannot be read for another reason than damage.
    """
    folders = scan(run)
    if not folders:
        _refuse_lost(run)
        return None
    faults: list[str] = []
    for folder in folders:
        try:
            content = open_step(folder, digests=verify, without_optimizer=without_optimizer)
        except CkptkitError as error:
            if not _is_damage(error):
                raise
            faults.append(error.what)
            continue
        passed = (f"passed over: {fault}" for fault in faults)
        return Loaded(content, (*passed, *content.notes, *_hint_notes(run, folder)))
    raise _none_is_whole(run, faults)


def _refuse_lost(run: Path) -> None:
    """Raise UsageError for a run without any checkpoint that should have one."""
    hint = latest_hint(run)
    if hint:
        raise UsageError(
            f"`{LATEST}` in `{run}` names `{hint}`, and no checkpoint is there",
            why="starting from step 0 would begin a run again that was under way",
            hint=f"put the checkpoint back, or remove `{LATEST}` to start from step 0",
        )


def _is_damage(error: CkptkitError) -> bool:
    """Say whether a checkpoint is damaged, or only cannot be read here and now."""
    if isinstance(error, ResourceError):
        return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO
    return isinstance(error, CorruptError | CoverageError)


def _none_is_whole(run: Path, faults: Sequence[str]) -> CorruptError:
    return CorruptError(
        f"none of the {len(faults)} checkpoints in `{run}` is whole",
        items=faults,
        why="starting from step 0 would throw the run away",
        hint="restore one from a copy; `--without-optimizer` goes on from weights alone; or name another "
        "`checkpoint.folder` to start again",
    )


def check_fits(
    content: StepContent, shapes: Mapping[str, Shape], trained: Collection[str], *, without_optimizer: bool
) -> list[str]:
    """Return the moments that a checkpoint lacks for a network whose weights have these `shapes`, by name.

    `trained` are the names of the weights that have moments. CoverageError for another network's weights, and for a
    lack that `without_optimizer` does not allow.
    """
    if odd := odd_shapes(content.shapes, shapes):
        raise CoverageError(
            f"`{content.path.name}` holds the weights of another network",
            items=odd,
            hint="name the model of this run, or another `checkpoint.folder` to start again",
        )
    lacking = content.lacking([*trained])
    if lacking and not without_optimizer:
        raise CoverageError(
            f"`{content.path.name}` lacks {len(lacking)} moments of weights that are trained",
            items=lacking,
            why="moments that start at zero again make the loss jump",
            hint="restore it from a copy, or pass `--without-optimizer` to let these start at zero",
        )
    return lacking


def odd_shapes(stored: Mapping[str, Shape], due: Mapping[str, Shape]) -> list[str]:
    """Return, for people, how stored weights differ from those that a network has; empty where they do not."""
    odd = [f"missing: {name} {tuple(due[name])}" for name in due if name not in stored]
    odd += [f"not in the network: {name} {stored[name]}" for name in stored if name not in due]
    both = [name for name in stored if name in due and stored[name] != due[name]]
    return odd + [f"{name} is {stored[name]}, in the network {tuple(due[name])}" for name in both]


def _hint_notes(run: Path, folder: StepFolder) -> list[str]:
    """Return a note when LATEST does not name the checkpoint that was found."""
    hint = latest_hint(run)
    if hint == folder.path.name:
        return []
    told = f"names `{hint}`" if hint else "is missing" if hint is None else "is empty"
    return [f"`{LATEST}` {told}; the newest whole checkpoint is `{folder.path.name}`"]

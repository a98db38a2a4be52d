"""MindFormers' newer checkpoint folders (`use_legacy_format: False`): which folder is one, which iteration counts.

    ROOT/latest_checkpointed_iteration.txt      the tracker: the last iteration that is complete, as a number
    ROOT/iteration_00000008/metadata.json       how tensors are cut, and which file holds what; none for one rank
                            common.json         where a run is resumed
                            CKP-model-0000000-0000002.safetensors, CKP-opt-...      of each rank

Both ROOT and one `iteration_N` can be named. What does not live here: what metadata.json says
(`mindformers_metadata.py`), opening the files (`mindformers_ranks.py`), writing (`mindformers_write.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from ckptkit.errors import CorruptError, CoverageError, UsageError
from ckptkit.formats import files
from ckptkit.formats.folder import MINDFORMERS_FILE, file_names, is_weight, natural
from ckptkit.formats.manifest import MANIFEST

TRACKER = "latest_checkpointed_iteration.txt"
METADATA, COMMON = "metadata.json", "common.json"
COMMON_KEYS = ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size", "ckpt_status")
NEWER_KEYS = ("consumed_samples",)  # of 2.1, which 1.8 to 2.0 refuse to read
_FOLDER = re.compile(r"iteration_(\d+)")
_MEGATRON = re.compile(r"iter_\d+|release")  # another tool's folders, beside a tracker of the same name


@dataclass(frozen=True, slots=True)
class Place:
    """The iteration that counts. `root` is where a manifest of it lies: the folder around it, or itself.

    `number` is None when its name does not say it.
    """

    root: Path
    folder: Path
    number: int | None
    notes: tuple[str, ...]

    @property
    def prefix(self) -> str:
        """What the names of its files begin with, seen from `root`."""
        return "" if self.root == self.folder else f"{self.folder.name}/"


def is_iteration(path: Path) -> bool:
    """Tell whether a folder is one iteration: files of ranks by their names, or both of its JSON files."""
    names = set(file_names(path))
    return {METADATA, COMMON} <= names or any(MINDFORMERS_FILE.fullmatch(name) for name in names)


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is an iteration, or holds some and no weights of its own."""
    if is_iteration(path):
        return True
    names = file_names(path)
    if any(is_weight(name) for name in names):
        return False
    below = [child.name for child in path.iterdir() if child.is_dir()]
    if any(_FOLDER.fullmatch(name) for name in below):
        return True
    return TRACKER in names and not any(_MEGATRON.fullmatch(name) for name in below)


def refuse_beside_iterations(path: Path, others: Sequence[str]) -> None:
    """Raise UsageError where `others`, which are a checkpoint in `path`, lie there beside whole iterations."""
    below = [c.name for c in path.iterdir() if _FOLDER.fullmatch(c.name) and c.is_dir() and is_iteration(c)]
    if others and below:
        raise _two_checkpoints(path, others, sorted(below, key=natural))


def refuse_beside_files(path: Path, others: Sequence[str]) -> None:
    """Raise UsageError where `others`, which are a checkpoint in `path`, lie there beside the files of an iteration."""
    own = [name for name in file_names(path) if MINDFORMERS_FILE.fullmatch(name)]
    if others and own:
        raise _two_checkpoints(path, others, own)


def _two_checkpoints(path: Path, one: Sequence[str], two: Sequence[str]) -> UsageError:
    return UsageError(
        f"`{path}` holds two checkpoints",
        items=[files.listed(one), files.listed(two)],
        why="nothing says which of them is meant",
        hint="name an iteration by its own folder, or move the one that is not meant away",
    )


def iteration_name(number: int) -> str:
    """Return the name of an iteration's folder, as MindFormers gives it."""
    return f"iteration_{number:08d}"


def locate(path: Path, step: int | None = None) -> Place:
    """Return the iteration of `path` that counts: `step`, or the one that the tracker names, or the only one.

    Raises CoverageError when it is not there, UsageError when it is not clear which it is, and CorruptError for a
    tracker that is no number.
    """
    if is_iteration(path):
        own = [n for n in file_names(path) if n in (METADATA, COMMON) or MINDFORMERS_FILE.fullmatch(n)]
        refuse_beside_iterations(path, own)
        return _itself(path, step)
    found = _iterations(path)
    tracked = _read_tracker(path)
    if step is not None:
        if step not in found:
            raise _no_iteration(path, f"`{path}` has no iteration {step}", found)
        return Place(path, found[step], step, _unfinished(step, tracked))
    if tracked is None:
        return _untracked(path, found)
    if tracked not in found:
        raise _no_iteration(path, f"`{TRACKER}` names iteration {tracked}, which is not in `{path}`", found)
    newer = [found[number].name for number in found if number > tracked]
    older = [found[number].name for number in found if number < tracked]
    notes = []
    if newer:
        what = "is" if len(newer) == 1 else "are"
        notes.append(
            f"{files.listed(newer)} {what} newer than iteration {tracked}, which `{TRACKER}` names, and passed over: "
            "a save that did not end looks like this"
        )
    if older:
        notes.append(f"iteration {tracked} is taken, as `{TRACKER}` says; passed over: {files.listed(older)}")
    return Place(path, found[tracked], tracked, tuple(notes))


def read_common(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return what `common.json` says, None where there is none, and notes; CorruptError when it is no JSON object."""
    if not files.has_small(folder / COMMON):
        return None, [f"`{folder.name}` has no `{COMMON}`: MindFormers cannot resume training from it"]
    common = files.read_json_object(folder / COMMON)
    wrong = [key for key in (*COMMON_KEYS, *NEWER_KEYS) if not _is_number(common.get(key))]
    if wrong:
        raise CorruptError(
            f"`{folder / COMMON}` has values that are no numbers",
            items=[f"{key}: {common[key]!r}" for key in wrong],
            hint="restore it from a copy, or remove it: the tensors can be read without it",
        )
    other = [key for key in common if key not in COMMON_KEYS]
    notes = [f"`{COMMON}` has keys that MindFormers 1.8 to 2.0 refuse: {files.listed(other)}"] if other else []
    return common, notes


def unlike_number(place: Place, common: Mapping[str, Any] | None) -> list[str]:
    """Return a note where `common.json` is of another iteration than the name of its folder says.

    MindFormers names the folder by `step_num`, or by `global_step`, which is smaller where updates were skipped.
    """
    step, count = ((common or {}).get(key) for key in ("step_num", "global_step"))
    odd = {"step_num": step} if step not in (None, place.number) else {}
    odd |= {"global_step": count} if count is not None and place.number is not None and count > place.number else {}
    if place.number is None or not odd:
        return []
    said = " and ".join(f"{key} {value}" for key, value in odd.items())
    return [f"`{COMMON}` of iteration {place.number} says {said}: MindFormers resumes by `{COMMON}`"]


def _is_number(value: object) -> bool:
    return value is None or type(value) is int or (isinstance(value, float) and isfinite(value))


def _itself(path: Path, step: int | None) -> Place:
    """Return the iteration that was named by its own folder."""
    named = _by_its_name(path)
    number = int(named.name.removeprefix("iteration_")) if named else None
    if step is not None and step != number:
        is_one = "" if number is None else f", it is iteration {number}"
        raise CoverageError(f"`{path}` has no iteration {step}{is_one}", hint="name the folder around it")
    if named is None or number is None:
        return Place(path, path, None, ())
    around = named.parent
    root = around if not (path / MANIFEST).is_file() and (around / MANIFEST).is_file() else path
    try:
        notes = _unfinished(number, _read_tracker(around))
    except CorruptError as error:  # the user says which iteration is meant
        notes = (f"{error.what}: whether iteration {number} is complete cannot be told",)
    return Place(root, named if root == around else path, number, notes)


def _by_its_name(path: Path) -> Path | None:
    """Return the path by whose last name an iteration's folder says its number; None where none does.

    The name of a link comes before that of the folder it leads to, unless only the latter lies in such a folder.
    """
    found = [other for other in dict.fromkeys((path.absolute(), path.resolve())) if _FOLDER.fullmatch(other.name)]
    beside = [other for other in found if any((other.parent / name).is_file() for name in (TRACKER, MANIFEST))]
    return next(iter(beside or found), None)


def _unfinished(number: int, tracked: int | None) -> tuple[str, ...]:
    """Return a note on an iteration that the tracker does not yet name."""
    if tracked is None or number <= tracked:
        return ()
    return (f"`{TRACKER}` names iteration {tracked}, an older one: this save may not have ended",)


def _untracked(path: Path, found: Mapping[int, Path]) -> Place:
    if len(found) > 1:
        raise UsageError(
            f"`{path}` holds {len(found)} iterations and no `{TRACKER}`",
            items=[folder.name for folder in found.values()],
            why="the tracker says which of them is complete",
            hint="name one with `--step`, or by its folder",
        )
    ((number, folder),) = found.items()
    return Place(path, folder, number, (f"no `{TRACKER}` says that iteration {number} is complete",))


def _iterations(path: Path) -> dict[int, Path]:
    """Return the iterations in a folder by number, the oldest first."""
    found: dict[int, Path] = {}
    for child in sorted(path.iterdir()):
        match = _FOLDER.fullmatch(child.name)
        if match is None or not child.is_dir():
            continue
        other = found.setdefault(int(match[1]), child)
        if other is not child:
            raise UsageError(
                f"`{path}` holds iteration {int(match[1])} twice",
                items=[other.name, child.name],
                hint="move one of the two away",
            )
    return dict(sorted(found.items()))


def _read_tracker(path: Path) -> int | None:
    file = path / TRACKER
    if not files.has_small(file):
        return None
    with files.opened(file) as descriptor:
        data = files.pread(file, descriptor, min(files.HEAD_BYTES, files.size_of(descriptor)), 0)
    text = data.decode("ascii", "replace").strip()
    if not text.isdecimal():
        raise CorruptError(
            f"`{file}` should be the number of an iteration, and is {text[:40]!r}",
            why="it says which iteration is complete",
            hint="write the number of the last complete iteration into it, or name that one's own folder",
        )
    return int(text)


def _no_iteration(path: Path, what: str, found: Mapping[int, Path]) -> CoverageError:
    names: Sequence[str] = [folder.name for folder in found.values()]
    hint = f"take another with `--step {max(found)}`, if it is complete" if found else "copy its folder here"
    return CoverageError(what, items=names or [f"`{path.name}` holds no iteration"], hint=hint)

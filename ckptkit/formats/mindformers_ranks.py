"""Open an iteration of MindFormers' newer checkpoint folders: each rank's tensors, held against `metadata.json`.

MindFormers itself looks whether the named files exist and no further. Here every tensor that `metadata.json` places in
a file must be in its header, with the shape and the dtype that it states, and the reverse. What does not live here:
which iteration counts (`mindformers_folder.py`), and whether the slices are where the layout puts them
(`commands/ranks.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.errors import CoverageError
from ckptkit.formats import files, safetensors
from ckptkit.formats.base import Checkpoint, FileIndex
from ckptkit.formats.folder import MINDFORMERS_FILE, file_names
from ckptkit.formats.mindformers_folder import METADATA, Place, locate, read_common, unlike_number
from ckptkit.formats.mindformers_metadata import Entry, Metadata, read_metadata
from ckptkit.types import DTYPES, TensorInfo

GRADIENTS = "accu_grads"  # that some releases list, and never write
SHOWN_RANKS = 3
_UNLISTED = "learning_rate"  # that a redundant save writes, and does not list
_WORDS = {dtype.mindspore.lower(): name for name, dtype in DTYPES.items() if dtype.mindspore}
_COUNT = re.compile(r"-(\d{7})\.safetensors")


@dataclass(frozen=True, slots=True)
class Iteration:
    """What an iteration says of itself. `metadata` is None for one rank; `common` where there is no common.json."""

    place: Place
    common: Mapping[str, Any] | None
    metadata: Metadata | None

    @property
    def number(self) -> int | None:
        """The iteration's number, by its folder's name or by common.json; None when neither says it."""
        step = (self.common or {}).get("global_step")
        told = step if isinstance(step, int) and step >= 0 else None
        return told if self.place.number is None else self.place.number


def open_iteration(path: Path, step: int | None = None) -> tuple[Iteration, dict[int, Checkpoint], list[str], bool]:
    """Open the iteration of `path` that counts: what it says, each rank's tensors, notes, and whether it is thinned.

    Thinned means saved with `remove_redundancy`: of the ranks with equal slices only one has a file with it. Raises
    CoverageError when files or tensors are missing, or are not what `metadata.json` says, and CorruptError.
    """
    place = locate(path, step)
    common, notes = read_common(place.folder)
    notes = [*place.notes, *notes, *unlike_number(place, common)]
    if not files.has_small(place.folder / METADATA):
        ranks = {0: _only_rank(place.folder)}
        return Iteration(place, common, None), ranks, notes, False
    metadata = read_metadata(place.folder)
    indexes = _read_files(place, metadata)
    metadata, more = _without_gradients(metadata, indexes)
    _check_listed(place, metadata, indexes)
    extra = _unlisted(place, metadata, indexes)
    held: dict[int, dict[str, TensorInfo]] = {rank: {} for rank in range(metadata.num_ranks)}
    for entry in metadata.entries.values():
        for _, stored in entry.places():
            held[stored.rank][entry.name] = indexes[stored.file][entry.name]
    for rank, info in extra:
        held[rank][info.name] = info
    if extra:
        more.append(f"`{METADATA}` does not list `{_UNLISTED}`, as redundant saves leave it: taken from the files")
    ranks = {rank: _checkpoint(place.folder, tensors) for rank, tensors in held.items()}
    return Iteration(place, common, metadata), ranks, [*notes, *metadata.notes, *more], _is_thinned(metadata)


def _only_rank(folder: Path) -> Checkpoint:
    """Open the files of a save by one rank, which has no metadata.json."""
    names = [name for name in file_names(folder) if name.endswith(".safetensors")]
    counts = {int(match[1]) for name in names if MINDFORMERS_FILE.fullmatch(name) and (match := _COUNT.search(name))}
    if counts != {1}:
        raise CoverageError(
            f"`{folder}` has no `{METADATA}`, and its files are those of several ranks",
            items=names,
            why="nothing else says how its tensors were cut",
            hint=f"copy `{METADATA}` from where the checkpoint was saved",
        )
    tensors: dict[str, TensorInfo] = {}
    for name in names:
        for info in safetensors.read_index(folder / name).tensors:
            first = tensors.setdefault(info.name, info)
            if first is not info:
                raise CoverageError(
                    f"`{info.name}` is in two files of `{folder}`",
                    items=[first.file.name, name],
                    why="nothing says which counts",
                    hint="move the file that is not of this save away",
                )
    return _checkpoint(folder, tensors)


def _read_files(place: Place, metadata: Metadata) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors of every file that metadata.json names, by name."""
    named = dict.fromkeys(stored.file for entry in metadata.entries.values() for _, stored in entry.places())
    missing = [name for name in named if files.look(place.folder / name) is None]
    if missing:
        raise CoverageError(
            f"{len(missing)} of {len(named)} files that `{METADATA}` names are not in `{place.folder}`",
            items=missing,
            why="their tensors would be lost; a save that did not end looks like this, as this file is written first",
            hint="copy the missing files, or take an earlier iteration",
        )
    found: Iterator[FileIndex] = (safetensors.read_index(place.folder / name) for name in named)
    return {index.file.name: {info.name: info for info in index.tensors} for index in found}


def _without_gradients(
    metadata: Metadata, indexes: Mapping[str, Mapping[str, TensorInfo]]
) -> tuple[Metadata, list[str]]:
    """Leave out accumulated gradients that no file has: releases before 2.1 list them all the same."""
    absent = [
        entry.name
        for entry in metadata.entries.values()
        if entry.name.startswith(GRADIENTS) and all(entry.name not in indexes[s.file] for _, s in entry.places())
    ]
    if not absent:
        return metadata, []
    kept = {name: entry for name, entry in metadata.entries.items() if name not in set(absent)}
    note = f"{len(absent)} `{GRADIENTS}` tensors are listed in `{METADATA}` and in no file: passed over"
    return replace(metadata, entries=kept), [note]


def _check_listed(place: Place, metadata: Metadata, indexes: Mapping[str, Mapping[str, TensorInfo]]) -> None:
    """Raise CoverageError for a slice that is not in its file, or is not what metadata.json says."""
    absent, odd = [], []
    for entry in metadata.entries.values():
        for number, stored in entry.places():
            info = indexes[stored.file].get(entry.name)
            if info is None:
                absent.append(f"{entry.name}: said to be in {stored.file}")
            elif info.shape != entry.shapes[number] or not _same_dtype(entry.dtype, info.dtype):
                said = f"{entry.dtype} {entry.shapes[number]}"
                odd.append(f"{entry.name}: {said}, and {info.dtype} {info.shape} in {stored.file}")
    if absent:
        raise CoverageError(
            f"{len(absent)} slices of `{place.folder.name}` are not in the files that `{METADATA}` names for them",
            items=absent,
            why="MindFormers would go on without some of them, and keep random values there",
            hint="copy the files again; MindSpore does not save what two pipeline stages share",
        )
    if odd:
        raise CoverageError(
            f"{len(odd)} slices of `{place.folder.name}` are not what `{METADATA}` says",
            items=odd,
            why="the file and its metadata are of different saves, or one of them is damaged",
            hint="copy the iteration again",
        )
    _check_one_slice(metadata)
    _check_one_rank(metadata)


def _check_one_slice(metadata: Metadata) -> None:
    """Raise CoverageError when two slices of a tensor are said to be one: a file has one tensor of a name."""
    wrong = []
    for entry in metadata.entries.values():
        seen: dict[str, int] = {}
        for number, stored in entry.places():
            other = seen.setdefault(stored.file, number)
            if other != number:
                wrong.append(f"{entry.name}: slices {other} and {number} in {stored.file}")
    if wrong:
        raise CoverageError(
            f"`{METADATA}` puts several slices of a tensor in one file, which can hold one",
            items=wrong,
            why="the file is damaged, or was edited",
            hint="copy the iteration again",
        )


def _check_one_rank(metadata: Metadata) -> None:
    """Raise CoverageError for a file of several ranks: each rank writes its own, so some slices are another rank's."""
    ranks_of: dict[str, dict[int, str]] = {}
    for entry in metadata.entries.values():
        for _, stored in entry.places():
            ranks_of.setdefault(stored.file, {}).setdefault(stored.rank, entry.name)
    wrong = [
        f"{file}: {', '.join(f'rank {rank} ({name})' for rank, name in sorted(found.items())[:SHOWN_RANKS])}"
        for file, found in ranks_of.items()
        if len(found) > 1
    ]
    if wrong:
        raise CoverageError(
            f"`{METADATA}` says of {len(wrong)} files that several ranks wrote them",
            items=wrong,
            why="a rank writes its own files, so slices would be taken for those of another rank",
            hint="early releases named wrong files there: save the checkpoint again with a later one",
        )


def _same_dtype(said: str, found: str) -> bool:
    """Tell whether MindSpore's word for a dtype means that of a file; a word that is not known says nothing."""
    return _WORDS.get(said.lower().rpartition(".")[2], found) == found


def _unlisted(
    place: Place, metadata: Metadata, indexes: Mapping[str, Mapping[str, TensorInfo]]
) -> list[tuple[int, TensorInfo]]:
    """Return the learning rates that redundant saves do not list, with their ranks; CoverageError for anything else."""
    listed: dict[str, set[str]] = {name: set() for name in indexes}
    rank_of: dict[str, int] = {}
    for entry in metadata.entries.values():
        for _, stored in entry.places():
            listed[stored.file].add(entry.name)
            rank_of.setdefault(stored.file, stored.rank)
    extra, rates = [], []
    for file, tensors in indexes.items():
        for name, info in tensors.items():
            if name in listed[file]:
                continue
            if name == _UNLISTED and file in rank_of:
                rates.append((rank_of[file], info))
            else:
                extra.append(f"{name} in {file}")
    beside = [name for name in file_names(place.folder) if name.endswith(".safetensors") and name not in indexes]
    extra += [f"the file {name}" for name in beside]
    if extra:
        raise CoverageError(
            f"`{place.folder}` holds {len(extra)} tensors or files that `{METADATA}` does not list",
            items=extra,
            why="MindFormers would leave them out without a word",
            hint="they may be of another save: move them away, or copy the iteration again",
        )
    return rates


def _is_thinned(metadata: Metadata) -> bool:
    """Tell whether some rank that holds a slice, by the layout or as the file says, has no file with it."""
    return any(_lacks_holders(metadata, entry) for entry in metadata.entries.values())


def _lacks_holders(metadata: Metadata, entry: Entry) -> bool:
    num_holders = len(metadata.stages[entry.name]) * metadata.devices
    return sum(len(found) for found in entry.stored.values()) < num_holders


def _checkpoint(folder: Path, tensors: Mapping[str, TensorInfo]) -> Checkpoint:
    used = sorted({info.file for info in tensors.values()})
    return Checkpoint(folder, folder, files.SAFETENSORS, tuple(used), dict(tensors))

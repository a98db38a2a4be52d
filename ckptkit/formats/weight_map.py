"""The index of a set of weight files, held against their headers both ways.

An index is a JSON object with `weight_map` (tensor name -> file name) and, perhaps, `metadata.total_size`:
HuggingFace's `*.index.json` and MindSpore's `param_name_map.json`. It is a claim; the headers decide. What does not
live here: which index of a folder counts (`folder.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CorruptError, CoverageError
from ckptkit.formats import files
from ckptkit.formats.base import FileIndex
from ckptkit.types import TensorInfo, total_bytes

ABSENT = object()


@dataclass(frozen=True, slots=True)
class WeightMap:
    """An index as its file states it; `total_size` is what stands there, or ABSENT."""

    file: Path
    entries: Mapping[str, str]
    total_size: object

    @property
    def file_names(self) -> list[str]:
        """The files that it names, in order of first mention."""
        return list(dict.fromkeys(self.entries.values()))


def read_weight_map(file: Path) -> WeightMap:
    """Return the index that `file` holds; raises CorruptError when it is none.

    A `param_name_map.json` may be the bare map, without `weight_map`: MindSpore reads that too.
    """
    content = files.read_json_object(file)
    bare = file.name == "param_name_map.json" and "weight_map" not in content
    entries = content if bare else content.get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise CorruptError(f"`{file}` has no `weight_map` with entries", hint="download or save it again")
    plain = {name for name in {v for v in entries.values() if isinstance(v, str)} if _is_plain(name)}
    odd = [name for name, value in entries.items() if not isinstance(value, str) or value not in plain]
    if odd:
        raise CorruptError(
            f"`{file}` names files that are not plain names in the same folder",
            items=[f"{name}: {entries[name]!r}" for name in odd],
            hint="download or save it again",
        )
    metadata = None if bare else content.get("metadata")
    total = metadata.get("total_size", ABSENT) if isinstance(metadata, dict) else ABSENT
    return WeightMap(file, entries, total)


def _is_plain(value: str) -> bool:
    return value not in ("", ".", "..") and "/" not in value and "\0" not in value


def find_files(weights: WeightMap) -> list[Path]:
    """Return the files that the index names; raises CoverageError naming all that are missing."""
    folder = weights.file.parent
    found = [folder / name for name in weights.file_names]
    missing = [path for path in found if not path.exists()]
    if missing:
        raise CoverageError(
            f"`{weights.file.name}` names {len(found)} files; missing: {len(missing)}",
            items=[
                f"link {path.name} points to missing {path.readlink()}" if path.is_symlink() else path.name
                for path in missing
            ],
            why="their tensors would be lost",
            hint="the download may be incomplete: finish it; if the index is of another checkpoint, move it away",
        )
    return found


def apply_map(weights: WeightMap, indexes: Sequence[FileIndex]) -> tuple[dict[str, TensorInfo], list[str]]:
    """Return each tensor from the file that the index names, and notes.

    Raises CoverageError when the index and the headers contradict each other: an indexed tensor is in another file
    or in none, or a tensor in the files is not indexed. A copy of an indexed tensor in a file that the index does
    not name for it is stale: it is passed over and counted.
    """
    by_file = {index.file.name: {tensor.name: tensor for tensor in index.tensors} for index in indexes}
    tensors = {}
    lost = []
    for name, file_name in weights.entries.items():
        tensor = by_file[file_name].get(name)
        if tensor is None:
            lost.append(name)
        else:
            tensors[name] = tensor
    if lost:
        raise _contradiction(weights, by_file, lost)
    stale: list[str] = []
    if sum(map(len, by_file.values())) > len(tensors):
        unknown = {name: file for file, held in by_file.items() for name in held if name not in weights.entries}
        if unknown:
            raise _unindexed(weights, unknown)
        stale = [f"{n} in {file}" for file, held in by_file.items() for n in held if weights.entries[n] != file]
    return tensors, [*_stale_note(weights, stale), *_size_note(weights, tensors)]


def _unindexed(weights: WeightMap, unknown: Mapping[str, str]) -> CoverageError:
    """Return the error for tensors, with their file, that the index does not name."""
    return CoverageError(
        f"the files hold tensors that `{weights.file.name}` does not name: {len(unknown)}",
        items=[f"{name} in {file}" for name, file in unknown.items()],
        why="they would be lost",
        hint="mend the index, or remove it if the files are the whole checkpoint",
    )


def _contradiction(
    weights: WeightMap, by_file: Mapping[str, Mapping[str, TensorInfo]], lost: Sequence[str]
) -> CoverageError:
    """Return the error for indexed tensors that are not where they should be; absent and misplaced apart."""
    absent, misplaced = [], []
    for name in lost:
        holders = [file for file, held in by_file.items() if name in held]
        if holders:
            misplaced.append(f"misplaced: {name}: said to be in {weights.entries[name]}, is in {', '.join(holders)}")
        else:
            absent.append(f"absent: {name}: said to be in {weights.entries[name]}, is in no file")
    return CoverageError(
        f"`{weights.file.name}` contradicts the files' headers: {len(absent)} absent, {len(misplaced)} misplaced",
        items=[*absent[:3], *misplaced[:2], *absent[3:], *misplaced[2:]],
        why="an index is a claim; the files' headers say otherwise",
        hint="download the index and the files again, from the same revision",
    )


def _stale_note(weights: WeightMap, stale: Sequence[str]) -> list[str]:
    if not stale:
        return []
    more = f" and {len(stale) - 5} more" if len(stale) > 5 else ""
    return [
        f"stale copies of tensors passed over: {len(stale)}; `{weights.file.name}` places them elsewhere: "
        f"{', '.join(stale[:5])}{more}"
    ]


def _size_note(weights: WeightMap, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return a note if the stated total size is missing or wrong; it is only a counter."""
    found = total_bytes(tensors.values())
    stated = weights.total_size
    if stated is ABSENT:
        return [f"`{weights.file.name}` states no total_size; the tensors have {found} bytes"]
    if type(stated) is not int or stated != found:
        return [f"`{weights.file.name}` states total_size {stated!r}; the tensors have {found} bytes"]
    return []

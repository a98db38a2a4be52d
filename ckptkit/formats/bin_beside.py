"""The `.bin` files beside chosen safetensors files: nothing is taken from them, but do they hold the same tensors?

A repository that keeps both formats may have updated one of them only. Indexes and headers are compared, so names,
shapes and dtypes; never elements, and no pickle runs. Whatever is wrong with the `.bin` files is a note and no error.
What does not live here: which files of a folder are chosen (`folder.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptkit.errors import CkptkitError, CorruptError, CoverageError, ResourceError, UsageError
from ckptkit.formats.files import listed
from ckptkit.formats.folder import Selection, select_bin
from ckptkit.formats.weight_map import apply_map, find_files, read_weight_map
from ckptkit.types import TensorInfo

Tensors = Mapping[str, TensorInfo]


def notes_on_bin(folder: Path, used: Sequence[Path], tensors: Tensors) -> list[str]:
    """Return a note if the `.bin` files of `folder` differ from `tensors`, which are in the files `used`."""
    try:
        selection = select_bin(folder, used)
        found = {} if selection is None else _read(selection)
    except (UsageError, CoverageError, ResourceError, CorruptError) as error:
        return [f"the ignored .bin files were not compared with the chosen ones: {_in_one_line(error)}"]
    parts = _differences(tensors, found) if found else []
    return [f"the ignored .bin files differ from the chosen ones: {'; '.join(parts)}"] if parts else []


def _read(selection: Selection) -> dict[str, TensorInfo]:
    """Return the tensors of a `.bin` set; none when there is an index and not one of its files."""
    from ckptkit.formats import torch_pickle  # seldom needed

    if selection.index is None:
        indexes = [torch_pickle.read_index(file) for file in selection.files]
        return {tensor.name: tensor for index in indexes for tensor in index.tensors}
    weights = read_weight_map(selection.index)
    if not any((selection.index.parent / name).exists() for name in weights.file_names):
        return {}
    tensors, _ = apply_map(weights, [torch_pickle.read_index(file) for file in find_files(weights)])
    return tensors


def _differences(chosen: Tensors, found: Tensors) -> list[str]:
    more = [name for name in found if name not in chosen]
    less = [name for name in chosen if name not in found]
    both = [(name, chosen[name], found[name]) for name in found if name in chosen]
    twins = {_place(info): name for name, _, info in both}
    tied = [f"{name} = {twins[_place(found[name])]}" for name in more if _place(found[name]) in twins]
    more = [name for name in more if _place(found[name]) not in twins]
    parts = [_counted(more, "only in .bin"), _counted(less, "only in safetensors")]
    parts.append(_counted(tied, "only in .bin and the same bytes there as another (tied)"))
    shapes = [f"{name} {b.shape}, not {a.shape}" for name, a, b in both if a.shape != b.shape]
    parts.append(_counted(shapes, "of another shape"))
    dtypes: dict[str, list[str]] = {}
    for name, a, b in both:
        if a.dtype != b.dtype:
            dtypes.setdefault(f"{b.dtype} in .bin, {a.dtype} in safetensors", []).append(name)
    parts += [_counted(names, text) for text, names in dtypes.items()]
    return [part for part in parts if part]


def _place(info: TensorInfo) -> tuple[object, ...]:
    return info.file, info.extents, info.shape, info.strides, info.dtype


def _counted(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}: {listed(names)}" if names else ""


def _in_one_line(error: CkptkitError) -> str:
    text = f"{error.what}: {listed(error.items)}" if error.items else error.what
    return f"{text}; {error.why}" if error.why else text

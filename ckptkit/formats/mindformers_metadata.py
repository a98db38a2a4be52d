"""`metadata.json` of MindFormers' newer checkpoint folders: read, and checked as far as it needs no other file.

    state_dict_metadata  {NAME: {properties: {dtype, ..}, global_shape, axis_fragmentations, layout, chunk}}
    layout               {device_matrix, tensor_map, interleaved_parallel, alias_name, rank_list}, or null
    chunk                [{global_offset: [k], local_shape}]
    storage_data         {"('NAME', (k,))": [{file_name, storage_rank, rank_group}, ..]}

`global_offset` is no offset of elements: k is the row-major number of the slice in the grid `axis_fragmentations`. A
layout is one pipeline stage's: `rank_list` has its global ranks, in the order of `device_matrix`, row-major. An entry
of `tensor_map` is -1, a device axis counted from the last, or a list of these, the most significant first. Release 1.8
writes no `rank_group`; a layout may be null from 2.0 on. What does not live here: the tensors' files
(`mindformers_ranks.py`), and whether the slices are where the layout puts them (`commands/ranks.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.errors import SHOWN_ITEMS, CorruptError, CoverageError
from ckptkit.formats import files
from ckptkit.formats.mindformers_folder import METADATA
from ckptkit.formats.mindspore_layouts import Strategy
from ckptkit.types import Shape, TensorLayout, value

MOST_RANKS = 1 << 16
LAYOUT_KEYS = ("device_matrix", "tensor_map", "interleaved_parallel", "alias_name", "rank_list")
_AGAIN = "restore it from a copy, or save the checkpoint again"


class Stored(NamedTuple):
    """A slice in a file: `rank` wrote it, and the ranks in `group` hold it (none of them, where 1.8 wrote it)."""

    file: str
    rank: int
    group: Shape


@value
class Entry:
    """One tensor: `parts` is the grid of its slices; `shapes` and `stored` are by the number of a slice.

    `layout` is None where the file has null; `ranks` are its rank list then empty.
    """

    name: str
    dtype: str
    shape: Shape
    parts: Shape
    layout: TensorLayout | None
    ranks: Shape
    shapes: Mapping[int, Shape]
    stored: Mapping[int, Sequence[Stored]]

    def places(self) -> Iterator[tuple[int, Stored]]:
        """Yield each file that has a slice, with the number of the slice."""
        for number, found in self.stored.items():
            for stored in found:
                yield number, stored


@dataclass(frozen=True, slots=True)
class Metadata:
    """All tensors of a `metadata.json`; a stage has `devices` ranks, and all stages have `num_ranks`.

    `stages` are those that hold each tensor.
    """

    entries: Mapping[str, Entry]
    stages: Mapping[str, Sequence[int]]
    devices: int
    num_ranks: int
    notes: tuple[str, ...]

    def strategies(self) -> tuple[Strategy, ...]:
        """Return the layouts as a strategy file of each stage would say them.

        A tensor is in each stage that a file of it is in, whatever stage its rank list is of: a counter that all stages
        share has the first one's.
        """
        tensors: list[dict[str, TensorLayout]] = [{} for _ in range(self.num_ranks // self.devices)]
        shapes: list[dict[str, Shape]] = [{} for _ in tensors]
        for entry in self.entries.values():
            layout = entry.layout or TensorLayout((self.devices,), ((),) * len(entry.shape))
            for stage in self.stages[entry.name]:
                tensors[stage][entry.name] = layout
                shapes[stage][entry.name] = entry.shape
        return tuple(Strategy(stage, tensors[stage], shapes[stage]) for stage in range(len(tensors)))


def read_metadata(folder: Path) -> Metadata:
    """Return what the `metadata.json` of an iteration says.

    Raises CorruptError for what is not of its form, CoverageError for what contradicts itself.
    """
    file = folder / METADATA
    content = files.read_json_object(file)
    tensors, storage = content.get("state_dict_metadata"), content.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(storage, dict) or not tensors:
        raise _odd(file, "it needs the objects `state_dict_metadata` and `storage_data`")
    stored = _read_storage(file, storage)
    entries = {name: _read_entry(file, name, row, stored.pop(name, {})) for name, row in tensors.items()}
    if stored:
        raise CoverageError(
            f"`{METADATA}` names files of {len(stored)} tensors that it does not describe",
            items=list(stored),
            why="how they are cut, nothing says",
            hint=_AGAIN,
        )
    devices, num_ranks = _stages(file, entries.values())
    reordered = sum(_is_reordered(row) for row in tensors.values())
    note = (
        f"the keys in {reordered} layouts of `{METADATA}` are not in MindFormers' order, by which alone it reads them"
    )
    stages = {name: sorted({rank // devices for rank in _ranks_of(entry)}) for name, entry in entries.items()}
    return Metadata(entries, stages, devices, num_ranks, (note,) if reordered else ())


def _read_storage(file: Path, storage: Mapping[str, Any]) -> dict[str, dict[int, list[Stored]]]:
    """Return the files of each slice, by tensor and number."""
    found: dict[str, dict[int, list[Stored]]] = {}
    groups: dict[Shape, Shape] = {}
    for key, rows in storage.items():
        try:
            name, (number,) = ast.literal_eval(key)
            stored = [_stored(row, groups) for row in rows]
            if not isinstance(name, str) or not _is_size(number) or not stored:
                raise ValueError
        except (ValueError, TypeError, SyntaxError, KeyError, MemoryError, RecursionError):
            raise _odd(file, f"`storage_data` has no sound entry at {key[:80]!r}") from None
        found.setdefault(name, {})[number] = stored
    return found


def _stored(row: Mapping[str, Any], groups: dict[Shape, Shape]) -> Stored:
    """Return an entry of `storage_data`; equal groups, of which a file has many, are one."""
    name, rank, group = row["file_name"], row["storage_rank"], row.get("rank_group") or []
    if not isinstance(name, str) or Path(name).name != name or not _is_size(rank) or not _are_sizes(group):
        raise ValueError
    held = tuple(group)
    return Stored(name, rank, groups.setdefault(held, held))


def _read_entry(file: Path, name: str, row: Any, stored: Mapping[int, Sequence[Stored]]) -> Entry:
    try:
        dtype, shape, parts = row["properties"]["dtype"], row["global_shape"], row["axis_fragmentations"]
        chunks = [(chunk["global_offset"], chunk["local_shape"]) for chunk in row["chunk"]]
        layout = row["layout"]
        sound = isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(parts) and len(parts) == len(shape)
        sound = sound and all(_are_sizes(offset) and len(offset) == 1 and _are_sizes(of) for offset, of in chunks)
        sound = sound and _are_properties(row["properties"])
        if not sound or 0 in parts:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise _odd(file, f"`{name}` has no sound entry") from None
    how, ranks = (None, ()) if layout is None else _read_layout(file, name, layout, len(shape))
    shapes: dict[int, Shape] = {}
    for (number,), local in chunks:
        if shapes.setdefault(number, tuple(local)) != tuple(local):
            raise _contradiction(f"slice {number} of `{name}` has two shapes in `{METADATA}`")
    entry = Entry(name, dtype, tuple(shape), tuple(parts), how, ranks, shapes, stored)
    _check_slices(entry)
    return entry


def _check_slices(entry: Entry) -> None:
    """Raise CoverageError unless all slices of the grid, and no others, are described and are in a file."""
    count = prod(entry.parts)  # of any size, where the file is damaged
    wrong = [f"slice {n} is not described" for n in _first_without(entry.shapes, count)]
    wrong += [f"slice {n} is in no file" for n in _first_without(entry.stored, count)]
    others = sorted(n for n in {*entry.shapes, *entry.stored} if n >= count)
    wrong += [f"slice {n} does not exist: there are {count}" for n in others]
    if not wrong and entry.layout is None and count > 1:
        wrong = [f"its layout is null, and it is cut in {count}"]
    if wrong:
        raise _contradiction(f"the slices of `{entry.name}` in `{METADATA}` do not make a tensor", wrong)


def _first_without(found: Container[int], count: int) -> list[int]:
    """Return the first numbers below `count` that are not `found`."""
    return list(islice((n for n in range(count) if n not in found), SHOWN_ITEMS))


def _read_layout(file: Path, name: str, layout: Any, num_axes: int) -> tuple[TensorLayout, Shape]:
    """Return a layout, and its ranks."""
    try:
        matrix, axes, ranks = layout["device_matrix"], layout["tensor_map"], layout["rank_list"]
        if not _are_sizes(matrix) or not matrix or 0 in matrix or not _are_sizes(ranks):
            raise ValueError
        places = [[m for m in (axis if isinstance(axis, list) else [axis]) if m != -1] for axis in axes]
        used = [m for axis in places for m in axis]
        if not _are_sizes(used) or any(m >= len(matrix) for m in used):
            raise ValueError
        if type(layout.get("interleaved_parallel", False)) is not bool or not _are_aliases(layout, len(matrix)):
            raise ValueError
    except (TypeError, KeyError, ValueError, AttributeError):
        raise _odd(file, f"`{name}` has no sound layout") from None
    wrong = []
    if prod(matrix) != len(ranks):
        wrong.append(f"device_matrix {matrix} is of {prod(matrix)} devices, and rank_list has {len(ranks)}")
    if len(places) != num_axes:
        wrong.append(f"tensor_map has {len(places)} axes, and the tensor {num_axes}")
    if len(set(used)) < len(used):
        wrong.append(f"tensor_map {axes} uses a device axis twice")
    if wrong:
        raise _contradiction(f"the layout of `{name}` in `{METADATA}` contradicts itself", wrong)
    return TensorLayout(tuple(matrix), tuple(tuple(axis) for axis in places)), tuple(ranks)


def _stages(file: Path, entries: Collection[Entry]) -> tuple[int, int]:
    """Return the number of devices of a stage, and that of all ranks; CoverageError when the layouts fit no stages."""
    lists = dict.fromkeys(entry.ranks for entry in entries if entry.layout is not None)
    ranks: set[int] = set().union(*[_ranks_of(entry) for entry in entries])
    if max(ranks) >= MOST_RANKS:
        raise _odd(file, f"it names rank {max(ranks)}, and at most {MOST_RANKS} ranks are read")
    devices = max((len(of) for of in lists), default=max(ranks) + 1)
    odd = [of for of in lists if len(of) != devices or of != tuple(range(of[0], of[0] + devices)) or of[0] % devices]
    if odd:
        raise CoverageError(
            f"the rank lists in `{file.name}` are not those of pipeline stages with {devices} devices each",
            items=[f"{list(of[:8])}{'...' if len(of) > 8 else ''}, of {len(of)}" for of in odd],
            why="ranks are read as stage * devices + device, as MindFormers' graph mode numbers them",
            hint="save the checkpoint with one rank list for each stage",
        )
    return devices, (max(ranks) // devices + 1) * devices


def _ranks_of(entry: Entry) -> set[int]:
    """Return the ranks that hold slices of a tensor, by its layout or as a file says."""
    stored = [stored for _, stored in entry.places()]
    groups = {id(one.group): one.group for one in stored}
    return {*entry.ranks}.union([one.rank for one in stored], *groups.values())


def _is_reordered(row: Mapping[str, Any]) -> bool:
    layout = row["layout"]
    return layout is not None and tuple(layout) != LAYOUT_KEYS


def _are_properties(properties: Mapping[str, Any]) -> bool:
    """Tell whether what only MindFormers reads of a tensor is of the kinds that it writes, where it is there."""
    flags = [properties.get(key) for key in ("allow_shape_mismatch", "allow_to_save")]
    replicas = properties.get("replica_id")
    return all(flag is None or type(flag) is bool for flag in flags) and (
        replicas is None or _is_size(replicas) or _are_sizes(replicas)
    )


def _are_aliases(layout: Mapping[str, Any], num_axes: int) -> bool:
    """Tell whether the device axes of a layout have names, where it gives any, each its own."""
    names = layout.get("alias_name")
    if names is None:
        return True
    sound = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return sound and len(names) == len(set(names)) == num_axes


def _is_size(number: object) -> bool:
    return type(number) is int and number >= 0


def _are_sizes(numbers: object) -> bool:
    return isinstance(numbers, list) and {*map(type, numbers)} <= {int} and min(numbers, default=0) >= 0


def _odd(file: Path, what: str) -> CorruptError:
    return CorruptError(f"`{file}` is not as MindFormers writes it: {what}", hint=_AGAIN)


def _contradiction(what: str, items: Sequence[str] = ()) -> CoverageError:
    return CoverageError(what, items=items, why="the file is damaged, or was edited", hint=_AGAIN)

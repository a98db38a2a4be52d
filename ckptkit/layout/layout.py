"""A layout: for each pipeline stage its devices, and how each of its tensors is cut over them.

Ranks count stage by stage: rank = stage * devices + device. Whatever a layout comes from (degrees, a run's YAML,
strategy files), it is this table in the end, so there is one way to cut and one way to join.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ckptkit.errors import UsageError
from ckptkit.layout.slices import num_opt_shards, num_parts, shard_index, unused_axes
from ckptkit.types import Shape, TensorLayout

MAX_RANKS = 1 << 16  # far above every cluster: more are a slip of the pen, and would take hours to plan


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: the number of its devices, and the layout of each of its tensors by name."""

    devices: int
    tensors: Mapping[str, TensorLayout]


@dataclass(frozen=True)
class Layout:
    """All stages, in order; every stage has the same number of devices."""

    stages: tuple[Stage, ...]

    @property
    def devices(self) -> int:
        """The number of devices of one stage."""
        return self.stages[0].devices

    @property
    def num_ranks(self) -> int:
        return self.devices * len(self.stages)

    @cached_property
    def stages_of(self) -> Mapping[str, tuple[int, ...]]:
        """The stages that hold each tensor: more than one for a copy that the first and the last stage share."""
        found: dict[str, tuple[int, ...]] = {}
        for number, stage in enumerate(self.stages):
            for name in stage.tensors:
                found[name] = (*found.get(name, ()), number)
        return found

    def ranks_of(self, name: str) -> Iterator[tuple[int, int, TensorLayout]]:
        """Yield (rank, device in its stage, layout) for each rank that holds a part of the tensor `name`."""
        for number in self.stages_of.get(name, ()):
            stage = self.stages[number]
            for device in range(stage.devices):
                yield number * stage.devices + device, device, stage.tensors[name]


def replicated(num_axes: int, devices: int) -> TensorLayout:
    """Return the layout of a tensor that every device of a stage holds whole."""
    return TensorLayout((devices,), ((),) * num_axes)


def slice_number(layout: TensorLayout, device: int) -> int:
    """Return the number of the part that `device` holds: row-major, in the grid of all parts."""
    number = 0
    for index, count in zip(shard_index(layout, device), num_parts(layout), strict=True):
        number = number * count + index
    return number


def without_opt_shard(layout: TensorLayout) -> TensorLayout:
    """Return a layout that gives each device the same part, and says so by its map alone.

    An optimizer shard cuts axis 0 over the device axes that nothing else uses, the last one the least significant; they
    become the last entries of the map of axis 0. A device axis that it uses in part becomes two, the second one used.
    """
    shards = num_opt_shards(layout)
    if shards == 1:
        return TensorLayout(layout.dev_matrix, layout.tensor_map)
    sizes: list[list[int]] = [[size] for size in layout.dev_matrix]
    used: list[int] = []
    for axis in reversed(unused_axes(layout)):
        size = min(shards, layout.dev_matrix[axis])
        shards //= size
        if size > 1:
            used.append(axis)
        if 1 < size < layout.dev_matrix[axis]:
            sizes[axis] = [layout.dev_matrix[axis] // size, size]
    number = {axis: sum(map(len, sizes[axis + 1 :])) for axis in range(len(sizes))}  # of an axis, or of its second half
    last = len(sizes) - 1
    maps: list[Shape] = [tuple(number[last - m] for m in axes) for axes in layout.tensor_map]
    maps[0] += tuple(number[axis] for axis in reversed(used))
    return TensorLayout(tuple(size for axis in sizes for size in axis), tuple(maps))


def check_num_ranks(count: int) -> None:
    """Raise UsageError for more ranks than a layout may have."""
    if count > MAX_RANKS:
        raise UsageError(
            f"the layout has {count} ranks, and at most {MAX_RANKS} are allowed",
            why="no run has so many devices, and a plan has a file for each",
            hint="look at the degrees and at the number of devices: their product is the number of ranks",
        )

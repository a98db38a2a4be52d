"""The part of a tensor that a device holds, by its `TensorLayout`.

The formula is the one by which MindSpore cuts: N = product of `dev_matrix`; a device's coordinates c are its number
in the stage, unravelled over `dev_matrix` row-major. A tensor axis that device axes a1, a2, .. cut (a1 the most
significant) is in dev[a1] * dev[a2] * .. equal parts, and the device has part number (c[a1] * dev[a2] + c[a2]) ...
An optimizer shard then cuts axis 0 over the devices that hold equal parts, counted from the last unused axis on.

What does not live here: which layout a tensor has (`degrees.py`, strategy files).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ckptkit.errors import CoverageError
from ckptkit.types import Region, Shape, TensorLayout


def num_parts(layout: TensorLayout) -> Shape:
    """Return in how many equal parts each axis of the tensor is cut, optimizer shards included."""
    dev = layout.dev_matrix
    parts = [prod(dev[len(dev) - 1 - m] for m in axes) for axes in layout.tensor_map]
    if parts:
        parts[0] *= num_opt_shards(layout)
    return tuple(parts)


def num_opt_shards(layout: TensorLayout) -> int:
    """Return in how many parts the optimizer shard cuts what the other device axes left of axis 0; 1 without one."""
    if not layout.opt_step or not layout.opt_size or not layout.tensor_map:
        return 1
    axes = unused_axes(layout)
    if layout.opt_size > 0:
        _check_opt_size(layout, axes)
        return layout.opt_size
    return prod(layout.dev_matrix[axis] for axis in axes)


def whole_shape(layout: TensorLayout, shard: Sequence[int], name: str = "a tensor") -> Shape:
    """Return the shape of the tensor `name`, whose parts have the shape `shard`; CoverageError for another layout."""
    if len(shard) != len(layout.tensor_map):
        raise CoverageError(
            f"the part of `{name}` that a rank holds has shape {tuple(shard)}, "
            f"and its layout is one of {len(layout.tensor_map)} axes",
            why="the ranks and the strategy files are of different nets",
            hint="give the strategy files of the run that saved these ranks",
        )
    return tuple(size * parts for size, parts in zip(shard, num_parts(layout), strict=True))


def shard_region(name: str, layout: TensorLayout, shape: Shape, device: int) -> Region:
    """Return the part of the tensor `name` of `shape` that `device`, its number in the stage, holds.

    Raises CoverageError when the layout does not fit the shape, or the parts would not be of equal size.
    """
    indexes, parts = shard_index(layout, device), num_parts(layout)
    if len(parts) != len(shape):
        raise CoverageError(f"`{name}` has shape {shape}, and its layout is one of {len(parts)} axes")
    for axis, (size, count) in enumerate(zip(shape, parts, strict=True)):
        if size % count:
            raise indivisible(name, axis, size, count)
    start = tuple(i * (size // n) for i, size, n in zip(indexes, shape, parts, strict=True))
    return Region(start, tuple(a + size // n for a, size, n in zip(start, shape, parts, strict=True)))


def shard_index(layout: TensorLayout, device: int) -> Shape:
    """Return for each axis the number of the part that `device` holds, of the `num_parts` there are."""
    dev = layout.dev_matrix
    at = coordinates(dev, device)
    indexes = []
    for axes in layout.tensor_map:
        index = 0
        for m in axes:
            axis = len(dev) - 1 - m
            index = index * dev[axis] + at[axis]
        indexes.append(index)
    shards = num_opt_shards(layout)
    if shards > 1:
        indexes[0] = indexes[0] * shards + _opt_index(layout, at, shards)
    return tuple(indexes)


def coordinates(dev_matrix: Shape, device: int) -> Shape:
    """Return a device's place in the device matrix, row-major."""
    at = []
    for size in reversed(dev_matrix):
        at.append(device % size)
        device //= size
    return tuple(reversed(at))


def indivisible(name: str, axis: int, size: int, parts: int, hint: str = "") -> CoverageError:
    """Return the error for an axis that cannot be cut in equal parts."""
    return CoverageError(
        f"`{name}` has {size} rows on axis {axis}, which {parts} devices cannot share equally",
        why="a parallel layout gives every device an equal part",
        hint=hint or f"choose degrees whose product on that axis divides {size}",
    )


def unused_axes(layout: TensorLayout) -> list[int]:
    """Return the device axes, counted from the first, over which the tensor is replicated."""
    k = len(layout.dev_matrix)
    used = {k - 1 - m for axes in layout.tensor_map for m in axes}
    return [axis for axis, size in enumerate(layout.dev_matrix) if size > 1 and axis not in used]


def _opt_index(layout: TensorLayout, at: Shape, shards: int) -> int:
    index, step, rest = 0, 1, shards
    for axis in reversed(unused_axes(layout)):
        size = min(rest, layout.dev_matrix[axis])
        index += at[axis] % size * step
        step *= size
        rest //= size
    return index


def _check_opt_size(layout: TensorLayout, axes: Sequence[int]) -> None:
    """Raise CoverageError where an optimizer shard would make more parts than it hands out, or some more often."""
    rest = layout.opt_size
    for axis in reversed(axes):
        size = min(rest, layout.dev_matrix[axis])
        if rest % size or layout.dev_matrix[axis] % size:
            break
        rest //= size
    if rest > 1:
        free = " * ".join(str(layout.dev_matrix[axis]) for axis in axes) or "1"
        raise CoverageError(
            f"an optimizer shard of {layout.opt_size} parts does not fit the {free} devices that hold equal parts",
            why="each part must lie on the same number of them",
        )

"""What every op promises, and the few helpers that ops share.

An op moves elements and never computes. It knows the shape it makes, the way back to each of its inputs (`part`),
and which box of each input a box of its output needs (`pull`). What does not live here: the ops themselves
(`ops.py`, `groups.py`) and trees of ops (`expr.py`).

The pull law, for every legal region r, with s the input shapes:

    op.apply(x)[r] == op.within(r).apply([x_i[p_i] for p_i in op.pull(r, s)])

`within` is the identity for every op but padding, which has to be told how much of the filling to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import lcm
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import CoverageError, UsageError
from ckptkit.types import Region, Shape

Array = NDArray[Any]
ANY = -1  # the arity of an op that takes any number of inputs


class Op(Protocol):
    """A movement of elements from `arity` inputs (ANY: one or more) to one output.

    An op with `is_part` takes a part of its input, so its own `part` does not exist.
    """

    @property
    def arity(self) -> int: ...

    @property
    def is_part(self) -> bool: ...

    def out_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the output's shape; raise CoverageError, naming the numbers, when the inputs do not fit."""

    def apply(self, arrays: Sequence[Array]) -> Array:
        """Return the output for whole inputs, or for the boxes that `pull` asked for."""

    def part(self, index: int, shapes: Sequence[Shape]) -> Op:
        """Return the unary op that recovers input `index` (of whole `shapes`) from the output."""

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        """Return the box (perhaps empty) of each input that `region` of the output needs.

        Raises UsageError when `region` cuts through elements that must stay together.
        """

    def needed(self, region: Region, shapes: Sequence[Shape]) -> list[tuple[int, Region]]:
        """Return the boxes of `pull` that are not empty, each with the number of its input."""

    def pieces(self, region: Region, shapes: Sequence[Shape]) -> Sequence[Region]:
        """Return the regions, together `region`, that can be pulled when `region` itself cannot.

        Only ops whose groups mean nothing outside of the op do so; the others leave a bad cut to `pull`.
        """

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        """Return the output's granules, given those of each input (see `granule`)."""

    def granule(self, axis: int, shapes: Sequence[Shape]) -> int:
        """Return g such that a region whose bounds on `axis` are multiples of g is legal."""

    def within(self, region: Region) -> Op:
        """Return the op that makes `region` of the output from the pulled boxes."""


class Base:
    """The defaults: one input, the same op for every region, granules from `lift`."""

    __slots__ = ()

    @property
    def arity(self) -> int:
        return 1

    @property
    def is_part(self) -> bool:
        return False

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        raise TypeError(f"{type(self).__name__} has no `pull`")

    def needed(self, region: Region, shapes: Sequence[Shape]) -> list[tuple[int, Region]]:
        return [(number, box) for number, box in enumerate(self.pull(region, shapes)) if box.size]

    def pieces(self, region: Region, shapes: Sequence[Shape]) -> Sequence[Region]:
        return (region,)

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        raise TypeError(f"{type(self).__name__} has no `lift`")

    def granule(self, axis: int, shapes: Sequence[Shape]) -> int:
        return self.lift([(1,) * len(s) for s in shapes], shapes)[axis]

    def within(self, region: Region) -> Any:
        return self


def replace_axis(shape: Shape, axis: int, *sizes: int) -> Shape:
    """Return `shape` with `sizes` in the place of its `axis`."""
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


def empty_like(shape: Shape) -> Region:
    """Return an empty region of a tensor of `shape`."""
    return Region((0,) * len(shape), (0,) * len(shape))


def index_axis(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    """Return the index that takes `start`:`stop` of `axis` and all of the axes before it."""
    return (*[slice(None)] * axis, slice(start, stop))


def check_axis(op: str, axis: int, shape: Shape, *, count: int = 1) -> None:
    """Raise CoverageError unless `axis` and the `count - 1` axes after it exist in `shape`."""
    if axis < 0 or axis + count > len(shape):
        raise CoverageError(f"`{op}` works on axis {axis}, which a tensor of shape {shape} does not have")


def check_alike(op: str, axis: int | None, shapes: Sequence[Shape]) -> None:
    """Raise CoverageError unless all shapes are equal, `axis` (when not None) aside."""
    first = shapes[0]
    if axis is not None:
        check_axis(op, axis, first)
    for shape in shapes:
        if shape == first:
            continue
        if axis is not None:
            check_axis(op, axis, shape)
        if len(shape) != len(first) or any(
            a != b for i, (a, b) in enumerate(zip(shape, first, strict=True)) if i != axis
        ):
            raise CoverageError(
                f"`{op}` cannot join tensors of shapes {first} and {shape}",
                why="they may differ on axis " + str(axis) if axis is not None else "they must be equal",
            )


def check_arity(op: str, wanted: int, shapes: Sequence[Shape]) -> None:
    """Raise CoverageError unless there are `wanted` shapes."""
    if len(shapes) != wanted:
        raise CoverageError(f"`{op}` takes {wanted} tensors, not {len(shapes)}")


def common(granules: Sequence[Shape]) -> Shape:
    """Return the least common multiple of the granules, axis by axis."""
    return tuple(lcm(*column) for column in zip(*granules, strict=True))


def block_pieces(region: Region, axis: int, block: int) -> list[Region]:
    """Cut `region` on `axis` into whole blocks of `block` rows and at most two parts of blocks."""
    a, b = region.start[axis], region.stop[axis]
    first, last = min(-(-a // block) * block, b), max(b // block * block, a)
    cuts = sorted({a, first, max(last, first), b})
    return [region.with_axis(axis, start, stop) for start, stop in pairwise(cuts)] or [region]


def cut_error(axis: int, start: int, stop: int, groups: int, size: int, parts: str = "") -> UsageError:
    """Return the error for a region that cuts one of `groups` groups of `size` rows."""
    made_of = f" ({parts})" if parts else ""
    return UsageError(
        f"the cut {start}:{stop} on axis {axis} goes through a group",
        why=f"that axis holds {groups} groups of {size} rows{made_of}, and a group must stay whole",
        hint=f"choose a parallel degree that divides {groups}",
    )


def filled(arrays: Sequence[Array]) -> list[Array]:
    """Return the arrays that hold elements, or the first one when none does."""
    return [a for a in arrays if a.size] or [arrays[0]]


def zeros(shape: Shape, like: Array) -> Array:
    """Return zeros of `shape` in the dtype of `like`."""
    return np.zeros(shape, like.dtype)

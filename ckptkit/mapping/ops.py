"""The ops: concat and slice, stack and index, transpose, pad; and, from `groups.py`, those that work in groups.

Each is a frozen value and keeps its law (see `op.py`). Ops come in pairs: `part` of one is the other. Arrays may
be of any dtype; bits are moved and never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from ckptkit.errors import CoverageError
from ckptkit.mapping.groups import Deinterleave, Interleave, Merge, RopePermute, Split
from ckptkit.mapping.op import (
    ANY,
    Array,
    Base,
    Op,
    check_alike,
    check_arity,
    check_axis,
    common,
    empty_like,
    filled,
    index_axis,
    replace_axis,
    zeros,
)
from ckptkit.types import Region, Shape

__all__ = [
    "ANY",
    "Concat",
    "Deinterleave",
    "Index",
    "Interleave",
    "Merge",
    "Op",
    "Pad",
    "RopePermute",
    "Slice",
    "Split",
    "Stack",
    "Transpose",
]

BLOCK = 256  # rows and columns of a transposed tile: two tiles of 16-bit words stay in the level 2 cache


@dataclass(frozen=True, slots=True)
class Concat(Base):
    """Join any number of tensors one after another on `axis`."""

    axis: int

    @property
    def arity(self) -> int:
        return ANY

    def out_shape(self, shapes: Sequence[Shape]) -> Shape:
        check_alike("concat", self.axis, shapes)
        return replace_axis(shapes[0], self.axis, sum(s[self.axis] for s in shapes))

    def apply(self, arrays: Sequence[Array]) -> Array:
        some = filled(arrays)
        if len(some) == 1:
            return some[0]
        return np.concatenate(some, axis=self.axis)

    def part(self, index: int, shapes: Sequence[Shape]) -> Op:
        start = sum(s[self.axis] for s in shapes[:index])
        return Slice(self.axis, start, start + shapes[index][self.axis])

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        axis, offset, pulled = self.axis, 0, []
        for shape in shapes:
            size = shape[axis]
            start = min(max(region.start[axis] - offset, 0), size)
            stop = min(max(region.stop[axis] - offset, 0), size)
            pulled.append(region.with_axis(axis, start, max(start, stop)))
            offset += size
        return tuple(pulled)

    def needed(self, region: Region, shapes: Sequence[Shape]) -> list[tuple[int, Region]]:
        """Return what `pull` would, and make no box for the inputs beside: a thousand ranks may hold parts."""
        axis, offset, found = self.axis, 0, []
        first, last = region.start[axis], region.stop[axis]
        for number, shape in enumerate(shapes if region.size else ()):
            end = offset + shape[axis]
            if end > first and end > offset:
                found.append((number, region.with_axis(axis, max(first, offset) - offset, min(last, end) - offset)))
            if end >= last:
                break
            offset = end
        return found

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        result = common(granules)
        sizes = [s[self.axis] for s in shapes]
        if any(size % result[self.axis] for size in sizes):
            return replace_axis(result, self.axis, sum(sizes))
        return result


@dataclass(frozen=True, slots=True)
class Slice(Base):
    """Take rows `start`:`stop` of `axis`: the way back from a concat or from padding."""

    axis: int
    start: int
    stop: int

    @property
    def is_part(self) -> bool:
        return True

    def out_shape(self, shapes: Sequence[Shape]) -> Shape:
        check_arity("slice", 1, shapes)
        check_axis("slice", self.axis, shapes[0])
        if not 0 <= self.start <= self.stop <= shapes[0][self.axis]:
            raise CoverageError(
                f"rows {self.start}:{self.stop} do not lie within axis {self.axis} of shape {shapes[0]}"
            )
        return replace_axis(shapes[0], self.axis, self.stop - self.start)

    def apply(self, arrays: Sequence[Array]) -> Array:
        # a pulled box already lies within start:stop, and only the whole input is longer
        (array,) = arrays
        if array.shape[self.axis] <= self.stop - self.start:
            return array
        return array[index_axis(self.axis, self.start, self.stop)]

    def part(self, index: int, shapes: Sequence[Shape]) -> Op:
        raise CoverageError(
            f"rows {self.start}:{self.stop} of axis {self.axis} do not determine a tensor of shape {shapes[0]}"
        )

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        a, b = region.start[self.axis], region.stop[self.axis]
        return (region.with_axis(self.axis, a + self.start, b + self.start),)

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        g = granules[0][self.axis]
        if self.start % g or self.stop % g:
            g = max(self.stop - self.start, 1)
        return replace_axis(granules[0], self.axis, g)


@dataclass(frozen=True, slots=True)
class Stack(Base):
    """Put `n` tensors of one shape side by side on a new `axis`."""

    axis: int
    n: int

    @property
    def arity(self) -> int:
        return self.n

    def out_shape(self, shapes: Sequence[Shape]) -> Shape:
        check_arity("stack", self.n, shapes)
        check_alike("stack", None, shapes)
        if not 0 <= self.axis <= len(shapes[0]):
            raise CoverageError(f"`stack` cannot make axis {self.axis} from tensors of shape {shapes[0]}")
        return (*shapes[0][: self.axis], self.n, *shapes[0][self.axis :])

    def apply(self, arrays: Sequence[Array]) -> Array:
        return np.stack(filled(arrays), axis=self.axis)

    def part(self, index: int, shapes: Sequence[Shape]) -> Op:
        return Index(self.axis, self.n, index)

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        axis = self.axis
        inner = Region(
            (*region.start[:axis], *region.start[axis + 1 :]), (*region.stop[:axis], *region.stop[axis + 1 :])
        )
        nothing = empty_like(shapes[0])
        wanted = range(region.start[axis], region.stop[axis])
        return tuple(inner if i in wanted else nothing for i in range(self.n))

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        result = common(granules)
        return (*result[: self.axis], 1, *result[self.axis :])


@dataclass(frozen=True, slots=True)
class Index(Base):
    """Take tensor `index` of the `n` on `axis`: the way back from a stack."""

    axis: int
    n: int
    index: int

    @property
    def is_part(self) -> bool:
        return True

    def out_shape(self, shapes: Sequence[Shape]) -> Shape:
        check_arity("index", 1, shapes)
        check_axis("index", self.axis, shapes[0])
        if shapes[0][self.axis] != self.n:
            raise CoverageError(
                f"axis {self.axis} of shape {shapes[0]} has {shapes[0][self.axis]} entries, not {self.n}"
            )
        return replace_axis(shapes[0], self.axis)

    def apply(self, arrays: Sequence[Array]) -> Array:
        (array,) = arrays
        index = 0 if array.shape[self.axis] == 1 else self.index
        return array[index_axis(self.axis, index, index + 1)].squeeze(self.axis)

    def part(self, index: int, shapes: Sequence[Shape]) -> Op:
        raise CoverageError(f"entry {self.index} of {self.n} does not determine a tensor of shape {shapes[0]}")

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        axis, i = self.axis, self.index
        return (
            Region(
                (*region.start[:axis], i, *region.start[axis:]),
                (*region.stop[:axis], i + 1, *region.stop[axis:]),
            ),
        )

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        return replace_axis(granules[0], self.axis)


@dataclass(frozen=True, slots=True)
class Transpose(Base):
    """Reorder the axes: output axis i is input axis `perm[i]`."""

    perm: tuple[int, ...]

    def out_shape(self, shapes: Sequence[Shape]) -> Shape:
        check_arity("transpose", 1, shapes)
        if sorted(self.perm) != list(range(len(shapes[0]))):
            raise CoverageError(f"`transpose` with perm {self.perm} does not fit a tensor of shape {shapes[0]}")
        return tuple(shapes[0][p] for p in self.perm)

    def apply(self, arrays: Sequence[Array]) -> Array:
        source = arrays[0].transpose(self.perm)
        out = np.empty(source.shape, source.dtype)
        fast = self.perm.index(len(self.perm) - 1)
        if fast == len(self.perm) - 1:
            out[...] = source
            return out
        # the input runs along one output axis and the output along another: go tile by tile
        index = [slice(None)] * out.ndim
        for i in range(0, out.shape[fast], BLOCK):
            index[fast] = slice(i, i + BLOCK)
            for j in range(0, out.shape[-1], BLOCK):
                index[-1] = slice(j, j + BLOCK)
                out[tuple(index)] = source[tuple(index)]
        return out

    def part(self, index: int, shapes: Sequence[Shape]) -> Op:
        return Transpose(tuple(self.perm.index(i) for i in range(len(self.perm))))

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        back = [self.perm.index(i) for i in range(len(self.perm))]
        return (Region(tuple(region.start[i] for i in back), tuple(region.stop[i] for i in back)),)

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        return tuple(granules[0][p] for p in self.perm)


@dataclass(frozen=True, slots=True)
class Pad(Base):
    """Lengthen `axis` to `to` rows with zeros at its end (a padded vocabulary)."""

    axis: int
    to: int

    def out_shape(self, shapes: Sequence[Shape]) -> Shape:
        check_arity("pad", 1, shapes)
        check_axis("pad", self.axis, shapes[0])
        if shapes[0][self.axis] > self.to:
            raise CoverageError(
                f"axis {self.axis} of shape {shapes[0]} cannot be padded to {self.to} rows: it is longer"
            )
        return replace_axis(shapes[0], self.axis, self.to)

    def apply(self, arrays: Sequence[Array]) -> Array:
        (array,) = arrays
        out = zeros(replace_axis(array.shape, self.axis, self.to), array)
        out[index_axis(self.axis, 0, array.shape[self.axis])] = array
        return out

    def part(self, index: int, shapes: Sequence[Shape]) -> Op:
        return Slice(self.axis, 0, shapes[0][self.axis])

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        size = shapes[0][self.axis]
        a, b = region.start[self.axis], region.stop[self.axis]
        return (region.with_axis(self.axis, min(a, size), min(b, size)),)

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        g, size = granules[0][self.axis], shapes[0][self.axis]
        return replace_axis(granules[0], self.axis, g if size % g == 0 else lcm(g, self.to))

    def within(self, region: Region) -> Pad:
        return Pad(self.axis, region.shape[self.axis])

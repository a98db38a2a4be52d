"""The ops that work in groups of rows: interleave, merge and split of axes, the rotary permutation.

A group holds rows of several inputs that belong together (the query heads, the key head and the value head of one
KV group, say). A region may hold whole groups, or lie inside one input's rows of one group; any other cut is a
UsageError that names the number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Literal

import numpy as np

from ckptkit.errors import CoverageError
from ckptkit.mapping.op import (
    Array,
    Base,
    Op,
    block_pieces,
    check_alike,
    check_arity,
    check_axis,
    common,
    cut_error,
    index_axis,
    replace_axis,
)
from ckptkit.types import Region, Shape


@dataclass(frozen=True, slots=True)
class Interleave(Base):
    """Join inputs on `axis` group by group: `rows[0]` rows of the first, `rows[1]` of the second, and again."""

    axis: int
    rows: tuple[int, ...]

    @property
    def arity(self) -> int:
        return len(self.rows)

    def out_shape(self, shapes: Sequence[Shape]) -> Shape:
        check_arity("interleave", len(self.rows), shapes)
        check_alike("interleave", self.axis, shapes)
        sizes = [s[self.axis] for s in shapes]
        groups = sizes[0] // self.rows[0]
        if any(size != groups * rows for size, rows in zip(sizes, self.rows, strict=True)):
            raise CoverageError(
                f"axes of {', '.join(map(str, sizes))} rows do not make groups of {_sum(self.rows)} rows"
            )
        return replace_axis(shapes[0], self.axis, sum(sizes))

    def apply(self, arrays: Sequence[Array]) -> Array:
        some = [a for a in arrays if a.size]
        if len(some) < 2:  # a box inside one input's rows of one group
            return some[0] if some else arrays[0]
        axis, total = self.axis, sum(self.rows)
        shape = some[0].shape
        groups = arrays[0].shape[axis] // self.rows[0]
        out = np.empty(replace_axis(shape, axis, groups, total), some[0].dtype)
        start = 0
        for array, rows in zip(arrays, self.rows, strict=True):
            out[index_axis(axis + 1, start, start + rows)] = array.reshape(replace_axis(shape, axis, groups, rows))
            start += rows
        return out.reshape(replace_axis(shape, axis, groups * total))

    def part(self, index: int, shapes: Sequence[Shape]) -> Op:
        return Deinterleave(self.axis, self.rows, index)

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        axis, total = self.axis, sum(self.rows)
        a, b = region.start[axis], region.stop[axis]
        if a % total == 0 and b % total == 0:
            return tuple(region.with_axis(axis, a // total * r, b // total * r) for r in self.rows)
        pulled, offset, group = [], a // total * total, a // total
        for rows in self.rows:
            inside = offset <= a <= b <= offset + rows
            first = group * rows - offset
            pulled.append(region.with_axis(axis, a + first, b + first) if inside else region.with_axis(axis, 0, 0))
            offset += rows
        if not any(p.size for p in pulled) and region.size:
            raise cut_error(axis, a, b, shapes[0][axis] // self.rows[0], total, _sum(self.rows))
        return tuple(pulled)

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        groups = lcm(*(g[self.axis] // gcd(g[self.axis], r) for g, r in zip(granules, self.rows, strict=True)))
        return replace_axis(common(granules), self.axis, groups * sum(self.rows))


@dataclass(frozen=True, slots=True)
class Deinterleave(Base):
    """Take input `index` out of the groups on `axis`: the way back from an interleave."""

    axis: int
    rows: tuple[int, ...]
    index: int

    @property
    def is_part(self) -> bool:
        return True

    def out_shape(self, shapes: Sequence[Shape]) -> Shape:
        check_arity("deinterleave", 1, shapes)
        check_axis("deinterleave", self.axis, shapes[0])
        size, total = shapes[0][self.axis], sum(self.rows)
        if size % total:
            raise CoverageError(f"an axis of {size} rows does not hold whole groups of {_sum(self.rows)} rows")
        return replace_axis(shapes[0], self.axis, size // total * self.rows[self.index])

    def apply(self, arrays: Sequence[Array]) -> Array:
        (array,) = arrays
        axis, total, rows = self.axis, sum(self.rows), self.rows[self.index]
        size = array.shape[axis]
        if size % total:  # a box inside this input's rows of one group
            return array
        start = sum(self.rows[: self.index])
        grouped = array.reshape(replace_axis(array.shape, axis, size // total, total))
        taken = grouped[index_axis(axis + 1, start, start + rows)]
        return taken.reshape(replace_axis(array.shape, axis, size // total * rows))

    def part(self, index: int, shapes: Sequence[Shape]) -> Op:
        raise CoverageError(f"one part of {_sum(self.rows)} rows does not determine a tensor of shape {shapes[0]}")

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        axis, total, rows = self.axis, sum(self.rows), self.rows[self.index]
        a, b = region.start[axis], region.stop[axis]
        group = a // rows
        if b <= (group + 1) * rows:
            first = group * total + sum(self.rows[: self.index]) - group * rows
            return (region.with_axis(axis, a + first, b + first),)
        if a % rows or b % rows:
            raise cut_error(axis, a, b, shapes[0][axis] // total, rows)
        return (region.with_axis(axis, a // rows * total, b // rows * total),)

    def pieces(self, region: Region, shapes: Sequence[Shape]) -> Sequence[Region]:
        return block_pieces(region, self.axis, self.rows[self.index])

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        g, total = granules[0][self.axis], sum(self.rows)
        return replace_axis(granules[0], self.axis, g // gcd(g, total) * self.rows[self.index])


@dataclass(frozen=True, slots=True)
class Merge(Base):
    """Make one axis of `axis` and the one after it, (a, b) -> (a*b)."""

    axis: int

    def out_shape(self, shapes: Sequence[Shape]) -> Shape:
        check_arity("merge", 1, shapes)
        check_axis("merge", self.axis, shapes[0], count=2)
        (shape,) = shapes
        return (*shape[: self.axis], shape[self.axis] * shape[self.axis + 1], *shape[self.axis + 2 :])

    def apply(self, arrays: Sequence[Array]) -> Array:
        (array,) = arrays
        return array.reshape(self.out_shape([array.shape]))

    def part(self, index: int, shapes: Sequence[Shape]) -> Op:
        return Split(self.axis, shapes[0][self.axis + 1])

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        axis = self.axis
        outer, inner = shapes[0][axis], shapes[0][axis + 1]
        a, b = region.start[axis], region.stop[axis]
        if a % inner == 0 and b % inner == 0:
            starts, stops = (a // inner, 0), (b // inner, inner)
        elif a // inner == (b - 1) // inner:
            block = a // inner
            starts, stops = (block, a - block * inner), (block + 1, b - block * inner)
        else:
            raise cut_error(axis, a, b, outer, inner)
        return (
            Region(
                (*region.start[:axis], *starts, *region.start[axis + 1 :]),
                (*region.stop[:axis], *stops, *region.stop[axis + 1 :]),
            ),
        )

    def pieces(self, region: Region, shapes: Sequence[Shape]) -> Sequence[Region]:
        return block_pieces(region, self.axis, shapes[0][self.axis + 1])

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        axis, g = self.axis, granules[0]
        return (*g[:axis], g[axis] * shapes[0][axis + 1], *g[axis + 2 :])


@dataclass(frozen=True, slots=True)
class Split(Base):
    """Make two axes of `axis`, (a*inner) -> (a, inner): the way back from a merge."""

    axis: int
    inner: int

    def out_shape(self, shapes: Sequence[Shape]) -> Shape:
        check_arity("split", 1, shapes)
        check_axis("split", self.axis, shapes[0])
        size = shapes[0][self.axis]
        if size % self.inner:
            raise CoverageError(f"an axis of {size} rows does not split into blocks of {self.inner} rows")
        return replace_axis(shapes[0], self.axis, size // self.inner, self.inner)

    def apply(self, arrays: Sequence[Array]) -> Array:
        (array,) = arrays
        size = array.shape[self.axis]
        blocks = (size // self.inner, self.inner) if size % self.inner == 0 else (1, size)
        return array.reshape(replace_axis(array.shape, self.axis, *blocks))

    def part(self, index: int, shapes: Sequence[Shape]) -> Op:
        return Merge(self.axis)

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        axis, inner = self.axis, self.inner
        a, b = region.start[axis], region.stop[axis]
        c, d = region.start[axis + 1], region.stop[axis + 1]
        if (c, d) != (0, inner) and b - a != 1:
            raise cut_error(axis + 1, c, d, shapes[0][axis] // inner, inner)
        start, stop = a * inner + c, (b - 1) * inner + d
        return (
            Region(
                (*region.start[:axis], start, *region.start[axis + 2 :]),
                (*region.stop[:axis], stop, *region.stop[axis + 2 :]),
            ),
        )

    def pieces(self, region: Region, shapes: Sequence[Shape]) -> Sequence[Region]:
        if region.shape[self.axis + 1] == self.inner:
            return (region,)
        rows = range(region.start[self.axis], region.stop[self.axis])
        return [region.with_axis(self.axis, row, row + 1) for row in rows]

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        g = granules[0][self.axis]
        return replace_axis(granules[0], self.axis, g // gcd(g, self.inner), self.inner)


@dataclass(frozen=True, slots=True)
class RopePermute(Base):
    """Reorder the rotary rows `start`:`stop` of each block of `block` rows on `axis`.

    `to="pairs"` takes halves (row j turns with row j + n/2, as HF has it) to pairs (2j with 2j + 1, as Meta has it);
    `to="halves"` is the way back.
    """

    axis: int
    block: int
    start: int
    stop: int
    to: Literal["pairs", "halves"]

    def out_shape(self, shapes: Sequence[Shape]) -> Shape:
        check_arity("rope-permute", 1, shapes)
        check_axis("rope-permute", self.axis, shapes[0])
        size = shapes[0][self.axis]
        if size % self.block:
            raise CoverageError(f"an axis of {size} rows does not hold whole heads of {self.block} rows")
        if not 0 <= self.start < self.stop <= self.block or (self.stop - self.start) % 2:
            raise CoverageError(f"rows {self.start}:{self.stop} of heads of {self.block} rows cannot be paired")
        return shapes[0]

    def apply(self, arrays: Sequence[Array]) -> Array:
        (array,) = arrays
        axis, half = self.axis, (self.stop - self.start) // 2
        blocks = array.shape[axis] // self.block
        grouped = array.reshape(replace_axis(array.shape, axis, blocks, self.block))
        out = grouped.copy()
        rows = index_axis(axis + 1, self.start, self.stop)
        pair = (2, half) if self.to == "pairs" else (half, 2)
        turned = grouped[rows].reshape(replace_axis(grouped[rows].shape, axis + 1, *pair))
        out[rows] = turned.swapaxes(axis + 1, axis + 2).reshape(out[rows].shape)
        return out.reshape(array.shape)

    def part(self, index: int, shapes: Sequence[Shape]) -> Op:
        to: Literal["pairs", "halves"] = "halves" if self.to == "pairs" else "pairs"
        return RopePermute(self.axis, self.block, self.start, self.stop, to)

    def pull(self, region: Region, shapes: Sequence[Shape]) -> tuple[Region, ...]:
        a, b = region.start[self.axis], region.stop[self.axis]
        if a % self.block or b % self.block:
            raise cut_error(self.axis, a, b, shapes[0][self.axis] // self.block, self.block)
        return (region,)

    def lift(self, granules: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
        return replace_axis(granules[0], self.axis, lcm(granules[0][self.axis], self.block))


def _sum(rows: Sequence[int]) -> str:
    return " + ".join(map(str, rows))

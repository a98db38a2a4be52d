"""A region whose bytes are byte ranges of source tensors one after another: a copy, whatever was cut or joined.

A rank's part of a tensor that is cut on its first axis is one range of it; a tensor joined from such parts is one
range after another. Anything else has no ranges: it is boxes of source tensors side by side, where it is cut or joined
on a later axis, or made by other ops. What does not live here: rows of such boxes (`columns.py`), copying (`moves/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from ckptkit.mapping.expr import Expr, Leaf
from ckptkit.mapping.ops import Concat, Slice
from ckptkit.types import Extent, Region, Shape, TensorInfo, item_bytes


class Range(NamedTuple):
    """`size` bytes of a tensor, from its byte `start` on."""

    info: TensorInfo
    start: int
    size: int

    def extents(self) -> list[Extent]:
        """Return where in the tensor's file these bytes lie."""
        found, position, stop = [], 0, self.start + self.size
        for offset, length in self.info.extents:
            first, last = max(position, self.start), min(position + length, stop)
            if first < last:
                found.append(Extent(offset + first - position, last - first))
            position += length
        return found


class Box(NamedTuple):
    """The elements of `region` of a leaf, and the box that they fill in what is made of them."""

    leaf: Leaf
    region: Region
    place: Region


def boxes(expr: Expr, region: Region) -> list[Box] | None:
    """Return the boxes that `region` of `expr` is put together of, their places counted from its start.

    None when an op between it and the source tensors does more than cut and join.
    """
    found: list[Box] = []
    return found if _collect_boxes(expr, region, (0,) * len(region.start), found) else None


def _collect_boxes(expr: Expr, region: Region, start: Shape, found: list[Box]) -> bool:
    if isinstance(expr, Leaf):
        found.append(Box(expr, region, Region.whole(region.shape).shifted(start)))
        return True
    if not isinstance(expr.op, Concat | Slice):
        return False
    axis, at = expr.op.axis, list(start)
    for number, box in expr.op.needed(region, [child.shape for child in expr.children]):
        if not _collect_boxes(expr.children[number], box, tuple(at), found):
            return False
        at[axis] += box.stop[axis] - box.start[axis]
    return True


def ranges(expr: Expr, region: Region, inputs: Mapping[str, TensorInfo]) -> list[Range] | None:
    """Return the bytes of `region` of `expr` as ranges of its source tensors, in order; None when they are not that.

    Neighbouring ranges of one tensor are one.
    """
    found: list[Range] = []
    if not _collect(expr, region, inputs, found):
        return None
    joined: list[Range] = []
    for part in found:
        last = joined[-1] if joined else None
        if last is not None and last.info is part.info and last.start + last.size == part.start:
            joined[-1] = Range(part.info, last.start, last.size + part.size)
        else:
            joined.append(part)
    return joined


def _collect(expr: Expr, region: Region, inputs: Mapping[str, TensorInfo], found: list[Range]) -> bool:
    if not region.size:
        return True
    if isinstance(expr, Leaf):
        return _leaf_range(inputs[expr.name], region, found)
    if not isinstance(expr.op, Concat | Slice):
        return False
    boxes = expr.op.needed(region, [child.shape for child in expr.children])
    pairs = [(expr.children[number], box) for number, box in boxes]
    if len(pairs) > 1 and prod(region.shape[: expr.op.axis]) > 1:
        return False  # the parts take turns
    return all(_collect(child, box, inputs, found) for child, box in pairs)


def _leaf_range(info: TensorInfo, region: Region, found: list[Range]) -> bool:
    if info.strides is not None:
        return False
    first = _first_if_contiguous(info.shape, region)
    if first is None:
        return False
    width = item_bytes(info.dtype)
    found.append(Range(info, first * width, region.size * width))
    return True


def _first_if_contiguous(shape: Shape, region: Region) -> int | None:
    """Return the first element of a region that is one run of a C-order tensor; None when it is several."""
    extent = region.shape
    axis = 0
    while axis < len(shape) and extent[axis] == 1:
        axis += 1
    if any(a != b for a, b in zip(extent[axis + 1 :], shape[axis + 1 :], strict=True)):
        return None
    return sum(start * prod(shape[i + 1 :]) for i, start in enumerate(region.start))

"""Outputs whose rows are pieces of rows of source tensors side by side: what was cut or joined on a later axis.

A tensor cut on its second axis gives each rank a piece of every row; joined again, every row is the ranks' pieces in
turn. Such outputs are moved row by row, without a look at what the elements are. What does not live here: byte ranges
one after another (`ranges.py`), moving the rows (`moves/columns.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ckptkit.plan.plan import OutputTensor
from ckptkit.plan.ranges import Box, boxes
from ckptkit.types import Region, Shape, TensorInfo, item_bytes

ROW_BYTES = 256 << 10  # longer rows are worth tiles


class Strip(NamedTuple):
    """Rows of `row_bytes` that follow one another in a tensor, from its byte `start` on."""

    info: TensorInfo
    start: int
    row_bytes: int


class Piece(NamedTuple):
    """`size` bytes of each row of strip number `strip`, from byte `start` on, that are byte `at` on of an output's."""

    strip: int
    start: int
    size: int
    at: int


@dataclass(frozen=True, slots=True)
class Columns:
    """`rows` rows of outputs from as many rows of strips, which are needed whole; `pieces` are those of each output."""

    rows: int
    strips: tuple[Strip, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of all strips."""
        return sum([strip.row_bytes for strip in self.strips])


def columns(outputs: Sequence[OutputTensor]) -> Columns | None:
    """Return what outputs are as columns; None when they are not that, or need no more than parts of the rows."""
    strips: dict[Strip, int] = {}
    pieces, counts = [], set()
    for output in outputs:
        box = output.box
        found = boxes(output.expr, box) if box.size else None
        axis = _axis(box.shape, found) if found else 0
        if found is None or not axis:
            return None
        own = []
        for part in found:
            strip = _strip(output.inputs[part.leaf.name], part.region, axis)
            if strip is None or strip.info.dtype != output.spec.dtype:
                return None
            width = item_bytes(strip.info.dtype) * prod(box.shape[axis + 1 :])
            number = strips.setdefault(strip, len(strips))
            start, size = part.region.start[axis], part.region.stop[axis] - part.region.start[axis]
            own.append(Piece(number, start * width, size * width, part.place.start[axis] * width))
        if sum([piece.size for piece in own]) > ROW_BYTES:
            return None
        pieces.append(tuple(own))
        counts.add(prod(box.shape[:axis]))
    made = Columns(counts.pop(), tuple(strips), tuple(pieces)) if len(counts) == 1 else None
    return made if made and made.row_bytes <= ROW_BYTES and _are_whole(made) else None


def _axis(shape: Shape, found: Sequence[Box]) -> int:
    """Return the one axis on which boxes lie side by side, or on which the only one was cut; 0 when there is none."""
    cut = {axis for box in found for axis, length in enumerate(shape) if box.place.shape[axis] != length}
    if not cut and len(found) == 1:
        leaf, region, _ = found[0]
        cut = {axis for axis, length in enumerate(leaf.shape) if axis and region.shape[axis] != length}
    return cut.pop() if len(cut) == 1 else 0


def _strip(info: TensorInfo, region: Region, axis: int) -> Strip | None:
    """Return the rows of a tensor that a region has pieces of, when they follow one another and the pieces are runs."""
    if info.strides is not None or len(info.extents) != 1:
        return None
    if any(region.shape[i] != length for i, length in enumerate(info.shape) if i not in (0, axis)):
        return None
    width = item_bytes(info.dtype)
    return Strip(info, region.start[0] * prod(info.shape[1:]) * width, prod(info.shape[axis:]) * width)


def _are_whole(made: Columns) -> bool:
    """Say whether outputs together need every byte of the strips' rows."""
    for number, strip in enumerate(made.strips):
        reached = 0
        for piece in sorted([piece for own in made.pieces for piece in own if piece.strip == number], key=_start):
            if piece.start > reached:
                return False
            reached = max(reached, piece.start + piece.size)
        if reached < strip.row_bytes:
            return False
    return True


def _start(piece: Piece) -> int:
    return piece.start

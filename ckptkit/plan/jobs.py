"""Cut a plan into jobs for workers, and the tensors of a job into tiles.

A job is one output that moves whole, a batch of small ones that lie side by side in their file, or one or more
outputs that are made tile by tile: more than one where they are parts of one fused tensor, made in step so that each
of its bytes is read once. What does not live here: doing the jobs (`execute.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Literal

import numpy as np

from ckptkit.errors import UsageError
from ckptkit.mapping.expr import Leaf, granules, leaves, pull
from ckptkit.plan.plan import OutputTensor, Plan
from ckptkit.types import Region, Shape, TensorInfo, item_bytes

BLOCK_BYTES = 256 << 10
TILES_BYTES = 8 << 20  # of the tiles of all workers; each needs about three times its tile, for inputs and ops
SMALL_BYTES = 32 << 10  # below this the cost of a tensor is that of its calls, not of its bytes


@dataclass(slots=True)
class Job:
    """Outputs by number. `how`: `batch` (whole, small, side by side), `whole` (one), or `tiles` (in step)."""

    how: Literal["batch", "whole", "tiles"]
    outputs: list[int]


def make_jobs(plan: Plan) -> list[Job]:
    """Return the jobs of a plan, in the order of its outputs."""
    jobs: dict[object, Job] = {}
    batch, batch_file, batch_end, batch_bytes = None, -1, -1, 0
    for number, output in enumerate(plan.outputs):
        info = moves_whole(output)
        if info is None:
            jobs.setdefault(_step_key(number, output), Job("tiles", [])).outputs.append(number)
            continue
        start = _batch_start(plan, output, info)
        if start is None:
            jobs[number] = Job("whole", [number])
            continue
        size = info.extents[0].size
        if batch is None or (batch_file, batch_end) != (output.file, start) or batch_bytes + size > BLOCK_BYTES:
            batch, batch_file, batch_bytes = Job("batch", []), output.file, 0
            jobs[number] = batch
        batch.outputs.append(number)
        batch_end, batch_bytes = start + size, batch_bytes + size
    return list(jobs.values())


def moves_whole(output: OutputTensor) -> TensorInfo | None:
    """Return the source tensor of an output that is a copy of it, cast or not; None when it is made of tiles."""
    if not isinstance(output.expr, Leaf):
        return None
    info = output.inputs[output.expr.name]
    if info.strides is not None:
        return None
    if len(info.extents) > 1 and any(extent.size % item_bytes(info.dtype) for extent in info.extents):
        return None
    return info


def _batch_start(plan: Plan, output: OutputTensor, info: TensorInfo) -> int | None:
    """Return the offset in its file of an output that may go in a batch, or None."""
    spec = output.spec
    if len(info.extents) != 1 or info.extents[0].size > SMALL_BYTES or info.dtype != spec.dtype or not plan.files:
        return None
    extents = plan.files[output.file].extents[spec.name]
    return extents[0].offset if len(extents) == 1 else None


def _step_key(number: int, output: OutputTensor) -> object:
    """Return a key that the parts of one fused tensor share, when making them apart would read it more than once."""
    parts = list(leaves(output.expr))
    if len(parts) != 1 or not output.spec.shape:
        return number
    pulled = sum(region.size for _, region in pull(output.expr, Region.whole(output.expr.shape)))
    if pulled == prod(output.expr.shape):
        return number
    units = output.expr.shape[0] // granules(output.expr)[0]
    return parts[0].name, units, output.spec.shape[1:], output.file


def tile_shapes(outputs: Sequence[OutputTensor], tile_bytes: int) -> list[Shape]:
    """Return one tile shape for each output of a job: in step, and together within `tile_bytes` where ops allow.

    Whole groups of axis 0 where some fit; else equal bands of one group, whose bytes still lie in order; else boxes
    cut on the next axes too.
    """
    budget = max(1, tile_bytes // len(outputs))
    steps = [granules(output.expr) for output in outputs]
    tile = [list(output.spec.shape) for output in outputs]
    size = max(item_bytes(dtype) for dtype in (outputs[0].spec.dtype, outputs[0].moved_as))
    for axis in range(len(tile[0])):
        largest = max(prod(t) * size for t in tile)
        if largest <= budget:
            break
        units = min(t[axis] // step[axis] for t, step in zip(tile, steps, strict=True))
        keep = max(1, units * budget // largest)
        for t, step in zip(tile, steps, strict=True):
            t[axis] = keep * step[axis]
        if axis == 0 and max(prod(t) * size for t in tile) > budget:
            _cut_group(outputs, tile, max(1, budget // size))
    return [tuple(t) for t in tile]


def _cut_group(outputs: Sequence[OutputTensor], tile: list[list[int]], budget: int) -> None:
    """Cut tiles of one group on axis 0 into as few equal bands as fit in `budget` elements, if the ops allow any.

    Bands of less than an eighth of the budget are not worth their calls.
    """
    common, largest = gcd(*(t[0] for t in tile)), max(prod(t) for t in tile)
    for bands in range(2, min(common, 8 * largest // budget) + 1):
        if common % bands or largest // bands > budget:
            continue
        if all(_may_cut(output, t, bands) for output, t in zip(outputs, tile, strict=True)):
            for t in tile:
                t[0] //= bands
            return


def _may_cut(output: OutputTensor, tile: list[int], bands: int) -> bool:
    """Say whether every band of one group of an output can be pulled; what holds for one group holds for all."""
    rows = tile[0] // bands
    whole = Region.whole((tile[0], *output.spec.shape[1:]))
    try:
        for band in range(bands):
            pull(output.expr, whole.with_axis(0, band * rows, (band + 1) * rows))
    except UsageError:
        return False
    return True


def tiles(shape: Shape, tile: Shape) -> Iterator[Region]:
    """Yield the boxes of `tile` size that cover `shape`, in C order; those at the edge are smaller."""
    starts = [range(0, size, step) for size, step in zip(shape, tile, strict=True)]
    grid = np.ndindex(*(len(r) for r in starts))
    for index in grid:
        start = tuple(r[i] for r, i in zip(starts, index, strict=True))
        stop = tuple(min(a + t, size) for a, t, size in zip(start, tile, shape, strict=True))
        yield Region(start, stop)


def in_order(shape: Shape, tile: Shape) -> bool:
    """Say whether the tiles, one after another, are the tensor's bytes in order."""
    cut = [axis for axis, (size, step) in enumerate(zip(shape, tile, strict=True)) if step < size]
    return not cut or all(step == 1 for step in tile[: cut[-1]])

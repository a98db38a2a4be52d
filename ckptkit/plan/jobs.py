"""Cut a plan into jobs for workers, and the tensors of a job into tiles.

A job is a tensor that is copied (for all the ranks that hold parts of it), a batch of small ones that lie side by side
in their file, outputs whose rows are pieces of others', or one or more outputs that are made tile by tile: more than
one where they are parts of one fused tensor, or ranks' parts of one tensor's rows, made in step so that each byte is
read once. What does not live here: doing the jobs (`moves/`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Literal

import numpy as np

from ckptkit.errors import UsageError
from ckptkit.mapping.expr import Expr, Leaf, aligned, granules, leaves, pull
from ckptkit.plan.columns import columns
from ckptkit.plan.plan import OutputTensor, Plan
from ckptkit.plan.ranges import Range, ranges
from ckptkit.types import Region, Shape, TensorInfo, item_bytes

BLOCK_BYTES = 256 << 10
TILES_BYTES = 8 << 20  # of the tiles of all workers; each needs about three times its tile, for inputs and ops
SMALL_BYTES = 32 << 10  # below this the cost of a tensor is that of its calls, not of its bytes


@dataclass(slots=True)
class Job:
    """Outputs by number. `how`: `batch` (copies, small, side by side in their file), `ranges` (copies of byte ranges,
    of one tensor), `columns` (copies of pieces of rows), or `tiles` (made in step)."""

    how: Literal["batch", "ranges", "columns", "tiles"]
    outputs: list[int]


@dataclass(slots=True)
class Making:
    """A box of an expression that is made tile by tile, and the outputs that take regions of it.

    `targets` are (region, numbers of the outputs that hold it).
    """

    expr: Expr
    hull: Region
    targets: list[tuple[Region, list[int]]]


def make_jobs(plan: Plan) -> list[Job]:
    """Return the jobs of a plan, in the order of its outputs."""
    jobs: dict[object, Job] = {}
    cut: dict[int, list[int]] = {}  # outputs that are regions, by their expression
    places = [file.extents for file in plan.files]
    batch, batch_file, batch_end, batch_room = Job("batch", []), -1, -1, 0
    for number, output in enumerate(plan.outputs):
        if output.region is not None:
            cut.setdefault(id(output.expr), []).append(number)
            continue
        file = output.file
        place = places[file][output.spec.name] if places and _is_small(output) else ()
        if len(place) != 1:
            found = copied(output)
            if found is None:
                jobs.setdefault(_step_key(number, output), Job("tiles", [])).outputs.append(number)
            else:
                jobs.setdefault(_ranges_key(number, found), Job("ranges", [])).outputs.append(number)
            continue
        start, size = place[0]
        if start != batch_end or file != batch_file or size > batch_room:
            jobs[number] = batch = Job("batch", [])
            batch_file, batch_room = file, BLOCK_BYTES - start % BLOCK_BYTES
        batch.outputs.append(number)
        batch_end, batch_room = start + size, batch_room - size
    for numbers in cut.values():
        jobs.update(_jobs_of_regions(plan, numbers))
    for job in jobs.values():
        if job.how == "tiles" and columns([plan.outputs[number] for number in job.outputs]) is not None:
            job.how = "columns"
    return list(jobs.values())


def copied(output: OutputTensor) -> list[Range] | None:
    """Return the byte ranges that an output is a copy of, cast or not; None when it is made of tiles."""
    if isinstance(output.expr, Leaf) and output.region is None:
        info = output.inputs[output.expr.name]
        found = [Range(info, 0, info.num_bytes)] if info.strides is None else None
    else:
        found = ranges(output.expr, output.box, output.inputs)
    if found is None or any(_cuts_elements(part.info) for part in found):
        return None
    if any(part.info.dtype != output.moved_as for part in found):
        return None  # they are widened first
    return found


def _ranges_key(number: int, found: Sequence[Range]) -> object:
    """Return a key that the copies of parts of one tensor share, so that its bytes are read in order."""
    part = found[0] if len(found) == 1 else None
    return number if part is None or part.size == part.info.num_bytes else (part.info.file, part.info.extents)


def _cuts_elements(info: TensorInfo) -> bool:
    """Say whether an element of a tensor lies in two pieces."""
    return len(info.extents) > 1 and any(extent.size % item_bytes(info.dtype) for extent in info.extents)


def _is_small(output: OutputTensor) -> bool:
    """Say whether an output is a whole tensor that is small enough to go in a batch."""
    if not isinstance(output.expr, Leaf):
        return False
    info = output.inputs[output.expr.name]
    extents = info.extents
    if len(extents) != 1 or extents[0].size > min(SMALL_BYTES, BLOCK_BYTES):
        return False
    return info.strides is None and info.dtype == output.spec.dtype


def _jobs_of_regions(plan: Plan, numbers: Sequence[int]) -> dict[object, Job]:
    """Return the jobs of the outputs that hold regions of one expression, by their first output's number.

    Copies are one job. Tiles of equal rows, moved in one dtype, are made in step, so that a row is read once for all,
    where outputs share source tensors and leave no gap; where not, each is a job.
    """
    copies = [number for number in numbers if copied(plan.outputs[number]) is not None]
    jobs: dict[object, Job] = {copies[0]: Job("ranges", copies)} if copies else {}
    rows: dict[tuple[int, int, str], list[int]] = {}
    done = set(copies)
    for number in numbers:
        if number not in done:
            output = plan.outputs[number]
            box = aligned(output.expr, output.box)
            rows.setdefault((box.start[0], box.stop[0], output.moved_as), []).append(number)
    for group in rows.values():
        by_region: dict[Region, list[int]] = {}
        for number in group:
            by_region.setdefault(plan.outputs[number].box, []).append(number)
        if _share(plan, [same[0] for same in by_region.values()]):
            jobs[group[0]] = Job("tiles", group)
        else:
            jobs.update({same[0]: Job("tiles", same) for same in by_region.values()})
    return jobs


def _share(plan: Plan, numbers: Sequence[int]) -> bool:
    """Say whether regions of one expression share source tensors, and the box around them needs no others."""
    names = [name for number in numbers for name in plan.outputs[number].inputs]
    if len(names) == len(set(names)):
        return False
    expr, hull = plan.outputs[numbers[0]].expr, plan.outputs[numbers[0]].box
    for number in numbers:
        hull = _around(hull, plan.outputs[number].box)
    return {leaf.name for leaf, _ in pull(expr, aligned(expr, hull))} <= set(names)


def makings(plan: Plan, job: Job) -> list[Making]:
    """Return what a job of tiles makes: one box for outputs that share an expression, else one for each output."""
    found: dict[int, Making] = {}
    for number in job.outputs:
        output = plan.outputs[number]
        box = output.box
        making = found.setdefault(id(output.expr), Making(output.expr, box, []))
        making.hull = _around(making.hull, box)
        for region, numbers in making.targets:
            if region == box:
                numbers.append(number)
                break
        else:
            making.targets.append((box, [number]))
    for making in found.values():
        making.hull = aligned(making.expr, making.hull)
    return list(found.values())


def _around(a: Region, b: Region) -> Region:
    """Return the least box that holds two."""
    return Region(tuple(map(min, a.start, b.start)), tuple(map(max, a.stop, b.stop)))


def _step_key(number: int, output: OutputTensor) -> object:
    """Return a key that the parts of one fused tensor share, when making them apart would read it more than once."""
    parts = tuple([leaf.name for leaf in leaves(output.expr)])
    if not output.spec.shape:
        return number
    pulled = sum(region.size for _, region in pull(output.expr, Region.whole(output.expr.shape)))
    if pulled == prod(output.expr.shape):
        return number
    units = output.expr.shape[0] // granules(output.expr)[0]
    return parts, units, output.spec.shape[1:], output.file


def tile_shapes(made: Sequence[Making], width: int, tile_bytes: int) -> list[Shape]:
    """Return one tile shape for each making of a job: in step, and together within `tile_bytes` where ops allow.

    `width` is the bytes of the widest element. Whole groups of axis 0 where some fit; else equal bands of one group,
    whose bytes still lie in order; else boxes cut on the next axes too.
    """
    budget = max(1, tile_bytes // len(made))
    steps = [granules(making.expr) for making in made]
    tile = [list(making.hull.shape) for making in made]
    for axis in range(len(tile[0])):
        largest = max(prod(t) * width for t in tile)
        if largest <= budget:
            break
        units = min(t[axis] // step[axis] for t, step in zip(tile, steps, strict=True))
        keep = max(1, units * budget // largest)
        for t, step in zip(tile, steps, strict=True):
            t[axis] = min(t[axis], keep * step[axis])
        if axis == 0 and max(prod(t) * width for t in tile) > budget:
            _cut_group(made, tile, max(1, budget // width))
    return [tuple(t) for t in tile]


def _cut_group(made: Sequence[Making], tile: list[list[int]], budget: int) -> None:
    """Cut tiles of one group on axis 0 into as few equal bands as fit in `budget` elements, if the ops allow any.

    Bands of less than an eighth of the budget are not worth their calls.
    """
    common, largest = gcd(*(t[0] for t in tile)), max(prod(t) for t in tile)
    for bands in range(2, min(common, 8 * largest // budget) + 1):
        if common % bands or largest // bands > budget:
            continue
        if all(_may_cut(making, t, bands) for making, t in zip(made, tile, strict=True)):
            for t in tile:
                t[0] //= bands
            return


def _may_cut(making: Making, tile: list[int], bands: int) -> bool:
    """Say whether every band of one group can be pulled; what holds for one group holds for all."""
    rows, first, hull = tile[0] // bands, making.hull.start[0], making.hull
    try:
        for band in range(bands):
            pull(making.expr, hull.with_axis(0, first + band * rows, first + (band + 1) * rows))
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

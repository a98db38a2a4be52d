"""Make outputs tile by tile: what no copy of byte ranges can make.

A tile is a box of an expression, small enough for memory and aligned so that every op can say which boxes of its inputs
it needs. Parts of one fused tensor, and the ranks' parts of the same rows, are made in step, so that each byte is read
once. What does not live here: how tiles are chosen (`plan/jobs.py`), copies (`copies.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from ckptkit.cast import Caster
from ckptkit.formats.base import Sink
from ckptkit.formats.io import read_region
from ckptkit.mapping.expr import Expr, Leaf, evaluate
from ckptkit.moves.run import Promises, Run, aligned_blocks
from ckptkit.plan import jobs
from ckptkit.plan.jobs import Job, Making, makings, tile_shapes, tiles
from ckptkit.plan.ranges import boxes
from ckptkit.types import DTYPES, Region, Shape, TensorInfo, contiguous_runs, item_bytes


@runtime_checkable
class RegionSink(Protocol):
    """A sink that takes a tile as it is, rather than run by run of its bytes."""

    def put_region(self, output: int, region: Region, values: NDArray[Any]) -> None:
        """Take `values`, the elements of `region` of output number `output`, in C order; they last for the call."""


@dataclass(slots=True)
class _Target:
    """Outputs that hold one region of a making, with their digest in the making and their caster."""

    region: Region
    numbers: Sequence[int]
    state: xxhash.xxh3_128 | None
    caster: Caster | None
    shape: Shape
    place: int  # where in its file the first output begins
    as_regions: bool  # the sink is a RegionSink


def make_tiles(run: Run, job: Job) -> None:
    """Make the outputs of a job tile by tile, in step, so that a source box is read once for all of them."""
    made = makings(run.plan, job)
    outputs = [run.plan.outputs[making.targets[0][1][0]] for making in made]
    width = max(item_bytes(dtype) for dtype in (outputs[0].spec.dtype, outputs[0].moved_as))
    shapes = tile_shapes(made, width, run.tile_bytes)
    targets = [_targets(run, making, tile) for making, tile in zip(made, shapes, strict=True)]
    inputs = {name: info for number in job.outputs for name, info in run.plan.outputs[number].inputs.items()}
    read = _Reader(run, inputs, keeps=len(made) > 1)
    tilings = [tiles(making.hull.shape, tile) for making, tile in zip(made, shapes, strict=True)]
    for step in zip(*tilings, strict=True):
        read.restart()
        for making, own, output, box in zip(made, targets, outputs, step, strict=True):
            read.dtype = output.moved_as
            region = box.shifted(making.hull.start)
            array = _make(making.expr, region, read)
            for target in own:
                _put_part(run, target, region, array, read.scratch)
            if not any(map(run.wants, job.outputs)):
                return
    read.promises.compare()
    for target in (target for own in targets for target in own):
        for number in target.numbers:
            run.finish(number, target.state.hexdigest() if target.state is not None else None)


def _make(expr: Expr, region: Region, read: _Reader) -> NDArray[Any]:
    """Return `region` of `expr`: put together of boxes of source tensors where that is all there is to do."""
    found = boxes(expr, region) if region.size else None
    if found is None:
        return evaluate(expr, region, read)
    if len(found) == 1:
        return read(found[0].leaf, found[0].region)
    whole = read.scratch.array(region.shape, DTYPES[read.dtype].carrier)
    for leaf, box, place in found:
        np.copyto(whole[place.slices()], read(leaf, box))
    return whole


def _targets(run: Run, making: Making, tile: Shape) -> list[_Target]:
    found = []
    in_order = jobs.in_order(making.hull.shape, tile)
    as_regions = isinstance(run.sink, RegionSink)
    for region, numbers in making.targets:
        first = numbers[0]
        state = xxhash.xxh3_128() if run.digests and in_order else None
        found.append(_Target(region, numbers, state, run.caster(first), region.shape, run.place(first), as_regions))
    return found


def _put_part(run: Run, target: _Target, region: Region, array: NDArray[Any], scratch: _Scratch) -> None:
    """Put what `region`, made in `array`, holds of a target, if that is still wanted."""
    part = region.common(target.region)
    if not any(map(run.wants, target.numbers)) or (not part.size and region.size):
        return
    values = array[part.relative_to(region.start).slices()]
    if not values.flags.c_contiguous:
        values, cut = scratch.array(values.shape, values.dtype), values
        np.copyto(values, cut)
        scratch.give_back()  # what follows takes no array before the sink has the bytes
    if target.caster is not None:
        values = run.cast(target.caster, values)
    if target.state is not None:
        target.state.update(values.reshape(-1).data.cast("B"))
    own = part.relative_to(target.region.start)
    for number in target.numbers:
        if run.writes(number):
            _put_tile(run.sink, number, target, own, values)
    run.tell(target.numbers, values.nbytes)


class _Scratch:
    """Arrays that are used again in every tile: for fresh ones the kernel would clear pages each time."""

    def __init__(self) -> None:
        self._bytes: list[NDArray[np.uint8]] = []
        self._used = 0

    def restart(self) -> None:
        """Begin a new tile: all arrays that were handed out are free again."""
        self._used = 0

    def give_back(self) -> None:
        """Take back the array that was handed out last: the next one may have its place."""
        self._used -= 1

    def array(self, shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        """Return an array that nobody else has until the next `restart`."""
        size = prod(shape) * np.dtype(dtype).itemsize
        if self._used == len(self._bytes):
            self._bytes.append(np.empty(size, np.uint8))
        elif len(self._bytes[self._used]) < size:
            self._bytes[self._used] = np.empty(size, np.uint8)
        self._used += 1
        return self._bytes[self._used - 1][:size].view(dtype).reshape(shape)


class _Reader:
    """Read boxes of source tensors, into arrays that last for a tile.

    With `keeps`, each tensor's last box is kept, for the next part of a fused one in the same tile.
    Where the sources of one output have different dtypes, each is widened, exactly, to `dtype`, which holds them all.
    A tensor whose boxes come in the order of its bytes is hashed on the way, when its manifest promises a digest.
    """

    def __init__(self, run: Run, inputs: dict[str, TensorInfo], *, keeps: bool) -> None:
        self.dtype = ""
        self.promises = Promises(run)
        self._inputs = inputs
        self._run = run
        self._keeps = keeps
        self._kept: dict[str, tuple[Region, str, NDArray[Any]]] = {}
        self.scratch = _Scratch()

    def restart(self) -> None:
        """Begin a new tile."""
        self.scratch.restart()
        self._kept.clear()

    def __call__(self, leaf: Leaf, region: Region) -> NDArray[Any]:
        if not region.size:  # a tile of padding alone
            return np.empty(region.shape, DTYPES[self.dtype].carrier)
        kept = self._kept.get(leaf.name)
        if kept is not None and kept[:2] == (region, self.dtype):
            return kept[2]
        info = self._inputs[leaf.name]
        array = self.scratch.array(region.shape, DTYPES[info.dtype].carrier)
        read_region(info, region, out=array, pool=self._run.pool)
        if self.promises.wants(info) and info.shape and region.shape[1:] == info.shape[1:]:
            row = info.num_bytes // max(1, info.shape[0])
            self.promises.saw(info, region.start[0] * row, array.reshape(-1).data.cast("B"))
        if info.dtype != self.dtype:
            array = Caster(info.dtype, self.dtype)(array)
        if self._keeps:
            self._kept[leaf.name] = region, self.dtype, array
        return array


def _put_tile(sink: Sink, number: int, target: _Target, region: Region, array: NDArray[Any]) -> None:
    if target.as_regions:
        cast(RegionSink, sink).put_region(number, region, array)
        return
    data = array.reshape(-1).data.cast("B")
    size = array.itemsize
    done = 0
    for first, count in contiguous_runs(target.shape, region):
        offset = first * size
        for start, stop in aligned_blocks(target.place + offset, count * size):
            sink.put(number, offset + start, data[done + start : done + stop])
        done += count * size

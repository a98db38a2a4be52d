"""What a worker does with a job: read, move elements, cast, hash, put; in bounded memory.

A tensor that moves whole is copied block by block through one reused buffer; small ones that lie side by side are put
in one go. Any other is made tile by tile: a tile is a box of the output, small enough for memory and aligned so that
every op can say which boxes of its inputs it needs. Parts of one fused tensor are made in step, so that each of its
bytes is read once. What is to be cast is cast in these blocks or tiles.

What does not live here: the queue of jobs (`execute.py`), how a plan is cut into them (`plan/jobs.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptkit.cast import CastCount, Caster, is_lossy
from ckptkit.errors import CorruptError
from ckptkit.formats.base import Sink
from ckptkit.formats.io import FilePool, extents_digest, read_region
from ckptkit.mapping.expr import Leaf, evaluate
from ckptkit.plan import jobs
from ckptkit.plan.jobs import Job, moves_whole, tile_shapes, tiles
from ckptkit.plan.plan import OutputTensor, Plan
from ckptkit.types import DTYPES, Region, TensorInfo, contiguous_runs, item_bytes


@dataclass(slots=True)
class Run:
    """What the workers of one execution share."""

    plan: Plan
    sink: Sink
    pool: FilePool
    digests: bool
    source_digests: Mapping[str, str]
    progress: Callable[[int], None]
    tile_bytes: int
    skip_files: Collection[int] = frozenset()
    stop: threading.Event = field(default_factory=threading.Event)
    overflow: threading.Event = field(default_factory=threading.Event)
    counts: dict[int, CastCount] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def writes(self, number: int) -> bool:
        """Say whether an output is still to be written; if not, it is at most cast and counted."""
        return not self.overflow.is_set() and self.plan.outputs[number].file not in self.skip_files

    def wants(self, number: int) -> bool:
        """Say whether there is anything to do for an output: to write it, or to count what its cast loses."""
        output = self.plan.outputs[number]
        return self.writes(number) or is_lossy(output.moved_as, output.spec.dtype)

    def caster(self, number: int) -> Caster | None:
        """Return a new caster for an output, None when it is not cast."""
        output = self.plan.outputs[number]
        if output.moved_as == output.spec.dtype:
            return None
        caster = Caster(output.moved_as, output.spec.dtype, clamp=self.plan.clamp)
        self.counts[number] = caster.count
        return caster

    def cast(self, caster: Caster, values: NDArray[Any]) -> NDArray[Any]:
        """Cast a block or tile; from the first value that does not fit on, nothing is written."""
        result = caster(values)
        if caster.count.overflowed and not self.plan.clamp:
            self.overflow.set()
        return result

    def advance(self, number: int, count: int) -> None:
        if self.plan.outputs[number].file not in self.skip_files:
            self.progress(count)

    def must_check(self, info: TensorInfo) -> bool:
        """Say whether a source tensor's digest is promised and wanted; once for each tensor."""
        if not self.digests or info.name not in self.source_digests:
            return False
        with self.lock:
            first = info.name not in self.checked
            self.checked.add(info.name)
        return first

    def finish(self, number: int, digest: str | None) -> None:
        if self.writes(number):
            self.sink.finish(number, digest)


class Stopped(Exception):
    """Another worker failed, or the user interrupted: leave at the next block."""


def do_job(run: Run, job: Job) -> None:
    first = job.outputs[0]
    if not run.wants(first):
        return
    if job.how == "tiles":
        _move(run, job.outputs)
    elif job.how == "batch":
        _copy_batch(run, job.outputs)
    else:
        info = moves_whole(run.plan.outputs[first])
        assert info is not None
        caster = run.caster(first)
        if caster is None:
            _copy(run, first, info)
        else:
            _cast(run, first, info, caster)


def _copy_batch(run: Run, numbers: Sequence[int]) -> None:
    """Copy small tensors that lie side by side in their file: each is read to its place, all are put at once."""
    if run.stop.is_set() or not run.writes(numbers[0]):
        return
    infos = [next(iter(run.plan.outputs[number].inputs.values())) for number in numbers]
    buffer = memoryview(bytearray(sum(info.extents[0].size for info in infos)))
    digests, blocks, done = [], [], 0
    for info in infos:
        blocks.append(buffer[done : done + info.extents[0].size])
        done += info.extents[0].size
    for file, group in groupby(zip(infos, blocks, strict=True), key=lambda pair: pair[0].file):
        run.pool.pread_many(file, ((info.extents[0].offset, block) for info, block in group))
    for info, block in zip(infos, blocks, strict=True):
        digest = xxhash.xxh3_128_hexdigest(block) if run.digests else None
        _compare_promised(run, info, digest)
        digests.append(digest)
    run.sink.put_batch(numbers, buffer, digests)
    run.progress(done)


def _copy(run: Run, number: int, info: TensorInfo) -> None:
    """Copy a tensor that moves whole, block by block."""
    state = xxhash.xxh3_128() if run.digests else None
    buffer = memoryview(bytearray(min(jobs.BLOCK_BYTES, max(1, info.num_bytes))))
    done = 0
    for offset, size in info.extents:
        for start in range(0, size, jobs.BLOCK_BYTES):
            block = buffer[: min(jobs.BLOCK_BYTES, size - start)]
            run.pool.pread_into(info.file, offset + start, block)
            if state is not None:
                state.update(block)
            if not run.writes(number):
                return
            run.sink.put(number, done, block)
            done += len(block)
            if run.stop.is_set():
                raise Stopped
        run.progress(size)
    digest = state.hexdigest() if state is not None else None
    _compare_promised(run, info, digest)
    run.finish(number, digest)


def _cast(run: Run, number: int, info: TensorInfo, caster: Caster) -> None:
    """Cast a tensor that moves whole, block by block."""
    buffer = np.empty(min(jobs.BLOCK_BYTES, info.num_bytes) // item_bytes(info.dtype), DTYPES[info.dtype].carrier)
    state = xxhash.xxh3_128() if run.digests else None
    source_state = xxhash.xxh3_128() if run.digests and info.name in run.source_digests else None
    done = 0
    for offset, size in info.extents:
        for start in range(0, size, buffer.nbytes):
            block = buffer[: (size - start) // buffer.itemsize]
            run.pool.pread_into(info.file, offset + start, block.data.cast("B"))
            if source_state is not None:
                source_state.update(block.data)
            data = run.cast(caster, block).data.cast("B")
            if run.writes(number):
                if state is not None:
                    state.update(data)
                run.sink.put(number, done, data)
            done += len(data)
            run.advance(number, len(data))
            if run.stop.is_set():
                raise Stopped
    _compare_promised(run, info, source_state.hexdigest() if source_state is not None else None)
    run.finish(number, state.hexdigest() if state is not None else None)


def _compare_promised(run: Run, info: TensorInfo, digest: str | None) -> None:
    promised = run.source_digests.get(info.name)
    if digest and promised and digest != promised:
        raise CorruptError(
            f"`{info.name}` in `{info.file.name}` is not what its manifest promises",
            items=[f"xxh3-128 is {digest}", f"promised  {promised}"],
            why="the bytes changed after ckptkit wrote them",
            hint="`ckptkit check` the source; get a sound copy of it",
        )


def _move(run: Run, job: Sequence[int]) -> None:
    """Make the outputs of a job tile by tile, in step, so that a source box is read once for all of them."""
    outputs = [run.plan.outputs[number] for number in job]
    shapes = tile_shapes(outputs, run.tile_bytes)
    ordered = [jobs.in_order(o.spec.shape, tile) for o, tile in zip(outputs, shapes, strict=True)]
    states = [xxhash.xxh3_128() if run.digests and in_order else None for in_order in ordered]
    casters = [run.caster(number) for number in job]
    read = _Reader(run, outputs[0])
    tilings = [tiles(o.spec.shape, tile) for o, tile in zip(outputs, shapes, strict=True)]
    for regions in zip(*tilings, strict=True):
        for number, output, region, state, caster in zip(job, outputs, regions, states, casters, strict=True):
            read.output = output
            array = np.ascontiguousarray(evaluate(output.expr, region, read))
            if caster is not None:
                array = run.cast(caster, array)
            if not run.wants(number):
                return
            if run.writes(number):
                if state is not None:
                    state.update(array.reshape(-1).data.cast("B"))
                _put_tile(run.sink, number, output, region, array)
            run.advance(number, array.nbytes)
            if run.stop.is_set():
                raise Stopped
    for info in {info.name: info for output in outputs for info in output.inputs.values()}.values():
        if run.must_check(info):
            _compare_promised(run, info, read.digest_of(info) or extents_digest(info.file, info.extents, run.pool))
    for number, state in zip(job, states, strict=True):
        run.finish(number, state.hexdigest() if state is not None else None)


class _Reader:
    """Read boxes of source tensors; the last one is kept, for the next part of the same fused tensor.

    Where the sources of one output have different dtypes, each is widened, exactly, to the one that holds them all.
    A tensor whose boxes come in the order of its bytes is hashed on the way, when its manifest promises a digest.
    """

    def __init__(self, run: Run, output: OutputTensor) -> None:
        self.output = output
        self._dtype = output.moved_as
        self._run = run
        self._key: tuple[str, Region] | None = None
        self._kept: NDArray[np.generic] | None = None
        self._hashed: dict[str, tuple[int, xxhash.xxh3_128]] = {}  # rows hashed so far, by name

    def digest_of(self, info: TensorInfo) -> str | None:
        """Return the digest of a source tensor, None unless all of it came in order."""
        rows, state = self._hashed.get(info.name, (0, None))
        return state.hexdigest() if state is not None and rows == info.shape[0] else None

    def _hash(self, info: TensorInfo, region: Region, array: NDArray[np.generic]) -> None:
        rows, state = self._hashed.get(info.name, (0, xxhash.xxh3_128()))
        if region.start[0] == rows and region.shape[1:] == info.shape[1:]:
            state.update(array.reshape(-1).data.cast("B"))
            self._hashed[info.name] = region.stop[0], state

    def __call__(self, leaf: Leaf, region: Region) -> NDArray[np.generic]:
        key = (leaf.name, region)
        if key != self._key or self._kept is None:
            info = self.output.inputs[leaf.name]
            self._kept = read_region(info, region, pool=self._run.pool)
            if info.name in self._run.source_digests and info.shape:
                self._hash(info, region, self._kept)
            if info.dtype != self._dtype:
                self._kept = Caster(info.dtype, self._dtype)(self._kept)
            self._key = key
        return self._kept


@runtime_checkable
class RegionSink(Protocol):
    """A sink that takes a tile as it is, rather than run by run of its bytes."""

    def put_region(self, output: int, region: Region, values: NDArray[Any]) -> None:
        """Take `values`, the elements of `region` of output number `output`, in C order."""


def _put_tile(sink: Sink, number: int, output: OutputTensor, region: Region, array: NDArray[np.generic]) -> None:
    if isinstance(sink, RegionSink):
        sink.put_region(number, region, array)
        return
    data = array.reshape(-1).data.cast("B")
    size = array.itemsize
    done = 0
    for first, count in contiguous_runs(output.spec.shape, region):
        sink.put(number, first * size, data[done : done + count * size])
        done += count * size

"""Stream a plan: read, move elements, cast, hash, put; in bounded memory, with a few workers.

A tensor that moves whole is copied block by block through one reused buffer. Any other is made tile by tile: a tile
is a box of the output, small enough for memory and aligned so that every op can say which boxes of its inputs it
needs. Parts of one fused tensor are made in step, so that each of its bytes is read once. What is to be cast is cast
in these blocks or tiles; when a value does not fit, the run goes on without writing, to tell of all such values.

What does not live here: where bytes go (`Sink`), what is made of what (`plan/`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptkit.cast import CastCount, Caster, is_lossy, overflow_error
from ckptkit.errors import CorruptError
from ckptkit.formats.base import Sink
from ckptkit.formats.io import FilePool, read_region
from ckptkit.mapping.expr import Leaf, evaluate, granules, leaves, pull
from ckptkit.plan.plan import OutputTensor, Plan
from ckptkit.types import DTYPES, Region, Shape, TensorInfo, contiguous_runs, item_bytes

BLOCK_BYTES = 256 << 10
TILE_BYTES = 2 << 20


@dataclass(slots=True)
class _Run:
    """What the workers of one execution share."""

    plan: Plan
    sink: Sink
    pool: FilePool
    digests: bool
    source_digests: Mapping[str, str]
    progress: Callable[[int], None]
    skip_files: Collection[int] = frozenset()
    stop: threading.Event = field(default_factory=threading.Event)
    overflow: threading.Event = field(default_factory=threading.Event)
    casters: dict[int, Caster] = field(default_factory=dict)

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
        self.casters[number] = Caster(output.moved_as, output.spec.dtype, clamp=self.plan.clamp)
        return self.casters[number]

    def cast(self, caster: Caster, values: NDArray[Any]) -> NDArray[Any]:
        """Cast a block or tile; from the first value that does not fit on, nothing is written."""
        result = caster(values)
        if caster.count.overflowed and not self.plan.clamp:
            self.overflow.set()
        return result

    def advance(self, number: int, count: int) -> None:
        if self.plan.outputs[number].file not in self.skip_files:
            self.progress(count)

    def finish(self, number: int, digest: str | None) -> None:
        if self.writes(number):
            self.sink.finish(number, digest)


class _Stopped(Exception):
    """Another worker failed, or the user interrupted: leave at the next block."""


def execute(
    plan: Plan,
    sink: Sink,
    *,
    workers: int = 2,
    digests: bool = True,
    skip_files: Collection[int] = frozenset(),
    source_digests: Mapping[str, str] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, CastCount]:
    """Put every output of `plan` into `sink`, but for those in the files numbered in `skip_files`.

    `source_digests` are what the source's manifest promises: a tensor that moves whole is compared with its entry.
    `progress` is told of bytes done. Returns what each cast output lost, by its name; those in `skip_files` are
    counted too. Raises the first error of any worker; CoverageError when a value overflows in a cast, and the sink
    then has only a part.
    """
    with FilePool() as pool:
        run = _Run(plan, sink, pool, digests, source_digests or {}, progress, skip_files)
        jobs = [job for job in group_jobs(plan) if run.wants(job[0])]
        queue = iter(jobs)
        lock = threading.Lock()

        def work() -> None:
            while not run.stop.is_set():
                with lock:
                    job = next(queue, None)
                if job is None:
                    return
                _do(run, job)

        _run_workers(run, work, max(1, min(workers, len(jobs))))
    if run.overflow.is_set():
        raise _overflow(run)
    return {plan.outputs[number].spec.name: run.casters[number].count for number in sorted(run.casters)}


def _overflow(run: _Run) -> Exception:
    """Return the error that names each output with values that do not fit, and the tensors it is made of."""
    found = []
    for number in sorted(run.casters):
        output, count = run.plan.outputs[number], run.casters[number].count
        if count.overflowed:
            name = ", ".join(dict.fromkeys(leaf.name for leaf in leaves(output.expr)))
            name += f" -> {output.spec.name}" if name != output.spec.name else ""
            found.append((name, prod(output.spec.shape), count))
            target = output.spec.dtype
    return overflow_error(found, target)


def _run_workers(run: _Run, work: Callable[[], None], count: int) -> None:
    with ThreadPoolExecutor(count, thread_name_prefix="ckptkit") as threads:
        futures = [threads.submit(work) for _ in range(count)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            run.stop.set()
    errors = [error for f in futures if (error := f.exception()) is not None]
    for error in errors:
        if not isinstance(error, _Stopped):
            raise error


def group_jobs(plan: Plan) -> list[tuple[int, ...]]:
    """Return the outputs as jobs: alone, or together where they are parts of one fused tensor, read in step."""
    jobs: dict[object, list[int]] = {}
    for number, output in enumerate(plan.outputs):
        jobs.setdefault(_job_key(number, output), []).append(number)
    return [tuple(numbers) for numbers in jobs.values()]


def _job_key(number: int, output: OutputTensor) -> object:
    parts = list(leaves(output.expr))
    if len(parts) != 1 or isinstance(output.expr, Leaf) or not output.spec.shape:
        return number
    whole = Region.whole(output.expr.shape)
    pulled = sum(region.size for _, region in pull(output.expr, whole))
    if pulled == prod(output.expr.shape):
        return number
    units = output.expr.shape[0] // granules(output.expr)[0]
    return parts[0].name, units, output.spec.shape[1:], output.file


def _do(run: _Run, job: tuple[int, ...]) -> None:
    first = run.plan.outputs[job[0]]
    if not run.wants(job[0]):
        return
    info = first.inputs[first.expr.name] if isinstance(first.expr, Leaf) else None
    if info is None or info.strides is not None or any(e.size % item_bytes(info.dtype) for e in info.extents):
        _move(run, job)
    elif (caster := run.caster(job[0])) is None:
        _copy(run, job[0], info)
    else:
        _cast(run, job[0], info, caster)


def _copy(run: _Run, number: int, info: TensorInfo) -> None:
    """Copy a tensor that moves whole, block by block."""
    state = xxhash.xxh3_128() if run.digests else None
    buffer = memoryview(bytearray(min(BLOCK_BYTES, max(1, info.num_bytes))))
    done = 0
    for offset, size in info.extents:
        for start in range(0, size, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, size - start)]
            run.pool.pread_into(info.file, offset + start, block)
            if state is not None:
                state.update(block)
            if not run.writes(number):
                return
            run.sink.put(number, done, block)
            done += len(block)
            if run.stop.is_set():
                raise _Stopped
        run.progress(size)
    digest = state.hexdigest() if state is not None else None
    _compare_promised(run, info, digest)
    run.finish(number, digest)


def _cast(run: _Run, number: int, info: TensorInfo, caster: Caster) -> None:
    """Cast a tensor that moves whole, block by block."""
    buffer = np.empty(min(BLOCK_BYTES, info.num_bytes) // item_bytes(info.dtype), DTYPES[info.dtype].carrier)
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
                raise _Stopped
    _compare_promised(run, info, source_state.hexdigest() if source_state is not None else None)
    run.finish(number, state.hexdigest() if state is not None else None)


def _compare_promised(run: _Run, info: TensorInfo, digest: str | None) -> None:
    promised = run.source_digests.get(info.name)
    if digest and promised and digest != promised:
        raise CorruptError(
            f"`{info.name}` in `{info.file.name}` is not what its manifest promises",
            items=[f"xxh3-128 is {digest}", f"promised  {promised}"],
            why="the bytes changed after ckptkit wrote them",
            hint="`ckptkit check` the source; get a sound copy of it",
        )


def _move(run: _Run, job: tuple[int, ...]) -> None:
    """Make the outputs of a job tile by tile, in step, so that a source box is read once for all of them."""
    outputs = [run.plan.outputs[number] for number in job]
    shapes = tile_shapes(outputs)
    in_order = [_in_order(o.spec.shape, tile) for o, tile in zip(outputs, shapes, strict=True)]
    states = [xxhash.xxh3_128() if run.digests and ordered else None for ordered in in_order]
    casters = [run.caster(number) for number in job]
    read = _Reader(run.pool, outputs[0])
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
                raise _Stopped
    for number, state in zip(job, states, strict=True):
        run.finish(number, state.hexdigest() if state is not None else None)


class _Reader:
    """Read boxes of source tensors; the last one is kept, for the next part of the same fused tensor.

    Where the sources of one output have different dtypes, each is widened, exactly, to the one that holds them all.
    """

    def __init__(self, pool: FilePool, output: OutputTensor) -> None:
        self.output = output
        self._dtype = output.moved_as
        self._pool = pool
        self._key: tuple[str, Region] | None = None
        self._kept: NDArray[np.generic] | None = None

    def __call__(self, leaf: Leaf, region: Region) -> NDArray[np.generic]:
        key = (leaf.name, region)
        if key != self._key or self._kept is None:
            info = self.output.inputs[leaf.name]
            self._kept = read_region(info, region, pool=self._pool)
            if info.dtype != self._dtype:
                self._kept = Caster(info.dtype, self._dtype)(self._kept)
            self._key = key
        return self._kept


def tile_shapes(outputs: Sequence[OutputTensor]) -> list[Shape]:
    """Return one tile shape for each output of a job: in step, and together within TILE_BYTES where ops allow."""
    budget = max(1, TILE_BYTES // len(outputs))
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
    return [tuple(t) for t in tile]


def tiles(shape: Shape, tile: Shape) -> Iterator[Region]:
    """Yield the boxes of `tile` size that cover `shape`, in C order; those at the edge are smaller."""
    starts = [range(0, size, step) for size, step in zip(shape, tile, strict=True)]
    grid = np.ndindex(*(len(r) for r in starts))
    for index in grid:
        start = tuple(r[i] for r, i in zip(starts, index, strict=True))
        stop = tuple(min(a + t, size) for a, t, size in zip(start, tile, shape, strict=True))
        yield Region(start, stop)


def _in_order(shape: Shape, tile: Shape) -> bool:
    """Say whether the tiles, one after another, are the tensor's bytes in order."""
    cut = [axis for axis, (size, step) in enumerate(zip(shape, tile, strict=True)) if step < size]
    return not cut or all(step == 1 for step in tile[: cut[-1]])


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

"""What the workers of one execution share, and the digests that they compare."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from numpy.typing import NDArray

from ckptkit.cast import CastCount, Caster, is_lossy
from ckptkit.errors import CorruptError, InternalError
from ckptkit.formats.base import Sink
from ckptkit.formats.io import FilePool
from ckptkit.plan import jobs
from ckptkit.plan.plan import OutputTensor, Plan
from ckptkit.types import TensorInfo

TELL_BYTES = 4 << 20  # of an output are done before `Run.tell` is asked again


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
    compared: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def writes(self, number: int) -> bool:
        """Say whether an output is still to be written; if not, it is at most cast and counted."""
        return not self.overflow.is_set() and self.plan.outputs[number].file not in self.skip_files

    def wants(self, number: int) -> bool:
        """Say whether there is anything to do for an output: to write it, or to count what its cast loses."""
        output = self.plan.outputs[number]
        return self.writes(number) or is_lossy(output.moved_as, output.spec.dtype)

    def place(self, number: int) -> int:
        """Return the byte of its file at which an output begins; 0 when it goes to no file."""
        output = self.plan.outputs[number]
        extents = self.plan.files[output.file].extents[output.spec.name] if self.plan.files else ()
        return extents[0].offset if extents else 0

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

    def tell(self, numbers: Sequence[int], count: int) -> bool:
        """Tell of `count` bytes done of each output; say whether there is more to do for any of them.

        Raises Stopped when another worker failed. With two workers each object that Python touches costs much more
        than with one, as it moves between the processors' caches: so this is asked now and then, not for each block.
        """
        for number in numbers:
            if self.plan.outputs[number].file not in self.skip_files:
                self.progress(count)
        if self.stop.is_set():
            raise Stopped
        return not self.overflow.is_set() or any(map(self.wants, numbers))

    def finish(self, number: int, digest: str | None) -> None:
        if self.writes(number):
            self.sink.finish(number, digest)


def check_whole(output: OutputTensor, done: int) -> None:
    """Raise InternalError when an output was given another number of bytes than it has."""
    if done != output.spec.num_bytes:
        raise InternalError(f"`{output.spec.name}` has {output.spec.num_bytes} bytes, and {done} were made")


class Stopped(Exception):
    """Another worker failed, or the user interrupted: leave at the next block."""


def aligned_blocks(place: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the blocks in which `size` bytes should be written from byte `place` of a file on.

    They end at multiples of `jobs.BLOCK_BYTES` in the file: the kernel then keeps each in one piece of its cache, and
    takes less time to copy it there and to write it out.
    """
    start = 0
    while start < size:
        stop = min(size, start + jobs.BLOCK_BYTES - (place + start) % jobs.BLOCK_BYTES)
        yield start, stop
        start = stop


def compare_promised(run: Run, info: TensorInfo, digest: str | None) -> None:
    promised = run.source_digests.get(info.name)
    if not digest or not promised:
        return
    if digest == promised:
        run.compared.add(info.name)
    else:
        raise CorruptError(
            f"`{info.name}` in `{info.file.name}` is not what its manifest promises",
            items=[f"xxh3-128 is {digest}", f"promised  {promised}"],
            why="the bytes changed after ckptkit wrote them",
            hint="`ckptkit check` the source; get a sound copy of it",
        )


class Promises:
    """Hash the source tensors of a job whose digests are promised, and compare those that were seen whole, in order."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: dict[str, tuple[TensorInfo, int, xxhash.xxh3_128]] = {}

    def wants(self, info: TensorInfo) -> bool:
        return self._run.digests and info.name in self._run.source_digests

    def saw(self, info: TensorInfo, start: int, data: memoryview) -> None:
        """Take the bytes of a tensor from its byte `start` on; those that were taken before are passed over."""
        if not self.wants(info):
            return
        _, position, state = self._seen.get(info.name, (info, 0, xxhash.xxh3_128()))
        if position == start:
            state.update(data)
            self._seen[info.name] = info, start + len(data), state

    def compare(self) -> None:
        """Raise CorruptError for a tensor that was seen whole and is not as promised."""
        for info, position, state in self._seen.values():
            if position == info.num_bytes:
                compare_promised(self._run, info, state.hexdigest())

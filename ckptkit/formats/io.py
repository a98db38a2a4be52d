"""Reading tensors: any region of any tensor of any format, by `pread` into an array of the dtype's carrier.

No mmap: a file that shrinks while it is read gives an error here and would give a signal there. What does not live
here: where the bytes lie (each format's `read_index`), writing (`execute.py` and its sinks).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.errors import InternalError
from ckptkit.formats import files
from ckptkit.formats.file_pool import FilePool
from ckptkit.types import DTYPES, Extent, Region, TensorInfo

Array = npt.NDArray[Any]

SMALL_GAP_BYTES = 512  # runs closer than this are read together, however short they are
GAP_BYTES = 4096  # and closer than this, if the gaps are no longer than the runs
SCRATCH_BYTES = 1024 * 1024
DIGEST_BLOCK_BYTES = 256 * 1024


def read_region(
    info: TensorInfo, region: Region | None = None, *, out: Array | None = None, pool: FilePool | None = None
) -> Array:
    """Return the elements of `info` inside `region` (default: all) as an array of the dtype's carrier.

    `out`, if given, is filled and returned: any array of the region's shape and the carrier dtype, contiguous or
    not. Neighbouring runs are read together with small gaps between them. Raises CorruptError when the file has
    shrunk, ResourceError when it cannot be read, InternalError when `region` or `out` does not fit the tensor.
    """
    region = Region.whole(info.shape) if region is None else region
    _check_region(info, region)
    carrier = np.dtype(DTYPES[info.dtype].carrier)
    if out is None:
        out = np.empty(region.shape, carrier)
    elif out.shape != region.shape or out.dtype != carrier:
        raise InternalError(f"`{info.name}`: {region.shape} {carrier} does not fit in {out.shape} {out.dtype}")
    if region.size:
        with FilePool(1) if pool is None else nullcontext(pool) as files_open:
            _Reader(info, files_open).fill(region, out)
    return out


def extents_digest(file: Path, extents: Sequence[Extent], pool: FilePool) -> str:
    """Return the xxh3-128 of the bytes in `extents` of a file, one after another; errors are those of `pread_into`."""
    state = xxhash.xxh3_128()
    with closing(pool.pread_blocks(file, extents, memoryview(bytearray(DIGEST_BLOCK_BYTES)))) as blocks:
        for block in blocks:
            state.update(block)
    return state.hexdigest()


def same_values(a: TensorInfo, b: TensorInfo) -> bool:
    """Tell whether two tensors have the same shape, dtype and elements, strided views included; reads both once."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a.strides is None and b.strides is None:
        return files.same_bytes(a, b)
    if not a.shape:
        return bool(read_region(a) == read_region(b))
    rows = max(1, SCRATCH_BYTES * a.shape[0] // max(1, a.num_bytes))
    whole = Region.whole(a.shape)
    with FilePool() as pool:
        for start in range(0, a.shape[0], rows):
            box = whole.with_axis(0, start, min(start + rows, a.shape[0]))
            if not np.array_equal(read_region(a, box, pool=pool), read_region(b, box, pool=pool)):
                return False
    return True


def _check_region(info: TensorInfo, region: Region) -> None:
    fits = len(region.start) == len(region.stop) == len(info.shape) and all(
        0 <= start <= stop <= length for start, stop, length in zip(region.start, region.stop, info.shape, strict=True)
    )
    if not fits:
        raise InternalError(f"region {region.start}..{region.stop} is not inside `{info.name}` {info.shape}")


def _c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a C-order tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


class _Reader:
    """Reads regions of one tensor."""

    __slots__ = ("ends", "info", "pool", "width")

    def __init__(self, info: TensorInfo, pool: FilePool) -> None:
        self.info, self.pool = info, pool
        self.width = DTYPES[info.dtype].bits // 8
        self.ends = list(accumulate(extent.size for extent in info.extents))

    def fill(self, region: Region, out: Array) -> None:
        """Fill `out` with the elements of a region that is not empty.

        The axes are taken in the order of storage (falling stride), so that a view is read as its storage lies;
        an axis of stride 0 is read once and spread.
        """
        strides = _c_strides(self.info.shape) if self.info.strides is None else self.info.strides
        first = sum(a * s for a, s in zip(region.start, strides, strict=True))
        once: tuple[Any, ...] = tuple(slice(None) if s else slice(0, 1) for s in strides)
        target = out[(*once, ...)]
        long = [axis for axis, length in enumerate(target.shape) if length > 1]
        dropped: tuple[Any, ...] = tuple(slice(None) if length > 1 else 0 for length in target.shape)
        order = sorted(range(len(long)), key=lambda i: strides[long[i]], reverse=True)
        self._fill_ordered(first, [strides[long[i]] for i in order], target[(*dropped, ...)].transpose(order))
        if target.shape != out.shape:
            np.copyto(out, target)

    def _fill_ordered(self, first: int, strides: Sequence[int], target: Array) -> None:
        """Fill `target`, whose axes have falling `strides`, from the storage that begins at element `first`."""
        run = 1
        axis = target.ndim
        while axis and strides[axis - 1] == run:
            axis -= 1
            run *= target.shape[axis]
        gap = (strides[axis - 1] - run) * self.width if axis else 0
        if axis and (gap < SMALL_GAP_BYTES or (gap < GAP_BYTES and gap <= run * self.width)):
            self._fill_blocks(first, strides, target, axis - 1)
            return
        if len(self.info.extents) == 1 and target.flags.c_contiguous and target.ndim:
            starts = self._starts(first, strides[:axis], target.shape[:axis])
            self._fill_runs(starts, run * self.width, target)
            return
        for index in np.ndindex(target.shape[:axis]):
            start = first + sum(i * s for i, s in zip(index, strides[:axis], strict=True))
            place: tuple[Any, ...] = (*index, ...)
            self._read(start, target[place])

    def _starts(self, first: int, strides: Sequence[int], shape: Sequence[int]) -> list[int]:
        """Return the byte of the tensor at which each run begins, in C order of the axes that the runs leave."""
        starts = np.full(tuple(shape), first)
        for axis, (stride, length) in enumerate(zip(strides, shape, strict=True)):
            steps = np.arange(length) * stride
            starts += steps.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        found: list[int] = (starts.reshape(-1) * self.width).tolist()
        return found

    def _fill_runs(self, starts: Sequence[int], size: int, target: Array) -> None:
        """Fill `target` with runs of `size` bytes of a tensor that lies in one piece: many, so at little cost each."""
        offset, length = self.info.extents[0]
        if starts and max(starts) + size > length:
            raise InternalError(f"`{self.info.name}` has no byte {max(starts) + size - 1}")
        data = target.reshape(-1).view(np.uint8).data
        views = (data[done : done + size] for done in range(0, len(data), size))
        self.pool.pread_many(self.info.file, zip([offset + start for start in starts], views, strict=True))

    def _fill_blocks(self, first: int, strides: Sequence[int], target: Array, axis: int) -> None:
        """Fill `target` by reading neighbours along `axis` together with the small gaps between them."""
        inner = 1 + sum((n - 1) * s for n, s in zip(target.shape[axis + 1 :], strides[axis + 1 :], strict=True))
        step = strides[axis]
        rows = max(1, min(target.shape[axis], SCRATCH_BYTES // (step * self.width)))
        scratch = np.empty((rows - 1) * step + inner, target.dtype)
        byte_strides = [s * self.width for s in strides[axis:]]
        for index in np.ndindex(target.shape[:axis]):
            start = first + sum(i * s for i, s in zip(index, strides[:axis], strict=True))
            for row in range(0, target.shape[axis], rows):
                count = min(rows, target.shape[axis] - row)
                part = scratch[: (count - 1) * step + inner]
                self._read(start + row * step, part)
                place: tuple[Any, ...] = (*index, slice(row, row + count))
                shape = (count, *target.shape[axis + 1 :])
                np.copyto(target[place], np.lib.stride_tricks.as_strided(part, shape, byte_strides))

    def _read(self, first: int, target: Array) -> None:
        """Fill `target` with the elements that follow one another in storage from element `first` on."""
        if not target.flags.c_contiguous:
            whole = np.empty(target.shape, target.dtype)
            self._read(first, whole)
            np.copyto(target, whole)
            return
        data = target.reshape(-1).view(np.uint8).data
        for extent in self._pieces(first * self.width, len(data)):
            self.pool.pread_into(self.info.file, extent.offset, data[: extent.size])
            data = data[extent.size :]

    def _pieces(self, position: int, size: int) -> Iterator[Extent]:
        """Yield where in the file `size` bytes of the tensor lie, from its byte `position` on."""
        index = bisect_right(self.ends, position)
        while size:
            if index == len(self.ends):
                raise InternalError(f"`{self.info.name}` has no byte {position}")
            offset, length = self.info.extents[index]
            inside = position - (self.ends[index] - length)
            count = min(size, length - inside)
            yield Extent(offset + inside, count)
            position += count
            size -= count
            index += 1


__all__ = ["FilePool", "extents_digest", "read_region", "same_values"]

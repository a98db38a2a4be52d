"""Columns: move rows, some at a time, from source tensors into the outputs that hold pieces of them.

A band of rows is read once for all outputs, and is small enough to stay in a processor's cache until it is written.
What does not live here: which outputs are columns (`plan/columns.py`), tensors whose elements change (`tiles.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptkit.moves.run import Promises, Run, Stopped, aligned_blocks
from ckptkit.plan import jobs
from ckptkit.plan.columns import Piece, columns


def copy_columns(run: Run, numbers: Sequence[int]) -> None:
    """Copy the outputs of a job band by band."""
    made = columns([run.plan.outputs[number] for number in numbers])
    assert made is not None
    promises = Promises(run)
    rows = min(made.rows, max(1, jobs.BLOCK_BYTES // made.row_bytes))
    block_bytes = max(1, jobs.BLOCK_BYTES >> (len(numbers) // 8).bit_length())  # together, at most eight of the former
    targets = [_Target(run, number, own, rows, block_bytes) for number, own in zip(numbers, made.pieces, strict=True)]
    bands = [np.empty((rows, strip.row_bytes), np.uint8) for strip in made.strips]
    for first in range(0, made.rows, rows):
        count = min(rows, made.rows - first)
        for (info, start, row_bytes), band in zip(made.strips, bands, strict=True):
            position, data = start + first * row_bytes, band[:count].reshape(-1).data
            run.pool.pread_into(info.file, info.extents[0].offset + position, data)
            promises.saw(info, position, data)
        for target in targets:
            target.take(bands, count, is_last=first + count == made.rows)
        if run.overflow.is_set() and not any(map(run.writes, numbers)):
            return
        if run.stop.is_set():
            raise Stopped
    promises.compare()
    for target in targets:
        target.finish()


class _Target:
    """An output, and those of its bytes that wait until they fill a block of its file."""

    def __init__(self, run: Run, number: int, pieces: Sequence[Piece], rows: int, block_bytes: int) -> None:
        self._run, self._number, self._pieces, self._block_bytes = run, number, pieces, block_bytes
        self._width = sum([piece.size for piece in pieces])
        self._buffer = np.empty(block_bytes + rows * self._width, np.uint8)
        self._waiting = self._done = 0
        self._place = run.place(number)
        self._state = xxhash.xxh3_128() if run.digests else None

    def take(self, bands: Sequence[NDArray[np.uint8]], count: int, *, is_last: bool) -> None:
        """Take the pieces of the first `count` rows of each strip's band; write whole blocks, and all of the last."""
        size = self._waiting + count * self._width
        new = self._buffer[self._waiting : size]
        rows = new.reshape(count, self._width)
        for strip, start, length, at in self._pieces:
            np.copyto(rows[:, at : at + length], bands[strip][:count, start : start + length])
        if self._state is not None:
            self._state.update(new.data)
        place = self._place + self._done
        written = 0
        for start, stop in aligned_blocks(place, size, self._block_bytes):
            if is_last or (place + stop) % self._block_bytes == 0:
                self._run.put([self._number], None, self._done + start, self._buffer.data[start:stop])
                written = stop
        self._done += written
        self._waiting = size - written
        if written:
            np.copyto(self._buffer[: self._waiting], self._buffer[written:size])

    def finish(self) -> None:
        self._run.finish(self._number, self._state.hexdigest() if self._state is not None else None)

"""Columns: move rows, some at a time, from source tensors into the outputs that hold pieces of them.

A band of rows is read once for all outputs, and is small enough to stay in a processor's cache until it is written.
Blocks that end at multiples of 256 KiB in the outputs' files would take more of Python than they save the kernel.
What does not live here: which outputs are columns (`plan/columns.py`), tensors whose elements change (`tiles.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from ckptkit.moves.run import TELL_BYTES, Promises, Run, check_whole
from ckptkit.plan import jobs
from ckptkit.plan.columns import columns

BAND_BYTES = 1 << 20


def copy_columns(run: Run, numbers: Sequence[int]) -> None:
    """Copy the outputs of a job band by band."""
    made = columns([run.plan.outputs[number] for number in numbers])
    assert made is not None
    promises = Promises(run)
    states = [xxhash.xxh3_128() if run.digests else None for _ in numbers]
    writes = [run.writes(number) for number in numbers]
    widths = [sum([piece.size for piece in own]) for own in made.pieces]
    rows = max(1, min(made.rows, BAND_BYTES // made.row_bytes, jobs.BLOCK_BYTES // max(widths)))
    bands = [np.empty((rows, strip.row_bytes), np.uint8) for strip in made.strips]
    buffer = np.empty(rows * max(widths), np.uint8)
    todo = list(zip(numbers, made.pieces, widths, states, writes, strict=True))
    put, told = run.sink.put, 0
    for first in range(0, made.rows, rows):
        count = min(rows, made.rows - first)
        for (info, start, row_bytes), band in zip(made.strips, bands, strict=True):
            position, data = start + first * row_bytes, band[:count].reshape(-1).data
            run.pool.pread_into(info.file, info.extents[0].offset + position, data)
            promises.saw(info, position, data)
        for number, own, width, state, is_written in todo:
            block = buffer[: count * width]
            lines = block.reshape(count, width)
            for strip, start, size, at in own:
                np.copyto(lines[:, at : at + size], bands[strip][:count, start : start + size])
            if state is not None:
                state.update(block.data)
            if is_written:
                put(number, first * width, block.data)
        done = first + count
        if done == made.rows or (done - told) * made.row_bytes >= TELL_BYTES:
            wanted = [run.tell([number], (done - told) * width) for number, width in zip(numbers, widths, strict=True)]
            if not any(wanted):
                return
            told = done
    promises.compare()
    for number, width, state in zip(numbers, widths, states, strict=True):
        check_whole(run.plan.outputs[number], made.rows * width)
        run.finish(number, state.hexdigest() if state is not None else None)

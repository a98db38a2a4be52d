"""Copies: byte ranges of source tensors into outputs, block by block, cast or not.

A tensor is copied block by block through one reused buffer; small ones that lie side by side are put in one go. What
several outputs hold is read once. What does not live here: tensors that ops rearrange (`tiles.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from operator import itemgetter

import numpy as np
import xxhash

from ckptkit.moves.run import TELL_BYTES, Promises, Run, check_whole, compare_promised
from ckptkit.plan.jobs import copied
from ckptkit.plan.plan import OutputTensor
from ckptkit.types import DTYPES, Region, item_bytes


def copy_batch(run: Run, numbers: Sequence[int], buffer: memoryview) -> None:
    """Copy small tensors that lie side by side in their file: each is read to its place, all are put at once."""
    if run.stop.is_set() or not run.writes(numbers[0]):
        return
    outputs = run.plan.outputs
    infos = [info for (info,) in (outputs[number].inputs.values() for number in numbers)]
    blocks, done = [], 0
    for info in infos:
        start, done = done, done + info.extents[0].size
        blocks.append(buffer[start:done])
    pieces = [(info.file, (info.extents[0].offset, block)) for info, block in zip(infos, blocks, strict=True)]
    for file, group in groupby(pieces, key=itemgetter(0)):
        run.pool.pread_joined(file, [piece for _, piece in group])
    digests = [xxhash.xxh3_128_hexdigest(block) for block in blocks] if run.digests else [None] * len(blocks)
    if run.source_digests:
        for info, digest in zip(infos, digests, strict=True):
            compare_promised(run, info, digest)
    run.sink.put_batch(numbers, buffer[:done], digests)
    run.progress(done)


def copy_ranges(run: Run, numbers: Sequence[int], buffer: memoryview) -> None:
    """Copy byte ranges of source tensors, block by block, into the outputs that hold them; equal ones are read once."""
    outputs = run.plan.outputs
    same: dict[tuple[int, Region], list[int]] = {}
    for number in numbers:
        same.setdefault((id(outputs[number].expr), outputs[number].box), []).append(number)
    promises = Promises(run)
    for group in sorted(same.values(), key=lambda group: _place(outputs[group[0]])):
        wanted = [number for number in group if run.wants(number)]
        if wanted:
            _copy_one(run, wanted, promises, buffer)
    promises.compare()


def _place(output: OutputTensor) -> tuple[int, ...]:
    """Return a key that puts a job's outputs in the order of the bytes that they are copied from."""
    if output.region is not None:
        return output.region.start
    return tuple([part.start for part in copied(output) or ()][:1])


def _copy_one(run: Run, group: Sequence[int], promises: Promises, buffer: memoryview) -> None:
    """Copy one region into the outputs `group`, cast or not, in blocks that `aligned_blocks` tells of."""
    first = run.plan.outputs[group[0]]
    parts = copied(first)
    assert parts is not None
    caster = run.caster(group[0])
    carrier = np.dtype(DTYPES[first.moved_as].carrier)
    before, after = (1, 1) if caster is None else (item_bytes(first.moved_as), item_bytes(first.spec.dtype))
    buffer = buffer[: len(buffer) * before // max(before, after)]
    place = run.place(group[0])
    place = place // after * before if place % after == 0 else 0
    state = xxhash.xxh3_128() if run.digests else None
    is_whole = caster is None and len(parts) == 1 and parts[0].size == parts[0].info.num_bytes
    put, written = run.sink.put, [number for number in group if run.writes(number)]
    done = told = 0
    for part in parts:
        is_promised = not is_whole and promises.wants(part.info)
        position = part.start
        here = place + done // after * before
        with closing(run.pool.pread_blocks(part.info.file, part.extents(), buffer, position=here)) as blocks:
            for block in blocks:
                if is_promised:
                    promises.saw(part.info, position, block)
                    position += len(block)
                data = block if caster is None else run.cast(caster, np.frombuffer(block, carrier)).data.cast("B")
                if caster is not None and run.overflow.is_set():
                    written = []
                if state is not None:
                    state.update(data)
                for number in written:
                    put(number, done, data)
                done += len(data)
                if done - told >= TELL_BYTES:
                    if not run.tell(group, done - told):
                        return
                    told = done
    run.tell(group, done - told)
    check_whole(first, done)
    digest = state.hexdigest() if state is not None else None
    if is_whole:
        compare_promised(run, parts[0].info, digest)
    for number in group:
        run.finish(number, digest)

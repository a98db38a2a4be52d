"""How many layers each pipeline stage has, and MindFormers' `offset` for it.

With interleave every stage has several chunks of layers. All is counted in chunks, in the order of the layers: chunk
v of stage s is number v * pp + s. Without interleave a chunk is a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ckptkit.errors import UsageError

Offset = int | list[int] | list[list[int]]


def chunk_layers(num_layers: int, pp: int, interleave: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the number of layers of each chunk: `given`, if it fits, or the default.

    By default all have the same number, and the first ones one more when there is a remainder. Only the very first and
    the very last chunk may be given no layer, as in MindFormers: they still have the embedding and the head to do.
    Raises UsageError when the layers do not add up.
    """
    chunks = pp * interleave
    what = f"{chunks} stages" if interleave == 1 else f"{pp} stages of {interleave} chunks"
    if given is None:
        if num_layers < chunks and chunks > 1:
            raise UsageError(
                f"{num_layers} layers cannot be spread over {what}",
                why="each would need a layer",
                hint=f"use at most {num_layers}, or say with `--pp-layers` which of the first and the last is empty",
            )
        base, rest = divmod(num_layers, chunks)
        return tuple(base + (index < rest) for index in range(chunks))
    shown = ",".join(map(str, given))
    if len(given) != chunks:
        raise UsageError(f"layers {shown} are {len(given)} numbers for {what}", hint=f"give {chunks} numbers")
    if sum(given) != num_layers:
        raise UsageError(
            f"layers {shown} add up to {sum(given)}, and the model has {num_layers}",
            why="a layer would be missing, or be there twice",
        )
    if min(given) < 0 or 0 in given[1:-1]:
        raise UsageError(
            f"layers {shown} leave a stage without any",
            why="MindFormers allows that for the first and the last only, which have the embedding and the head",
        )
    return tuple(given)


def stage_of_layers(chunks: Sequence[int], pp: int) -> tuple[int, ...]:
    """Return the stage of each layer."""
    return tuple(number % pp for number, size in enumerate(chunks) for _ in range(size))


def offset_of(chunks: Sequence[int], pp: int) -> Offset:
    """Return what each chunk has beyond the floor of the mean: 0, one row, or a row for each chunk of a stage."""
    base = sum(chunks) // len(chunks)
    beyond = [size - base for size in chunks]
    if not any(beyond):
        return 0
    rows = [beyond[start : start + pp] for start in range(0, len(beyond), pp)]
    return rows[0] if len(rows) == 1 else rows


def chunks_of_offset(offset: Any, num_layers: int, pp: int, interleave: int) -> tuple[int, ...]:
    """Return the number of layers of each chunk as MindFormers reads them from a run file's `offset`.

    A chunk has the floor of the mean and its offset. What is one number or one row holds for all chunks; where the
    chunks then have more places than there are layers, the last ones get what is left. Raises UsageError for an
    offset that MindFormers refuses.
    """
    rows = offset if isinstance(offset, list) else [offset] * pp
    rows = rows if all(isinstance(row, list) for row in rows) else [rows] * interleave
    flat = [number for row in rows for number in row]
    if (
        len(rows) != interleave
        or any(len(row) != pp for row in rows)
        or any(type(number) is not int for number in flat)
    ):
        shape = f"{pp} numbers" if interleave == 1 else f"{interleave} rows of {pp} numbers"
        raise UsageError(f"`offset` is {offset}, and {pp} stages want 0 or {shape}")
    base, rest = divmod(num_layers, pp * interleave)
    said = offset if isinstance(offset, int) else sum(flat if isinstance(offset[0], list) else offset)
    if said != rest:
        fitting = offset_of(chunk_layers(num_layers, pp, interleave, None), pp)
        raise UsageError(
            f"`offset` {offset} adds up to {said}, and {num_layers} layers over {pp * interleave} stages leave {rest}",
            why="MindFormers wants the offsets to add up to that remainder",
            hint=f"`offset: {fitting}` is one that fits",
        )
    ends = [min(end, num_layers) for end in accumulate(base + number for number in flat)]
    sizes = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
    return chunk_layers(num_layers, pp, interleave, sizes)

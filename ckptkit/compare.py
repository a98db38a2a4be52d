"""The sink that compares: what the executor makes of one checkpoint, against the tensors of another.

Bytes come first; only where they differ, or where the dtypes do, are elements widened to float64 for figures. Memory
is one block of the other side and its float64 forms for each worker, whatever a tensor's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.cast import Caster
from ckptkit.formats.io import FilePool, read_region
from ckptkit.types import DTYPES, Region, Shape, TensorInfo, TensorSpec, item_bytes
from ckptkit.values import FLOATS, widener

Array = NDArray[Any]

BLOCK = 32768  # elements: a block's float64 forms stay in the processor's cache
_MOST_RANGES = 1000
_CAST = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(slots=True)
class Tally:
    """What is known of one pair of tensors, A's `mine` and B's `theirs`, of equal shape.

    `changed` elements differ, the first of them number `first` in C order. Among those that are finite on both
    sides, `max_abs` is the largest |a - b|; `max_a` is the largest finite |a| of the whole tensor. `nan` and `inf`
    count on each side. These figures are made only when the tensors differ, and are None for dtypes that are no
    numbers. `rounded`: B is exactly A rounded to B's dtype; None when the dtypes are equal or are never cast.
    """

    mine: TensorSpec
    theirs: TensorSpec
    changed: int = 0
    first: int | None = None
    max_abs: float | None = None
    max_a: float | None = None
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)
    rounded: bool | None = None

    @property
    def equal(self) -> bool:
        """Same dtype, same bytes."""
        return not self.changed and self.mine.dtype == self.theirs.dtype

    @property
    def max_relative(self) -> float | None:
        """max |a - b| / max |a|, over the tensor; inf where all of A is zero and B is not."""
        if self.max_abs is None or self.max_a is None:
            return None
        if self.max_a == 0:
            return 0.0 if self.max_abs == 0 else float("inf")
        return self.max_abs / self.max_a


@dataclass(slots=True)
class _State:
    """A tally in the making. `castable`: the dtypes differ, and one is cast to the other. `rest` are the first bytes
    of an element that a block cut; `same` are ranges of elements, (first, count), whose bytes were equal and of
    which no figures were made."""

    tally: Tally
    other: TensorInfo
    castable: bool
    caster: Caster | None = None
    lock: Lock = field(default_factory=Lock)
    rest: bytes = b""
    same: list[tuple[int, int]] = field(default_factory=list)


class Comparer:
    """A sink: output number i is compared with the tensor `others[i]`, of the same shape. Close it after use."""

    def __init__(self, specs: Sequence[TensorSpec], others: Sequence[TensorInfo]) -> None:
        self._states = [_start(spec, other) for spec, other in zip(specs, others, strict=True)]
        self._pool = FilePool()

    @property
    def tallies(self) -> list[Tally]:
        return [state.tally for state in self._states]

    def close(self) -> None:
        self._pool.close()

    def put(self, output: int, offset: int, data: memoryview) -> None:
        """Compare bytes of an output, from byte `offset` on, with the same elements of the other tensor."""
        state = self._states[output]
        width = item_bytes(state.tally.mine.dtype)
        with state.lock:
            if state.rest or len(data) % width:
                offset -= len(state.rest)
                data = memoryview(state.rest + bytes(data))
                state.rest = bytes(data[len(data) - len(data) % width :])
            values = np.frombuffer(data, DTYPES[state.tally.mine.dtype].carrier, len(data) // width)
            for start in range(0, values.size, BLOCK):
                self._compare(state, offset // width + start, values[start : start + BLOCK])

    def finish(self, output: int, digest: str | None) -> None:
        """Complete the figures of an output that differs: with the values of the parts whose bytes are equal."""
        state = self._states[output]
        with state.lock:
            for first, count in state.same if state.tally.max_a is not None else ():
                for start in range(first, first + count, BLOCK):
                    theirs = self._read(state.other, start, min(BLOCK, first + count - start))
                    _add_figures(state.tally, theirs, theirs)
            state.same.clear()
            state.caster = None
            if state.castable:
                state.tally.rounded = state.tally.rounded is not False

    def _compare(self, state: _State, first: int, mine: Array) -> None:
        tally = state.tally
        theirs = self._read(state.other, first, mine.size)
        if tally.mine.dtype != tally.theirs.dtype:
            _compare_values(state, first, mine, theirs)
        elif np.array_equal(mine, theirs):
            _remember_same(state, first, mine)
        else:
            _note_changed(tally, first, mine != theirs)
            _add_figures(tally, mine, theirs)

    def _read(self, info: TensorInfo, first: int, count: int) -> Array:
        """Return `count` elements of a tensor in C order, from element `first` on."""
        if info.strides is None:
            flat = replace(info, shape=(info.num_elements,))
            return read_region(flat, Region((first,), (first + count,)), pool=self._pool)
        parts = [read_region(info, box, pool=self._pool).reshape(-1) for box in boxes(info.shape, first, count)]
        return np.concatenate(parts)


def _start(spec: TensorSpec, other: TensorInfo) -> _State:
    differ = spec.dtype != other.dtype
    return _State(Tally(spec, other.spec), other, differ and {spec.dtype, other.dtype} <= _CAST)


def boxes(shape: Shape, first: int, count: int) -> list[Region]:
    """Return the boxes, in order, that hold `count` elements in C order from element `first` on."""
    if count <= 0:
        return []
    if not shape:
        return [Region((), ())]
    row = prod(shape[1:])
    index, inside = divmod(first, row)
    if inside or count < row:  # a part of one row, then the rest
        size = min(count, row - inside)
        part = [Region((index, *b.start), (index + 1, *b.stop)) for b in boxes(shape[1:], inside, size)]
        return part + boxes(shape, first + size, count - size)
    whole = count // row
    head = Region((index, *(0 for _ in shape[1:])), (index + whole, *shape[1:]))
    return [head, *boxes(shape, first + whole * row, count - whole * row)]


def _remember_same(state: _State, first: int, values: Array) -> None:
    """Keep in mind a range that is equal; its figures are made at the end, if they are needed at all."""
    if state.same and sum(state.same[-1]) == first:
        state.same[-1] = (state.same[-1][0], state.same[-1][1] + values.size)
    elif len(state.same) < _MOST_RANGES:
        state.same.append((first, values.size))
    else:
        _add_figures(state.tally, values, values)


def _compare_values(state: _State, first: int, mine: Array, theirs: Array) -> None:
    """Compare elements of two dtypes by their values; a NaN equals a NaN."""
    tally = state.tally
    a, b = widener(tally.mine.dtype), widener(tally.theirs.dtype)
    if a is None or b is None:
        return
    x, y = a(mine), b(theirs)
    _note_changed(tally, first, (x != y) & ~(np.isnan(x) & np.isnan(y)))
    _add_figures(tally, mine, theirs)
    if state.castable and tally.rounded is not False:
        state.caster = state.caster or Caster(tally.mine.dtype, tally.theirs.dtype)
        tally.rounded = np.array_equal(state.caster(mine), theirs)


def _note_changed(tally: Tally, first: int, changed: Array) -> None:
    count = int(np.count_nonzero(changed))
    if count:
        place = first + int(np.argmax(changed))
        tally.first = place if tally.first is None else min(tally.first, place)
        tally.changed += count


def _add_figures(tally: Tally, mine: Array, theirs: Array) -> None:
    a, b = widener(tally.mine.dtype), widener(tally.theirs.dtype)
    if a is None or b is None:
        return
    x, y = a(mine), b(theirs)
    finite_x, finite_y = np.isfinite(x), np.isfinite(y)
    if tally.mine.dtype in FLOATS or tally.theirs.dtype in FLOATS:
        nans = int(np.isnan(x).sum()), int(np.isnan(y).sum())
        infs = int((~finite_x).sum()) - nans[0], int((~finite_y).sum()) - nans[1]
        tally.nan = tally.nan[0] + nans[0], tally.nan[1] + nans[1]
        tally.inf = tally.inf[0] + infs[0], tally.inf[1] + infs[1]
    with np.errstate(all="ignore"):
        gap = np.abs(x - y, out=np.zeros_like(x), where=finite_x & finite_y)
    tally.max_abs = max(tally.max_abs or 0.0, float(gap.max(initial=0.0)))
    tally.max_a = max(tally.max_a or 0.0, float(np.abs(x).max(initial=0.0, where=finite_x)))

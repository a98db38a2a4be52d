"""The sink that compares: what the executor makes of one checkpoint, against the tensors of another.

Bytes come first; only where they differ, or where the dtypes do, are elements widened to float64 for figures. Memory
is one block or tile of the other side and some float64 blocks for each worker, whatever a tensor's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.cast import Caster
from ckptkit.formats.io import FilePool, read_region
from ckptkit.types import DTYPES, Region, Shape, TensorInfo, TensorSpec, item_bytes
from ckptkit.values import widener

Array = NDArray[Any]

BLOCK = 32768  # elements: a block's float64 forms stay in the processor's cache
_MOST_PLACES = 1000
_CAST = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(slots=True)
class Tally:
    """What is known of one pair of tensors, A's `mine` and B's `theirs`, of equal shape.

    `changed` elements differ, the first of them number `first` in C order. Among those that are finite on both
    sides, `max_abs` is the largest |a - b|; `max_a` is the largest finite |a| of the whole tensor. `nan` and `inf`
    count on each side. These figures are made only when the tensors differ, and are None for dtypes that are no
    numbers. `rounded`: B is exactly A rounded to B's dtype, and `rounded_a` the other way; None when the dtypes are
    equal or are never cast.
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
    rounded_a: bool | None = None

    @property
    def equal(self) -> bool:
        """Same dtype, same bytes."""
        return not self.changed and self.mine.dtype == self.theirs.dtype

    @property
    def is_odd(self) -> bool:
        """Whether one side has NaN or inf where the other has not, as far as counts tell."""
        return self.nan[0] != self.nan[1] or self.inf[0] != self.inf[1]

    @property
    def is_cast(self) -> bool:
        """Whether all that differs is the dtype: one side is the other one rounded, the signs of zeros included.

        Where no cast leads from one dtype to the other, equal values are that.
        """
        if self.mine.dtype == self.theirs.dtype or self.is_odd:
            return False
        if self.rounded is None:
            return not self.changed
        return self.rounded or self.rounded_a is True

    @property
    def max_relative(self) -> float | None:
        """max |a - b| / max |a|, over the tensor; inf where all of A is zero and B is not."""
        if self.max_abs is None or self.max_a is None:
            return None
        if self.max_a == 0:
            return 0.0 if self.max_abs == 0 else float("inf")
        return self.max_abs / self.max_a


@dataclass(slots=True)
class _Place:
    """Where elements lie: a region of a tensor, or of its flat form (one axis)."""

    info: TensorInfo
    region: Region

    def element(self, number: int) -> int:
        """Return the number, in C order in the whole tensor, of element `number` of the region."""
        return _element(self.info.shape, self.region, number)


@dataclass(slots=True)
class _State:
    """A tally in the making. `castable`: the dtypes differ, and one is cast to the other. `rest` are the first bytes
    of an element that a block cut; `same` are places whose bytes were equal and of which no figures were made."""

    tally: Tally
    other: TensorInfo
    castable: bool
    casters: tuple[Caster, Caster] | None = None
    lock: Lock = field(default_factory=Lock)
    rest: bytes = b""
    same: list[_Place] = field(default_factory=list)


def joined_tally(mine: TensorSpec, theirs: TensorSpec, parts: Sequence[tuple[Region, Tally]]) -> Tally:
    """Return the tally of a whole tensor of which each part was compared alone, replicas too.

    `max_a`, and so the relative difference, is over the parts that differ.
    """
    whole = Tally(mine, theirs)
    for region, tally in parts:
        whole.changed += tally.changed
        if tally.first is not None:
            first = _element(mine.shape, region, tally.first)
            whole.first = first if whole.first is None else min(whole.first, first)
        if tally.max_abs is not None:
            whole.max_abs = max(whole.max_abs or 0.0, tally.max_abs)
        if tally.max_a is not None:
            whole.max_a = max(whole.max_a or 0.0, tally.max_a)
        whole.nan = whole.nan[0] + tally.nan[0], whole.nan[1] + tally.nan[1]
        whole.inf = whole.inf[0] + tally.inf[0], whole.inf[1] + tally.inf[1]
    for key in ("rounded", "rounded_a"):
        found = [getattr(tally, key) for _, tally in parts]
        setattr(whole, key, None if None in found else all(found))
    return whole


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
            first = offset // width
            if state.other.strides is None:
                flat = replace(state.other, shape=(state.other.num_elements,))
                self._compare(state, _Place(flat, Region((first,), (first + values.size,))), values)
                return
            for box in boxes(state.other.shape, first, values.size):
                self._compare(state, _Place(state.other, box), values[: box.size])
                values = values[box.size :]

    def put_batch(self, outputs: Sequence[int], data: memoryview, digests: Sequence[str | None]) -> None:
        """Compare whole tensors whose bytes follow one another in `data`."""
        for output, digest in zip(outputs, digests, strict=True):
            size = self._states[output].tally.mine.num_bytes
            self.put(output, 0, data[:size])
            self.finish(output, digest)
            data = data[size:]

    def put_region(self, output: int, region: Region, values: Array) -> None:
        """Compare a box of an output with the same box of the other tensor."""
        state = self._states[output]
        with state.lock:
            self._compare(state, _Place(state.other, region), values.reshape(-1))

    def finish(self, output: int, digest: str | None) -> None:
        """Complete the figures of an output that differs: with the values of the parts whose bytes are equal."""
        state = self._states[output]
        with state.lock:
            widen = widener(state.tally.mine.dtype)
            if widen is not None and state.tally.max_a is not None:
                for place in state.same:
                    for values in _blocks(self._read(place)):
                        wide = widen(values)
                        _add_figures(state.tally, wide, wide)
            state.same.clear()
            state.casters = None
            if state.castable:
                state.tally.rounded = state.tally.rounded is not False
                state.tally.rounded_a = state.tally.rounded_a is not False

    def _read(self, place: _Place) -> Array:
        return read_region(place.info, place.region, pool=self._pool).reshape(-1)

    def _compare(self, state: _State, place: _Place, mine: Array) -> None:
        theirs = self._read(place)
        same_dtype = state.tally.mine.dtype == state.tally.theirs.dtype
        if same_dtype and np.array_equal(mine, theirs) and len(state.same) < _MOST_PLACES:
            _remember(state, place)
            return
        for number, (a, b) in enumerate(zip(_blocks(mine), _blocks(theirs), strict=True)):
            changed = _compare_bits(state, a, b) if same_dtype else _compare_values(state, a, b)
            count = int(np.count_nonzero(changed))
            if count:
                first = place.element(number * BLOCK + int(np.argmax(changed)))
                state.tally.first = first if state.tally.first is None else min(state.tally.first, first)
                state.tally.changed += count


def _start(spec: TensorSpec, other: TensorInfo) -> _State:
    differ = spec.dtype != other.dtype
    return _State(Tally(spec, other.spec), other, differ and {spec.dtype, other.dtype} <= _CAST)


def _element(shape: Shape, region: Region, number: int) -> int:
    """Return the number, in C order in a tensor of `shape`, of element `number` of a region of it."""
    found = 0
    for start, extent, size, inner in zip(region.start, region.shape, shape, _inner(region.shape), strict=True):
        found = found * size + start + number // inner % extent
    return found


def _inner(shape: Shape) -> list[int]:
    """Return, for each axis, the number of elements of one step on it."""
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _blocks(values: Array) -> Iterator[Array]:
    for start in range(0, values.size, BLOCK):
        yield values[start : start + BLOCK]


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


def _remember(state: _State, place: _Place) -> None:
    """Keep in mind a place that is equal; its figures are made at the end, if they are needed at all."""
    if state.same and len(place.info.shape) == 1:
        last = state.same[-1]
        if len(last.info.shape) == 1 and last.region.stop == place.region.start:
            state.same[-1] = _Place(last.info, Region(last.region.start, place.region.stop))
            return
    state.same.append(place)


def _compare_bits(state: _State, mine: Array, theirs: Array) -> Array:
    """Return which elements differ, of two tensors of one dtype, and add to the figures."""
    widen = widener(state.tally.mine.dtype)
    if widen is not None:
        _add_figures(state.tally, widen(mine), widen(theirs))
    changed: Array = mine != theirs
    return changed


def _compare_values(state: _State, mine: Array, theirs: Array) -> Array:
    """Return which values differ, of two tensors of two dtypes, and add to the figures; a NaN equals a NaN."""
    tally = state.tally
    widen_a, widen_b = widener(tally.mine.dtype), widener(tally.theirs.dtype)
    if widen_a is None or widen_b is None:
        return np.zeros(0, bool)
    x, y = widen_a(mine), widen_b(theirs)
    changed: Array = x != y
    if changed.any():
        changed &= ~(np.isnan(x) & np.isnan(y))
    _add_figures(tally, x, y)
    if state.castable:
        dtypes = tally.mine.dtype, tally.theirs.dtype
        state.casters = state.casters or (Caster(*dtypes), Caster(*reversed(dtypes)))
        if tally.rounded is not False:
            tally.rounded = np.array_equal(state.casters[0](mine), theirs)
        if tally.rounded_a is not False:
            tally.rounded_a = np.array_equal(mine, state.casters[1](theirs))
    return changed


def _add_figures(tally: Tally, x: Array, y: Array) -> None:
    with np.errstate(all="ignore"):
        gap = np.abs(x - y)
    largest, largest_x = float(gap.max(initial=0.0)), float(np.abs(x).max(initial=0.0))
    if not (isfinite(largest) and isfinite(largest_x)):  # then something is NaN or inf, on one side or on both
        finite_x, finite_y = np.isfinite(x), np.isfinite(y)
        nans = int(np.isnan(x).sum()), int(np.isnan(y).sum())
        tally.nan = tally.nan[0] + nans[0], tally.nan[1] + nans[1]
        infs = int((~finite_x).sum()) - nans[0], int((~finite_y).sum()) - nans[1]
        tally.inf = tally.inf[0] + infs[0], tally.inf[1] + infs[1]
        largest = float(gap.max(initial=0.0, where=finite_x & finite_y))
        largest_x = float(np.abs(x).max(initial=0.0, where=finite_x))
    tally.max_abs = max(tally.max_abs or 0.0, largest)
    tally.max_a = max(tally.max_a or 0.0, largest_x)

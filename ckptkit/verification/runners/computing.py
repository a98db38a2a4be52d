"""One more run of every input in fp16 or bf16: what each output loses against fp32, and what leaves the dtype's range.

Each block is run with its parameters and its input in that dtype, as its framework does it (`Computes`), and compared
with the fp32 run of the same network, in which the largest number is noted that the dtype would have to hold: what is
lost after an overflow is no number any more, and tells nothing of the layers that follow. What does not live here:
loading (`run_net.py`), and what a report makes of it (`verification/compute.py`). Shapes: T tokens, H hidden, V the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptkit.verification.runners.job import ComputedInput, ComputedRow, Floats, Input, Result
from ckptkit.verification.runners.net import Computes, Tap, Walk, Watch, as_floats

OUTPUT = "its output"
LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Format:
    """A dtype to compute in: its name in both frameworks, its largest number, where rounding to infinity begins, half
    a last place further, and up to where it rounds to 0, half of its least number (IEEE 754-2019, section 4.3.1)."""

    name: str
    limit: float
    overflows: float
    vanishes: float


FORMATS: dict[str, Format] = {
    "fp16": Format("float16", 65504.0, 65520.0, 2.0**-25),
    "bf16": Format("bfloat16", float.fromhex("0x1.fep127"), float.fromhex("0x1.ffp127"), 2.0**-134),
}


class Computing:
    """The runs of a network in another dtype, and what they gave so far: `result.computed`."""

    def __init__(self, net: Computes, dtype: str, result: Result) -> None:
        self._net, self._format, self._found = net, FORMATS[dtype], result.computed
        self._found.dtype = dtype
        self._found.kept = list(net.kept)
        self._rows: dict[str, ComputedRow] = {}

    def plain(self, item: Input, tap: Tap | None) -> Walk:
        """Return the fp32 walk of an input, of which the largest numbers are noted."""

        def see(part: str, what: str, values: Any) -> None:
            _grow(self._row(part), what, as_floats(values), item)

        return self._watched(item, tap, see, low=False)

    def low(self, item: Input, tap: Tap | None) -> Walk:
        """Return the walk of an input in the dtype, of which what is no number is counted."""

        def see(part: str, what: str, values: Any) -> None:
            _lose(self._row(part), what, as_floats(values))

        return self._watched(item, tap, see, low=True)

    def _watched(self, item: Input, tap: Tap | None, see: Watch, *, low: bool) -> Walk:
        """Return the walk of an input of which `see` is told all, and `tap`, as of any walk, the outputs."""

        def told(name: str, values: Any) -> None:
            see(name, OUTPUT, values)
            if tap is not None:
                tap(name, values)

        return self._net.watched(item.ids, item.positions, told, see, low=low)

    @contextmanager
    def lowered(self, names: Sequence[str]) -> Iterator[None]:
        """Hold a block's parameters in the dtype; those that it does not hold are noted."""
        for name in names:
            largest, _ = magnitude(self._net.get(name))
            lost = largest >= self._format.overflows or 0 < largest <= self._format.vanishes
            if lost and name not in self._found.unfit:
                self._found.unfit.append(name)
        with self._net.lowered(names):
            yield

    def compare(self, name: str, plain_TH: Floats, low_TH: Floats) -> None:
        """Note how far an output is from that of the fp32 run."""
        self._row(name).relative = _relative(plain_TH, low_TH)

    def end(self, item: Input, plain_TV: Floats, low_TV: Floats, *, traced: bool) -> None:
        """Note what became of an input's logits."""
        row = self._row(LOGITS)
        _grow(row, OUTPUT, plain_TV, item)
        lost = _lose(row, OUTPUT, low_TV)
        relative = _relative(plain_TV, low_TV)
        if traced:
            row.relative = relative
        alike = plain_TV.argmax(1) == low_TV.argmax(1)
        top1 = int(np.count_nonzero(alike & np.isfinite(low_TV).all(1)))
        self._found.inputs.append(ComputedInput(item.name, len(item.ids), relative, top1, lost))

    def _row(self, name: str) -> ComputedRow:
        if name not in self._rows:
            self._rows[name] = ComputedRow(name)
            self._found.rows.append(self._rows[name])
        return self._rows[name]


def _grow(row: ComputedRow, what: str, values: Floats, item: Input) -> None:
    """Note the largest number of an output so far, and where it was."""
    largest, _ = magnitude(values)
    if largest > row.largest or not row.at:
        row.largest, row.at, row.input = largest, what, item.name


def _lose(row: ComputedRow, what: str, values: Floats) -> int:
    """Count what is no number any more; return how many these are."""
    _, lost = magnitude(values)
    row.not_finite += lost
    if lost and not row.lost:
        row.lost = what
    return lost


def magnitude(values: Floats) -> tuple[float, int]:
    """Return the largest finite magnitude, and how many numbers are not finite."""
    absolute = np.abs(values)
    largest = float(absolute.max(initial=0.0))
    if np.isfinite(largest):
        return largest, 0
    finite = np.isfinite(absolute)
    return float(absolute.max(initial=0.0, where=finite)), int(values.size - np.count_nonzero(finite))


def _relative(plain: Floats, low: Floats) -> float | None:
    """Return max |low - plain| / max |plain|; None when one of them is not finite."""
    largest, lost = magnitude(plain)
    if lost or magnitude(low)[1]:
        return None
    gap = float(np.abs(low - plain).max(initial=0.0))
    return gap / largest if largest else gap

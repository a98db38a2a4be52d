"""What a run in fp16 or bf16 says of a side: where the dtype overflows, and what it costs, layer by layer.

Only what leaves the dtype's range is a failure. How large an error is too large depends on what the model is for, and
no bound follows from the arithmetic, so errors are reported. What does not live here: the run (`runners/computing.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.verification.runners.computing import FORMATS, Format
from ckptkit.verification.runners.job import Computed, ComputedRow, Result

COMPUTES = tuple(FORMATS)
_SHOWN_WHOLE = 1e7  # larger numbers are shown with an exponent


@dataclass(frozen=True, slots=True)
class SideComputed:
    """A side, `A` or `B`, in another dtype."""

    label: str
    found: Computed

    @property
    def format(self) -> Format:
        return FORMATS[self.found.dtype]

    @property
    def first(self) -> ComputedRow | None:
        """The first output, in the order of the network, that leaves the range or holds what is no number."""
        return next((row for row in self.found.rows if self.is_wrong(row)), None)

    @property
    def ok(self) -> bool:
        return self.first is None and not self.found.unfit

    @property
    def verdict(self) -> str:
        """What is wrong, in a few words; empty when nothing is."""
        dtype, row = self.found.dtype, self.first
        unfit = self.found.unfit
        if unfit:
            more = f" and {len(unfit) - 1} more" if len(unfit) > 1 else ""
            return f"{dtype} does not hold all weights: not those of {unfit[0]}{more}"
        if row is None:
            return ""
        if self.overflows(row):
            return f"{dtype} overflows in {row.name}: {number(row.largest)} of at most {number(self.format.limit)}"
        return f"{dtype} fails in {row.name}: {row.not_finite} numbers are inf or NaN, first {row.lost}"

    def overflows(self, row: ComputedRow) -> bool:
        """Say whether an output, or what is on the way to it, is beyond the dtype's range in fp32."""
        return row.largest >= self.format.overflows

    def is_wrong(self, row: ComputedRow) -> bool:
        return row.not_finite > 0 or self.overflows(row)


def sides_computed(results: list[tuple[str, Result]], dtype: str) -> list[SideComputed]:
    """Return the sides that ran in `dtype`, of those that ran."""
    return [SideComputed(label, result.computed) for label, result in results if result.computed.dtype == dtype]


def number(value: float) -> str:
    """Return a magnitude as people read it."""
    return f"{value:.0f}" if 1000 <= value < _SHOWN_WHOLE else f"{value:.3g}"

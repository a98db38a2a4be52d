"""Level layers: what both networks give inside, output by output; the first that is off, and why.

What does not live here: running (`forward.py`), and the hypotheses about causes (`causes*.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ckptkit.formats.file_pool import FilePool
from ckptkit.verification.causes import find_cause
from ckptkit.verification.causes_case import Evidence, facts_of
from ckptkit.verification.causes_search import Cause
from ckptkit.verification.forward import Dump
from ckptkit.verification.layer_weights import SideWeights
from ckptkit.verification.logits import UNIT, bound
from ckptkit.verification.runners.dialects import find_dialect
from ckptkit.verification.runners.job import Floats, Input, Job

LOGITS = "logits"
# What exp and rsqrt of two libraries may differ by, in last places; one large number passes it on unaveraged.
FUNCTIONS = 16 * UNIT
_TRACED_TOKENS = 128  # the longest input that is looked into: a layer's replay is quadratic in it
_NAME = re.compile(r"layers\.(\d+)(?:\.(\w+))?")


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One output: `name` as in `Net.walk`, its `layer` (None outside of the layers) and `part` (`embedding`,
    `attention`, `mlp`, `block`, `norm`, `logits`). `relative` is the largest |a - b| over the largest |a|; infinite
    where a number is none."""

    name: str
    layer: int | None
    part: str
    relative: float
    bound: float
    max_abs: float
    largest: float

    @property
    def wrong(self) -> bool:
        return not self.relative <= self.bound


@dataclass(frozen=True, slots=True)
class Layers:
    """All outputs of one input in the order of the network. `first` is the first that is off, and `cause` why."""

    input: str
    rows: tuple[LayerRow, ...]
    first: LayerRow | None
    cause: Cause | None

    @property
    def ok(self) -> bool:
        return self.first is None


def traced_input(inputs: Sequence[Input]) -> str:
    """Return the name of the input to look into: a text if there is one, else the longest of moderate length."""
    plain = [item for item in inputs if item.positions is None and len(item.ids) <= _TRACED_TOKENS] or list(inputs)
    return max(plain, key=lambda item: (item.name == "text", len(item.ids))).name


def place(name: str) -> tuple[int | None, str]:
    """Return the layer (None outside of the layers) and the part of an output, from its name in `Net.walk`."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), found[2] or "block") if found else (None, name)


def compare_layers(a: Dump, b: Dump, jobs: tuple[Job | None, Job]) -> Layers | None:
    """Compare what the two networks give inside for the input that both traced; None where one shows nothing.

    `jobs` are what the two sides ran; A's is None where only its dump is at hand.
    """
    names = [item.name for item in a.inputs]
    traced = jobs[1].trace
    if traced not in names or not (a.result.taps and b.result.taps):
        return None
    number = names.index(traced)
    rows = _rows(a, b, number)
    first = next((row for row in rows if row.wrong), None)
    cause = None if first is None else _cause(first, a, b, number, jobs)
    return Layers(traced, tuple(rows), first, cause)


def _rows(a: Dump, b: Dump, number: int) -> list[LayerRow]:
    of_b = {tap.name: tap for tap in b.result.taps}
    rows = []
    for tap in a.result.taps:
        other = of_b.get(tap.name)
        if other is None:
            continue
        limit = bound([tap.sensitivity, other.sensitivity, FUNCTIONS])
        rows.append(_row(tap.name, a.tap(tap.name), b.tap(tap.name), limit))
    one, two = a.result.inputs[number], b.result.inputs[number]
    rows.append(_row(LOGITS, a.logits(number), b.logits(number), bound([one.sensitivity, two.sensitivity])))
    return rows


def _row(name: str, a_TH: Floats, b_TH: Floats, limit: float) -> LayerRow:
    layer, part = place(name)
    largest = float(np.abs(a_TH).max(initial=0.0, where=np.isfinite(a_TH)))
    if a_TH.shape != b_TH.shape or not (np.isfinite(a_TH).all() and np.isfinite(b_TH).all()):
        return LayerRow(name, layer, part, inf, limit, inf, largest)
    gap = float(np.abs(a_TH.astype(np.float64) - b_TH).max(initial=0.0))
    return LayerRow(name, layer, part, gap / largest if largest else gap, limit, gap, largest)


def _cause(first: LayerRow, a: Dump, b: Dump, number: int, jobs: tuple[Job | None, Job]) -> Cause | None:
    """Return why the first output is off; None where its part, fed with what A had, gives what A gave."""
    taps = {tap.name for tap in a.result.taps}

    def tap(name: str) -> Floats:
        return a.tap(name) if name in taps else a.logits(number)

    with FilePool() as pool:
        sides = [None if job is None else _weights(job, dump, pool) for job, dump in zip(jobs, (a, b), strict=True)]
        assert sides[1] is not None, "B has a job"
        evidence = Evidence(
            tap=tap,
            ids=a.inputs[number].ids,
            positions=a.inputs[number].positions,
            facts_a=facts_of(a.result.reading),
            weights_b=sides[1],
            weights_a=sides[0],
            frequencies_a=_frequencies(a),
            frequencies_b=_frequencies(b),
        )
        return find_cause(_PARTS.get(first.part, first.part), first.layer or 0, evidence, bound=first.bound)


_PARTS = {"block": "mlp"}  # a block is off where nothing that it is made of is: its sum is


def _weights(job: Job, dump: Dump, pool: FilePool) -> SideWeights:
    facts = facts_of(dump.result.reading)
    tensors = {tensor.name: tensor for tensor in job.tensors}
    return SideWeights(tensors, pool, facts, find_dialect(job.dialect, job.variant, facts))


def _frequencies(dump: Dump) -> Floats | None:
    values = next(iter(dump.result.constants.values()), None)
    return None if values is None else np.array(values, np.float32)

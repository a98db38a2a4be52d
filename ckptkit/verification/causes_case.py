"""What a search for a cause starts from, and what a hypothesis is. The hypotheses are in the other `causes_*.py`.

Shapes: T tokens, O what a part gives, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ckptkit.verification.layer_weights import Index, SideWeights, Weights
from ckptkit.verification.logits import ROUNDINGS, TOO_SENSITIVE, UNIT
from ckptkit.verification.replay import Doubles, Given, Place, Setting, Tap, frequencies_at, given_at, replay
from ckptkit.verification.runners.facts import Facts
from ckptkit.verification.runners.job import Floats
from ckptkit.verification.runners.rope_facts import Rope

BF16, F16 = 2.0**-8, 2.0**-11  # half a unit in the last place of 1
FAR = 10.0  # how many times nearer a repaired replay is than the unrepaired one, at least
_FIRST_TOKENS = 16
_LARGE = 1 << 26  # elements; see `_moved`
_DRAWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One input and both sides. `tap` gives A's outputs: `embedding`, `layers.N.attention` and `layers.N.mlp` (what
    each adds to the residual), `layers.N`, `norm`, `logits`. `facts_a` is what A's network took its config for, and
    the facts of `weights_b` what B's did; frequencies are those that the networks reported, None for those of the
    config. `weights_a` is None where A is a dump from elsewhere. `positions` None are 0, 1, 2, ..."""

    tap: Tap
    ids: Sequence[int]
    positions: Sequence[int] | None
    facts_a: Facts
    weights_b: SideWeights
    weights_a: SideWeights | None = None
    frequencies_a: Floats | None = None
    frequencies_b: Floats | None = None


@dataclass(frozen=True)
class Case:
    """A part that is off: what A gave there, `expected`, and `wrong`, the setting of B that does not give it."""

    evidence: Evidence
    place: Place
    given: Given
    expected: Floats
    wrong: Setting

    @property
    def facts_a(self) -> Facts:
        return self.evidence.facts_a

    @property
    def facts_b(self) -> Facts:
        return self.wrong.facts

    @cached_property
    def right(self) -> Weights | None:
        """Return A's weights of the part, where they are at hand."""
        side = self.evidence.weights_a
        return None if side is None else side.part(self.place.part, self.place.layer)

    @cached_property
    def frequencies_a(self) -> Floats:
        return frequencies_at(self.facts_a, self.evidence.frequencies_a, self.given.positions)

    def off(self, setting: Setting) -> float:
        """Return how far the replay is from what A gave: the largest |a - b| over the largest |a|."""
        return relative(replay(self.place, setting, self.given), self.expected)

    def names(self, fields: Sequence[str]) -> tuple[str, ...]:
        """Return the tensors of B that hold some fields, each once."""
        side, layer = self.evidence.weights_b, self.place.layer
        if self.place.part == "norm":  # the norms beside it are the last layer's
            layer = self.facts_b.layers - 1
        return tuple(dict.fromkeys(name for field in fields for name in side.names(field, layer)))

    def shortened(self) -> Case:
        """Return the case of the first tokens that show at least half of the distance."""
        whole, tokens = self.off(self.wrong), _FIRST_TOKENS
        while tokens < len(self.given.ids):
            short = replace(self, given=self.given.first(tokens), expected=self.expected[:tokens])
            if short.off(self.wrong) >= whole / 2:
                return short
            tokens *= 2
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A hypothesis: were B's setting changed like this, it would be right. `fields` are those of the common form that
    are wrong then, empty for the config; `text` says what is wrong, without the tensors, and `hint` what to do."""

    name: str
    text: str
    fields: tuple[str, ...]
    hint: str
    change: Callable[[Setting], Setting]


def case_at(place: Place, evidence: Evidence) -> Case:
    """Return the case of a part: what A's network was given there and gave, and B's setting."""
    facts = evidence.weights_b.facts
    given = given_at(place, evidence.tap, evidence.ids, evidence.positions, evidence.facts_a.layers)
    frequencies = frequencies_at(facts, evidence.frequencies_b, given.positions)
    wrong = Setting(facts, evidence.weights_b.part(place.part, place.layer), frequencies)
    return Case(evidence, place, given, evidence.tap(place.tap), wrong)


def facts_of(reading: Mapping[str, Any]) -> Facts:
    """Return the facts that a runner's `reading` tells, as when A is a dump of which no config.json is at hand."""
    plain = dict(reading)
    words = dict(plain.pop("rope"))
    original = words.pop("original_max_position_embeddings", 0)
    rope = Rope(words.pop("type"), plain.pop("rope_base"), original=original, **words)
    window, sparse_layers = tuple(plain.pop("window")), tuple(plain.pop("sparse_layers"))
    return Facts(**plain, rope=rope, window=window, sparse_layers=sparse_layers, notes=(), unknown=())


def relative(found_TO: Doubles, expected_TO: Floats) -> float:
    """Return the largest |a - b| over the largest |a|; infinite for other shapes, and for what is no number."""
    if found_TO.shape != expected_TO.shape:
        return float("inf")
    distance = float(np.abs(found_TO - expected_TO).max(initial=0.0))
    largest = float(np.abs(expected_TO).max(initial=0.0))
    if not np.isfinite(distance) or not largest:
        return float("inf") if distance else 0.0
    return distance / largest


def rounding_at(case: Case, setting: Setting) -> float:
    """Return how far rounding may put a right network from a replay of this setting, relative as `Case.off` is.

    It is measured as the bound of the logits is (`logits.py`): every weight, input and frequency moves by one unit in
    its last place, up or down at random (seeded), and what that does to the output is taken ROUNDINGS times, for a sum
    is rounded more than once.
    """
    rng = np.random.default_rng(0)
    other = replace(_moved(setting, 2 * UNIT, rng), frequencies=_signed(setting.frequencies, 2 * UNIT, rng))
    given = replace(case.given, x=_signed(case.given.x, 2 * UNIT, rng))
    before, after = replay(case.place, setting, case.given), replay(case.place, other, given)
    return min(TOO_SENSITIVE, ROUNDINGS * max(UNIT, relative(after, before.astype(np.float32))))


def coarse_rounding_at(case: Case, setting: Setting, unit: float) -> float:
    """Return how far the part moves when its weights are rounded to a dtype with such a `unit`.

    Each weight moves by as much as rounding may at most, at random, some times over: an expert that is tied with
    another one is chosen in one draw and not in the next. Twice the largest stands for draws that were not made.
    """
    rng = np.random.default_rng(0)
    before = replay(case.place, setting, case.given).astype(np.float32)
    draws = (replay(case.place, _moved(setting, unit, rng), case.given) for _ in range(_DRAWS))
    return min(1.0, 2 * max(relative(after, before) for after in draws))


def _moved(setting: Setting, unit: float, rng: np.random.Generator) -> Setting:
    """Move every weight by `unit`, relative. A matrix of the size of a vocabulary stays as it is, for moving its input
    moves every product as well."""
    weights = {
        name: _signed(values, unit, rng) if values.size <= _LARGE else values
        for name, values in setting.weights.items()
    }
    return replace(setting, weights=weights)


def _signed(values: Floats, unit: float, rng: np.random.Generator) -> Floats:
    signs = rng.integers(0, 2, values.shape, np.int8) * np.float32(2 * unit) - np.float32(unit)
    return values * (1 + signs)


def grain(weights: Weights) -> float:
    """Return the relative size of half a unit in the last place of the coarsest dtype that holds all values."""
    every = [values for name, values in weights.items() if values.size]
    if all(not (np.ascontiguousarray(values).view(np.uint32) & 0xFFFF).any() for values in every):
        return BF16
    with np.errstate(over="ignore"):
        halves = all(np.array_equal(values, values.astype(np.float16)) for values in every)
    return F16 if halves else UNIT


def is_rounded(case: Case, unit: float) -> bool:
    """Tell whether B's weights are A's rounded to nearest, by a `unit` at most; true where A's are not at hand."""
    if case.right is None:
        return True
    wrong, smallest = case.wrong.weights, np.float64(2.0**-25)  # half of float16's smallest number
    if wrong.keys() != case.right.keys() or any(wrong[name].shape != a.shape for name, a in case.right.items()):
        return False
    return all(
        bool((np.abs(wrong[name].astype(np.float64) - a) <= np.maximum(unit * np.abs(a), smallest)).all())
        for name, a in case.right.items()
    )


def row_axis(values: Floats) -> int:
    """Return the axis of what a matrix gives: the first, and the second where there is one matrix for each expert."""
    return 1 if values.ndim == 3 else 0


def rows_moved(setting: Setting, fields: Sequence[str], index: Index) -> Setting:
    """Return the setting with the rows of some fields, laid one after another, in another order: row r is index[r]."""
    parts = [setting.weights[field] for field in fields]
    axis = row_axis(parts[0])
    whole = np.take(np.concatenate(parts, axis=axis), index, axis=axis)
    ends = np.cumsum([part.shape[axis] for part in parts])[:-1]
    return setting.having(**dict(zip(fields, np.split(whole, ends, axis=axis), strict=True)))

"""Rules, one for every tensor of a dialect, as the planner reads them. Data; `rules.py` makes it.

A rule gives its tensor as an expression of HF tensors, and each of those back as an expression of its tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Literal

from ckptkit.mapping.expr import Expr, Leaf, invert, leaves, renamed
from ckptkit.mapping.rows import IgnoreRow
from ckptkit.types import value


@dataclass(frozen=True, slots=True)
class Traits:
    """What a table row says of all its tensors, or of all the biases that go with them.

    `tp_axis` and `ep_axis` are the axes that those parallelisms cut, or None; `tp_unit` and `ep_unit` the rows of
    one indivisible unit there. `tp_unless` names a setting that keeps the tensor whole; `tp_indivisible` says
    whether a degree that does not divide it is refused or replicates it. With `keep_fp32` it is cast to F32 only;
    with `state` (of an optimizer) it is never cast.
    """

    origin: str
    stage: str
    optional: bool
    keep_fp32: bool
    tp_axis: int | None
    tp_unit: int
    tp_unless: str | None
    tp_indivisible: str
    ep_axis: int | None
    ep_unit: int
    state: bool = False


@value
class Rule:
    """One tensor of a dialect, `target`: `expr` is it over HF tensors; `layer` is None outside of the layers."""

    target: str
    expr: Expr
    layer: int | None
    traits: Traits

    @property
    def sources(self) -> tuple[Leaf, ...]:
        """The HF tensors that it is made of."""
        return leaves(self.expr)

    @property
    def inverse(self) -> tuple[Expr, ...]:
        """Each of `sources`, as an expression over `Leaf(target)`."""
        return tuple(back for _, back in self.ways_back())

    def ways_back(self) -> list[tuple[Leaf, Expr]]:
        """Return each of `sources` with it as an expression over `Leaf(target)`."""
        if isinstance(self.expr, Leaf) and self.expr.name == self.target:
            return [(self.expr, self.expr)]
        return invert(self.expr, Leaf(self.target, self.expr.shape))

    def filled(self, placeholder: str, numbers: Sequence[str], layers: Sequence[int | None]) -> list[Rule]:
        """Return the rule with each of `numbers` in the place of `placeholder` (`{expert}`) in its names.

        `layers` are those of the new rules, one for each number.
        """
        expr, targets = self.expr, _filled(self.target, placeholder, numbers)
        exprs: Sequence[Expr]
        if not isinstance(expr, Leaf):
            exprs = [renamed(expr, placeholder, number) for number in numbers]
        else:  # one text for both names where they are equal
            names = targets if expr.name == self.target else _filled(expr.name, placeholder, numbers)
            exprs = list(map(Leaf, names, repeat(expr.shape)))
        return list(map(Rule, targets, exprs, layers, repeat(self.traits)))

    @property
    def origin(self) -> str:
        return self.traits.origin

    @property
    def stage(self) -> str:
        return self.traits.stage

    @property
    def optional(self) -> bool:
        return self.traits.optional

    @property
    def keep_fp32(self) -> bool:
        return self.traits.keep_fp32

    @property
    def is_state(self) -> bool:
        return self.traits.state

    @property
    def tp_axis(self) -> int | None:
        return self.traits.tp_axis

    @property
    def tp_unit(self) -> int:
        return self.traits.tp_unit

    @property
    def tp_unless(self) -> str | None:
        return self.traits.tp_unless

    @property
    def tp_indivisible(self) -> str:
        return self.traits.tp_indivisible

    @property
    def ep_axis(self) -> int | None:
        return self.traits.ep_axis

    @property
    def ep_unit(self) -> int:
        return self.traits.ep_unit


def _filled(name: str, placeholder: str, numbers: Sequence[str]) -> list[str]:
    """Return `name` with each number in the place of the placeholder, which stands in it once or not at all."""
    head, found, tail = name.partition(placeholder)
    return [f"{head}{number}{tail}" for number in numbers] if found else [name] * len(numbers)


@dataclass(frozen=True, slots=True)
class Tie:
    """Two tensors that hold the same values when the model is tied, in HF's names and in the dialect's."""

    hf: str
    hf_twin: str
    target: str
    target_twin: str


@dataclass(frozen=True, slots=True)
class RuleSet:
    """All rules of a family in one dialect, for one config.json."""

    family: str
    dialect: str
    variant: str
    rules: tuple[Rule, ...]
    ties: tuple[Tie, ...]
    tied: bool
    table_files: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    ignores: tuple[IgnoreRow, ...] = field(default=(), repr=False)
    dims: Mapping[str, int] = field(default_factory=dict, repr=False)  # what config.json gives the tables' dims

    def ignored(self, name: str, side: Literal["hf", "dialect"]) -> str | None:
        """Return the written reason why `name` is left behind on a side, or None when there is none."""
        for row in self.ignores:
            if row.side == side and row.regex.fullmatch(name):
                return row.why
        return None

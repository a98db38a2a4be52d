"""The typed content of a table: what `schema.py` parses TOML into. Data only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.mapping.dims import Dim, Flag, Formula, LayerSet


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A catalogue row: an HF tensor (or one per layer and expert), its shape, and whether a bias goes with it.

    `bias` is None, `always`, or the name of a flag; `layers` is a layer set or None for all; `optional` is the
    reason why the tensor may be absent, or empty; a tensor with `keep_fp32` is cast to no dtype but F32.
    """

    hf: str
    shape: tuple[Formula, ...]
    bias: str | None
    layers: str | None
    tied_to: str | None
    optional: str
    stage: str
    where: str
    keep_fp32: bool = False


@dataclass(frozen=True, slots=True)
class OpSpec:
    """An op as a row spells it; which fields count depends on `op` (see mappings/README.md)."""

    op: str
    axis: int = 0
    count: Formula | None = None  # groups of an interleave, blocks of a rope-permute, size of a pad, inner of a split
    over: str = ""
    perm: tuple[int, ...] = ()
    to: str = ""
    start: Formula | None = None
    stop: Formula | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """The axis that a kind of parallelism cuts, and how many indivisible units it holds (None: its rows)."""

    axis: int
    unit: Formula | None = None
    unless: str | None = None
    indivisible: str = "refuse"


@dataclass(frozen=True, slots=True)
class MapRow:
    """A dialect row: HF tensors, in op order, and the tensor that the ops make of them."""

    hf: tuple[str, ...]
    target: str
    ops: tuple[OpSpec, ...]
    tp: Cut | None
    ep: Cut | None
    stage: str
    where: str


@dataclass(frozen=True, slots=True)
class IgnoreRow:
    """Names that are left behind on one side, and why."""

    side: str  # "hf" or "dialect"
    pattern: str
    why: str
    regex: re.Pattern[str]
    where: str


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """A config key that changes the model in a way that the weights (in a dialect's table: its nets) cannot hold.

    Its value must be absent, null, false or one of `allowed`; `then` is `refuse` or `warn`.
    """

    key: str
    allowed: tuple[object, ...]
    then: str
    why: str


@dataclass(frozen=True, slots=True)
class ExpectRow:
    """Two formulas that are equal in every model that the dialect's own nets can hold; `why` when they are not."""

    left: Formula
    right: Formula
    why: str
    where: str


@dataclass(frozen=True, slots=True)
class Catalogue:
    """An HF family: the hub's side of every rule."""

    family: str
    aliases: tuple[str, ...]
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    extends: str | None
    dims: Mapping[str, Dim]
    multiples: Mapping[str, str]
    flags: Mapping[str, Flag]
    sets: Mapping[str, LayerSet]
    ranges: Mapping[str, str]
    tied: Flag | None
    rows: tuple[TensorRow, ...]
    ignores: tuple[IgnoreRow, ...]
    configs: tuple[ConfigRow, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DialectTable:
    """A spoke: one family in one dialect and variant."""

    family: str
    dialect: str
    variant: str
    extends: str | None
    about: str
    rows: tuple[MapRow, ...]
    ignores: tuple[IgnoreRow, ...]
    expects: tuple[ExpectRow, ...]
    configs: tuple[ConfigRow, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """A family as the other rooms see it; `table(dialect, variant)` finds one of its dialect tables."""

    catalogue: Catalogue
    table: Callable[[str, str], DialectTable]

    @property
    def name(self) -> str:
        return self.catalogue.family

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.catalogue.aliases

    @property
    def model_types(self) -> tuple[str, ...]:
        return self.catalogue.model_types

    def refused(self, config: Mapping[str, Any]) -> list[str]:
        """Return what in config.json makes a conversion wrong, one line each."""
        return objections(self.catalogue.configs, config, "refuse")

    def warned(self, config: Mapping[str, Any]) -> list[str]:
        """Return what in config.json the weights convert without, but a user should know, one line each."""
        return objections(self.catalogue.configs, config, "warn")


def objections(rows: Sequence[ConfigRow], config: Mapping[str, Any], then: str) -> list[str]:
    """Return what `rows` say against config.json, one line each."""
    found = []
    for row in rows:
        value = config.get(row.key)
        if row.then == then and value is not None and value is not False and value not in row.allowed:
            found.append(f"`{row.key}` is {value!r}: {row.why}")
    return found

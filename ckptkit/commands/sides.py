"""The two sides of a comparison: opened, cut over ranks or not, and how their names and layouts go together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.commands.choose import Spoke, check_hub_variant, choose_source, refuse_empty, type_text
from ckptkit.commands.ranks import open_sharded
from ckptkit.commands.source import Source, as_list, check_rules, find_config, load_own_tables, manifest_of, open_named
from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.files import listed
from ckptkit.formats.io import same_values
from ckptkit.formats.model_config import read_config
from ckptkit.formats.rank_folders import find_ranks
from ckptkit.formats.wrappers import unwrap
from ckptkit.mapping.expr import Leaf
from ckptkit.mapping.pad import pad
from ckptkit.mapping.rows import Family
from ckptkit.mapping.rules import RuleSet, resolve
from ckptkit.mapping.state import add_state, odd_state
from ckptkit.mapping.state_names import is_state
from ckptkit.mapping.tables import Tables
from ckptkit.plan.padding import check_padding
from ckptkit.plan.pair import Pairing, Twins, pair_by_names, pair_by_rules

_NO_SIZES = ("torch_dtype", "dtype", "transformers_version")  # keys of config.json that change no rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user says of the two sides; None leaves it to manifests, config.json and names."""

    model: str | None = None
    config: Path | None = None
    table: tuple[Path, ...] = ()
    dialect_a: str | None = None
    dialect_b: str | None = None
    variant_a: str | None = None
    variant_b: str | None = None
    strategy_a: Path | None = None
    strategy_b: Path | None = None
    step_a: int | None = None
    step_b: int | None = None

    @property
    def anything(self) -> bool:
        return any((self.model, self.dialect_a, self.dialect_b, self.variant_a, self.variant_b))


def asked_of(
    model: str | None,
    config: str | Path | None,
    table: str | Path | Sequence[str | Path],
    dialects: tuple[str | None, str | None],
    variants: tuple[str | None, str | None],
    strategies: tuple[str | Path | None, str | Path | None],
    steps: tuple[int | None, int | None],
) -> Asked:
    """Return what was asked, of the words of `diff` and `verify`; pairs are for A and B."""
    strategy_a, strategy_b = (Path(path) if path else None for path in strategies)
    return Asked(
        model=model, config=Path(config) if config else None, table=tuple(as_list(table)), dialect_a=dialects[0],
        dialect_b=dialects[1], variant_a=variants[0], variant_b=variants[1], strategy_a=strategy_a,
        strategy_b=strategy_b, step_a=steps[0], step_b=steps[1],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sides:
    """Both sides, how they are compared (`how`), and each one's (dialect, variant).

    Without a `family` they are compared by equal names alone, and `config` is None or that of an unknown model.
    """

    a: Source
    b: Source
    asked: Asked
    tables: Tables
    how: str
    family: Family | None = None
    config: Mapping[str, Any] | None = None
    spoke_a: Spoke = ("", "")
    spoke_b: Spoke = ("", "")

    def rules(self) -> tuple[RuleSet, RuleSet] | None:
        """Return the rules of both sides, padding as their manifests say; None without a family."""
        if self.family is None or self.config is None:
            return None
        rules_a, rules_b = (resolve(self.family, self.config, *spoke) for spoke in (self.spoke_a, self.spoke_b))
        return pad(rules_a, self.a.padded), pad(rules_b, self.b.padded)

    def own_rules(self, side: Source, of: Source | None = None) -> RuleSet:
        """Return the rules of a side, of a known family, by its own config.json, or by that `of` the other one.

        The config.json of both stands in for one that is not there; UsageError when one lacks a number.
        """
        assert self.family is not None and self.config is not None
        own = self.own_config(side if of is None else of)
        spoke = self.spoke_a if side is self.a else self.spoke_b
        return pad(resolve(self.family, self.config if own is None else own, *spoke), side.padded)

    def kept(self) -> set[str]:
        """Return the tensors of B, by name, that a cast leaves in fp32, as the tables say."""
        rules = self.rules()
        return {rule.target for rule in rules[1].rules if rule.keep_fp32} if rules else set()

    def pair(self) -> Pairing:
        """Pair the tensors of both sides; CoverageError when one was fused with other sizes than config.json gives."""
        a, b = self.a.checkpoint, self.b.checkpoint
        rules = self.rules()
        if rules is None:
            return pair_by_names(a, b, None, self._twins(None))
        for side, its in zip((self.a, self.b), rules, strict=True):
            _check_made(side, its)
        twins = self._twins(rules[0].tied)
        if self.spoke_a == self.spoke_b and self.a.padded == self.b.padded:
            return pair_by_names(a, b, rules[0], twins)
        odd = self.odd_state(self.a)  # has no partner: a finding, where a conversion would refuse it
        with_state = add_state(*rules, {name: info for name, info in a.tensors.items() if name not in odd})
        pairing = pair_by_rules(a, b, *with_state, twins)
        check_padding(pairing, with_state[0], a.tensors, self.a.joined)
        return pairing

    def odd_state(self, side: Source) -> dict[str, str]:
        """Return the training state of a side that fits no parameter of it, by name, and why."""
        rules = self.rules()
        its = None if rules is None else rules[0] if side is self.a else rules[1]
        pairs = [(tie.target, tie.target_twin) for tie in its.ties if its.tied] if its is not None else []
        return odd_state(side.checkpoint.tensors, {one: two for a, b in pairs for one, two in ((a, b), (b, a))})

    def own_config(self, side: Source) -> dict[str, Any] | None:
        """Return a side's own config.json, if it has one and none was named for both."""
        return None if self.asked.config is not None else own_config(side.checkpoint)

    def check_layouts(self) -> None:
        """Raise UsageError when nothing tells how the fused tensors of the two sides are laid out."""
        untold = not (
            _is_told(self.a, self.asked.dialect_a, self.asked.variant_a)
            or _is_told(self.b, self.asked.dialect_b, self.asked.variant_b)
        )
        if self.family is not None and untold:
            choose_source(self.a, self.tables, self.family, None, None, options=("--dialect-a", "--variant-a"))

    def _twins(self, otherwise: bool | None) -> Twins:
        same = [same_values if side.joined is None else side.joined.same for side in (self.a, self.b)]
        return Twins(self._tied(self.a, otherwise), self._tied(self.b, otherwise), *same)

    def _tied(self, side: Source, otherwise: bool | None) -> bool | None:
        """Say whether a side's own config.json ties its head, if it has one and none was named."""
        own = self.own_config(side)
        if self.family is None or otherwise is None:
            return None
        return otherwise if own is None else resolve(self.family, own, "hf").tied


def open_sides(a: Path, b: Path, asked: Asked) -> Sides:
    """Open both sides and settle how they are compared; UsageError, CorruptError or ResourceError."""
    refuse_empty(
        {"--model": asked.model, "--dialect-a": asked.dialect_a, "--dialect-b": asked.dialect_b,
         "--variant-a": asked.variant_a, "--variant-b": asked.variant_b}
    )  # fmt: skip
    one = open_side(a, asked.strategy_a, asked.step_a, "a")
    two = open_side(b, asked.strategy_b, asked.step_b, "b")
    return _settle(one, two, asked, load_own_tables(asked.table))


def open_side(path: Path, strategy: Path | None, step: int | None, label: str) -> Source:
    """Open a side as it is, whole or cut over ranks: what contradicts a manifest is for the comparison to tell."""
    if path.is_dir() and find_ranks(path):
        try:
            return open_sharded(path, strategy=strategy, step=step)
        except UsageError as error:
            hint = error.hint.replace("--src-strategy", f"--strategy-{label}").replace("--step", f"--step-{label}")
            raise UsageError(error.what, items=error.items, why=error.why, hint=hint) from None
    for option, told in ((f"--strategy-{label}", strategy), (f"--step-{label}", step)):
        if told is not None:
            raise UsageError(
                f"`{option}` is about a checkpoint that is cut over ranks, and `{path}` has no `rank_N` folders",
                hint="leave it out, or name the folder that holds `rank_0`",
            )
    checkpoint = open_named(path)
    with suppress(CoverageError):  # adapters, and prefixes that only some names carry: compared as they are stored
        checkpoint = unwrap(checkpoint)
    return Source(checkpoint, manifest_of(path))


def own_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the config.json beside a checkpoint, or None."""
    return read_config(checkpoint.folder) if (checkpoint.folder / "config.json").is_file() else None


def _check_made(side: Source, rules: RuleSet) -> None:
    """Raise CoverageError when a result of ours was fused by other sizes than `rules` have, though all shapes fit.

    Its rows lie in another order then, and equal bytes would not mean equal weights, nor different ones different.
    """
    manifest = side.manifest
    if manifest is None or all(isinstance(rule.expr, Leaf) for rule in rules.rules):
        return
    shapes = {rule.target: rule.expr.shape for rule in rules.rules}
    weights = {name: info for name, info in side.checkpoint.tensors.items() if not is_state(name)}
    if all(shapes.get(name) == info.shape for name, info in weights.items()):
        check_rules(side, rules.dims, manifest["to"].get("rules", ""))


def _settle(a: Source, b: Source, asked: Asked, tables: Tables) -> Sides:
    """Settle family and spokes; fall back on equal names where nothing is known and nothing was asked."""
    found = _find_config(a, b, asked)
    if found is None:
        return Sides(a, b, asked, tables, "by equal names: no config.json, so no table applies")
    family = _family(a, b, found, asked, tables)
    if isinstance(family, str):
        return Sides(a, b, asked, tables, f"by equal names: {family}", None, found)
    names_a, names_b = a.checkpoint.tensors.keys(), b.checkpoint.tensors.keys()
    told_a, told_b = _is_told(a, asked.dialect_a, asked.variant_a), _is_told(b, asked.dialect_b, asked.variant_b)
    unknown = [label for label, names in (("A", names_a), ("B", names_b)) if not tables.detect(names, family)]
    if not (told_a or told_b) and unknown:
        how = f"by equal names: the {family.name} tables know none of {' and '.join(unknown)}'s"
        return Sides(a, b, asked, tables, how, None, found)
    if not (told_a or told_b) and names_a == names_b:
        best = tables.detect(names_a, family)[0]
        spoke = best.dialect, best.variant
        return Sides(a, b, asked, tables, "by equal names" + _other_config(a, b, asked), family, found, spoke, spoke)
    one, two = _spokes(a, b, asked, tables, family, (told_a, told_b))
    how = "by equal names" if one == two else "A as a conversion to B's naming makes it"
    if told_a != told_b and names_a == names_b and len(_variants_of(tables, names_a, family)) > 1:
        here, there = ("A", "B") if told_b else ("B", "A")
        how += f"; nothing tells {here}'s layout, so it is taken for {there}'s (`--variant-{here.lower()}`)"
    return Sides(a, b, asked, tables, how + _other_config(a, b, asked), family, found, one, two)


def _is_told(side: Source, dialect: str | None, variant: str | None) -> bool:
    """Say whether options or a manifest tell the naming of a side."""
    return bool(dialect or variant or (side.manifest and side.manifest["to"]["dialect"]))


def _spokes(
    a: Source, b: Source, asked: Asked, tables: Tables, family: Family, told: tuple[bool, bool]
) -> tuple[Spoke, Spoke]:
    """Return both sides' dialects and variants; one of two with the same names stands for both."""
    differ = a.checkpoint.tensors.keys() != b.checkpoint.tensors.keys()
    one = two = None
    if told[0] or differ:
        options = ("--dialect-a", "--variant-a")
        one = choose_source(a, tables, family, asked.dialect_a, asked.variant_a, options=options)
    if told[1] or differ:
        options = ("--dialect-b", "--variant-b")
        two = choose_source(b, tables, family, asked.dialect_b, asked.variant_b, options=options)
    one, two = one or two or ("hf", ""), two or one or ("hf", "")
    check_hub_variant(tables, family, one, asked.variant_a, "--variant-a")
    check_hub_variant(tables, family, two, asked.variant_b, "--variant-b")
    return one, two


def _variants_of(tables: Tables, names: Collection[str], family: Family) -> list[Spoke]:
    """Return the spokes that fit the names best, and equally well."""
    matches = tables.detect(names, family)
    return [(m.dialect, m.variant) for m in matches if (m.matched, m.absent) == (matches[0].matched, matches[0].absent)]


def _find_config(a: Source, b: Source, asked: Asked) -> Mapping[str, Any] | None:
    """Return the config.json that gives the sizes: the one named, A's, B's, or None."""
    if asked.config is not None:
        return find_config(a, asked.config)[0]
    config = own_config(a.checkpoint)
    config = own_config(b.checkpoint) if config is None else config
    if config is None and asked.anything:
        find_config(a, None)  # raises, and says what to pass
    return config


def _other_config(a: Source, b: Source, asked: Asked) -> str:
    """Say in what B's config.json differs from A's, which gives the sizes; empty when it does not."""
    one, two = own_config(a.checkpoint), own_config(b.checkpoint)
    if asked.config is not None or one is None or two is None:
        return ""
    odd = [key for key in {**one, **two} if key not in _NO_SIZES and one.get(key) != two.get(key)]
    return f", by A's config.json; B's differs in {listed(odd)}" if odd else ""


def _family(a: Source, b: Source, config: Mapping[str, Any], asked: Asked, tables: Tables) -> Family | str:
    """Return the family of both sides, or why there is none."""
    if asked.model is not None:
        return tables.family(asked.model)
    beside = [its for side in (a, b) if (its := own_config(side.checkpoint)) is not None]
    own: Sequence[Mapping[str, Any]] = [config] if asked.config else beside
    found: dict[str, Family] = {}
    for each in own:
        try:
            family = tables.for_config(each)
        except UsageError:
            if asked.anything:
                raise
            return f"no table for {type_text(each)} (`--config DIR` names another config.json for both)"
        found[family.name] = family
    if len(found) > 1:
        return f"the two config.json files name two families, {' and '.join(found)}"
    return next(iter(found.values()))

"""`ckptkit diff`: two checkpoints of any formats and namings, tensor by tensor, from their bytes.

Two checkpoints in one naming are compared by equal names; a HuggingFace and a MindSpore one, or two layouts of
fused tensors, by running the conversion of A into a sink that compares (`compare.py`). A missing tensor is a
difference, and never an error: a comparison is to tell of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.commands.choose import Spoke, check_hub_variant, choose_source, refuse_empty, type_text
from ckptkit.commands.diff_report import Sides, report_on
from ckptkit.commands.source import Source, check_rules, find_config, load_own_tables, manifest_of, open_named
from ckptkit.compare import Comparer
from ckptkit.errors import CoverageError, UsageError
from ckptkit.execute import execute
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.files import listed
from ckptkit.formats.model_config import read_config
from ckptkit.formats.wrappers import unwrap
from ckptkit.mapping.expr import Leaf
from ckptkit.mapping.rows import Family
from ckptkit.mapping.rules import RuleSet, resolve
from ckptkit.mapping.tables import Tables
from ckptkit.plan.pair import Pairing, Tied, pair_by_names, pair_by_rules
from ckptkit.report import Report

_NO_SIZES = ("torch_dtype", "dtype", "transformers_version")  # keys of config.json that change no rule
Progress = Callable[[int, int], Callable[[int], None]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user says of the two sides; None leaves it to manifests, config.json and names."""

    model: str | None = None
    config: Path | None = None
    dialect_a: str | None = None
    dialect_b: str | None = None
    variant_a: str | None = None
    variant_b: str | None = None

    @property
    def anything(self) -> bool:
        return any((self.model, self.dialect_a, self.dialect_b, self.variant_a, self.variant_b))


@dataclass(frozen=True, slots=True)
class _Settled:
    """How to compare: a family with its config and both spokes; no family means by equal names alone."""

    note: str
    family: Family | None = None
    config: Mapping[str, Any] | None = None
    a: Spoke = ("", "")
    b: Spoke = ("", "")


def diff(
    a: str | Path,
    b: str | Path,
    *,
    model: str | None = None,
    config: str | Path | None = None,
    table: Sequence[str | Path] = (),
    dialect_a: str | None = None,
    dialect_b: str | None = None,
    variant_a: str | None = None,
    variant_b: str | None = None,
    workers: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Compare the checkpoints `a` and `b` and return a report; its exit code is 0 if they are equal, else 1.

    Equal means: the same tensors, with equal shapes, dtypes and bytes. Two things without a partner count as no
    difference, and are named: a head that is bit-equal to its embedding where the other side's config.json says
    that they are tied, and what a table ignores for a written reason. For tensors that differ the report gives
    max |a - b| and, as the relative difference, max |a - b| / max |a| over the tensor.

    `model`, `config` and `table` are as for `convert`; `dialect_a`, `variant_a` and their twins settle the naming
    of a side that its names or manifest do not. Raises UsageError, CorruptError or ResourceError; CoverageError when
    a side was fused with other sizes than config.json gives.
    """
    asked = Asked(model, Path(config) if config else None, dialect_a, dialect_b, variant_a, variant_b)
    refuse_empty(
        {"--model": model, "--dialect-a": dialect_a, "--dialect-b": dialect_b, "--variant-a": variant_a,
         "--variant-b": variant_b}
    )  # fmt: skip
    one, two = _open(Path(a)), _open(Path(b))
    settled = _settle(one, two, asked, load_own_tables(table))
    pairing, rules = _pair(one, two, settled, asked)
    comparer = Comparer([output.spec for output in pairing.outputs], pairing.others)
    plan = pairing.plan()
    try:
        advance = progress(plan.tensor_bytes, 0) if progress else lambda _: None
        execute(plan, comparer, workers=workers, digests=False, progress=advance)
    finally:
        comparer.close()
    how = settled.note + ("" if settled.family is None or asked.config else _other_config(one, two))
    sides = Sides(Path(a), Path(b), one.checkpoint, two.checkpoint, how, settled.a, settled.b, rules)
    return report_on(sides, pairing, comparer.tallies)


def _check_made(side: Source, rules: RuleSet) -> None:
    """Raise CoverageError when a result of ours was fused by other sizes than `rules` have, though all shapes fit.

    Its rows lie in another order then, and equal bytes would not mean equal weights, nor different ones different.
    """
    manifest = side.manifest
    if manifest is None or all(isinstance(rule.expr, Leaf) for rule in rules.rules):
        return
    shapes = {rule.target: list(rule.expr.shape) for rule in rules.rules}
    if all(shapes.get(name) == row["shape"] for name, row in manifest["tensors"].items()):
        check_rules(side, rules.dims, manifest["to"].get("rules", ""))


def _open(path: Path) -> Source:
    """Open a side as it is: what contradicts a manifest is for the comparison to tell."""
    checkpoint = open_named(path)
    with suppress(CoverageError):  # adapters, and prefixes that only some names carry: compared as they are stored
        checkpoint = unwrap(checkpoint)
    return Source(checkpoint, manifest_of(path))


def _settle(a: Source, b: Source, asked: Asked, tables: Tables) -> _Settled:
    """Settle family and spokes; fall back on equal names where nothing is known and nothing was asked."""
    found = _find_config(a, b, asked)
    if found is None:
        return _Settled("by equal names: no config.json, so no table applies")
    family = _family(a, b, found, asked, tables)
    if isinstance(family, str):
        return _Settled(f"by equal names: {family}")
    names_a, names_b = a.checkpoint.tensors.keys(), b.checkpoint.tensors.keys()
    told_a = bool(asked.dialect_a or asked.variant_a or a.manifest)
    told_b = bool(asked.dialect_b or asked.variant_b or b.manifest)
    unknown = [label for label, names in (("A", names_a), ("B", names_b)) if not tables.detect(names, family)]
    if not (told_a or told_b) and unknown:
        return _Settled(f"by equal names: the {family.name} tables know none of {' and '.join(unknown)}'s")
    if not (told_a or told_b) and names_a == names_b:
        best = tables.detect(names_a, family)[0]
        spoke = best.dialect, best.variant
        return _Settled("by equal names", family, found, spoke, spoke)
    options_a, options_b = ("--dialect-a", "--variant-a"), ("--dialect-b", "--variant-b")
    one = two = None
    if told_a or names_a != names_b:
        one = choose_source(a, tables, family, asked.dialect_a, asked.variant_a, options=options_a)
    if told_b or names_a != names_b:
        two = choose_source(b, tables, family, asked.dialect_b, asked.variant_b, options=options_b)
    one, two = one or two or ("hf", ""), two or one or ("hf", "")  # one of two with the same names stands for both
    check_hub_variant(tables, family, one, asked.variant_a, "--variant-a")
    check_hub_variant(tables, family, two, asked.variant_b, "--variant-b")
    how = "by equal names" if one == two else "A as a conversion to B's naming makes it"
    if told_a != told_b and names_a == names_b and len(_variants_of(tables, names_a, family)) > 1:
        here, there = ("A", "B") if told_b else ("B", "A")
        how += f"; nothing tells {here}'s layout, so it is taken for {there}'s (`--variant-{here.lower()}`)"
    return _Settled(how, family, found, one, two)


def _variants_of(tables: Tables, names: Collection[str], family: Family) -> list[Spoke]:
    """Return the spokes that fit the names best, and equally well."""
    matches = tables.detect(names, family)
    return [(m.dialect, m.variant) for m in matches if (m.matched, m.absent) == (matches[0].matched, matches[0].absent)]


def _find_config(a: Source, b: Source, asked: Asked) -> Mapping[str, Any] | None:
    """Return the config.json that gives the sizes: the one named, A's, B's, or None."""
    if asked.config is not None:
        return find_config(a, asked.config)[0]
    config = _own_config(a.checkpoint)
    config = _own_config(b.checkpoint) if config is None else config
    if config is None and asked.anything:
        find_config(a, None)  # raises, and says what to pass
    return config


def _own_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    return read_config(checkpoint.folder) if (checkpoint.folder / "config.json").is_file() else None


def _other_config(a: Source, b: Source) -> str:
    """Say in what B's config.json differs from A's, which gives the sizes; empty when it does not."""
    one, two = _own_config(a.checkpoint), _own_config(b.checkpoint)
    if one is None or two is None:
        return ""
    odd = [key for key in {**one, **two} if key not in _NO_SIZES and one.get(key) != two.get(key)]
    return f", by A's config.json; B's differs in {listed(odd)}" if odd else ""


def _family(a: Source, b: Source, config: Mapping[str, Any], asked: Asked, tables: Tables) -> Family | str:
    """Return the family of both sides, or why there is none."""
    if asked.model is not None:
        return tables.family(asked.model)
    own = [config] if asked.config else [c for c in map(_own_config, (a.checkpoint, b.checkpoint)) if c is not None]
    found: dict[str, Family] = {}
    for each in own:
        try:
            family = tables.for_config(each)
        except UsageError:
            if asked.anything:
                raise
            return f"no table for {type_text(each)}"
        found[family.name] = family
    if len(found) > 1:
        return f"the two config.json files name two families, {' and '.join(found)}"
    return next(iter(found.values()))


def _pair(a: Source, b: Source, settled: _Settled, asked: Asked) -> tuple[Pairing, tuple[RuleSet, ...]]:
    family, config = settled.family, settled.config
    if family is None or config is None:
        return pair_by_names(a.checkpoint, b.checkpoint, None, Tied()), ()
    rules_a = resolve(family, config, *settled.a)
    _check_made(a, rules_a)
    tied = Tied(_tied(a, family, asked, rules_a.tied), _tied(b, family, asked, rules_a.tied))
    if settled.a == settled.b:
        _check_made(b, rules_a)
        return pair_by_names(a.checkpoint, b.checkpoint, rules_a, tied), (rules_a,)
    rules_b = resolve(family, config, *settled.b)
    _check_made(b, rules_b)
    return pair_by_rules(a.checkpoint, b.checkpoint, rules_a, rules_b, tied), (rules_a, rules_b)


def _tied(side: Source, family: Family, asked: Asked, otherwise: bool) -> bool:
    """Say whether a side's own config.json ties its head, if it has one and none was named."""
    own = None if asked.config is not None else _own_config(side.checkpoint)
    return otherwise if own is None else resolve(family, own, "hf").tied

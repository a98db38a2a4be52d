"""Rows and a config.json -> concrete rules: one for every tensor of a dialect.

Shapes do not depend on the layer or the expert. So a row is worked out once, with the placeholders left in its names,
and its rules are copies of that with numbers in their place. What does not live here: which tables there are
(`tables.py`) and what a checkpoint really holds (the planner).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import Any

from ckptkit.errors import CkptkitError, UsageError
from ckptkit.mapping import names
from ckptkit.mapping.dims import Numbers
from ckptkit.mapping.expr import Expr, Leaf, node
from ckptkit.mapping.ops import Concat, Interleave, Merge, Op, Pad, RopePermute, Split, Stack, Transpose
from ckptkit.mapping.rows import Catalogue, Cut, ExpectRow, Family, MapRow, OpSpec, TensorRow, objections
from ckptkit.mapping.rule import Rule, RuleSet, Tie, Traits
from ckptkit.types import Shape

__all__ = ["Rule", "RuleSet", "Tie", "resolve"]


MAX_COUNT = 10_000  # layers, or experts
LAYERS_AT_ONCE = 256  # whose rules are made row by row, which is fast; they are put in order while still in the cache


def resolve(family: Family, config: Mapping[str, Any], dialect: str, variant: str = "") -> RuleSet:
    """Return the rules of `family` in `dialect`; the dialect `hf` gives identity rules.

    Raises UsageError when config.json lacks a number that the tables need, or holds one that cannot be.
    """
    catalogue = family.catalogue
    table = family.table(dialect, variant)
    numbers = Numbers(
        config, catalogue.dims, catalogue.multiples, catalogue.flags, catalogue.sets, catalogue.files[-1], {}
    )
    for dim in catalogue.multiples:
        numbers.dim(dim)
    _check_ranges(catalogue, numbers)
    build = _Builder(numbers, {row.hf: row for row in catalogue.rows}, catalogue.ranges)
    rules = build.rules(table.rows)
    tied = catalogue.tied is not None and numbers.answer(catalogue.tied, "tied")
    ignores = table.ignores if dialect == "hf" else catalogue.ignores + table.ignores
    return RuleSet(
        family=family.name,
        dialect=dialect,
        variant=variant,
        rules=rules,
        ties=_ties(catalogue.rows, table.rows),
        tied=tied,
        table_files=tuple(dict.fromkeys((*catalogue.files, *table.files))),
        warnings=(*_warnings(table.expects, numbers), *objections(table.configs, config, "warn")),
        ignores=ignores,
        dims=dict(numbers.known),
    )


def _check_ranges(catalogue: Catalogue, numbers: Numbers) -> None:
    """Raise UsageError when config.json counts more layers or experts than any model has; each would get its rules."""
    total = 1
    for dim in catalogue.ranges.values():
        total *= max(1, numbers.dim(dim))
        if numbers.dim(dim) > MAX_COUNT or total > MAX_COUNT**2 // 100:
            key = catalogue.dims[dim].key or dim
            raise UsageError(
                f"`{key}` in config.json is {numbers.dim(dim)}: no model has so many",
                why="a tensor would be expected for each",
                hint="config.json does not describe this model: take the one that came with the weights",
            )


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A row worked out: its rule, and perhaps that of the bias, with placeholders in their names.

    `spans` are the numbers, as text, that placeholders other than `{layer}` take.
    """

    rules: tuple[Rule, ...]
    spans: tuple[tuple[str, tuple[str, ...]], ...]

    def of_layers(self, layers: Sequence[int]) -> dict[int, Sequence[Rule]]:
        """Return the rules of each of `layers`, number by number."""
        columns = [rule.filled("{layer}", [*map(str, layers)], layers) for rule in self.rules]
        return {layer: self.spread(rules) for layer, rules in zip(layers, zip(*columns, strict=True), strict=False)}

    def spread(self, rules: Sequence[Rule]) -> Sequence[Rule]:
        """Return the rules of a layer, or of a row that has none, number by number."""
        if not self.spans:
            return rules
        groups = [rules]
        for placeholder, numbers in self.spans:
            groups = [
                rules
                for group in groups
                for rules in zip(
                    *[rule.filled(placeholder, numbers, [rule.layer] * len(numbers)) for rule in group], strict=True
                )
            ]
        return [rule for group in groups for rule in group]


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes rules of rows: the numbers of one config.json, the catalogue's rows, its placeholder ranges."""

    numbers: Numbers
    tensors: Mapping[str, TensorRow]
    ranges: Mapping[str, str]
    shapes: dict[str, Shape] = field(default_factory=dict)

    def rules(self, rows: Sequence[MapRow]) -> tuple[Rule, ...]:
        """Return the rules in table order; neighbouring rows of layers go layer by layer."""
        found: list[Rule] = []
        for layered, group in groupby(rows, key=lambda row: "{layer}" in row.target):
            if not layered:
                for row in group:
                    pattern = self._pattern(row, {})
                    found += pattern.spread(pattern.rules)
                continue
            held = [(row, self._layers(row)) for row in group]
            block = [(layers, self._pattern(row, {"layer": min(layers)})) for row, layers in held if layers]
            total = self.numbers.dim(self.ranges["layer"])
            for start in range(0, total, LAYERS_AT_ONCE):
                some = range(start, min(start + LAYERS_AT_ONCE, total))
                parts = [pattern.of_layers([n for n in some if n in layers]) for layers, pattern in block]
                for layer in some:
                    for rules in parts:
                        found += rules.get(layer, ())
        return tuple(found)

    def _layers(self, row: MapRow) -> frozenset[int]:
        total = self.numbers.dim(self.ranges["layer"])
        chosen = self.tensors[row.hf[0]].layers
        return frozenset(range(total) if chosen is None else self.numbers.layers(chosen, total))

    def _pattern(self, row: MapRow, first: Mapping[str, int]) -> _Pattern:
        """Work out a row; `first` is the first layer that has it, for errors to name."""
        free = [p for p in names.placeholders(row.target) if p not in first]
        counts = {p: self.numbers.dim(self.ranges[p]) for p in free}
        spans = tuple((f"{{{p}}}", tuple(map(str, range(count)))) for p, count in counts.items())
        if not all(numbers for _, numbers in spans):
            return _Pattern((), spans)
        example = names.fill(row.target, {**first, **dict.fromkeys(free, 0)})
        biased = (False, True) if self._has_bias(row) else (False,)
        return _Pattern(tuple(self._rule(row, example, bias=bias) for bias in biased), spans)

    def _has_bias(self, row: MapRow) -> bool:
        bias = self.tensors[row.hf[0]].bias
        return bias == "always" or (bias is not None and self.numbers.flag(bias))

    def _rule(self, row: MapRow, example: str, *, bias: bool) -> Rule:
        """Return the rule of a row, or of the bias that goes with it, placeholders unfilled.

        `example` is the name of the first tensor that it stands for. Raises UsageError or CoverageError when the ops
        do not fit the tensors, or have no way back.
        """
        try:
            expr = self._expr(row, example, bias=bias)
            tp, tp_unit = self._cut(row, row.tp, expr.shape)
            ep, ep_unit = self._cut(row, row.ep, expr.shape)
            traits = Traits(
                origin=row.where,
                stage=row.stage,
                optional=bool(self.tensors[row.hf[0]].optional),
                keep_fp32=any(self.tensors[hf].keep_fp32 for hf in row.hf),
                tp_axis=tp,
                tp_unit=tp_unit,
                tp_unless=None if row.tp is None else row.tp.unless,
                tp_indivisible="refuse" if row.tp is None else row.tp.indivisible,
                ep_axis=ep,
                ep_unit=ep_unit,
            )
            rule = Rule(names.bias_name(row.target) if bias else row.target, expr, None, traits)
            rule.ways_back()
        except CkptkitError as error:
            why = "; ".join(filter(None, [error.why, f"{row.where} makes `{example}`"]))
            raise type(error)(error.what, items=error.items, why=why, hint=error.hint) from None
        return rule

    def _expr(self, row: MapRow, example: str, *, bias: bool) -> Expr:
        """Return the target over its HF tensors, for the weight or for the bias that goes with it."""
        kept = names.placeholders(row.target)
        spread = [p for p in names.placeholders(row.hf[0]) if p not in kept]
        spans = [range(self.numbers.dim(self.ranges[p])) for p in spread]
        lists: dict[tuple[int, ...], list[Expr]] = {
            chosen: [self._leaf(hf, dict(zip(spread, chosen, strict=True)), bias) for hf in row.hf]
            for chosen in product(*spans)
        }
        for op in row.ops:
            if op.op == "stack":
                lists = _stack(lists, spread.index(op.over), op.axis)
                spread.remove(op.over)
            elif op.op in ("concat", "interleave"):
                lists = {k: [node(self._join(row, op, v), v)] for k, v in lists.items()}
            else:
                lists = {k: [node(self._unary(row, op, e.shape), [e]) for e in v] for k, v in lists.items()}
        if () not in lists:
            raise UsageError(f"`{example}` is made of no tensors: the model has none of them")
        return lists[()][0]

    def _leaf(self, hf: str, numbers: Mapping[str, int], bias: bool) -> Leaf:
        if hf not in self.shapes:
            tensor = self.tensors[hf]
            self.shapes[hf] = tuple(self.numbers.number(axis, tensor.where) for axis in tensor.shape)
            if 0 in self.shapes[hf]:
                raise UsageError(
                    f"config.json gives `{hf}` the shape {self.shapes[hf]}: it would hold nothing",
                    hint="config.json does not describe this model: take the one that came with the weights",
                )
        shape = self.shapes[hf]
        name = names.fill(hf, numbers)
        return Leaf(names.bias_name(name), shape[:1]) if bias else Leaf(name, shape)

    def _join(self, row: MapRow, op: OpSpec, parts: Sequence[Expr]) -> Op:
        if op.op == "concat" or op.count is None:
            return Concat(op.axis)
        groups = self.numbers.number(op.count, row.where)
        return Interleave(op.axis, tuple(_share(part.shape, op.axis, groups) for part in parts))

    def _unary(self, row: MapRow, op: OpSpec, shape: Shape) -> Op:
        count = 0 if op.count is None else self.numbers.number(op.count, row.where)
        if op.count is not None and count < 1:
            raise UsageError(f"`{op.op}` with {count} parts or rows makes no tensor")
        match op.op:
            case "transpose":
                return Transpose(op.perm)
            case "merge":
                return Merge(op.axis)
            case "split":
                return Split(op.axis, count)
            case "pad":
                return Pad(op.axis, count)
        block = _share(shape, op.axis, count)
        start = 0 if op.start is None else self.numbers.number(op.start, row.where)
        stop = block if op.stop is None else self.numbers.number(op.stop, row.where)
        return RopePermute(op.axis, block, start, stop, "pairs" if op.to == "pairs" else "halves")

    def _cut(self, row: MapRow, cut: Cut | None, shape: Shape) -> tuple[int | None, int]:
        """Return the axis to cut and its rows per unit; a bias has no axis 1 to cut."""
        if cut is None or cut.axis >= len(shape):
            return None, 1
        units = shape[cut.axis] if cut.unit is None else self.numbers.number(cut.unit, row.where)
        return cut.axis, _share(shape, cut.axis, units)


def _stack(lists: Mapping[tuple[int, ...], list[Expr]], place: int, axis: int) -> dict[tuple[int, ...], list[Expr]]:
    """Stack, position by position, the lists whose keys differ only at `place`."""
    grouped: dict[tuple[int, ...], list[list[Expr]]] = {}
    for key, exprs in lists.items():
        grouped.setdefault((*key[:place], *key[place + 1 :]), []).append(exprs)
    return {
        key: [node(Stack(axis, len(column)), column) for column in zip(*group, strict=True)]
        for key, group in grouped.items()
    }


def _share(shape: Shape, axis: int, parts: int) -> int:
    """Return the rows of one of `parts` equal parts of an axis; raise UsageError when they are not whole."""
    if parts < 1 or shape[axis] % parts:
        raise UsageError(f"axis {axis} of {shape[axis]} rows does not divide into {parts} equal parts")
    return shape[axis] // parts


def _warnings(expects: Sequence[ExpectRow], numbers: Numbers) -> Iterator[str]:
    for row in expects:
        left, right = numbers.number(row.left, row.where), numbers.number(row.right, row.where)
        if left != right:
            yield f"{row.left.text} is {left} and {row.right.text} is {right}: {row.why}"


def _ties(tensors: Sequence[TensorRow], rows: Sequence[MapRow]) -> tuple[Tie, ...]:
    targets = {row.hf[0]: row.target for row in rows if len(row.hf) == 1}
    return tuple(
        Tie(row.hf, row.tied_to, targets[row.hf], targets[row.tied_to])
        for row in tensors
        if row.tied_to is not None and row.hf in targets and row.tied_to in targets
    )

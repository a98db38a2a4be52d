"""Rows and a config.json -> concrete rules: one for every tensor of a dialect.

A rule gives its tensor as an expression of HF tensors, and each of those back as an expression of its tensor. What
does not live here: which tables there are (`tables.py`) and what a checkpoint really holds (the planner).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import Any, Literal

from ckptkit.errors import CkptkitError, UsageError
from ckptkit.mapping import names
from ckptkit.mapping.dims import Numbers
from ckptkit.mapping.expr import Expr, Leaf, invert, node
from ckptkit.mapping.ops import Concat, Interleave, Merge, Op, Pad, RopePermute, Split, Stack, Transpose
from ckptkit.mapping.rows import Cut, ExpectRow, Family, IgnoreRow, MapRow, OpSpec, TensorRow, objections
from ckptkit.types import Shape


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor of a dialect: `expr` is it over `sources`, `inverse` each source over `Leaf(target)`.

    `tp_axis` and `ep_axis` are the axes that those parallelisms cut, or None; `tp_unit` and `ep_unit` the rows of
    one indivisible unit there. `tp_unless` names a setting that keeps the tensor whole; `tp_indivisible` says
    whether a degree that does not divide it is refused or replicates it. With `keep_fp32` it is cast to F32 only.
    """

    sources: tuple[Leaf, ...]
    target: str
    expr: Expr
    inverse: tuple[Expr, ...]
    tp_axis: int | None
    tp_unit: int
    ep_axis: int | None
    stage: str
    layer: int | None
    optional: bool
    origin: str
    ep_unit: int = 1
    tp_unless: str | None = None
    tp_indivisible: str = "refuse"
    keep_fp32: bool = False


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

    def ignored(self, name: str, side: Literal["hf", "dialect"]) -> str | None:
        """Return the written reason why `name` is left behind on a side, or None when there is none."""
        for row in self.ignores:
            if row.side == side and row.regex.fullmatch(name):
                return row.why
        return None


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
    build = _Builder(numbers, {row.hf: row for row in catalogue.rows}, catalogue.ranges)
    tied = catalogue.tied is not None and numbers.answer(catalogue.tied, "tied")
    ignores = table.ignores if dialect == "hf" else catalogue.ignores + table.ignores
    return RuleSet(
        family=family.name,
        dialect=dialect,
        variant=variant,
        rules=tuple(build.rules(table.rows)),
        ties=_ties(catalogue.rows, table.rows),
        tied=tied,
        table_files=tuple(dict.fromkeys((*catalogue.files, *table.files))),
        warnings=(*_warnings(table.expects, numbers), *objections(table.configs, config, "warn")),
        ignores=ignores,
    )


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes rules of rows: the numbers of one config.json, the catalogue's rows, its placeholder ranges."""

    numbers: Numbers
    tensors: Mapping[str, TensorRow]
    ranges: Mapping[str, str]
    shapes: dict[str, Shape] = field(default_factory=dict)

    def rules(self, rows: Sequence[MapRow]) -> Iterator[Rule]:
        """Yield the rules in table order; neighbouring rows of layers go layer by layer."""
        for layered, group in groupby(rows, key=lambda row: "{layer}" in row.target):
            block = list(group)
            if not layered:
                for row in block:
                    yield from self._of_row(row, {})
                continue
            wanted = {id(row): self._layers(row) for row in block}
            for layer in range(self.numbers.dim(self.ranges["layer"])):
                for row in block:
                    if layer in wanted[id(row)]:
                        yield from self._of_row(row, {"layer": layer})

    def _layers(self, row: MapRow) -> frozenset[int]:
        total = self.numbers.dim(self.ranges["layer"])
        chosen = self.tensors[row.hf[0]].layers
        return frozenset(range(total) if chosen is None else self.numbers.layers(chosen, total))

    def _of_row(self, row: MapRow, given: Mapping[str, int]) -> Iterator[Rule]:
        """Yield a row's rules for the placeholder numbers `given`, once for each number of the others."""
        free = [p for p in names.placeholders(row.target) if p not in given]
        spans = [range(self.numbers.dim(self.ranges[p])) for p in free]
        for chosen in product(*spans):
            known = {**given, **dict(zip(free, chosen, strict=True))}
            yield self._rule(row, known, bias=False)
            if self._has_bias(row):
                yield self._rule(row, known, bias=True)

    def _has_bias(self, row: MapRow) -> bool:
        bias = self.tensors[row.hf[0]].bias
        return bias == "always" or (bias is not None and self.numbers.flag(bias))

    def _rule(self, row: MapRow, known: Mapping[str, int], *, bias: bool) -> Rule:
        target = names.fill(row.target, known)
        try:
            expr = self._expr(row, known, bias=bias)
            target = names.bias_name(target) if bias else target
            pairs = invert(expr, Leaf(target, expr.shape))
            tp, tp_unit = self._cut(row, row.tp, expr.shape)
            ep, ep_unit = self._cut(row, row.ep, expr.shape)
        except CkptkitError as error:
            why = "; ".join(filter(None, [error.why, f"{row.where} makes `{target}`"]))
            raise type(error)(error.what, items=error.items, why=why, hint=error.hint) from None
        return Rule(
            sources=tuple(leaf for leaf, _ in pairs),
            target=target,
            expr=expr,
            inverse=tuple(back for _, back in pairs),
            tp_axis=tp,
            tp_unit=tp_unit,
            ep_axis=ep,
            stage=row.stage,
            layer=known.get("layer"),
            optional=bool(self.tensors[row.hf[0]].optional),
            origin=row.where,
            ep_unit=ep_unit,
            tp_unless=None if row.tp is None else row.tp.unless,
            tp_indivisible="refuse" if row.tp is None else row.tp.indivisible,
            keep_fp32=any(self.tensors[hf].keep_fp32 for hf in row.hf),
        )

    def _expr(self, row: MapRow, known: Mapping[str, int], *, bias: bool) -> Expr:
        """Return the target over its HF tensors, for the weight or for the bias that goes with it."""
        spread = [p for p in names.placeholders(row.hf[0]) if p not in known]
        spans = [range(self.numbers.dim(self.ranges[p])) for p in spread]
        lists: dict[tuple[int, ...], list[Expr]] = {
            chosen: [self._leaf(hf, {**known, **dict(zip(spread, chosen, strict=True))}, bias) for hf in row.hf]
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
            raise UsageError(f"`{names.fill(row.target, known)}` is made of no tensors: the model has none of them")
        return lists[()][0]

    def _leaf(self, hf: str, known: Mapping[str, int], bias: bool) -> Leaf:
        if hf not in self.shapes:
            tensor = self.tensors[hf]
            self.shapes[hf] = tuple(self.numbers.number(axis, tensor.where) for axis in tensor.shape)
        shape = self.shapes[hf]
        name = names.fill(hf, known)
        return Leaf(names.bias_name(name), shape[:1]) if bias else Leaf(name, shape)

    def _join(self, row: MapRow, op: OpSpec, parts: Sequence[Expr]) -> Op:
        if op.op == "concat" or op.count is None:
            return Concat(op.axis)
        groups = self.numbers.number(op.count, row.where)
        return Interleave(op.axis, tuple(_share(part.shape, op.axis, groups) for part in parts))

    def _unary(self, row: MapRow, op: OpSpec, shape: Shape) -> Op:
        count = 0 if op.count is None else self.numbers.number(op.count, row.where)
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

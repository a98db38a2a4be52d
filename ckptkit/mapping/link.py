"""Checks that need two tables: a catalogue with the one that it extends, a dialect table with its catalogue.

Also how one table overrides another. Nothing here needs a config.json: these are faults of the tables alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckptkit.errors import UsageError
from ckptkit.mapping import names
from ckptkit.mapping.dims import Formula
from ckptkit.mapping.rows import Catalogue, DialectTable, MapRow, OpSpec, TensorRow

JOINS = ("concat", "interleave")
BIAS_OPS = ("concat", "interleave", "rope-permute", "pad")


def extend_catalogue(base: Catalogue, own: Catalogue) -> Catalogue:
    """Return `own`, and from `base` all that it does not state; a row replaces the row of its HF name."""
    mine = {row.hf: row for row in own.rows}
    rows = [mine.pop(row.hf, row) for row in base.rows]
    for row in mine.values():
        rows.insert(_place(row.hf, [r.hf for r in rows]), row)
    keys = {row.key for row in own.configs}
    return replace(
        own,
        extends=None,
        dims={**base.dims, **own.dims},
        multiples={**base.multiples, **own.multiples},
        flags={**base.flags, **own.flags},
        sets={**base.sets, **own.sets},
        ranges={**base.ranges, **own.ranges},
        tied=base.tied if own.tied is None else own.tied,
        rows=tuple(rows),
        ignores=base.ignores + own.ignores,
        configs=(*(row for row in base.configs if row.key not in keys), *own.configs),
        files=base.files + own.files,
    )


def override(base: DialectTable, own: DialectTable) -> DialectTable:
    """Return `base` with each row of `own` in the place of the rows that hold any of its HF names."""
    rows: list[MapRow] = list(base.rows)
    for row in own.rows:
        covered = [i for i, old in enumerate(rows) if set(old.hf) & set(row.hf)]
        if own.variant and not covered:
            raise UsageError(
                f"{row.where}: `{row.hf[0]}` is in no row of {base.files[-1]}, so it overrides nothing",
                hint="a variant's rows replace the rows that hold their HF names",
            )
        rows = [old for i, old in enumerate(rows) if i not in covered[1:]]
        if covered:
            rows[covered[0]] = row
        else:
            rows.insert(_place(row.target, [r.target for r in rows]), row)
    return replace(
        own,
        extends=None,
        rows=tuple(rows),
        ignores=base.ignores + own.ignores,
        expects=base.expects + own.expects,
        configs=base.configs + own.configs,
        files=base.files + own.files,
    )


def check_catalogue(catalogue: Catalogue) -> None:
    """Raise UsageError on unknown dims, flags, sets, ranges and twins, and on names that two rows have."""
    where = catalogue.files[-1]
    _known("dim", _formulas(catalogue), catalogue.dims)
    pairs = [(f"{where} [multiples]", n) for item in catalogue.multiples.items() for n in item]
    pairs += [(f"{where} [ranges]", dim) for dim in catalogue.ranges.values()]
    pairs += [(f"{where} [sets]", s.needs) for s in catalogue.sets.values() if s.needs is not None]
    _known("dim", pairs, catalogue.dims)
    rows = catalogue.rows
    _known("flag", [(r.where, r.bias) for r in rows if r.bias not in (None, "always")], catalogue.flags)
    _known("layer set", [(r.where, r.layers) for r in rows if r.layers is not None], catalogue.sets)
    others = [(f"{where} [sets]", s.complement) for s in catalogue.sets.values() if s.complement is not None]
    _known("layer set", others, catalogue.sets)
    spans = [(r.where, p) for r in rows for p in names.placeholders(r.hf)]
    _known("range", spans, catalogue.ranges)
    _known("tensor", [(r.where, r.tied_to) for r in rows if r.tied_to is not None], {r.hf: r for r in rows})
    _unique((name, row.where) for row in rows for name in _names(row))
    for row in rows:
        if row.layers is not None and "{layer}" not in row.hf:
            raise UsageError(f"{row.where}: `layers` is given, but `{row.hf}` has no `{{layer}}`")
    if any(row.tied_to is not None for row in rows) and catalogue.tied is None:
        raise UsageError(f"{where}: a row has `tied_to`, but `tied` does not say which config key decides")


def check_dialect(table: DialectTable, catalogue: Catalogue) -> None:
    """Raise UsageError unless the table's rows cover the catalogue once and their ops fit its tensors."""
    tensors = {row.hf: row for row in catalogue.rows}
    covered: dict[str, str] = {}
    for row in table.rows:
        for name in row.hf:
            if name not in tensors:
                raise UsageError(
                    f"{row.where}: `{name}` is no tensor of {catalogue.files[-1]}",
                    hint="add a [[tensor]] row to the catalogue, or correct the name",
                )
            if name in covered:
                raise UsageError(f"{row.where}: `{name}` is already covered by {covered[name]}")
            covered[name] = row.where
        _check_row(row, [tensors[name] for name in row.hf], catalogue)
    missing = [row for row in catalogue.rows if row.hf not in covered]
    if missing:
        raise UsageError(
            f"{table.files[-1]} has no row for {len(missing)} tensors of {catalogue.files[-1]}",
            items=[row.hf for row in missing],
            why="a checkpoint converted with it would lack them",
        )
    _unique((row.target, row.where) for row in table.rows)
    formulas = [(row.where, f) for row in table.expects for f in (row.left, row.right)]
    _known("dim", [(where, name) for where, f in formulas for name in sorted(f.names())], catalogue.dims)


def _place(name: str, present: list[str]) -> int:
    """Return where a new row goes: one of a layer after the last such row, any other at the end."""
    layered = [i for i, other in enumerate(present) if "{layer}" in other]
    return layered[-1] + 1 if "{layer}" in name and layered else len(present)


def _check_row(row: MapRow, sources: list[TensorRow], catalogue: Catalogue) -> None:
    formulas = [f for op in row.ops for f in (op.count, op.start, op.stop)]
    formulas += [cut.unit for cut in (row.tp, row.ep) if cut is not None]
    _known("dim", [(row.where, n) for f in formulas if f is not None for n in sorted(f.names())], catalogue.dims)
    first = sources[0]
    for other in sources[1:]:
        if (other.bias, other.layers, bool(other.optional)) != (
            first.bias,
            first.layers,
            bool(first.optional),
        ):
            raise UsageError(
                f"{row.where}: `{first.hf}` and `{other.hf}` cannot be joined: "
                "they differ in bias, layers or optional in the catalogue"
            )
        if set(names.placeholders(other.hf)) != set(names.placeholders(first.hf)):
            raise UsageError(f"{row.where}: `{first.hf}` and `{other.hf}` have different placeholders")
    rank = _check_ops(row, sources)
    for kind, cut in (("tp", row.tp), ("ep", row.ep)):
        if cut is not None and cut.axis >= rank:
            raise UsageError(f"{row.where}: `{kind}` cuts axis {cut.axis}, but `{row.target}` has {rank} axes")
    if first.bias is not None:
        _check_bias(row)


def _check_ops(row: MapRow, sources: list[TensorRow]) -> int:
    """Return the number of axes of the target; raise unless the ops make one tensor of the sources."""
    count, rank = len(sources), len(sources[0].shape)
    if any(len(s.shape) != rank for s in sources):
        raise UsageError(f"{row.where}: the tensors in `hf` differ in their number of axes")
    spread = [p for p in names.placeholders(row.hf[0]) if p not in names.placeholders(row.target)]
    for op in row.ops:
        if op.op in JOINS:
            if count < 2:
                raise UsageError(f"{row.where}: `{op.op}` joins tensors, but only one is left to it")
            count = 1
        elif op.op == "stack":
            if op.over not in spread:
                raise UsageError(f"{row.where}: `stack` over `{op.over}`, which is not left over by the target")
            spread.remove(op.over)
        rank = _rank_after(row, op, rank)
    if count > 1:
        raise UsageError(f"{row.where}: {count} tensors in `hf` and one target, but no op joins them")
    if spread:
        raise UsageError(
            f"{row.where}: `{{{spread[0]}}}` is in `hf` and not in `{row.target}`, and no `stack` is over it"
        )
    return rank


def _rank_after(row: MapRow, op: OpSpec, rank: int) -> int:
    """Return the number of axes after `op`; raise when `op` works on an axis that is not there."""
    last = {"merge": rank - 2, "stack": rank}.get(op.op, rank - 1)
    if op.op == "transpose":
        if len(op.perm) != rank:
            raise UsageError(f"{row.where}: `perm` has {len(op.perm)} axes, but the tensor there has {rank}")
    elif op.axis > last:
        raise UsageError(f"{row.where}: `{op.op}` on axis {op.axis} of a tensor with {rank} axes")
    return rank + {"merge": -1, "split": 1, "stack": 1}.get(op.op, 0)


def _check_bias(row: MapRow) -> None:
    for op in row.ops:
        if op.op not in BIAS_OPS or op.axis != 0:
            raise UsageError(
                f"{row.where}: its tensors have biases, and `{op.op}` on axis {op.axis} does not carry over to a bias",
                hint="only concat, interleave, rope-permute and pad on axis 0 do",
            )
    if not row.target.endswith(".weight"):
        raise UsageError(f"{row.where}: its tensors have biases, but `{row.target}` does not end in `.weight`")


def _formulas(catalogue: Catalogue) -> list[tuple[str, str]]:
    where = catalogue.files[-1]
    found: list[tuple[str, Formula | None]] = [(f"{where} [dims]", dim.default) for dim in catalogue.dims.values()]
    found += [(f"{where} [sets]", f) for s in catalogue.sets.values() for f in (s.start, s.every)]
    found += [(row.where, axis) for row in catalogue.rows for axis in row.shape]
    return [(place, name) for place, f in found if f is not None for name in sorted(f.names())]


def _known(kind: str, uses: Iterable[tuple[str, str | None]], known: Mapping[str, object]) -> None:
    for where, name in uses:
        if name not in known:
            raise UsageError(f"{where}: unknown {kind} `{name}`", hint=f"known here: {', '.join(known) or 'none'}")


def _names(row: TensorRow) -> list[str]:
    return [row.hf] if row.bias is None else [row.hf, names.bias_name(row.hf)]


def _unique(uses: Iterable[tuple[str, str]]) -> None:
    seen: dict[str, str] = {}
    for name, where in uses:
        key = names.pattern_skeleton(name)
        if key in seen:
            raise UsageError(f"{where}: `{name}` is already a name of {seen[key]}")
        seen[key] = where

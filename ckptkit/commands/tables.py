"""`ckptkit tables`: which families there are, what a table says, and whether a table of one's own is sound.

Works without numpy as long as no config.json is given: rules, which hold shapes, need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ckptkit.commands.source import load_own_tables
from ckptkit.errors import UsageError
from ckptkit.formats.model_config import read_config
from ckptkit.mapping.rows import DialectTable, Family, MapRow, OpSpec, TensorRow
from ckptkit.mapping.schema import parse_file, read_toml
from ckptkit.mapping.tables import HUB, Tables
from ckptkit.report import Report, listed
from ckptkit.types import Shape

Shapes = Mapping[str, tuple[Shape, tuple[Shape, ...]]]  # a row -> the shapes of its target and of its HF tensors


def list_tables(*, table: Sequence[str | Path] = ()) -> Report:
    """List the families with their aliases, model_types, dialects and variants; `table` are files of your own."""
    tables = load_own_tables(table)
    families = [tables.family(name) for name in tables.families()]
    report = Report("tables list", f"{len(families)} families")
    report.data = {"families": [_family_data(tables, family) for family in families]}
    for family, data in zip(families, report.data["families"], strict=True):
        report.add(family.name, f"model_type {', '.join(data['model_types']) or '(none)'}")
        if data["aliases"]:
            report.add(family.name, f"also called {', '.join(data['aliases'])}")
        for dialect, variants in data["dialects"].items():
            report.add(family.name, f"{dialect}{f', or variant {_or(list(variants))}' if variants else ''}")
    return report


def show_table(
    family: str,
    *,
    dialect: str | None = None,
    variant: str | None = None,
    config: str | Path | None = None,
    table: Sequence[str | Path] = (),
) -> Report:
    """Show each row of a family's table: the target, the HF tensors that it is made of, and the ops.

    `dialect` is the family's MindFormers naming without one (HuggingFace's where there is none). With `config`, a
    folder or a config.json, shapes are numbers, those of the first layer that has the row; else they are formulas.
    """
    tables = load_own_tables(table)
    found = tables.family(family)
    dialect = _dialect(tables, found, dialect)
    chosen = found.table(dialect, variant or "")
    report = Report("tables show", f"{found.name}: {HUB} -> {dialect}{f', variant {variant}' if variant else ''}")
    report.add("files", ", ".join(dict.fromkeys((*found.catalogue.files, *chosen.files))))
    if chosen.about:
        report.add("about", chosen.about)
    shapes = None if config is None else _shapes(found, chosen, Path(config))
    tensors = {row.hf: row for row in found.catalogue.rows}
    for row in chosen.rows:
        for text in _row_text(row, [tensors[name] for name in row.hf], shapes):
            report.add(row.stage, text)
    for tensor in found.catalogue.rows:
        if tensor.tied_to is not None and found.catalogue.tied is not None:
            report.add("tied", f"{tensor.hf} to {tensor.tied_to}, if {found.catalogue.tied.key or 'always'}")
    for ignore in (*found.catalogue.ignores, *chosen.ignores):
        side = HUB if ignore.side == "hf" else dialect
        report.add("ignored", f"{ignore.pattern} ({side}): {ignore.why}")
    report.data = {
        **_family_data(tables, found),
        "dialect": dialect,
        "variant": variant,
        "files": list(dict.fromkeys((*found.catalogue.files, *chosen.files))),
        "rows": [_row_data(row, [tensors[name] for name in row.hf], shapes) for row in chosen.rows],
    }
    return report


def check_tables(
    files: Sequence[str | Path] = (), *, config: str | Path | None = None, table: Sequence[str | Path] = ()
) -> Report:
    """Check every table, `files` of your own included, and return a report of what they hold.

    A table of your own is checked together with the shipped ones, which it may extend; the report's rows are about
    your own alone, if there are any.
    With `config`, the tables of its family are resolved too, and the tensors that come of them counted. Raises
    UsageError, naming file and row, on the first fault; then the exit code is 2.
    """
    own = [Path(f) for f in (*files, *table)]
    tables = load_own_tables(own)
    checked = tables.check()
    shipped = [name for name in checked if name not in {str(path) for path in own}]
    what = f"{len(own)} of your own, with the {len(shipped)} shipped ones" if own else f"{len(shipped)} shipped ones"
    report = Report("tables check", f"sound tables: {what}")
    for path in own:
        for text in _contents(path):
            report.add("yours", f"{path}: {text}")
    for text in [] if own else listed(shipped):
        report.add("shipped", text)
    report.data = {"files": list(checked), "resolved": []}
    if config is not None:
        settings = read_config(Path(config))
        for row in _resolve_all(tables, tables.for_config(settings), settings):
            report.data["resolved"].append(row)
            report.add("resolved", _resolved_text(row))
    return report


def _family_data(tables: Tables, family: Family) -> dict[str, Any]:
    return {
        "family": family.name,
        "aliases": list(family.aliases),
        "model_types": list(family.model_types),
        "dialects": {
            dialect: {v: family.table(dialect, v).about for v in tables.variants(family, dialect)}
            for dialect in (HUB, *tables.dialects(family))
        },
    }


def _or(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _dialect(tables: Tables, family: Family, asked: str | None) -> str:
    known = (HUB, *tables.dialects(family))
    if asked == "mindformers":
        return tables.mindformers_dialect(family)
    if asked is None:
        return next((d for d in known if d.startswith("mindformers")), known[-1])
    if asked not in known:
        raise UsageError(f"the {family.name} family has no dialect `{asked}`", items=known, hint="choose one of these")
    return asked


def op_text(op: OpSpec) -> str:
    """Return an op as a sentence's part: `interleave axis 0 groups kv_heads`."""
    words = [op.op]
    if op.op == "transpose":
        return f"transpose {list(op.perm)}"
    if op.op == "stack":
        words.append(f"over {op.over}")
    words.append(f"axis {op.axis}")
    key = {"interleave": "groups", "rope-permute": "blocks", "split": "inner", "pad": "to"}.get(op.op)
    if key and op.count is not None:
        words.append(f"{key} {op.count.text}")
    if op.op == "rope-permute":
        words.append(f"to {op.to}")
        words += [f"{word} {f.text}" for word, f in (("start", op.start), ("stop", op.stop)) if f is not None]
    return " ".join(words)


def _row_text(row: MapRow, tensors: Sequence[TensorRow], shapes: Shapes | None) -> list[str]:
    """Return a row's lines: one for a plain renaming, else the target with its ops, then each HF tensor."""
    known = None if shapes is None else shapes.get(row.where + row.target)
    sizes = [str(s) for s in known[1]] if known else [_formulas(t) for t in tensors]
    absent = " (not in this model)" if shapes is not None and known is None else ""
    bias = (
        ""
        if tensors[0].bias is None
        else f", with biases{'' if tensors[0].bias == 'always' else ' if ' + tensors[0].bias}"
    )
    if not row.ops:
        arrow = f"{row.hf[0]} -> {row.target}" if row.hf[0] != row.target else row.target
        return [f"{arrow}  {sizes[0]}{bias}{absent}"]
    size = f"  {known[0]}" if known else ""
    ops = ", then ".join(op_text(op) for op in row.ops)
    parts = [f"  {name}  {text}" for name, text in zip(row.hf, sizes, strict=True)]
    return [f"{row.target}{size} is {ops}, of{bias and f' (all{bias[1:]})'}{absent}", *parts]


def _formulas(tensor: TensorRow) -> str:
    return f"({', '.join(axis.text for axis in tensor.shape)})"


def _row_data(row: MapRow, tensors: Sequence[TensorRow], shapes: Shapes | None) -> dict[str, Any]:
    data: dict[str, Any] = {
        "target": row.target,
        "hf": list(row.hf),
        "hf_shapes": [[axis.text for axis in tensor.shape] for tensor in tensors],
        "ops": [op_text(op) for op in row.ops],
        "bias": tensors[0].bias,
        "layers": tensors[0].layers,
        "stage": row.stage,
        "where": row.where,
    }
    if shapes is not None:
        known = shapes.get(row.where + row.target)
        data["shape"] = None if known is None else list(known[0])
        data["hf_shapes"] = None if known is None else [list(shape) for shape in known[1]]
    return data


def _shapes(family: Family, table: DialectTable, config: Path) -> dict[str, tuple[Shape, tuple[Shape, ...]]]:
    """Return the shapes of each row, of the first layer (and expert) that has it."""
    from ckptkit.mapping.names import pattern_skeleton, skeleton
    from ckptkit.mapping.rules import Rule, resolve

    rules: dict[tuple[str, str], Rule] = {}
    for rule in resolve(family, read_config(config), table.dialect, table.variant).rules:
        rules.setdefault((rule.origin, skeleton(rule.target)), rule)
    found = {}
    for row in table.rows:
        first = rules.get((row.where, pattern_skeleton(row.target)))
        if first is not None:
            shapes = {skeleton(leaf.name): leaf.shape for leaf in first.sources}
            found[row.where + row.target] = first.expr.shape, tuple(shapes[pattern_skeleton(name)] for name in row.hf)
    return found


def _contents(path: Path) -> list[str]:
    """Say what a user's file holds: a catalogue, a dialect table, or both."""
    catalogue, table = parse_file(read_toml(path, str(path)))
    found = []
    if catalogue is not None:
        found.append(f"catalogue of {catalogue.family}, {len(catalogue.rows)} tensors")
    if table is not None:
        variant = f", variant {table.variant}" if table.variant else ""
        found.append(f"{table.family} in {table.dialect}{variant}, {len(table.rows)} row(s)")
    return found


def _resolve_all(tables: Tables, family: Family, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    from ckptkit.mapping.rules import resolve

    found = []
    for dialect in (HUB, *tables.dialects(family)):
        for variant in ("", *tables.variants(family, dialect)):
            rules = resolve(family, config, dialect, variant)
            found.append(
                {
                    "family": family.name,
                    "dialect": dialect,
                    "variant": variant or None,
                    "tensors": len(rules.rules),
                    "hf_tensors": len({leaf.name for rule in rules.rules for leaf in rule.sources}),
                    "elements": sum(prod(rule.expr.shape) for rule in rules.rules),
                    "tied": rules.tied,
                    "warnings": list(rules.warnings),
                }
            )
    return found


def _resolved_text(row: Mapping[str, Any]) -> str:
    variant = f", variant {row['variant']}" if row["variant"] else ""
    text = f"{row['family']} in {row['dialect']}{variant}: {row['tensors']} tensors of {row['hf_tensors']} in {HUB}"
    return "; ".join([f"{text}, {row['elements']:,} elements{', tied' if row['tied'] else ''}", *row["warnings"]])

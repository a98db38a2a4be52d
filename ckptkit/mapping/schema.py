"""TOML -> typed rows, and every check that one file allows.

Checks that need two files (is each HF name in the catalogue? do the ops fit its axes?) are in `link.py`. All errors
are UsageErrors that start with the file and the row.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckptkit.errors import UsageError
from ckptkit.mapping import names
from ckptkit.mapping.dims import Dim, Flag, Formula, LayerSet
from ckptkit.mapping.fields import Fields
from ckptkit.mapping.rows import (
    Catalogue,
    ConfigRow,
    Cut,
    DialectTable,
    ExpectRow,
    IgnoreRow,
    MapRow,
    OpSpec,
    TensorRow,
)

CATALOGUE_KEYS = (
    "family", "aliases", "model_types", "architectures", "extends", "about", "tied",
    "dims", "multiples", "flags", "sets", "ranges", "tensor", "ignore", "config",
)  # fmt: skip
DIALECT_KEYS = ("family", "dialect", "variant", "extends", "about", "tensor", "ignore", "expect", "config")
TENSOR_KEYS = ("hf", "shape", "bias", "layers", "tied_to", "optional", "stage", "keep_fp32")
MAP_KEYS = ("hf", "target", "ops", "tp", "ep", "stage")
OP_KEYS: Mapping[str, tuple[str, ...]] = {
    "concat": ("axis",),
    "interleave": ("axis", "groups"),
    "stack": ("axis", "over"),
    "transpose": ("perm",),
    "merge": ("axis",),
    "split": ("axis", "inner"),
    "rope-permute": ("axis", "blocks", "to", "start", "stop"),
    "pad": ("axis", "to"),
}
STAGES = ("first", "last", "layer", "all")
_WORD = re.compile(r"[a-z_][a-z0-9_]*")


def read_toml(path: Path, label: str) -> Fields:
    """Return the parsed file at `path`; `label` is how errors call it."""
    try:
        return Fields(tomllib.loads(path.read_text(encoding="utf-8")), label)
    except OSError as error:
        raise UsageError(f"cannot read table `{label}`: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"table `{label}` is not valid TOML: {error}") from None


def parse_file(file: Fields) -> tuple[Catalogue | None, DialectTable | None]:
    """Return the catalogue, the dialect table, or both (a user's family in one file), that a file holds."""
    if "model_types" not in file.data:
        if "dialect" not in file.data:
            raise file.error(
                "is neither a catalogue nor a dialect table",
                "give `model_types` (a catalogue), `dialect` (a dialect table), or both",
            )
        return None, parse_dialect(file)
    if "dialect" not in file.data:
        return parse_catalogue(file), None
    file.only(*CATALOGUE_KEYS, "dialect", "expect")
    rows = file.rows("tensor", "row")
    for row in rows:
        row.only(*dict.fromkeys(TENSOR_KEYS + MAP_KEYS))
    return _catalogue(file, rows), _dialect(file, rows)


def parse_catalogue(file: Fields) -> Catalogue:
    """Return the HF catalogue that a file holds."""
    file.only(*CATALOGUE_KEYS)
    rows = file.rows("tensor", "row")
    for row in rows:
        row.only(*TENSOR_KEYS)
    return _catalogue(file, rows)


def parse_dialect(file: Fields) -> DialectTable:
    """Return the dialect table that a file holds."""
    file.only(*DIALECT_KEYS)
    rows = file.rows("tensor", "row")
    for row in rows:
        row.only(*MAP_KEYS)
    configs = tuple(_warning_row(row) for row in file.rows("config", "config row"))
    return replace(_dialect(file, rows), configs=configs)


def _catalogue(file: Fields, rows: list[Fields]) -> Catalogue:
    dims, multiples, sets = file.table("dims"), file.table("multiples"), file.table("sets")
    ranges = file.table("ranges")
    return Catalogue(
        family=file.text("family"),
        aliases=file.texts("aliases"),
        model_types=file.texts("model_types"),
        architectures=file.texts("architectures"),
        extends=file.optional_text("extends"),
        dims={key: _dim(dims, key) for key in dims.data},
        multiples={key: multiples.text(key) for key in multiples.data},
        flags={key: _flag(file.table("flags"), key) for key in file.table("flags").data},
        sets={key: _layer_set(sets.table(key)) for key in sets.data},
        ranges={key: ranges.text(key) for key in ranges.data},
        tied=_flag(file, "tied") if file.has("tied") else None,
        rows=tuple(tensor for row in rows for tensor in _tensor_rows(row)),
        ignores=tuple(i for i in _ignores(file) if i.side == "hf"),
        configs=tuple(_config_row(row) for row in file.rows("config", "config row")),
        files=(file.where,),
    )


def _dialect(file: Fields, rows: list[Fields]) -> DialectTable:
    return DialectTable(
        family=file.text("family"),
        dialect=file.text("dialect"),
        variant=file.text("variant", ""),
        extends=file.optional_text("extends"),
        about=file.text("about", ""),
        rows=tuple(_map_row(row) for row in rows),
        ignores=tuple(_ignores(file)),
        expects=tuple(_expect(row) for row in file.rows("expect", "expect row")),
        configs=(),  # in a file that is a catalogue too, config rows are the catalogue's
        files=(file.where,),
    )


def _dim(dims: Fields, key: str) -> Dim:
    if not _WORD.fullmatch(key):
        raise dims.error(f"`{key}` is no name for a dim: use lower-case letters, digits and `_`")
    value = dims.data[key]
    if isinstance(value, str):
        return Dim(dims.text(key), None)
    if isinstance(value, dict):
        dim = dims.table(key)
        dim.only("key", "default")
        return Dim(dim.text("key"), formula(dim, "default", dim.data.get("default")))
    return Dim(None, Formula.parse(str(dims.integer(key))))


def _flag(flags: Fields, key: str) -> Flag:
    value = flags.data[key]
    if isinstance(value, bool):
        return Flag(None, value)
    if isinstance(value, str):
        return Flag(flags.text(key), None)
    flag = flags.table(key)
    flag.only("key", "default")
    default = flag.data.get("default")
    if not isinstance(default, bool):
        raise flag.error(f"`default` must be true or false, not {default!r}")
    return Flag(flag.text("key"), default)


def _layer_set(fields: Fields) -> LayerSet:
    fields.only("not", "start", "every", "offset", "except", "needs")
    chosen = LayerSet(
        complement=fields.optional_text("not"),
        start=formula(fields, "start", fields.data.get("start", 0)),
        every=formula(fields, "every", fields.data.get("every", 1)),
        offset=fields.integer("offset", 0),
        excluding=fields.optional_text("except"),
        needs=fields.optional_text("needs"),
    )
    if chosen.complement is not None and len(fields.data) > 1:
        raise fields.error("`not` stands alone")
    return chosen


def _tensor_rows(row: Fields) -> list[TensorRow]:
    """Return the catalogue's rows of a [[tensor]]; several HF names need as many shapes."""
    hf = _patterns(row, "hf")
    shapes = row.items("shape") if len(hf) > 1 else [row.items("shape")]
    if len(shapes) != len(hf) or not all(isinstance(s, list) for s in shapes):
        raise row.error(f"`shape` must be a list of {len(hf)} shapes, one for each name in `hf`")
    bias = row.data.get("bias", False)
    if not isinstance(bias, bool | str):
        raise row.error(f"`bias` must be true or the name of a flag, not {bias!r}")
    keep_fp32 = row.data.get("keep_fp32", False)
    if not isinstance(keep_fp32, bool):
        raise row.error(f"`keep_fp32` must be true or false, not {keep_fp32!r}")
    rows = [
        TensorRow(
            hf=name,
            shape=_shape(row, shape),
            bias=("always" if bias else None) if isinstance(bias, bool) else bias,
            layers=row.optional_text("layers"),
            tied_to=row.optional_text("tied_to"),
            optional=row.text("optional", ""),
            stage=_stage(row, name, "hf"),
            where=row.where,
            keep_fp32=keep_fp32,
        )
        for name, shape in zip(hf, shapes, strict=True)
    ]
    for tensor in rows:
        if tensor.bias is not None and not tensor.hf.endswith(".weight"):
            raise row.error(f"`{tensor.hf}` does not end in `.weight`, so it cannot have a bias")
    return rows


def _shape(row: Fields, shape: list[object]) -> tuple[Formula, ...]:
    if not shape:
        raise row.error("`shape` is missing or empty")
    axes = [formula(row, "shape", axis) for axis in shape]
    return tuple(axis for axis in axes if axis is not None)


def _map_row(row: Fields) -> MapRow:
    hf, target = _patterns(row, "hf"), row.text("target")
    _check_pattern(row, target)
    extra = set(names.placeholders(target)) - {p for name in hf for p in names.placeholders(name)}
    if extra:
        raise row.error(f"`{target}` has the placeholder `{{{min(extra)}}}`, which no name in `hf` has")
    return MapRow(
        hf=hf,
        target=target,
        ops=tuple(_op(op) for op in row.rows("ops", "op")),
        tp=_cut(row, "tp", "unit", "unless", "indivisible"),
        ep=_cut(row, "ep", "unit"),
        stage=_stage(row, target, "target"),
        where=row.where,
    )


def _op(fields: Fields) -> OpSpec:
    name = fields.choice("op", tuple(OP_KEYS))
    fields.only("op", *OP_KEYS[name])
    count_key = {"interleave": "groups", "rope-permute": "blocks", "split": "inner", "pad": "to"}.get(name)
    count = None
    if count_key is not None:
        count = formula(fields, count_key, fields.data.get(count_key))
        if count is None:
            raise fields.error(f"`{count_key}` is missing")
    perm = fields.items("perm")
    if name == "transpose" and (not perm or sorted(perm, key=str) != list(range(len(perm)))):
        raise fields.error(f"`perm` must hold each axis once, not {perm!r}")
    return OpSpec(
        op=name,
        axis=fields.integer("axis", 0),
        count=count,
        over=fields.text("over") if name == "stack" else "",
        perm=tuple(perm),
        to=fields.choice("to", ("pairs", "halves")) if name == "rope-permute" else "",
        start=formula(fields, "start", fields.data.get("start")),
        stop=formula(fields, "stop", fields.data.get("stop")),
    )


def _cut(row: Fields, key: str, *more: str) -> Cut | None:
    if not row.has(key):
        return None
    if not isinstance(row.data[key], dict):
        return Cut(row.integer(key))
    cut = row.table(key)
    cut.only("axis", *more)
    return Cut(
        axis=cut.integer("axis"),
        unit=formula(cut, "unit", cut.data.get("unit")),
        unless=cut.choice("unless", ("vocab_emb_dp",)) if cut.has("unless") else None,
        indivisible=cut.choice("indivisible", ("refuse", "replicate"), "refuse"),
    )


def _ignores(file: Fields) -> list[IgnoreRow]:
    found = []
    for row in file.rows("ignore", "ignore row"):
        row.only("hf", "target", "why")
        sides = [side for side in ("hf", "target") if row.has(side)]
        if len(sides) != 1:
            raise row.error("needs either `hf` or `target`")
        why = row.text("why")
        for pattern in row.texts(sides[0]):
            _check_pattern(row, pattern)
            side = "hf" if sides[0] == "hf" else "dialect"
            found.append(IgnoreRow(side, pattern, why, names.ignore_regex(pattern), row.where))
    return found


def _config_row(row: Fields) -> ConfigRow:
    row.only("key", "allowed", "then", "why")
    then = row.choice("then", ("refuse", "warn"))
    return ConfigRow(row.text("key"), tuple(row.items("allowed")), then, row.text("why"))


def _warning_row(row: Fields) -> ConfigRow:
    """Return a dialect's config row, which can only warn: what a net cannot hold still converts there and back."""
    found = _config_row(row)
    if found.then != "warn":
        raise row.error('a dialect\'s config row says `then = "warn"`; `refuse` belongs in the catalogue')
    return found


def _expect(row: Fields) -> ExpectRow:
    row.only("equal", "why")
    pair = [f for f in (formula(row, "equal", text) for text in row.items("equal")) if f is not None]
    if len(pair) != 2:
        raise row.error("`equal` must hold two formulas")
    return ExpectRow(pair[0], pair[1], row.text("why"), row.where)


def _stage(row: Fields, name: str, key: str) -> str:
    """Return the pipeline stage of a row's tensor: `layer` goes with `{layer}`, else it must be said or is `all`."""
    stage = row.choice("stage", STAGES, "layer" if "{layer}" in name else "all")
    if (stage == "layer") != ("{layer}" in name):
        raise row.error(f"stage `{stage}` does not fit the {key} `{name}`", "`layer` goes with `{layer}`")
    return stage


def _patterns(row: Fields, key: str) -> tuple[str, ...]:
    found = row.texts(key)
    if not found:
        raise row.error(f"`{key}` is missing")
    for pattern in found:
        _check_pattern(row, pattern)
    if len(set(found)) != len(found):
        raise row.error(f"`{key}` holds a name twice")
    return found


def _check_pattern(row: Fields, pattern: str) -> None:
    fault = names.fault(pattern)
    if fault:
        raise row.error(f"`{pattern}` {fault}")


def formula(fields: Fields, key: str, value: object) -> Formula | None:
    """Return the formula that `value` spells, None for None; raise, naming `key`, when it spells none."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise fields.error(f"`{key}` must be a dim, a number, or a product such as `heads*head_dim`, not {value!r}")
    try:
        return Formula.parse(str(value))
    except ValueError as error:
        raise fields.error(f"`{key}`: {error}") from None

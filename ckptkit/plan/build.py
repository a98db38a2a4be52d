"""Build the plan of a conversion: source names -> hub (HuggingFace) names -> target names.

Every dialect is a spoke of the hub: the source's rules give each hub tensor as an expression over stored tensors,
the target's rules give each output as an expression over hub tensors, and substituting one into the other gives
each output over stored tensors. One mechanism serves all directions: HF to a dialect, back, between two dialects,
and between two variants of one.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import xxhash

from ckptkit.cast import why_kept
from ckptkit.errors import CoverageError
from ckptkit.formats.base import Checkpoint, OutputFile
from ckptkit.formats.registry import lay_out_checkpoint
from ckptkit.mapping.expr import Expr, Leaf, leaves
from ckptkit.mapping.rules import Rule, RuleSet
from ckptkit.plan.express import express
from ckptkit.plan.match import Match, match
from ckptkit.plan.plan import Fate, OutputTensor, Plan, describe
from ckptkit.plan.prove import prove
from ckptkit.types import DTYPES, TensorInfo, TensorSpec, value


@dataclass(frozen=True, slots=True)
class Target:
    """What the user asked for: the file kind of `formats/registry.py`, shard size, leniencies, and a dtype to cast to.

    `dtype` is None to change no value; `clamp` is about the casts (see `Plan`).
    """

    kind: str
    max_shard_bytes: int
    tie: bool = False
    allow_unmapped: bool = False
    dtype: str | None = None
    clamp: bool = False


def build_plan(
    source: Checkpoint,
    source_rules: RuleSet,
    target_rules: RuleSet,
    target: Target,
    *,
    config: Mapping[str, Any],
    side: Sequence[tuple[Path, str]] = (),
    notes: Sequence[str] = (),
) -> Plan:
    """Return the proved plan that turns `source` into `target_rules`' naming.

    `config` is the parsed config.json and `side` are the files to copy beside the weights, each with its name
    there. Raises CoverageError when a tensor is missing, misshapen, unmapped or contradictory.
    """
    matched = match(source, source_rules, tie=target.tie, allow_unmapped=target.allow_unmapped)
    parts, kept = _parts(source_rules, target_rules, matched, target.dtype)
    specs = [part.spec for part in parts]
    files, extra = lay_out_checkpoint(target.kind, specs, max_shard_bytes=target.max_shard_bytes)
    edited, edits = _edit_config(config, side, _config_changes(config, matched, source_rules, target.dtype))
    plan = Plan(
        outputs=_placed(parts, files),
        files=tuple(files),
        extra={**extra, **edited},
        side=tuple((path, name) for path, name in side if name not in edited),
        ignored=tuple(matched.ignored),
        dropped=tuple(matched.dropped),
        unmapped=tuple(matched.unmapped),
        notes=(*source.notes, *notes, *target_rules.warnings, *matched.notes, *edits),
        facts=_facts(source, source_rules, target_rules, target, specs),
        compared_bytes=matched.compared_bytes,
        sources=source.files,
        kept=tuple(kept),
        clamp=target.clamp,
    )
    prove(plan, source)
    return plan


def rules_digest(rules: RuleSet, names: Container[str]) -> str:
    """Return the xxh3-128 of how `rules` make the tensors called `names`: the ops of each, with their numbers.

    A manifest records it, so that another config.json or an edited table is noticed before fused tensors are cut.
    """
    lines = [f"{rule.target} = {describe(rule.expr)}\n" for rule in rules.rules if rule.target in names]
    return str(xxhash.xxh3_128_hexdigest("".join(lines).encode()))


@value
class _Part:
    """An output that has no file yet: see `OutputTensor`."""

    spec: TensorSpec
    expr: Expr
    inputs: Mapping[str, TensorInfo]


def _parts(source: RuleSet, target: RuleSet, matched: Match, wanted: str | None) -> tuple[list[_Part], list[Fate]]:
    """Return each output's spec, and its expression over stored tensors with these, in the order of the model.

    The second list says which outputs the `wanted` dtype leaves alone, and why.
    """
    found = matched.found
    parts, kept = [], []
    for rule, expr, lacking in express(source, target, matched.absent):
        if expr is None:
            _refuse_some(rule, lacking)
            continue
        if isinstance(expr, Leaf):
            inputs = {expr.name: found[expr.name]}
        else:
            inputs = {leaf.name: found[leaf.name] for leaf in leaves(expr)}
        dtypes = [info.dtype for info in inputs.values()]
        dtype = wanted or dtypes[0]
        if dtypes.count(dtype) < len(dtypes):
            why = wanted and why_kept(dtypes, expr.shape, keep_fp32=rule.keep_fp32, wanted=wanted)
            if why:
                kept.append(Fate(rule.target, why))
            if why or wanted is None:
                dtype = _one_dtype(rule, inputs)
        parts.append(_Part(TensorSpec(rule.target, expr.shape, dtype), expr, inputs))
    return parts, kept


def _placed(parts: Sequence[_Part], files: Sequence[OutputFile]) -> tuple[OutputTensor, ...]:
    """Return the outputs file by file; those of one file stay in the order of the model."""
    place = {name: number for number, file in enumerate(files) for name in file.extents}
    outputs = [OutputTensor(part.spec, place[part.spec.name], part.expr, part.inputs) for part in parts]
    return tuple(sorted(outputs, key=attrgetter("file")))


def _refuse_some(rule: Rule, lacking: Sequence[str]) -> None:
    """Raise CoverageError when some but not all of a rule's hub tensors are absent."""
    if len(lacking) < len(rule.sources):
        raise CoverageError(
            f"`{rule.target}` needs tensors that the source does not have",
            items=lacking,
            why=f"{rule.origin} fuses {len(rule.sources)} tensors, and only some are there",
            hint="get the missing tensors, or choose another `--variant`",
        )


def _one_dtype(rule: Rule, inputs: Mapping[str, TensorInfo]) -> str:
    dtypes = {info.dtype for info in inputs.values()}
    if len(dtypes) > 1:
        raise CoverageError(
            f"`{rule.target}` would be fused from tensors of different dtypes",
            items=[f"{name}  {info.dtype}" for name, info in inputs.items()],
            why="one tensor has one dtype, and a value is never cast in silence",
            hint="convert to a variant that keeps these tensors apart, or cast all with `--dtype`",
        )
    return dtypes.pop()


def _config_changes(
    config: Mapping[str, Any], matched: Match, rules: RuleSet, dtype: str | None
) -> dict[str, tuple[Any, Any]]:
    """Return what config.json must say else than it does: key -> (old, new)."""
    changes: dict[str, tuple[Any, Any]] = {}
    if matched.tied != rules.tied:
        changes["tie_word_embeddings"] = (rules.tied, matched.tied)
    if dtype is not None:
        name = DTYPES[dtype].torch
        keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]
        changes |= {key: (config.get(key), name) for key in keys if config.get(key) != name}
    return changes


def _edit_config(
    config: Mapping[str, Any], side: Sequence[tuple[Path, str]], changes: Mapping[str, tuple[Any, Any]]
) -> tuple[dict[str, bytes], list[str]]:
    """Return config.json rewritten with `changes`, and a note of each; nothing when it can travel as a byte copy."""
    if not changes or not any(name == "config.json" for _, name in side):
        return {}, []
    changed = {**config, **{key: new for key, (_, new) in changes.items()}}
    notes = [f"config.json: {key} {_plain(old)} -> {_plain(new)}" for key, (old, new) in changes.items()]
    return {"config.json": (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()}, notes


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _facts(
    source: Checkpoint, source_rules: RuleSet, target_rules: RuleSet, target: Target, specs: Sequence[TensorSpec]
) -> dict[str, Any]:
    cast = {"cast": {"dtype": target.dtype, "clamp": target.clamp}} if target.dtype is not None else {}
    return {
        "family": target_rules.family,
        "dims": dict(sorted(target_rules.dims.items())),
        "from": {
            "dialect": source_rules.dialect,
            "variant": source_rules.variant,
            "format": source.kind,
            "tables": list(source_rules.table_files),
        },
        "to": {
            "dialect": target_rules.dialect,
            "variant": target_rules.variant,
            "format": "ckpt" if target.kind == "ckpt" else "safetensors",
            "tables": list(target_rules.table_files),
            "rules": rules_digest(target_rules, {spec.name for spec in specs}),
        },
        "layout": {"tp": 1, "pp": 1, "ep": 1, "dp": 1},
        **cast,
    }

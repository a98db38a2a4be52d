"""Build the plan of a conversion: source names -> hub (HuggingFace) names -> target names.

Every dialect is a spoke of the hub: the source's rules give each hub tensor as an expression over stored tensors,
the target's rules give each output as an expression over hub tensors, and substituting one into the other gives
each output over stored tensors. One mechanism serves all directions: HF to a dialect, back, between two dialects,
and between two variants of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import xxhash

from ckptkit.cast import why_kept
from ckptkit.errors import CoverageError
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.io import same_values
from ckptkit.formats.registry import CKPT, HF, MINDFORMERS, lay_out_checkpoint
from ckptkit.mapping.expr import Leaf, leaves, substitute
from ckptkit.mapping.rules import Rule, RuleSet
from ckptkit.mapping.state import kinds_of_state
from ckptkit.plan.express import express
from ckptkit.plan.join import Joined
from ckptkit.plan.match import Match, match
from ckptkit.plan.padding import filled_padding
from ckptkit.plan.plan import Fate, OutputTensor, Plan, describe
from ckptkit.plan.prove import padding, prove, without_padding
from ckptkit.plan.shard import Placement
from ckptkit.report import tensors
from ckptkit.types import DTYPES, Shape, TensorInfo, TensorSpec


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where the tensors of a result go: see `Placement`; `extra` are small files, `layout` what the manifest says.

    `load` are the settings with which the result is loaded.
    """

    placement: Placement
    extra: Mapping[str, bytes]
    layout: Mapping[str, Any]
    notes: Sequence[str] = ()
    load: Sequence[str] = ()


Arrange = Callable[[Sequence[OutputTensor], RuleSet], Arrangement]


@dataclass(frozen=True, slots=True)
class Target:
    """What the user asked for: the file kind of `formats/registry.py`, shard size, leniencies, and a dtype to cast to.

    `dtype` is None to change no value; `clamp` is about the casts (see `Plan`). `arrange` gives the tensors their
    ranks; without it they are whole, in files of at most `max_shard_bytes`. `drop_state` leaves training state out.
    """

    kind: str
    max_shard_bytes: int
    tie: bool = False
    allow_unmapped: bool = False
    dtype: str | None = None
    clamp: bool = False
    arrange: Arrange | None = None
    drop_state: bool = False


def build_plan(
    source: Checkpoint,
    source_rules: RuleSet,
    target_rules: RuleSet,
    target: Target,
    *,
    config: Mapping[str, Any],
    side: Sequence[tuple[Path, str]] = (),
    notes: Sequence[str] = (),
    joined: Joined | None = None,
) -> Plan:
    """Return the proved plan that turns `source` into `target_rules`' naming.

    `config` is the parsed config.json and `side` are the files to copy beside the weights, each with its name
    there. `joined` says how the tensors of a sharded source are made of its shards. Raises CoverageError when a
    tensor is missing, misshapen, unmapped or contradictory.
    """
    same = same_values if joined is None else joined.same
    matched = match(
        source,
        source_rules,
        tie=target.tie,
        allow_unmapped=target.allow_unmapped,
        drop_state=target.drop_state,
        same=same,
    )
    wholes, kept = _wholes(source_rules, target_rules, matched, target.dtype)
    specs = [whole.spec for whole in wholes]
    stored = wholes if joined is None else _over_shards(wholes, matched, joined)
    arranged = target.arrange(stored, target_rules) if target.arrange else _in_files(stored, target_rules, target)
    padded = _padded(target_rules, {spec.name for spec in specs})
    edited, edits = _edit_config(config, side, _config_changes(config, matched, source_rules, target.dtype))
    plan = Plan(
        outputs=arranged.placement.outputs,
        files=arranged.placement.files,
        extra={**arranged.extra, **edited},
        side=tuple((path, name) for path, name in side if name not in edited),
        ignored=tuple(matched.ignored),
        dropped=tuple(matched.dropped),
        unmapped=tuple(matched.unmapped),
        notes=(
            *source.notes,
            *notes,
            *target_rules.warnings,
            *matched.notes,
            *_padding_notes(source_rules, matched, target_rules, wholes, joined),
            *arranged.notes,
            *edits,
        ),
        facts=_facts(source, source_rules, target_rules, target, specs)
        | {"layout": {**arranged.layout, **({"padded": padded} if padded else {})}},
        compared_bytes=matched.compared_bytes,
        compared=frozenset(matched.compared),
        sources=source.files,
        kept=tuple(kept),
        clamp=target.clamp,
        links=arranged.placement.links,
        load=tuple(arranged.load),
        replicas=() if joined is None else joined.replicas,
    )
    left = {rule.target: padding(rule.expr) for rule in source_rules.rules if not isinstance(rule.expr, Leaf)}
    prove(wholes, plan, source, left)
    return plan


def rules_digest(rules: RuleSet, names: Container[str]) -> str:
    """Return the xxh3-128 of how `rules` make the tensors called `names`: the ops of each, with their numbers.

    A manifest records it, so that another config.json or an edited table is noticed before fused tensors are cut.
    Padding, which the manifest records apart, does not count.
    """
    lines = [
        f"{rule.target} = {expr.name if isinstance(expr := rule.expr, Leaf) else describe(without_padding(expr))}\n"
        for rule in rules.rules
        if rule.target in names and not rule.traits.state
    ]
    return str(xxhash.xxh3_128_hexdigest("".join(lines).encode()))


def _wholes(
    source: RuleSet, target: RuleSet, matched: Match, wanted: str | None
) -> tuple[list[OutputTensor], list[Fate]]:
    """Return each tensor of the result over stored tensors, in the order of the model, as if all were in file 0.

    The second list says which of them the `wanted` dtype leaves alone, and why.
    """
    found = matched.found
    wholes, kept = [], []
    for rule, expr, lacking in express(source, target, matched.absent):
        if expr is None:
            _refuse_some(rule, lacking)
            continue
        if isinstance(expr, Leaf):
            info = found[expr.name]
            inputs = {expr.name: info}
            if wanted is None or wanted == info.dtype:
                wholes.append(OutputTensor(TensorSpec(rule.target, expr.shape, info.dtype), 0, expr, inputs))
                continue
        else:
            inputs = {leaf.name: found[leaf.name] for leaf in leaves(expr)}
        dtypes = [info.dtype for info in inputs.values()]
        dtype = wanted or dtypes[0]
        if dtypes.count(dtype) < len(dtypes):
            why = wanted and _why_kept(rule, dtypes, expr.shape, wanted)
            if why:
                kept.append(Fate(rule.target, why))
            if why or wanted is None:
                dtype = _one_dtype(rule, inputs)
        wholes.append(OutputTensor(TensorSpec(rule.target, expr.shape, dtype), 0, expr, inputs))
    return wholes, kept


def _why_kept(rule: Rule, dtypes: Sequence[str], shape: Shape, wanted: str) -> str | None:
    if rule.is_state:
        return "training state is never cast"
    return why_kept(dtypes, shape, keep_fp32=rule.keep_fp32, wanted=wanted)


def _in_files(wholes: Sequence[OutputTensor], rules: RuleSet, target: Target) -> Arrangement:
    """Return whole tensors file by file; those of one file stay in the order of the model."""
    specs = [whole.spec for whole in wholes]
    state = {rule.target for rule in rules.rules if rule.traits.state} if target.kind == HF else frozenset()
    files, extra = lay_out_checkpoint(target.kind, specs, max_shard_bytes=target.max_shard_bytes, state=state)
    layout = {"tp": 1, "pp": 1, "ep": 1, "dp": 1}
    if len(files) == 1:
        return Arrangement(Placement(tuple(wholes), tuple(files), {}), extra, layout)
    place = {name: number for number, file in enumerate(files) for name in file.extents}
    outputs = [OutputTensor(whole.spec, place[whole.spec.name], whole.expr, whole.inputs) for whole in wholes]
    placement = Placement(tuple(sorted(outputs, key=attrgetter("file"))), tuple(files), {})
    return Arrangement(placement, extra, layout)


def _padded(rules: RuleSet, names: Container[str]) -> dict[str, list[int]]:
    """Return the rows of each tensor that is padded, without its padding and with it."""
    fused = [rule for rule in rules.rules if not isinstance(rule.expr, Leaf)]
    return {
        rule.target: [without_padding(rule.expr).shape[0], rule.expr.shape[0]]
        for rule in fused
        if padding(rule.expr) and rule.target in names
    }


def _padding_notes(
    source: RuleSet, matched: Match, target: RuleSet, wholes: Sequence[OutputTensor], joined: Joined | None
) -> list[str]:
    """Say which rows of padding are left behind, with values or without, added, or kept."""
    cropped = _padded(source, matched.found)
    before = list(cropped.values())
    after = list(_padded(target, {whole.spec.name for whole in wholes}).values())
    if before and after == before and not any(padding(whole.expr) for whole in wholes):
        return [
            f"{tensors(len(after), 'keeps its', 'keep their')} rows of padding: {after[0][1]} rows for {after[0][0]}"
        ]
    notes = []
    if before:
        words = tensors(len(before), "loses", "lose")
        notes.append(f"{words} the rows of padding that ckptkit.json records: {before[0][1]} -> {before[0][0]}")
        notes += [
            f"`{found.name}`: {found.count} of the {found.total} elements of padding left behind are not zero, as "
            f"after training: no word has their rows, from {found.first} on"
            for found in filled_padding(source, cropped, matched.found, joined)
        ]
    if after:
        notes.append(f"{tensors(len(after), 'is', 'are')} padded with rows of zeros: {after[0][0]} -> {after[0][1]}")
    return notes


def _over_shards(wholes: Sequence[OutputTensor], matched: Match, joined: Joined) -> list[OutputTensor]:
    """Return tensors over the shards that those they are made of are joined from."""
    made_of = {name: joined.exprs[info.name] for name, info in matched.found.items()}
    found = []
    for whole in wholes:
        expr = substitute(whole.expr, made_of)
        found.append(OutputTensor(whole.spec, 0, expr, {leaf.name: joined.shards[leaf.name] for leaf in leaves(expr)}))
    return found


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
    names = {spec.name for spec in specs}
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
            "format": target.kind if target.kind in (CKPT, MINDFORMERS) else "safetensors",
            "tables": list(target_rules.table_files),
            "rules": rules_digest(target_rules, names),
        },
        **({"state": kinds} if (kinds := kinds_of_state(target_rules, names)) else {}),
        **cast,
    }

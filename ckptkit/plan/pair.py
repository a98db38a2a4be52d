"""Pair the tensors of two checkpoints, so that each of B's can be compared with what it is in A.

Two ways: by equal names, or by the tables, where A's tensors are expressed in B's naming as a conversion would. What
has no partner is a finding, never an error: a comparison tells of all differences at once. Nothing is taken for equal
but what is compared, with two exceptions that carry their reason: a twin of a tied tensor that one side does not
store, and tensors that a table ignores for a written reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckptkit.cast import common_dtype, why_kept
from ckptkit.formats.base import Checkpoint
from ckptkit.mapping.expr import Expr, Leaf, leaves
from ckptkit.mapping.rules import Rule, RuleSet, Tie
from ckptkit.plan.express import express
from ckptkit.plan.plan import Fate, OutputTensor
from ckptkit.types import TensorInfo, TensorSpec

Kind = Literal["only_in_a", "only_in_b", "shape", "parts", "padding", "replica"]
Side = Literal["hf", "dialect"]
Same = Callable[[TensorInfo, TensorInfo], bool]
_Row = tuple[Rule, Expr | None, tuple[str, ...]]  # what `express` yields


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference that needs no reading: a tensor without a partner, of another shape, made of parts that do not fit
    together, with padding that is not zero, or with a replica that is no copy. `name` is its name where it is stored,
    in B when it is in both; `text` says more, or is empty."""

    kind: Kind
    name: str
    text: str


@dataclass(slots=True)
class Pairing:
    """`outputs[i]`, made of A's tensors and named as in B, is to be compared with `others[i]` of B.

    `benign` are tensors without a partner that are no difference, and why; `absent` those, as they are called in B,
    that config.json and the table expect and neither side has.
    """

    outputs: list[OutputTensor] = field(default_factory=list)
    others: list[TensorInfo] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    benign: list[Fate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Twins:
    """Whether each side's head is its embedding, as its config.json says (None when nothing says so), and how two
    tensors of that side are found to be bit-equal."""

    a: bool | None
    b: bool | None
    same_a: Same
    same_b: Same


def pair_by_names(a: Checkpoint, b: Checkpoint, rules: RuleSet | None, twins: Twins) -> Pairing:
    """Pair the tensors of equal names; `rules`, if known, are those of both sides."""
    left = {name: _whole(info) for name, info in a.tensors.items()}
    right = dict(b.tensors)
    result = Pairing()
    if rules is not None:
        _note_missing(rules, left, right, result)
        _settle_ties(rules.ties, left, right, twins, result)
        _pass_over_ignored(rules, {n for n in left if n not in right}, "a", left, result)
        _pass_over_ignored(rules, {n for n in right if n not in left}, "b", right, result)
    _join(left, right, result)
    return result


def pair_by_rules(a: Checkpoint, b: Checkpoint, rules_a: RuleSet, rules_b: RuleSet, twins: Twins) -> Pairing:
    """Pair what the tables make of A's tensors in B's naming with B's tensors."""
    result = Pairing()
    found = _fitting(a, rules_a, result)
    rows = list(express(rules_a, rules_b, {rule.target for rule in rules_a.rules if rule.target not in found}))
    left, right = _left(rows, found, result), dict(b.tensors)
    strays = {name: info for name, info in a.tensors.items() if name not in {r.target for r in rules_a.rules}}
    known = {rule.target for rule in rules_b.rules}
    left |= {name: _whole(info) for name, info in strays.items() if name in right and name not in known}
    _settle_ties(rules_b.ties, left, right, twins, result)
    alone = {name: _whole(info) for name, info in strays.items() if name not in left}
    _pass_over_ignored(rules_a, set(alone), "a", alone, result)
    _pass_over_ignored(rules_b, {n for n in right if n not in left and n not in known}, "b", right, result)
    # a tied twin may stand in for what A lacks
    unmade = [(rule, lacking) for rule, expr, lacking in rows if expr is None and rule.target not in left]
    _report_lacking(unmade, rules_a, a, right, result)
    _note_missing(rules_b, left, right, result)
    _join(left, right, result)
    result.findings += [Finding("only_in_a", name, "matches no row of the table") for name in alone]
    return result


def _whole(info: TensorInfo) -> OutputTensor:
    return OutputTensor(info.spec, 0, Leaf(info.name, info.shape), {info.name: info})


def _fitting(a: Checkpoint, rules: RuleSet, result: Pairing) -> dict[str, TensorInfo]:
    """Return A's tensors that have the shape their rule expects; the others are findings."""
    found = {}
    for rule in rules.rules:
        info = a.tensors.get(rule.target)
        if info is not None and info.shape == rule.expr.shape:
            found[rule.target] = info
        elif info is not None:
            text = f"{info.shape} in A, {rule.expr.shape} by config.json and {rule.origin}"
            result.findings.append(Finding("shape", rule.target, text))
    return found


def _left(rows: Sequence[_Row], found: Mapping[str, TensorInfo], result: Pairing) -> dict[str, OutputTensor]:
    """Return A's tensors in B's naming, as far as all their parts are there and go together."""
    left = {}
    for rule, expr, _ in rows:
        if expr is None:
            continue
        inputs = {leaf.name: found[leaf.name] for leaf in leaves(expr)}
        dtypes = sorted({info.dtype for info in inputs.values()})
        if len(dtypes) > 1 and why_kept(dtypes, expr.shape or (1,), keep_fp32=False, wanted="F32") is not None:
            result.findings.append(Finding("parts", rule.target, f"its parts in A are {' and '.join(dtypes)}"))
        spec = TensorSpec(rule.target, expr.shape, common_dtype(dtypes) if len(dtypes) > 1 else dtypes[0])
        left[rule.target] = OutputTensor(spec, 0, expr, inputs)
    return left


def _report_lacking(
    rows: Sequence[tuple[Rule, Sequence[str]]],
    rules_a: RuleSet,
    a: Checkpoint,
    right: dict[str, TensorInfo],
    result: Pairing,
) -> None:
    """Report tensors of B of which A lacks all or a part, and parts in A of what B does not have either."""
    stored = {leaf.name: rule.target for rule in rules_a.rules for leaf in rule.sources}
    for rule, lacking in rows:
        other = right.pop(rule.target, None)
        missing = list(dict.fromkeys(stored.get(name, name) for name in lacking))
        misfit = [name for name in missing if name in a.tensors]  # these have a finding already
        if misfit and other is not None:
            result.notes.append(f"`{rule.target}` of B was not compared: `{misfit[0]}` has another shape in A")
        elif other is not None:
            result.findings.append(Finding("only_in_b", rule.target, f"A lacks {', '.join(missing)}"))
        elif not misfit and len(lacking) < len(rule.sources):
            text = f"B lacks {rule.target}, which A could not make without {', '.join(missing)}"
            here = dict.fromkeys(stored[leaf.name] for leaf in rule.sources if leaf.name not in lacking)
            result.findings += [Finding("only_in_a", name, text) for name in here]


def _note_missing(
    rules: RuleSet, left: Mapping[str, OutputTensor], right: Mapping[str, TensorInfo], result: Pairing
) -> None:
    """Note what both checkpoints lack: no difference between them, but perhaps news."""
    stored = {*left, *right, *(finding.name for finding in result.findings)}
    pairs = [(tie.target, tie.target_twin) for tie in rules.ties if rules.tied]
    twins = {name for pair in pairs for name in pair if not stored.isdisjoint(pair)}  # one of two suffices
    neither = [r.target for r in rules.rules if not r.optional and r.target not in stored and r.target not in twins]
    result.absent += neither
    if neither:
        more = f" and {len(neither) - 1} more" if len(neither) > 1 else ""
        result.notes.append(f"neither A nor B has `{neither[0]}`{more}, which {rules.table_files[-1]} expects")


def _join(left: Mapping[str, OutputTensor], right: Mapping[str, TensorInfo], result: Pairing) -> None:
    """Pair what is on both sides; what is on one side only, or has two shapes, is a finding."""
    broken = {finding.name for finding in result.findings if finding.kind == "parts"}
    for name, output in left.items():
        other = right.get(name)
        if other is None:
            for stored in output.inputs:
                result.findings.append(Finding("only_in_a", stored, f"B lacks {name}" if stored != name else ""))
        elif other.shape != output.spec.shape:
            text = f"{output.spec.shape} in A, {other.shape} in B"
            result.findings.append(Finding("shape", name, text))
        elif name not in broken:
            result.outputs.append(output)
            result.others.append(other)
    result.findings += [Finding("only_in_b", name, "") for name in right if name not in left]


def _pass_over_ignored(
    rules: RuleSet,
    names: set[str],
    side: Literal["a", "b"],
    tensors: dict[str, OutputTensor] | dict[str, TensorInfo],
    result: Pairing,
) -> None:
    """Take out of `tensors` those of `names` that the table ignores, for the reason that it gives."""
    where: Side = "hf" if rules.dialect == "hf" else "dialect"
    for name in [n for n in tensors if n in names]:
        why = rules.ignored(name, where)
        if why is not None:
            result.benign.append(Fate(name, f"only in {side.upper()}: {why}"))
            del tensors[name]


def _settle_ties(
    ties: Sequence[Tie], left: dict[str, OutputTensor], right: dict[str, TensorInfo], twins: Twins, result: Pairing
) -> None:
    """Take out a twin that only one side stores, where it is bit-equal to the one that both have.

    The other side's config.json must say that the two are tied: without it, a head that is not stored is missing.
    """
    for tie in ties:
        for name, twin in ((tie.target, tie.target_twin), (tie.target_twin, tie.target)):
            a, b = (name in left, twin in left), (name in right, twin in right)
            if a == (True, True) and b == (False, True) and twins.b and _equal(left[name], left[twin], twins.same_a):
                result.benign.append(Fate(_one_name(left[name]), f"only in A: bit-equal to its tied twin `{twin}`"))
                del left[name]
            elif a == (False, True) and b == (True, True) and twins.a and twins.same_b(right[name], right[twin]):
                result.benign.append(Fate(name, f"only in B: bit-equal to its tied twin `{twin}`"))
                del right[name]
            elif a == (True, False) and b == (False, True) and twins.a and twins.b:
                result.notes.append(f"`{twin}` of B is compared with its tied twin of A, `{_one_name(left[name])}`")
                output = left.pop(name)
                left[twin] = replace(output, spec=replace(output.spec, name=twin))


def _one_name(output: OutputTensor) -> str:
    return next(iter(output.inputs))


def _equal(a: OutputTensor, b: OutputTensor, same: Same) -> bool:
    """Say whether two outputs, each made of one tensor, are bit-equal; one made of several is never a twin."""
    if len(a.inputs) != 1 or len(b.inputs) != 1:
        return False
    return same(next(iter(a.inputs.values())), next(iter(b.inputs.values())))

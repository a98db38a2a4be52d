"""Optimizer state as more rules: for each weight's rule, one with `adam_m.` before all its names.

MindSpore calls a moment by its parameter's name with a prefix, and has one of the parameter's shape. So a moment is
fused, cut and turned as its parameter is, whatever the naming; on HuggingFace's side, which has no names for such
tensors, the prefix stays. State is never cast. Counters (`global_step`) have no parameter and keep name and shape.
What does not live here: which layout a moment without one of its own follows (the planner asks `parameter_of`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from ckptkit.errors import CoverageError
from ckptkit.mapping.expr import Expr, Leaf, Node
from ckptkit.mapping.rule import Rule, RuleSet, Traits
from ckptkit.mapping.state_names import PREFIXES, is_counter, state_of
from ckptkit.report import tensors
from ckptkit.types import TensorInfo, TensorSpec

_OTHERS = {"muon_m.": ("adam_m.", "adam_v."), "adam_m.": ("muon_m.",), "adam_v.": ("muon_m.",)}  # of Muon


def add_state(source: RuleSet, target: RuleSet, stored: Mapping[str, TensorInfo]) -> tuple[RuleSet, RuleSet]:
    """Return both rule sets with rules for the training state among `stored`, the source's tensors.

    State of a parameter that the source has no rule for gets none; nor does factored state. Both stay unmapped. Where a
    head stands in for the tied embedding, which is not stored, so does its state. Raises CoverageError when state has
    another shape than its parameter.
    """
    if source.tied:
        stored = {**stored, **_of_twins(source, stored)}
    heads = {name.partition(".")[0] + "." for name in stored}
    prefixes = [prefix for prefix in PREFIXES if prefix in heads]
    both = {name: _identity(info.spec, _OWN) for name, info in stored.items() if is_counter(name)}
    for rule in source.rules if both else ():
        both.pop(rule.target, None)  # a table may well have a tensor of that name
    if not prefixes and not both:
        return source, target
    for prefix in prefixes:
        for rule in (*source.rules, *target.rules):
            if _is_placeholder(prefix, rule, stored):
                spec = stored[prefix + rule.target].spec
                both.setdefault(spec.name, _identity(spec, replace(_OWN, stage=rule.stage), rule.layer))
    kinds: dict[Traits, Traits] = {}
    added = [
        _with_prefix(rule, prefix, kinds)
        for prefix in prefixes
        for rule in source.rules
        if (name := prefix + rule.target) in stored and name not in both
    ]
    _check_shapes(added, stored)
    hub = {leaf.name for rule in added for leaf in rule.sources}
    made = [
        _with_prefix(rule, prefix, kinds)
        for prefix in prefixes
        for rule in target.rules
        if any(prefix + leaf.name in hub for leaf in rule.sources)
    ]
    return _more(source, [*added, *both.values()]), _more(target, [*made, *both.values()])


def _of_twins(rules: RuleSet, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the state of heads under the names that it would have as that of embeddings which are not stored."""
    pairs = [(tie.target, tie.target_twin) for tie in rules.ties if tie.target_twin not in stored]
    names = {prefix + twin: prefix + head for head, twin in pairs for prefix in PREFIXES if prefix + head in stored}
    return {twin: stored[head] for twin, head in names.items() if twin not in stored}


def kinds_of_state(rules: RuleSet, names: Container[str]) -> dict[str, int]:
    """Return how many of the tensors called `names` are training state, by prefix; `counters` are of no parameter."""
    found: dict[str, int] = {}
    for rule in rules.rules:
        if rule.is_state and rule.target in names:
            known = state_of(rule.target)
            kind = "counters" if known is None else known[0]
            found[kind] = found.get(kind, 0) + 1
    return found


def check_state(stored: Mapping[str, TensorInfo]) -> None:
    """Raise CoverageError for state of another shape than its parameter, in a checkpoint of any network."""
    found = ((info, _parameter(name, stored, {})) for name, info in stored.items())
    _refuse_shapes([_line(i, p) for i, p in found if p is not None and not _fits(i, p)])


def odd_state(stored: Mapping[str, TensorInfo], twins: Mapping[str, str]) -> dict[str, str]:
    """Return the state among `stored` that no parameter has, or one of another shape, by name, and why.

    `twins` are the tied tensors that stand in for one another.
    """
    found = {}
    for name, info in stored.items():
        known = state_of(name)
        if known is None:
            continue
        parameter = _parameter(name, stored, twins)
        rest = any(other + known[1] in stored for other in _OTHERS.get(known[0], ()))  # beside a placeholder
        if parameter is None:
            found[name] = f"training state of `{known[1]}`, which is not there"
        elif not _fits(info, parameter) or (info.shape != parameter.shape and known[0] in _OTHERS and not rest):
            found[name] = f"training state of another shape than its parameter: {_line(info, parameter)}"
    return found


def _parameter(name: str, stored: Mapping[str, TensorInfo], twins: Mapping[str, str]) -> TensorInfo | None:
    """Return the stored parameter that the state `name` belongs to, or its tied twin."""
    known = state_of(name)
    return None if known is None else stored.get(known[1]) or stored.get(twins.get(known[1], ""))


def _fits(info: TensorInfo, parameter: TensorInfo) -> bool:
    """Say whether state has its parameter's shape, or need not have it: sums over an axis, Muon's placeholders."""
    known = state_of(info.name)
    if known is None or known[0] not in PREFIXES or info.shape == parameter.shape:
        return True
    return info.shape == (1,) and known[0] in _OTHERS


def identity_rules(specs: Iterable[TensorSpec | TensorInfo]) -> RuleSet:
    """Return rules that leave each tensor as it is: for any network's checkpoint, where no table is needed.

    State whose parameter is among `specs`, and counters, are marked as state.
    """
    shapes = {spec.name: spec.shape for spec in specs}
    rules = []
    for name, shape in shapes.items():
        known = state_of(name)
        state = is_counter(name) if known is None else known[1] in shapes
        rules.append(Rule(name, Leaf(name, shape), None, _OWN if state else _ANY))
    return RuleSet("", "", "", tuple(rules), (), tied=False, table_files=())


_ANY = Traits(
    origin="the names that are stored",
    stage="all",
    optional=False,
    keep_fp32=False,
    tp_axis=None,
    tp_unit=1,
    tp_unless=None,
    tp_indivisible="refuse",
    ep_axis=None,
    ep_unit=1,
)
_OWN = replace(_ANY, origin="training state", optional=True, state=True)


def _identity(spec: TensorSpec, traits: Traits, layer: int | None = None) -> Rule:
    return Rule(spec.name, Leaf(spec.name, spec.shape), layer, traits)


def _more(rules: RuleSet, added: Iterable[Rule]) -> RuleSet:
    return replace(rules, rules=(*rules.rules, *added))


def _with_prefix(rule: Rule, prefix: str, kinds: dict[Traits, Traits]) -> Rule:
    """Return the rule of a weight's state; `kinds` keeps the traits that rules share."""
    traits = kinds.get(rule.traits)
    if traits is None:
        traits = kinds[rule.traits] = replace(rule.traits, optional=True, keep_fp32=False, state=True)
    return Rule(prefix + rule.target, _prefixed(rule.expr, prefix), rule.layer, traits)


def _prefixed(expr: Expr, prefix: str) -> Expr:
    if isinstance(expr, Leaf):
        return Leaf(prefix + expr.name, expr.shape)
    return Node(expr.op, tuple([_prefixed(child, prefix) for child in expr.children]), expr.shape)


def _is_placeholder(prefix: str, rule: Rule, stored: Mapping[str, TensorInfo]) -> bool:
    """Tell whether Muon put one element where a parameter has no such moment: it has Muon's or Adam's, not both.

    Nothing of the parameter is in it, so it keeps its name in every naming; the other moment, beside it, is stored
    under the rule's name or under HuggingFace's.
    """
    info = stored.get(prefix + rule.target) if prefix in _OTHERS else None
    if info is None or info.shape != (1,) or rule.expr.shape == (1,):
        return False
    for other in _OTHERS[prefix]:
        moment = stored.get(other + rule.target)
        if moment is None and all(other + leaf.name in stored for leaf in rule.sources):
            return True
        if moment is not None and moment.shape == rule.expr.shape:
            return True
    return False


def _check_shapes(added: Iterable[Rule], stored: Mapping[str, TensorInfo]) -> None:
    """Raise CoverageError for state whose shape is not that of its stored parameter."""
    wrong = []
    for rule in added:
        shape = stored[rule.target].shape
        parameter = stored.get(rule.target.partition(".")[2])
        if shape != rule.expr.shape and parameter is not None and parameter.shape != shape:
            wrong.append(_line(stored[rule.target], parameter))
    _refuse_shapes(wrong)


def _line(info: TensorInfo, parameter: TensorInfo) -> str:
    return f"{info.name} {info.shape}, {parameter.name} {parameter.shape}"


def _refuse_shapes(wrong: Sequence[str]) -> None:
    if wrong:
        raise CoverageError(
            tensors(len(wrong), "of state has", "of state have") + " another shape than the parameter it belongs to",
            items=wrong,
            why="such state has an element for each one of its parameter; this may be one rank's part of it",
            hint="save the state again, or leave it out with `--no-optimizer`",
        )

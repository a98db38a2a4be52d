"""A vocabulary padded with zero rows, so that every rank has an equal part of the embedding and of the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptkit.errors import CoverageError
from ckptkit.mapping.expr import node
from ckptkit.mapping.ops import Pad
from ckptkit.mapping.rule import Rule, RuleSet


def pad_vocabulary(rules: RuleSet, rows: int) -> RuleSet:
    """Return `rules` with the tensors that have a row for each word lengthened to `rows` by zeros.

    They are those of the first and the last stage that tensor parallelism cuts by a first axis of the vocabulary's
    length. Raises CoverageError when the vocabulary is larger, or when the tables name no such tensor.
    """
    vocabulary = rules.dims.get("vocab")
    found = {
        rule.target: rule
        for rule in rules.rules
        if rule.stage in ("first", "last") and rule.tp_axis == 0 and rule.expr.shape[0] == vocabulary
    }
    if not found:
        raise CoverageError(
            f"the tables of {rules.family} in {rules.dialect} name no tensor that is cut by the vocabulary",
            hint="leave out `--pad-vocab-to`",
        )
    large = {name: rule.expr.shape[0] for name, rule in found.items() if rule.expr.shape[0] > rows}
    if large:
        raise CoverageError(
            f"the vocabulary cannot be padded to {rows} rows",
            items=[f"{name} has {size}" for name, size in large.items()],
            hint="give a larger number: a multiple of the tensor-parallel degree",
        )
    return pad(rules, dict.fromkeys(found, rows))


def pad(rules: RuleSet, rows: Mapping[str, int]) -> RuleSet:
    """Return `rules` with each tensor that `rows` names lengthened to so many rows by zeros."""
    padded = [_padded(rule, rows[rule.target]) if rule.target in rows else rule for rule in rules.rules]
    return replace(rules, rules=tuple(padded))


def _padded(rule: Rule, rows: int) -> Rule:
    return Rule(rule.target, node(Pad(0, rows), [rule.expr]), rule.layer, rule.traits)

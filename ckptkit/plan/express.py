"""Each tensor of one naming as an expression over the stored tensors of another, by way of the hub's names.

What does not live here: which tensors there are (`match.py`, `pair.py`) and what is made of the expressions
(`build.py` gives them files, `pair.py` a tensor to be compared with).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckptkit.mapping.expr import Expr, Leaf, substitute
from ckptkit.mapping.rules import Rule, RuleSet


def express(
    source: RuleSet, target: RuleSet, absent: Collection[str]
) -> Iterator[tuple[Rule, Expr | None, tuple[str, ...]]]:
    """Yield each rule of `target` with its tensor as an expression over `source`'s, in the order of the model.

    `absent` are the tensors of `source` that are not stored. Where a rule needs one of these, the expression is
    None, and the third item names the hub tensors that it lacks.
    """
    hub: dict[str, Expr] = {}
    for rule in source.rules:
        if rule.target in absent:
            continue
        if isinstance(rule.expr, Leaf) and rule.expr.name == rule.target:  # the hub itself, or a name that it shares
            hub[rule.target] = rule.expr
            continue
        for leaf, back in rule.ways_back():
            hub[leaf.name] = back
    for rule in target.rules:
        whole = hub.get(rule.expr.name) if isinstance(rule.expr, Leaf) else None
        if whole is not None and whole.shape == rule.expr.shape:  # most of a model, so it has a short way
            yield rule, whole, ()
            continue
        lacking = tuple([leaf.name for leaf in rule.sources if leaf.name not in hub])
        yield rule, None if lacking else substitute(rule.expr, hub), lacking

"""Prove, before the first byte is written, that a plan loses nothing and invents nothing.

Ops move elements and never compute (their laws are property tests), so coverage is a count: each output holds as
many elements as its sources give it, and the outputs together take every element of every source tensor that they
name exactly once. A tensor that is named by no output must have a fate with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from ckptkit.errors import CoverageError, InternalError
from ckptkit.formats.base import Checkpoint
from ckptkit.mapping.expr import Expr, Leaf
from ckptkit.plan.plan import Plan


def taken(expr: Expr) -> Iterator[tuple[Leaf, int]]:
    """Yield (leaf, number of its elements that `expr` holds) for each leaf of `expr`."""
    yield from _walk(expr, prod(expr.shape))


def _walk(expr: Expr, size: int) -> Iterator[tuple[Leaf, int]]:
    if isinstance(expr, Leaf):
        yield expr, size
    elif len(expr.children) == 1:
        yield from _walk(expr.children[0], size)
    else:
        for child in expr.children:
            yield from _walk(child, prod(child.shape))


def prove(plan: Plan, source: Checkpoint) -> None:
    """Raise unless every output element has one source element and every source element one use or a fate."""
    used: Counter[str] = Counter()
    for output in plan.outputs:
        parts = list(taken(output.expr))
        if sum(count for _, count in parts) != prod(output.spec.shape):
            raise InternalError(f"`{output.spec.name}` would not be filled exactly by its sources")
        for leaf, count in parts:
            info = output.inputs[leaf.name]
            if info.shape != leaf.shape:
                raise InternalError(f"`{leaf.name}` is stored as {info.shape} but planned as {leaf.shape}")
            used[leaf.name] += count
    # a leaf may be read through its tied twin, which is stored under another name; count it under its own
    sizes = {i.name: i.num_elements for o in plan.outputs for i in o.inputs.values()}
    uneven = [f"{name}: {count} of {sizes[name]} elements used" for name, count in used.items() if count != sizes[name]]
    if uneven:
        raise CoverageError(
            f"{len(uneven)} source tensors would not be used exactly once",
            items=uneven,
            why="the table names one tensor twice, or only a part of a fused one",
            hint="check the rows that name these tensors",
        )
    _every_source_has_a_fate(plan, source, set(used))


def _every_source_has_a_fate(plan: Plan, source: Checkpoint, used: set[str]) -> None:
    fates = {fate.name for fate in (*plan.ignored, *plan.dropped, *plan.unmapped)}
    stored = {info.extents for output in plan.outputs for info in output.inputs.values()}
    lost = [
        name
        for name, info in source.tensors.items()
        if name not in used and name not in fates and info.extents not in stored
    ]
    if lost:
        raise InternalError(f"{len(lost)} source tensors have neither a use nor a fate", items=lost)
    if both := used & fates:
        raise InternalError(f"{len(both)} source tensors are both used and passed over", items=sorted(both))
    twice = [name for name, count in Counter(o.spec.name for o in plan.outputs).items() if count > 1]
    if twice:
        raise InternalError(f"{len(twice)} output names are planned twice", items=twice)

"""Prove, before the first byte is written, that a plan loses nothing and invents nothing.

Ops move elements and never compute (their laws are property tests), so coverage is a count: each output holds as
many elements as its sources give it, and the outputs together take every element of every source tensor that they
name exactly once. A tensor that is named by no output must have a fate with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from math import prod

from ckptkit.errors import CoverageError, InternalError
from ckptkit.formats.base import Checkpoint
from ckptkit.mapping.expr import Expr, Leaf
from ckptkit.plan.plan import Plan
from ckptkit.report import tensors


def taken(expr: Expr) -> Iterable[tuple[Leaf, int]]:
    """Return (leaf, number of its elements that `expr` holds) for each leaf of `expr`, from left to right."""
    if isinstance(expr, Leaf):
        return ((expr, prod(expr.shape)),)
    found: list[tuple[Leaf, int]] = []
    rest: list[tuple[Expr, int]] = [(expr, prod(expr.shape))]  # the last one is the next to visit
    while rest:
        part, size = rest.pop()
        if isinstance(part, Leaf):
            found.append((part, size))
        elif len(part.children) == 1:
            rest.append((part.children[0], size))
        else:
            rest.extend([(child, prod(child.shape)) for child in reversed(part.children)])
    return found


def prove(plan: Plan, source: Checkpoint) -> None:
    """Raise unless every output element has one source element and every source element one use or a fate."""
    unused: dict[str, int] = {}  # how many elements of each source tensor
    for output in plan.outputs:
        missing = prod(output.spec.shape)
        for leaf, count in taken(output.expr):
            name, shape = leaf.name, leaf.shape
            if output.inputs[name].shape != shape:
                raise InternalError(f"`{name}` is stored as {output.inputs[name].shape} but planned as {shape}")
            missing -= count
            unused[name] = unused.get(name, prod(shape)) - count
        if missing:
            raise InternalError(f"`{output.spec.name}` would not be filled exactly by its sources")
    uneven = _uneven(plan, {name: count for name, count in unused.items() if count})
    if uneven:
        raise CoverageError(
            tensors(len(uneven), "of the source", "of the source") + " would not be used exactly once",
            items=uneven,
            why="the table names one tensor twice, or only a part of a fused one",
            hint="check the rows that name these tensors",
        )
    _every_output_has_its_name(plan)
    _every_source_has_a_fate(plan, source, unused.keys())


def _uneven(plan: Plan, unused: Mapping[str, int]) -> list[str]:
    """Return a line for each source tensor that is not used once, given how many of its elements are not (or again)."""
    sizes = {n: info.num_elements for o in plan.outputs for n, info in o.inputs.items()} if unused else {}
    return [f"{name}: {sizes[name] - count} of {sizes[name]} elements used" for name, count in unused.items()]


def _every_output_has_its_name(plan: Plan) -> None:
    names = [output.spec.name for output in plan.outputs]
    if len(set(names)) < len(names):
        twice = [name for name, count in Counter(names).items() if count > 1]
        raise InternalError(f"{len(twice)} output names are planned twice", items=twice)


def _every_source_has_a_fate(plan: Plan, source: Checkpoint, used: Set[str]) -> None:
    fates = {fate.name for fate in (*plan.ignored, *plan.dropped, *plan.unmapped)}
    lost = [name for name in source.tensors if name not in used and name not in fates]
    if lost:  # but for those that are read under the name of their tied twin
        read = {(info.file, info.extents) for output in plan.outputs for info in output.inputs.values()}
        lost = [n for n in lost if (source.tensors[n].file, source.tensors[n].extents) not in read]
    if lost:
        raise InternalError(f"{len(lost)} source tensors have neither a use nor a fate", items=lost)
    if both := used & fates:
        raise InternalError(f"{len(both)} source tensors are both used and passed over", items=sorted(both))

"""Prove, before the first byte is written, that a plan loses nothing and invents nothing.

Ops move elements and never compute (their laws are property tests), so coverage is a count: each output holds as
many elements as its sources give it, and the outputs together take every element of every source tensor that they
name exactly once. A tensor that is named by no output must have a fate with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from math import prod

from ckptkit.errors import CoverageError, InternalError
from ckptkit.formats.base import Checkpoint
from ckptkit.mapping.expr import Expr, Leaf, Node
from ckptkit.mapping.ops import Pad
from ckptkit.plan.plan import OutputTensor, Plan
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
        elif isinstance(part.op, Pad):
            rest.append((part.children[0], size - padding(part)))
        elif len(part.children) == 1:
            rest.append((part.children[0], size))
        else:
            rest.extend([(child, prod(child.shape)) for child in reversed(part.children)])
    return found


def padding(expr: Expr) -> int:
    """Return how many elements of a tensor are declared padding; only its outermost op pads."""
    if isinstance(expr, Leaf) or not isinstance(expr.op, Pad):
        return 0
    return prod(expr.shape) - prod(expr.children[0].shape)


def without_padding(expr: Expr) -> Expr:
    """Return a tensor without the padding that its outermost op adds."""
    return expr.children[0] if isinstance(expr, Node) and isinstance(expr.op, Pad) else expr


def prove(
    wholes: Sequence[OutputTensor], plan: Plan, source: Checkpoint, padded: Mapping[str, int] | None = None
) -> None:
    """Raise unless every element of `wholes` has one source element and every source element one use or a fate.

    `padded` is how many elements of a source tensor are padding, which may be left behind. That the plan's outputs hold
    `wholes` exactly is proved where they are cut (`shard.py`), that shards make whole tensors where they are joined.
    """
    unused: dict[str, int] = {}  # how many elements of each source tensor
    for whole in wholes:
        spec, expr, inputs = whole.spec, whole.expr, whole.inputs
        if isinstance(expr, Leaf) and spec.shape == expr.shape == inputs[expr.name].shape and expr.name not in unused:
            unused[expr.name] = 0  # most of a model: the whole of a tensor, of which nothing is used yet
            continue
        missing = prod(spec.shape) - padding(expr)
        for leaf, count in taken(expr):
            name, shape = leaf.name, leaf.shape
            if inputs[name].shape != shape:
                raise InternalError(f"`{name}` is stored as {inputs[name].shape} but planned as {shape}")
            missing -= count
            unused[name] = unused.get(name, prod(shape)) - count
        if missing:
            raise InternalError(f"`{spec.name}` would not be filled exactly by its sources")
    left = padded or {}
    uneven = _uneven(wholes, {name: count for name, count in unused.items() if count and count != left.get(name, 0)})
    if uneven:
        raise CoverageError(
            tensors(len(uneven), "of the source", "of the source") + " would not be used exactly once",
            items=uneven,
            why="the table names one tensor twice, or only a part of a fused one",
            hint="check the rows that name these tensors",
        )
    _every_output_has_its_name(plan)
    _every_source_has_a_fate(plan, source, unused.keys(), wholes)


def _uneven(wholes: Sequence[OutputTensor], unused: Mapping[str, int]) -> list[str]:
    """Return a line for each source tensor that is not used once, given how many of its elements are not (or again)."""
    sizes = {n: info.num_elements for whole in wholes for n, info in whole.inputs.items()} if unused else {}
    return [f"{name}: {sizes[name] - count} of {sizes[name]} elements used" for name, count in unused.items()]


def _every_output_has_its_name(plan: Plan) -> None:
    names = [(output.file, output.spec.name) for output in plan.outputs]
    if len(set(names)) < len(names):
        twice = [name for (_, name), count in Counter(names).items() if count > 1]
        raise InternalError(f"{len(twice)} output names are planned twice", items=twice)


def _every_source_has_a_fate(plan: Plan, source: Checkpoint, used: Set[str], wholes: Sequence[OutputTensor]) -> None:
    fates = {fate.name for fate in (*plan.ignored, *plan.dropped, *plan.unmapped)}
    lost = [name for name in source.tensors if name not in fates] if source.tensors.keys() - used else []
    lost = [name for name in lost if name not in used]
    if lost:  # but for those that are read under the name of their tied twin
        read = {info.name for whole in wholes for info in whole.inputs.values()}
        lost = [name for name in lost if name not in read]
    if lost:
        raise InternalError(f"{len(lost)} source tensors have neither a use nor a fate", items=lost)
    if both := used & fates:
        raise InternalError(f"{len(both)} source tensors are both used and passed over", items=sorted(both))

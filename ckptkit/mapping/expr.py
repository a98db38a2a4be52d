"""A tensor as a tree of ops over named tensors: shape, pull, evaluation, composition.

An expression is a value. Its leaves are tensors of the side it reads (their whole shapes known), its nodes are ops.
What does not live here: where a leaf's bytes are (the planner knows) and which expressions exist (`rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ckptkit.errors import CoverageError, UsageError
from ckptkit.mapping.op import ANY, Array, Op
from ckptkit.mapping.ops import Concat, Deinterleave, Index, Pad, Slice, Transpose
from ckptkit.types import Region, Shape, value


@value
class Leaf:
    """A tensor by name, whole."""

    name: str
    shape: Shape


@value
class Node:
    """`op` applied to `children`; build it with `node`, which computes `shape`."""

    op: Op
    children: tuple[Expr, ...]
    shape: Shape


Expr: TypeAlias = Leaf | Node
Read: TypeAlias = Callable[[Leaf, Region], Array]


def node(op: Op, children: Sequence[Expr]) -> Expr:
    """Return `op` of `children`, or less where ops undo one another; raise CoverageError on shapes that misfit."""
    if op.arity not in (ANY, len(children)):
        raise CoverageError(f"`{type(op).__name__}` takes {op.arity} tensors, not {len(children)}")
    shape = op.out_shape([child.shape for child in children])
    first = children[0]
    if len(children) == 1 and _changes_nothing(op, first.shape):
        return first
    if isinstance(first, Node):
        simpler = _part_of_join(op, first) if len(children) == 1 else None
        if simpler is None:
            simpler = _join_of_parts(op, children)
        if simpler is not None and simpler.shape == shape:
            return simpler
    return Node(op, tuple(children), shape)


def pull(expr: Expr, region: Region) -> list[tuple[Leaf, Region]]:
    """Return the leaves that `region` of `expr` needs, in order, each with its box; a leaf can occur twice.

    Leaves that give nothing to the region are left out. Raises UsageError when the region cuts a group.
    """
    found: list[tuple[Leaf, Region]] = []
    _pull(expr, region, found)
    return found


def evaluate(expr: Expr, region: Region, read: Read) -> Array:
    """Return `region` of `expr` as an array, reading each leaf's box with `read`."""
    if not region.size:
        first = leaves(expr)[0]
        nothing = read(first, Region((0,) * len(first.shape), (0,) * len(first.shape)))
        return np.empty(region.shape, nothing.dtype)
    if isinstance(expr, Leaf):
        return read(expr, region)
    shapes = [child.shape for child in expr.children]
    pieces = expr.op.pieces(region, shapes)
    value = _apply(expr, pieces[0], shapes, read)
    if len(pieces) == 1:
        return value
    out = np.empty(region.shape, value.dtype)
    out[pieces[0].relative_to(region.start).slices()] = value
    for piece in pieces[1:]:
        out[piece.relative_to(region.start).slices()] = _apply(expr, piece, shapes, read)
    return out


def granules(expr: Expr) -> tuple[int, ...]:
    """Return one number per axis: a region whose bounds are multiples of them can be pulled."""
    if isinstance(expr, Leaf):
        return (1,) * len(expr.shape)
    return expr.op.lift([granules(c) for c in expr.children], [c.shape for c in expr.children])


def aligned(expr: Expr, region: Region) -> Region:
    """Return `region`, or where it cuts a group the least box around it that can be pulled."""
    try:
        pull(expr, region)
    except UsageError:
        steps = granules(expr)
        start = tuple(a // g * g for a, g in zip(region.start, steps, strict=True))
        stop = (min(-(-b // g) * g, size) for b, g, size in zip(region.stop, steps, expr.shape, strict=True))
        return Region(start, tuple(stop))
    return region


def leaves(expr: Expr) -> tuple[Leaf, ...]:
    """Return the leaves of `expr` from left to right."""
    if isinstance(expr, Leaf):
        return (expr,)
    found: list[Leaf] = []
    rest: list[Expr] = [expr]  # the last one is the next to visit
    while rest:
        first = rest.pop()
        if isinstance(first, Leaf):
            found.append(first)
        else:
            rest.extend(reversed(first.children))
    return tuple(found)


def renamed(expr: Expr, old: str, new: str) -> Expr:
    """Return `expr` with `old` replaced by `new` in the name of each leaf."""
    if isinstance(expr, Leaf):
        return Leaf(expr.name.replace(old, new), expr.shape)
    return Node(expr.op, tuple([renamed(child, old, new) for child in expr.children]), expr.shape)


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """Return `expr` with each leaf that `values` names replaced; raise CoverageError when a shape differs."""
    if isinstance(expr, Leaf):
        value = values.get(expr.name, expr)
        if value.shape != expr.shape:
            raise CoverageError(f"`{expr.name}` has shape {expr.shape} on one side and {value.shape} on the other")
        return value
    children = [substitute(child, values) for child in expr.children]
    if all(isinstance(child, Leaf) for child in children):
        return Node(expr.op, tuple(children), expr.shape)  # what `node` would return: ops undo only other ops
    return node(expr.op, children)


def invert(expr: Expr, target: Expr) -> list[tuple[Leaf, Expr]]:
    """Return, for each leaf of `expr` from left to right, that leaf as an expression of `target`.

    `target` stands for the value of `expr`. Raises CoverageError when `expr` drops elements.
    """
    if isinstance(expr, Leaf):
        return [(expr, target)]
    shapes = [child.shape for child in expr.children]
    found: list[tuple[Leaf, Expr]] = []
    for i, child in enumerate(expr.children):
        found += invert(child, node(expr.op.part(i, shapes), [target]))
    return found


def _pull(expr: Expr, region: Region, found: list[tuple[Leaf, Region]]) -> None:
    if not region.size:
        return
    if isinstance(expr, Leaf):
        found.append((expr, region))
        return
    shapes = [child.shape for child in expr.children]
    for piece in expr.op.pieces(region, shapes):
        for number, box in expr.op.needed(piece, shapes):
            _pull(expr.children[number], box, found)


def _apply(expr: Node, region: Region, shapes: Sequence[Shape], read: Read) -> Array:
    """Return `region` of a node, one that its op can pull at once."""
    boxes = expr.op.pull(region, shapes)
    padding = not any(box.size for box in boxes)  # then even an empty read is needed, to learn the dtype
    arrays = [
        evaluate(child, box, read) if box.size or padding else np.empty(box.shape, np.uint8)
        for child, box in zip(expr.children, boxes, strict=True)
    ]
    return expr.op.within(region).apply(arrays)


def _changes_nothing(op: Op, shape: Shape) -> bool:
    """Say whether unary `op` returns a tensor of `shape` as it is."""
    match op:
        case Concat():
            return True
        case Slice(axis, start, stop):
            return (start, stop) == (0, shape[axis])
        case Pad(axis, to):
            return to == shape[axis]
        case Transpose(perm):
            return perm == tuple(range(len(shape)))
        case _:
            return False


def _part_of_join(op: Op, joined: Node) -> Expr | None:
    """Return the child of `joined` that unary `op` takes out again, if it does."""
    if joined.op.is_part:
        return None
    shapes = [child.shape for child in joined.children]
    known = op.index if isinstance(op, Index | Deinterleave) else None
    for i in range(len(shapes)) if known is None else [known]:
        if i < len(shapes) and joined.op.part(i, shapes) == op:
            return joined.children[i]
    return None


def _join_of_parts(op: Op, children: Sequence[Expr]) -> Expr | None:
    """Return the tensor whose parts, all of them and in order, `op` joins, if it does."""
    first = children[0]
    if op.is_part or not isinstance(first, Node) or len(first.children) != 1:
        return None
    whole, shapes = first.children[0], [child.shape for child in children]
    for i, child in enumerate(children):
        if not isinstance(child, Node) or child.children != (whole,) or child.op != op.part(i, shapes):
            return None
    return whole

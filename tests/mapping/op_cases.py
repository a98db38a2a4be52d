"""Random ops with shapes that fit them, random legal regions, and arrays whose every element is its own number."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from hypothesis import strategies as st

from ckptkit.mapping.expr import Expr, Leaf, Node, node
from ckptkit.mapping.op import Array, Op
from ckptkit.mapping.ops import (
    Concat,
    Interleave,
    Merge,
    Pad,
    RopePermute,
    Split,
    Stack,
    Transpose,
)
from ckptkit.types import Region, Shape

Case = tuple[Op, list[Shape]]
SIZES = st.integers(1, 5)
CARRIERS = ("uint16", "uint32", "uint64")


def numbered(shapes: Sequence[Shape], dtype: str = "uint16") -> list[Array]:
    """Return arrays of `shapes` that together hold 1, 2, 3, ... (0 is left for padding)."""
    arrays, first = [], 1
    for shape in shapes:
        arrays.append(np.arange(first, first + prod(shape)).astype(dtype).reshape(shape))
        first += prod(shape)
    return arrays


@st.composite
def op_cases(draw: st.DrawFn) -> Case:
    """Draw one op of any kind, and the shapes of its inputs."""
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["concat", "interleave", "stack", "transpose", "merge", "split", "pad", "rope"]))
    if kind == "concat":
        sizes = draw(st.lists(SIZES, min_size=1, max_size=3))
        return Concat(axis), [_with(shape, axis, size) for size in sizes]
    if kind == "interleave":
        rows = tuple(draw(st.lists(SIZES, min_size=2, max_size=3)))
        groups = draw(SIZES)
        return Interleave(axis, rows), [_with(shape, axis, groups * r) for r in rows]
    if kind == "stack":
        count = draw(st.integers(1, 12))
        return Stack(draw(st.integers(0, len(shape))), count), [shape] * count
    return draw(unary_ops(shape, axis, kind))


@st.composite
def unary_ops(draw: st.DrawFn, shape: Shape, axis: int, kind: str) -> Case:
    """Draw a unary op of `kind`, and its input's shape (`shape`, changed on `axis` where the op needs it)."""
    if kind == "transpose":
        return Transpose(tuple(draw(st.permutations(range(len(shape)))))), [shape]
    if kind == "merge":
        return Merge(axis), [(*shape[:axis], draw(SIZES), *shape[axis:])]
    inner = draw(SIZES)
    if kind == "split":
        return Split(axis, inner), [_with(shape, axis, inner * shape[axis])]
    if kind == "pad":
        return Pad(axis, shape[axis] + draw(st.integers(0, 3))), [shape]
    before, half, after = draw(st.integers(0, 2)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    block = before + 2 * half + after
    to = draw(st.sampled_from(["pairs", "halves"]))
    return RopePermute(axis, block, before, before + 2 * half, to), [_with(shape, axis, block * shape[axis])]


@st.composite
def regions(draw: st.DrawFn, shape: Shape, granules: Shape) -> Region:
    """Draw a region whose bounds are multiples of the granules."""
    bounds = [
        sorted(draw(st.lists(st.integers(0, n // g), min_size=2, max_size=2)))
        for n, g in zip(shape, granules, strict=True)
    ]
    return Region(
        tuple(a * g for (a, _), g in zip(bounds, granules, strict=True)),
        tuple(b * g for (_, b), g in zip(bounds, granules, strict=True)),
    )


@st.composite
def chains(draw: st.DrawFn) -> tuple[Expr, Expr]:
    """Draw a tree of ops over leaves, twice: simplified by `node`, and op by op as drawn.

    The leaves are a grid of tensors; each step joins neighbours or changes all of them alike.
    """
    groups, rows = draw(SIZES), tuple(draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)))
    width, copies = draw(SIZES), draw(st.integers(1, 11))
    columns: list[list[Expr]] = [
        [Leaf(f"t.{i}.{j}", (groups * r, width)) for j in range(copies)] for i, r in enumerate(rows)
    ]
    join: Op = Interleave(0, rows) if draw(st.booleans()) else Concat(0)
    if draw(st.booleans()):
        plain: Expr = _raw(Stack(0, copies), [_raw(join, [c[j] for c in columns]) for j in range(copies)])
        neat: Expr = node(Stack(0, copies), [node(join, [c[j] for c in columns]) for j in range(copies)])
    else:
        plain = _raw(_deeper(join), [_raw(Stack(0, copies), column) for column in columns])
        neat = node(_deeper(join), [node(Stack(0, copies), column) for column in columns])
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["transpose", "merge", "split", "pad"]))
        op = draw(_fitting(plain.shape, kind))
        if op is not None:
            plain, neat = _raw(op, [plain]), node(op, [neat])
    return neat, plain


@st.composite
def _fitting(draw: st.DrawFn, shape: Shape, kind: str) -> Op | None:
    axis = draw(st.integers(0, len(shape) - 1))
    if kind == "transpose":
        return Transpose(tuple(draw(st.permutations(range(len(shape))))))
    if kind == "merge":
        return Merge(axis) if axis + 1 < len(shape) else None
    if kind == "pad":
        return Pad(axis, shape[axis] + draw(st.integers(0, 2)))
    return Split(axis, draw(st.sampled_from([n for n in range(1, shape[axis] + 1) if shape[axis] % n == 0])))


def _deeper(join: Op) -> Op:
    return Interleave(join.axis + 1, join.rows) if isinstance(join, Interleave) else Concat(1)


def _raw(op: Op, children: list[Expr]) -> Node:
    return Node(op, tuple(children), op.out_shape([c.shape for c in children]))


def _with(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])

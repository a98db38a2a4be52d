"""What B's tensors are to A's, where both are at hand: elements are moved, taken from elsewhere, or other ones.

No arithmetic of the network is in it: values are compared bit for bit, but for an offset or a factor. It says which
tensors differ, and names what no hypothesis about the part as a whole can find.

Shapes: R rows, C columns, D a head's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckptkit.verification.causes_case import Case
from ckptkit.verification.causes_layout import words
from ckptkit.verification.layer_weights import EXPERTS, Index
from ckptkit.verification.runners.job import Floats

_UNITS = 4 * 2.0**-24  # a sum or a product of two float32 numbers, and its inverse, each rounded once


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which B is not A. `name` is the kind of difference, and is empty where nothing explains it."""

    field: str
    name: str
    text: str


def differences(case: Case) -> list[Difference]:
    """Return the fields of the part in which B's weights differ from A's; none where A's are not at hand."""
    right, wrong = case.right, case.wrong.weights
    if right is None:
        return []
    used = [field for field in {**right, **wrong} if field not in unused(case)]
    return [found for field in used if (found := _difference(case, field, right.get(field), wrong.get(field)))]


def unused(case: Case) -> tuple[str, ...]:
    """Return the fields that come with a part and do not enter it."""
    return {
        "attention": ("mlp_norm",),
        "mlp": ("attention_norm",),
        "norm": ("attention_norm", "mlp_norm"),
        "embedding": ("head", "own_head"),
        "logits": ("embedding", "own_head"),
    }[case.place.part]


def _difference(case: Case, field: str, a: Floats | None, b: Floats | None) -> Difference | None:
    if a is None or b is None:
        if not any(values is not None and values.any() for values in (a, b)):
            return None
        owner = "B" if a is None else "A"
        return Difference(
            field, "bias too many" if a is None else "bias missing", f"{words((field,))}: only {owner} has it"
        )
    if a.shape != b.shape:
        return Difference(field, "", f"{words((field,))} is {b.shape}, and A's {a.shape}")
    if _same(a, b):
        return None
    name, text = next(_relations(case, field, a, b), ("", _by_how_much(a, b)))
    return Difference(field, name, f"{words((field,))} {text}")


def _relations(case: Case, field: str, a: Floats, b: Floats) -> Iterator[tuple[str, str]]:
    """Yield what B's values are to A's, of the same shape: the kind and the words for it."""
    is_bias = field.endswith("_bias")
    if not b.any():
        yield "bias missing" if is_bias else "all zero", "is all zero, and A's is not"
    if a.ndim > 1 and a.shape[-1] == a.shape[-2] and _same(np.swapaxes(a, -1, -2), b):
        yield "transposed", "is A's, transposed"
    for axis in range(a.ndim):
        order = _order(a, b, axis)
        if order is not None:
            yield _moved(case, field, order, axis, a.ndim)
    if a.ndim == 1 and a.size > 1:
        yield from _numbers(is_bias, a, b)
    yield from _taken(case, field, b)


def _order(a: Floats, b: Floats, axis: int) -> Index | None:
    """Return which slice of A along an axis each of B's is, bit for bit; None unless each is another one."""
    places: dict[bytes, list[int]] = {}
    for index, part in enumerate(np.moveaxis(a, axis, 0)):
        places.setdefault(part.tobytes(), []).append(index)
    found = []
    for part in np.moveaxis(b, axis, 0):
        left = places.get(part.tobytes())
        if not left:
            return None
        found.append(left.pop(0))
    return np.array(found, np.intp)


def _moved(case: Case, field: str, order: Index, axis: int, axes: int) -> tuple[str, str]:
    """Return the words for rows, columns, heads or experts in another order."""
    count, size = len(order), case.facts_b.head_dim
    if field in EXPERTS and axis == 0:
        return "expert order", f"has A's experts in another order ({_shown(order)})"
    heads = order.reshape(-1, size) if count % size == 0 else order.reshape(-1, 1)
    whole_heads = size > 1 and heads.shape[1] == size and bool((heads == heads[:, :1] + np.arange(size)).all())
    of_heads = (field.removesuffix("_bias") in ("q", "k", "v") and axis == 0) or (field == "o" and axis == axes - 1)
    if of_heads and whole_heads and not (heads[:, 0] % size).any():
        return "heads permuted", f"has A's heads in another order ({_shown(heads[:, 0] // size)})"
    name = (
        "bias order"
        if field.endswith("_bias")
        else "rows permuted"
        if axis < axes - 1 or axes == 1
        else "columns permuted"
    )
    kind = "rows" if name != "columns permuted" else "columns"
    step = int(order[0]) % count
    if np.array_equal(order, (np.arange(count) + step) % count):
        by = step if step <= count // 2 else step - count
        name = "bias shifted" if field.endswith("_bias") else name
        return name, f"has A's {kind} shifted by {-by}"
    return name, f"has A's {kind} in another order"


def _shown(order: Index) -> str:
    first = ", ".join(map(str, order[:8]))
    return first + (", ..." if len(order) > 8 else "")


def _numbers(is_bias: bool, a: Floats, b: Floats) -> Iterator[tuple[str, str]]:
    """Yield a vector that is A's plus a constant, or times one."""
    one, two = a.astype(np.float64), b.astype(np.float64)
    offset, room = float(np.median(two - one)), _UNITS * float(np.abs(one).max() + np.abs(two).max())
    if np.abs(two - one - offset).max() <= room < abs(offset):
        yield "bias shifted" if is_bias else "offset", f"is A's plus {offset:.6g}"
    squares = float(one @ one)
    factor = float(one @ two) / squares if squares else 0.0
    if factor and np.abs(two - factor * one).max() <= room:
        yield "scaled", f"is A's times {factor:.6g}"


def _taken(case: Case, field: str, b: Floats) -> Iterator[tuple[str, str]]:
    """Yield another field of A's layer, or the same field of another layer, that B's values are."""
    for other, values in (case.right or {}).items():
        if other != field and values.shape == b.shape and _same(values, b):
            yield "taken from elsewhere", f"is A's {words((other,))}"
    side, place = case.evidence.weights_a, case.place
    if side is None or place.part not in ("attention", "mlp"):
        return
    for layer in range(case.facts_a.layers):
        if layer == place.layer:
            continue
        there = side.field(place.part, layer, field)
        if there is not None and there.shape == b.shape and _same(there, b):
            yield "layers exchanged", f"is that of A's layer {layer}"


def _by_how_much(a: Floats, b: Floats) -> str:
    off = np.abs(a.astype(np.float64) - b)
    share = np.count_nonzero(a != b) / a.size
    largest = float(np.abs(a).max()) or 1.0
    return f"differs from A's in {share:.1%} of its elements, by up to {off.max() / largest:.1e} of the largest"


def _same(a: Floats, b: Floats) -> bool:
    """Tell whether all values are equal; zeros of both signs are."""
    return bool(np.array_equal(a, b))

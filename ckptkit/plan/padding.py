"""Is the padding zero that is left behind: rows beyond the vocabulary, which a conversion cuts and a comparison skips?

Training fills such rows of a head. What does not live here: which tensors are padded (`mapping/pad.py`), and the
padding of B in a comparison, which is compared with zeros.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ckptkit.formats.io import FilePool, read_region
from ckptkit.mapping.expr import Leaf, Node
from ckptkit.mapping.ops import Pad
from ckptkit.mapping.rules import RuleSet
from ckptkit.plan.join import Joined
from ckptkit.plan.pair import Finding, Pairing
from ckptkit.types import Region, TensorInfo, item_bytes

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Filled:
    """Padding of the tensor `name`, from row `first` on: of its `total` elements `count` are not zero, bit for bit."""

    name: str
    first: int
    count: int
    total: int


def filled_padding(
    rules: RuleSet, names: Container[str], tensors: Mapping[str, TensorInfo], joined: Joined | None
) -> Iterator[Filled]:
    """Yield the padding that is not all zero, of those of `tensors` called `names`; reads it, a part at a time."""
    with FilePool() as pool:
        for rule in rules.rules:
            if rule.target not in names or not isinstance(rule.expr, Node) or not isinstance(rule.expr.op, Pad):
                continue
            axis, info = rule.expr.op.axis, tensors[rule.target]
            padding = Region.whole(info.shape).with_axis(axis, rule.expr.children[0].shape[axis], info.shape[axis])
            count = sum(_not_zero(info, padding, joined, pool))
            if count:
                yield Filled(rule.target, padding.start[axis], count, padding.size)


def check_padding(pairing: Pairing, rules: RuleSet, tensors: Mapping[str, TensorInfo], joined: Joined | None) -> None:
    """Add a finding to `pairing` for each of A's `tensors` with a bit set in padding that no output takes whole."""
    cropped = {name for output in pairing.outputs if not isinstance(output.expr, Leaf) for name in output.inputs}
    for found in filled_padding(rules, cropped, tensors, joined):
        text = f"padding is not zero: {found.count} of {found.total} elements in A from row {found.first} on"
        pairing.findings.append(Finding("padding", found.name, text))


def _not_zero(info: TensorInfo, padding: Region, joined: Joined | None, pool: FilePool) -> Iterator[int]:
    """Yield the number of elements of pieces of `padding`, as they are stored, that are not zero, bit for bit."""
    parts = [(Region.whole(info.shape), info)] if joined is None else joined.parts_of(info.name)
    for region, part in parts:
        common = region.common(padding)
        if not common.size:
            continue
        first, last = common.start[0], common.stop[0]
        rows = max(1, _CHUNK_BYTES // (common.size // (last - first) * item_bytes(part.dtype)))
        for start in range(first, last, rows):
            piece = common.with_axis(0, start, min(start + rows, last)).relative_to(region.start)
            yield int(np.count_nonzero(read_region(part, piece, pool=pool)))

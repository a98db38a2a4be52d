"""Is the padding zero that a comparison leaves out: the rows of A beyond its vocabulary, which have no partner in B?

What does not live here: which tensors are padded (`mapping/pad.py`), and B's padding, which is compared with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ckptkit.formats.io import FilePool, read_region
from ckptkit.mapping.expr import Leaf, Node
from ckptkit.mapping.ops import Pad
from ckptkit.mapping.rules import RuleSet
from ckptkit.plan.join import Joined
from ckptkit.plan.pair import Finding, Pairing
from ckptkit.types import Region, TensorInfo


def check_padding(pairing: Pairing, rules: RuleSet, tensors: Mapping[str, TensorInfo], joined: Joined | None) -> None:
    """Add a finding to `pairing` for each of A's `tensors` with a bit set in padding that no output takes whole."""
    cropped = {name for output in pairing.outputs if not isinstance(output.expr, Leaf) for name in output.inputs}
    with FilePool() as pool:
        for rule in rules.rules:
            if rule.target not in cropped or not isinstance(rule.expr, Node) or not isinstance(rule.expr.op, Pad):
                continue
            axis, info = rule.expr.op.axis, tensors[rule.target]
            padding = Region.whole(info.shape).with_axis(axis, rule.expr.children[0].shape[axis], info.shape[axis])
            count = sum(_not_zero(info, padding, joined, pool))
            if count:
                text = f"padding is not zero: {count} of {padding.size} elements in A from row {padding.start[axis]} on"
                pairing.findings.append(Finding("padding", rule.target, text))


def _not_zero(info: TensorInfo, padding: Region, joined: Joined | None, pool: FilePool) -> Iterator[int]:
    """Yield the number of elements of each stored part of `padding` that are not zero, bit for bit."""
    parts = [(Region.whole(info.shape), info)] if joined is None else joined.parts_of(info.name)
    for region, part in parts:
        common = region.common(padding)
        if common.size:
            yield int(np.count_nonzero(read_region(part, common.relative_to(region.start), pool=pool)))

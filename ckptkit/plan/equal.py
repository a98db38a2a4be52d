"""Are two tensors equal, however they are stored? For tied twins, of which a plan keeps one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ckptkit.formats.io import FilePool, read_region
from ckptkit.mapping.expr import Expr, Leaf, evaluate, leaves
from ckptkit.mapping.op import Array
from ckptkit.types import Region, TensorInfo, item_bytes

_BAND_BYTES = 4 << 20


def equal(one: Expr, two: Expr, inputs: Mapping[str, TensorInfo]) -> bool:
    """Say whether two expressions over `inputs` have the same shape, dtype and elements; reads both once."""
    if one.shape != two.shape or len({inputs[leaf.name].dtype for leaf in (*leaves(one), *leaves(two))}) > 1:
        return False
    whole = Region.whole(one.shape)
    with FilePool() as pool:

        def read(leaf: Leaf, region: Region) -> Array:
            return read_region(inputs[leaf.name], region, pool=pool)

        return all(np.array_equal(evaluate(one, band, read), evaluate(two, band, read))
                   for band in _bands(whole, item_bytes(inputs[leaves(one)[0].name].dtype)))  # fmt: skip


def _bands(whole: Region, width: int) -> list[Region]:
    """Cut a region into bands of rows that fit in memory."""
    if not whole.stop:
        return [whole]
    rows = whole.stop[0]
    band = max(1, _BAND_BYTES * rows // max(1, whole.size * width))
    return [whole.with_axis(0, start, min(start + band, rows)) for start in range(0, rows, band)]

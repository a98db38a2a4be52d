"""Take weights in: the sink that keeps what a plan makes in memory, as float32 by name.

What does not live here: the plan itself (`commands/resume_train.py`); what a stopped run left (`step_scan.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import CoverageError
from ckptkit.execute import execute
from ckptkit.plan.plan import Plan
from ckptkit.train.arrays import Floats
from ckptkit.types import DTYPES, Region, TensorSpec

Array = NDArray[Any]


class MemorySink:
    """A sink whose outputs become arrays: each of its dtype's carrier, in C order."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = tuple(specs)
        self._arrays: list[Array] = [np.empty(spec.shape, DTYPES[spec.dtype].carrier) for spec in specs]
        self._bytes = [array.reshape(-1).view(np.uint8).data for array in self._arrays]

    @property
    def arrays(self) -> dict[str, Array]:
        return {spec.name: array for spec, array in zip(self._specs, self._arrays, strict=True)}

    def put(self, output: int, offset: int, data: memoryview) -> None:
        """Take bytes of an output, from byte `offset` on."""
        self._bytes[output][offset : offset + len(data)] = data

    def put_batch(self, outputs: Sequence[int], data: memoryview, digests: Sequence[str | None]) -> None:
        """Take whole tensors whose bytes follow one another in `data`."""
        for output in outputs:
            size = self._specs[output].num_bytes
            self.put(output, 0, data[:size])
            data = data[size:]

    def put_region(self, output: int, region: Region, values: Array) -> None:
        """Take a box of an output."""
        self._arrays[output][region.slices()] = values.reshape(region.shape)

    def finish(self, output: int, digest: str | None) -> None:
        """Do nothing: the arrays are complete by themselves."""


def load_weights(
    plan: Plan,
    *,
    workers: int = 2,
    source_digests: Mapping[str, str] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Floats]:
    """Return what `plan` makes, by name, as float32.

    `source_digests` are what the source's manifest promises: a tensor that is not as it was is a CorruptError. Raises
    CoverageError for an output that the plan leaves in another dtype than float32.
    """
    specs = [output.spec for output in plan.outputs]
    if odd := [f"{spec.name}  {spec.dtype}" for spec in specs if spec.dtype != "F32"]:
        raise CoverageError(
            f"{len(odd)} tensors are not numbers that can be trained",
            items=odd,
            hint="dequantise the model first",
        )
    sink = MemorySink(specs)
    execute(plan, sink, workers=workers, source_digests=source_digests, progress=progress)
    return {name: array.view(np.float32) for name, array in sink.arrays.items()}

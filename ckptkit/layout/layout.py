"""A layout: for each pipeline stage its devices, and how each of its tensors is cut over them.

Ranks count stage by stage: rank = stage * devices + device. Whatever a layout comes from (degrees, a run's YAML,
strategy files), it is this table in the end, so there is one way to cut and one way to join.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ckptkit.errors import UsageError
from ckptkit.types import TensorLayout

MAX_RANKS = 1 << 16  # far above every cluster: more are a slip of the pen, and would take hours to plan


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: the number of its devices, and the layout of each of its tensors by name."""

    devices: int
    tensors: Mapping[str, TensorLayout]


@dataclass(frozen=True)
class Layout:
    """All stages, in order; every stage has the same number of devices."""

    stages: tuple[Stage, ...]

    @property
    def devices(self) -> int:
        """The number of devices of one stage."""
        return self.stages[0].devices

    @property
    def num_ranks(self) -> int:
        return self.devices * len(self.stages)

    @cached_property
    def stages_of(self) -> Mapping[str, tuple[int, ...]]:
        """The stages that hold each tensor: more than one for a copy that the first and the last stage share."""
        found: dict[str, tuple[int, ...]] = {}
        for number, stage in enumerate(self.stages):
            for name in stage.tensors:
                found[name] = (*found.get(name, ()), number)
        return found

    def ranks_of(self, name: str) -> Iterator[tuple[int, int, TensorLayout]]:
        """Yield (rank, device in its stage, layout) for each rank that holds a part of the tensor `name`."""
        for number in self.stages_of.get(name, ()):
            stage = self.stages[number]
            for device in range(stage.devices):
                yield number * stage.devices + device, device, stage.tensors[name]


def replicated(num_axes: int, devices: int) -> TensorLayout:
    """Return the layout of a tensor that every device of a stage holds whole."""
    return TensorLayout((devices,), ((),) * num_axes)


def check_num_ranks(count: int) -> None:
    """Raise UsageError for more ranks than a layout may have."""
    if count > MAX_RANKS:
        raise UsageError(
            f"the layout has {count} ranks, and at most {MAX_RANKS} are allowed",
            why="no run has so many devices, and a plan has a file for each",
            hint="look at the degrees and at the number of devices: their product is the number of ranks",
        )

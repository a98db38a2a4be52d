"""The learning rate as a pure function of the step; there is no state that a restart could lose or apply twice.

With L the base rate, M the lowest, W the warm-up steps, T the total steps, and `step` the number of updates done before
this one (0 for the first update):

    step < W        L * (step + 1) / W                              a rise from L/W, above 0, to L
    otherwise       p = (step - W) / (T - W)                        0 at the end of the warm-up, 1 at T
      constant      L
      linear        L - (L - M) * p
      cosine        L - (L - M) * (1 - cos(pi * p)) / 2             Loshchilov and Hutter 2017, one cycle
    step >= T       M for cosine and linear, L for constant

T is the length of the schedule, wherever a run stops. The last update of a whole schedule is step T - 1, just above M.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol


class Schedule(Protocol):
    """The `schedule` section of a config."""

    @property
    def kind(self) -> Literal["cosine", "linear", "constant"]: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def min_lr(self) -> float: ...


def lr_at(schedule: Schedule, base_lr: float, step: int) -> float:
    """Return the learning rate of the update that comes after `step` updates.

    The same arguments give the same bits on one machine; another C library may round the cosine otherwise.
    """
    if step < 0:
        raise ValueError(f"a step is 0 or more, and this one is {step}")
    if step < schedule.warmup_steps:
        return base_lr * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return base_lr
    if step >= schedule.total_steps:
        return schedule.min_lr
    progress = (step - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps)
    fallen = progress if schedule.kind == "linear" else (1.0 - math.cos(math.pi * progress)) / 2.0
    # rounding may end an ulp below the lowest rate
    return max(schedule.min_lr, base_lr - (base_lr - schedule.min_lr) * fallen)

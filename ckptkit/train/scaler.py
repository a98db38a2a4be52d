"""The loss scale of float16: gradients are computed times it, so that small ones do not become 0.

A dynamic scale doubles after a number of updates without overflow and halves at each overflow, between 1 and 2 ** 24;
a static one stays. The update that overflowed is tried again with the same rows at the lower scale, so neither the step
nor the data moves. What does not live here: finding an overflow (`step.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ckptkit.errors import CorruptError, DivergedError

LOWEST, HIGHEST = 1.0, 2.0**24


@dataclass(slots=True)
class Scaler:
    """`scale` now; `counter` updates since it last changed; `skipped` overflows since the run began. None for
    `growth_interval` is a static scale."""

    scale: float = 1.0
    growth_interval: int | None = None
    counter: int = 0
    skipped: int = 0

    def good(self) -> None:
        """Count an update without overflow."""
        if self.growth_interval is None:
            return
        self.counter += 1
        if self.counter >= self.growth_interval:
            self.scale, self.counter = min(self.scale * 2, HIGHEST), 0

    def overflowed(self, step: int) -> None:
        """Halve the scale; DivergedError, with `step`, for a static one and at the lowest."""
        self.skipped += 1
        if self.growth_interval is None:
            raise DivergedError(
                f"a gradient of step {step} overflows float16 at the static loss scale {self.scale:g}",
                why="a static scale cannot give way",
                hint="set `precision.loss_scale: dynamic`, or a lower number, or `precision.compute: fp32`",
            )
        if self.scale <= LOWEST:
            raise DivergedError(
                f"a gradient of step {step} overflows float16 even at the loss scale {self.scale:g}",
                why="the gradients themselves are beyond 65504, which more scaling cannot help",
                hint="lower `optimizer.lr`, go back to an earlier checkpoint, or set `precision.compute: fp32`",
            )
        self.scale, self.counter = max(self.scale / 2, LOWEST), 0

    def state(self) -> dict[str, float | int]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "counter": self.counter, "skipped": self.skipped}

    def load(self, state: Mapping[str, float | int]) -> None:
        """Take what a checkpoint kept; a static scale stays that of the config. CorruptError for what is no state."""
        try:
            scale, counter, skipped = float(state["scale"]), int(state["counter"]), int(state["skipped"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError("the loss scale's state is not complete", why=str(error)) from error
        if not (math.isfinite(scale) and scale >= LOWEST and counter >= 0 and skipped >= 0):
            raise CorruptError(f"the loss scale's state makes no sense: {dict(state)}")
        if self.growth_interval is not None:
            self.scale, self.counter = scale, counter
        self.skipped = skipped


def make_scaler(compute: str, loss_scale: str | float, initial_scale: float, growth_interval: int) -> Scaler:
    """Return the scaler that a config's `precision` asks for; in float32 the scale is 1 and stays."""
    if compute != "fp16":
        return Scaler()
    if loss_scale == "dynamic":
        return Scaler(min(max(initial_scale, LOWEST), HIGHEST), growth_interval)
    return Scaler(float(loss_scale))

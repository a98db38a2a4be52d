"""One update: micro-batches, overflow, clipping, AdamW; and what to say when a number is none.

A global batch is cut in fixed slots of `micro_batch` rows. Each adds to the sum of cross entropies, and to a gradient
that is divided by the tokens of the whole batch from the start, in the order of the slots; so the update does not
depend on how tokens fall on them but for rounding. What does not live here: gradients of a slot (`net.py`), rows
(`batches.py`).

Shapes: R rows of the global batch, T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import DivergedError, UsageError
from ckptkit.train.arrays import Floats
from ckptkit.train.batches import StepData
from ckptkit.train.micro_batch import Slot
from ckptkit.train.net import Gradients, TrainNet
from ckptkit.train.optimizer import AdamW, AdamWSettings, trained_names
from ckptkit.train.processors import place_threads
from ckptkit.train.scaler import Scaler


@dataclass(frozen=True, slots=True)
class StepResult:
    """`loss` is the mean over the batch's `tokens`, a float32's value; `grad_norm` that of the gradient before
    clipping; `scale` the loss scale that the update was made with, `overflows` how often it was tried before."""

    loss: float
    grad_norm: float
    scale: float
    overflows: int
    tokens: int


class Trainer:
    """A network, its optimizer and its loss scale."""

    def __init__(self, net: TrainNet, settings: AdamWSettings, scaler: Scaler | None = None) -> None:
        net.train_only(trained_names(net.names, settings.freeze))
        self.net, self.scaler, self.optimizer = net, scaler or Scaler(), AdamW(net, settings)
        self.moments_begun = 0  # the update after which the moments were zero: bias correction counts from there

    def step(self, data: StepData, lr: float, micro_batch: int, recompute: frozenset[int] = frozenset()) -> StepResult:
        """Make the update that follows `data.step` updates.

        Raises UsageError for a batch without a token that counts, DivergedError when the loss or a gradient is no
        number, or overflows at every loss scale.
        """
        _check_tokens(data)
        overflows = 0
        while True:
            scale = self.scaler.scale
            loss, gradients = self._accumulate(data, scale, micro_batch, recompute)
            if not np.isfinite(loss):
                raise self._no_number("the loss", data, micro_batch)
            squares = self.optimizer.squares(gradients)
            norm = math.sqrt(sum(squares.tolist())) / scale
            if math.isfinite(norm):
                break
            if self.net.compute != "fp16":
                raise self._no_gradient(squares, data, micro_batch)
            del gradients
            self.scaler.overflowed(data.step + 1)
            overflows += 1
        factor = self.optimizer.clip_factor(norm) / scale
        self.optimizer.update(gradients, lr=lr, count=data.step + 1 - self.moments_begun, factor=factor)
        self.scaler.good()
        if self.net.mindspore.get_context("device_target") == "CPU":
            place_threads()
        return StepResult(float(loss), norm, scale, overflows, data.tokens)

    def evaluate(self, data: StepData, micro_batch: int) -> tuple[float, int]:
        """Return the sum of the tokens' cross entropies, without dropout, and the number of tokens."""
        total = np.float32(0)
        for slot in _slots(data, micro_batch):
            total = total + self.net.loss(slot)
        return float(total), data.tokens

    def snapshot(self) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Return copies of the weights, and of the moments."""
        return {name: self.net.get(name) for name in self.net.names}, self.optimizer.state()

    def state(self) -> dict[str, Floats]:
        """Return copies of weights and moments by name."""
        weights, moments = self.snapshot()
        return weights | moments

    def load(self, state: Mapping[str, Floats]) -> None:
        """Set weights and moments, all or some; KeyError for a name that is neither."""
        for name, values in state.items():
            if name in self.optimizer.moments:
                self.optimizer.put(name, values)
            else:
                self.net.put(name, values)

    def _accumulate(
        self, data: StepData, scale: float, micro_batch: int, recompute: frozenset[int]
    ) -> tuple[np.float32, Gradients]:
        """Return the loss, and its gradient times `scale`."""
        total, gradients = np.float32(0), None
        for slot in _slots(data, micro_batch):
            loss, gradients = self.net.gradients(slot, scale / data.tokens, recompute, gradients)
            total = total + loss
        return np.float32(total / np.float32(data.tokens)), gradients or {}

    def _no_gradient(self, squares: NDArray[np.float64], data: StepData, micro_batch: int) -> DivergedError:
        """Return the error about gradients: the first is the last in network order, where the backward pass begins."""
        odd = [name for name, square in zip(self.optimizer.names, squares, strict=True) if not math.isfinite(square)]
        own = [name for name in odd if name != self.net.dialect.embedding]  # a tied one is the head's, too
        name = (own or odd or [""])[-1]
        return self._no_number(f"the gradient of `{name}`" if odd else "the norm of the gradient", data, micro_batch)

    def _no_number(self, what: str, data: StepData, micro_batch: int) -> DivergedError:
        """Return the error about `what`, with the first part of the forward pass that is not finite."""
        where = next((part for part, fine in self._parts(data, micro_batch) if not fine), "")
        odd = [f"the parameter `{name}`" for name in self.net.names if not np.isfinite(self.net.get(name)).all()]
        outputs = [f"the output of {where}, the first of the forward pass"] if where else []
        return DivergedError(
            f"{what} is not finite at step {data.step + 1}",
            items=[*outputs, *odd] or ["every parameter, and every output of the forward pass, is finite"],
            why="an update with it would make the weights NaN; nothing was changed",
            hint="lower `optimizer.lr` or lengthen `schedule.warmup_steps`, set `optimizer.clip_norm`, look at the "
            "rows of this step (`log.sample_ids`); then go on from the last checkpoint",
        )

    def _parts(self, data: StepData, micro_batch: int) -> Iterator[tuple[str, bool]]:
        """Yield the parts of the network in order, and whether their outputs are finite."""
        for slot in _slots(data, micro_batch):
            for part, values in self.net.values(slot):
                yield part, bool(np.isfinite(values).all())


def _check_tokens(data: StepData) -> None:
    if data.tokens == 0:
        raise UsageError(
            f"no token of step {data.step + 1} counts: every row's loss is masked",
            why="the mean loss of no tokens is no number",
            hint="prompts may fill the rows and leave no room for responses: raise `data.seq_length`, or drop them",
        )


def _slots(data: StepData, micro_batch: int) -> Iterator[Slot]:
    """Yield the micro-batches; one in which no token counts adds nothing, and is left out."""
    rows = len(data.ids_RT)
    if micro_batch < 1 or rows % micro_batch:
        raise UsageError(f"a micro-batch of {micro_batch} rows does not divide a batch of {rows}")
    for start in range(0, rows, micro_batch):
        part = slice(start, start + micro_batch)
        if data.weights_RT[part].any():
            yield Slot(
                data.ids_RT[part], data.targets_RT[part], data.weights_RT[part], data.positions_RT[part],
                data.segments_RT[part], tuple(range(data.first + start, data.first + start + micro_batch)),
            )  # fmt: skip

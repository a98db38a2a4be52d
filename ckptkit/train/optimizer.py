"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) with bias correction and decoupled decay, as torch.optim.AdamW.

One graph updates all parameters in place. Its operator, AdamWeightDecay, has no bias correction and subtracts
lr' * (m / (sqrt(v) + eps') + decay' * p); with lr' = lr * sqrt(1 - beta2 ** t) / (1 - beta1 ** t), eps' = eps *
sqrt(1 - beta2 ** t) and decay' = decay * lr / lr' that is torch's update. Norms and biases do not decay.

Moments are called as torch's state is: `exp_avg.NAME` and `exp_avg_sq.NAME`. What does not live here: gradients
(`net.py`), the learning rate of a step (`schedule.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import UsageError
from ckptkit.train.arrays import Floats
from ckptkit.train.net import Gradients, TrainNet
from ckptkit.train.pieces import Function, Tensor
from ckptkit.train.step_files import MOMENTS


class AdamWSettings(Protocol):
    """What the config says; `clip_norm` None does not clip, `freeze` has patterns of names that are not trained."""

    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip_norm(self) -> float | None: ...
    @property
    def freeze(self) -> Sequence[str]: ...


def trained_names(names: Sequence[str], freeze: Sequence[str]) -> tuple[str, ...]:
    """Return the names that no pattern of `freeze` matches, in their order.

    UsageError for a pattern that matches none, and when all are frozen.
    """
    if idle := [pattern for pattern in freeze if not any(fnmatchcase(name, pattern) for name in names)]:
        raise UsageError(
            f"`optimizer.freeze`: {len(idle)} patterns match no parameter",
            items=idle,
            hint=f"names are HuggingFace's, such as `{names[0]}` and `{names[-1]}`; `*` stands for any letters",
        )
    trained = tuple(name for name in names if not any(fnmatchcase(name, pattern) for pattern in freeze))
    if not trained:
        raise UsageError("`optimizer.freeze` leaves no parameter to train", items=list(freeze))
    return trained


def decays(shape: Sequence[int]) -> bool:
    """Say whether weight decay holds for a parameter of that shape: for matrices, not for norms and biases."""
    return len(shape) > 1


class AdamW:
    """Updates the parameters of `net` that are trained; moments begin at 0."""

    def __init__(self, net: TrainNet, settings: AdamWSettings) -> None:
        self._net, self._settings, ms = net, settings, net.mindspore
        self.names = tuple(name for name in net.names if name in net.trained)
        self.moments: dict[str, Tensor] = {}
        for name in self.moment_names():
            self.moments[name] = ms.Tensor(np.zeros(net.shapes[name.partition(".")[2]], np.float32))
        self._squares = ms.jit(_make_squares(ms))
        does_decay = tuple(decays(net.shapes[name]) for name in self.names)
        self._update = ms.jit(_make_update(ms, does_decay, settings.beta1, settings.beta2))

    def moment_names(self) -> Iterator[str]:
        """Yield the names of all moments."""
        for moment in MOMENTS:
            for name in self.names:
                yield f"{moment}{name}"

    def squares(self, gradients: Mapping[str, Tensor]) -> NDArray[np.float64]:
        """Return each gradient's sum of squares, in the order of `names`; a gradient that is not finite gives such."""
        sums: NDArray[np.float64] = (
            self._squares(*(gradients[name] for name in self.names)).asnumpy().astype(np.float64)
        )
        return sums

    def clip_factor(self, norm: float) -> float:
        """Return what gradients of that global norm are multiplied by: torch's `clip_grad_norm_`."""
        most = self._settings.clip_norm
        return 1.0 if most is None else min(1.0, most / (norm + 1e-6))

    def update(self, gradients: Gradients, *, lr: float, count: int, factor: float) -> None:
        """Make update number `count`, from 1, with the gradients times `factor`."""
        settings = self._settings
        root = math.sqrt(1.0 - settings.beta2**count)
        rate = lr * root / (1.0 - settings.beta1**count)
        decay = settings.weight_decay * lr / rate if rate else 0.0
        numbers = (rate, settings.eps * root, decay, factor)
        scalars = [self._net.mindspore.Tensor(np.float32(number)) for number in numbers]
        moments = [[self.moments[f"{moment}{name}"] for name in self.names] for moment in MOMENTS]
        parameters = [self._net.parameters[name] for name in self.names]
        self._update(*scalars, *parameters, *moments[0], *moments[1], *(gradients[name] for name in self.names))

    def state(self) -> dict[str, Floats]:
        """Return copies of the moments."""
        return {name: np.array(moment.asnumpy()) for name, moment in self.moments.items()}

    def put(self, name: str, values: Floats) -> None:
        """Set a moment to a copy of `values`."""
        self.moments[name] = self._net.mindspore.Tensor(np.array(values, np.float32, order="C"))


def _make_squares(ms: Any) -> Function:
    """A product of a row and a column adds in blocks: a plain sum of a million squares loses three digits."""
    times, join = ms.ops.MatMul(), ms.ops.Concat(0)

    def squares(*gradients: Tensor) -> Tensor:
        sums: Any = ()
        for gradient in gradients:
            sums = (*sums, times(gradient.reshape(1, -1), gradient.reshape(-1, 1)).reshape(1))
        return sums[0] if len(sums) == 1 else join(sums)

    return squares


def _make_update(ms: Any, does_decay: tuple[bool, ...], beta1: float, beta2: float) -> Function:
    step = ms.ops.AdamWeightDecay()
    count, first, second = len(does_decay), ms.Tensor(beta1, ms.float32), ms.Tensor(beta2, ms.float32)
    none = ms.Tensor(0.0, ms.float32)

    def update(rate: Tensor, eps: Tensor, decay: Tensor, factor: Tensor, *tensors: Tensor) -> Tensor:
        """Update the first quarter of the tensors in place, and both moments, the next two; the last are gradients.

        The operator writes to its inputs, tensors as well as parameters; what it returns is not their new values.
        """
        for index in range(count):
            share = decay if does_decay[index] else none
            gradient = tensors[3 * count + index] * factor
            step(
                tensors[index], tensors[count + index], tensors[2 * count + index],
                rate, first, second, eps, share, gradient,
            )  # fmt: skip
        return factor

    return update

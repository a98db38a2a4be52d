"""Two sets of logits of the same tokens: how far apart, and how far apart rounding may put them.

The bound. Two right implementations add the same products in other orders, so their logits differ by rounding, the
more the deeper the network and the worse its conditioning. How much is measured, not guessed: the runner moves every
weight by one unit in its last place, up or down at random, and runs again; the logits move by the *sensitivity* s
(relative to the largest logit). One unit in the last place of a weight is a relative change of u = 2^-24 to 2^-23 of
each product, independent of the others: what a rounding of each product once would do. A sum of n products is rounded
n times and not once; with partial sums as large as sqrt(k) products, the rounding of a plain sum is about sqrt(n / 2)
times that of the products. Real kernels add in blocks and lanes and do better. ROUNDINGS stands for that factor. So
the bound grows with depth as the sensitivity does, and is a few units u where the model is well conditioned.
The rotary frequencies, which are multiplied by positions, are compared by themselves; where they differ in their last
place, what that does at far positions is measured in the same way and allowed too, UNITS_OF_CONSTANTS times.

Shapes: T tokens, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptkit.verification.runners.job import Floats

UNIT = 2.0**-24
ROUNDINGS = 16.0
TOO_SENSITIVE = 1e-3  # rounding alone moves a logit by this part of the largest: nothing can be proved then
UNITS_OF_CONSTANTS = 4.0  # last places that two right computations of a frequency may differ by: 3 occur (test_rope.py)
_ROWS = 64  # positions compared at a time
_TOP = 5

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far B's logits are from A's, over all positions of an input.

    `max_abs` is the largest |a - b|, at position `worst`; `relative` is it over the largest |a|; `cosine` the least
    of a position; `kl` the largest KL(softmax a || softmax b) of a position, in nats. `top1` and `top5` count the
    positions whose likeliest token, and whose set of five likeliest tokens, agree.
    """

    tokens: int
    max_abs: float
    largest: float
    worst: int
    cosine: float
    kl: float
    top1: int
    top5: int
    not_finite: int

    @property
    def relative(self) -> float:
        if self.not_finite or not self.largest:
            return float("inf") if self.not_finite or self.max_abs else 0.0
        return self.max_abs / self.largest


def distance(a_TV: Floats, b_TV: Floats) -> Distance:
    """Compare the logits of one input, of equal shape, position by position in float64."""
    max_abs, largest, worst, cosine, kl = 0.0, 0.0, 0, 1.0, 0.0
    top1 = top5 = not_finite = 0
    for start in range(0, len(a_TV), _ROWS):
        a, b = (np.asarray(x_TV[start : start + _ROWS], np.float64) for x_TV in (a_TV, b_TV))
        finite = np.isfinite(a) & np.isfinite(b)
        not_finite += int(finite.size - np.count_nonzero(finite))
        rows = finite.all(1)
        a, b, numbers = a[rows], b[rows], np.flatnonzero(rows) + start
        if not len(a):
            continue
        gaps = np.abs(a - b).max(1)
        if gaps.max() > max_abs:
            max_abs, worst = float(gaps.max()), int(numbers[gaps.argmax()])
        largest = max(largest, float(np.abs(a).max()))
        cosine = min(cosine, float(_cosine(a, b).min()))
        kl = max(kl, float(_kl(a, b).max()))
        top1 += int((a.argmax(1) == b.argmax(1)).sum())
        top5 += sum(_top(x) == _top(y) for x, y in zip(a, b, strict=True))
    return Distance(len(a_TV), max_abs, largest, worst, cosine, kl, top1, top5, not_finite)


def bound(sensitivities: Sequence[float | None], constants: Sequence[float | None] = ()) -> float:
    """Return the largest relative distance that rounding explains, of what both sides measured on one input.

    `constants` are what they measured for the rotary frequencies, where these differ.
    """
    of_constants = max([0.0, *(s for s in constants if s is not None)])
    return ROUNDINGS * max([UNIT, *(s for s in sensitivities if s is not None)]) + UNITS_OF_CONSTANTS * of_constants


def _cosine(a: Doubles, b: Doubles) -> Doubles:
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Doubles = np.where(norms > 0, (a * b).sum(1) / norms, 1.0)
    return found


def _kl(a: Doubles, b: Doubles) -> Doubles:
    log_a, log_b = _log_softmax(a), _log_softmax(b)
    found: Doubles = np.maximum((np.exp(log_a) * (log_a - log_b)).sum(1), 0.0)
    return found


def _log_softmax(x: Doubles) -> Doubles:
    shifted = x - x.max(1, keepdims=True)
    found: Doubles = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return found


def _top(row: Doubles) -> set[int]:
    count = min(_TOP, len(row))
    return set(np.argpartition(row, -count)[-count:].tolist())

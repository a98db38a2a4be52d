"""The mean loss over a held-out set, its rows in the order of the file."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ckptkit.train.batches import Batches
from ckptkit.train.corpus import Corpus
from ckptkit.train.log import perplexity
from ckptkit.train.step import Trainer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`loss` is the mean over all `tokens` that count, `perplexity` e to it; `seconds` is the time that it took."""

    loss: float
    perplexity: float
    tokens: int
    seconds: float


def evaluate(trainer: Trainer, corpus: Corpus, *, batch_size: int, micro_batch: int, most: int | None) -> Evaluation:
    """Return the evaluation of `corpus`, of its first `most` batches where that is given; nothing is dropped out.

    Losses are summed batch by batch in float64, so that their number does not blur the mean.
    """
    started = time.perf_counter()
    batches = Batches(corpus, batch_size, seed=0, shuffle=False)
    count = batches.steps_per_epoch if most is None else min(most, batches.steps_per_epoch)
    total, tokens = 0.0, 0
    for step in range(count):
        loss, number = trainer.evaluate(batches.at(step), micro_batch=micro_batch)
        total, tokens = total + loss, tokens + number
    mean = total / tokens
    return Evaluation(mean, perplexity(mean), tokens, time.perf_counter() - started)

"""The mean loss over a held-out set, its rows in the order of the file."""

from __future__ import annotations

import math
import time

from ckptkit.train.batches import Batches
from ckptkit.train.corpus import Corpus
from ckptkit.train.log import Evaluation
from ckptkit.train.step import Trainer


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
    seconds = time.perf_counter() - started
    return Evaluation(loss=mean, perplexity=perplexity(mean), tokens=tokens, seconds=seconds)


def perplexity(loss: float) -> float:
    """Return e to the loss; infinity where that is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf

"""The global batch of a step: a pure function of the step, with nothing to restore.

An epoch's last batch is filled up with rows of weight 0 and segment 0, so that every step has the same shape and no row
waits, or is seen twice. A step that is tried again (an fp16 overflow) is the same call again.

Where several ranks share a batch, each takes some rows of the arrays here; `samples`, `tokens` and all else stay those
of the global batch, whatever their number. That is all that a rank has to do with data: nothing else in the data's
modules knows of processes. What does not live here: making it ahead of time (`prefetch.py`).
"""

# ruff: noqa: N815 - fields name their axes, as variables do

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptkit.train.arrays import Floats, Ints
from ckptkit.train.corpus import Corpus
from ckptkit.train.order import position_of, rows_of, samples_before, steps_per_epoch


@dataclass(frozen=True, slots=True, eq=False)
class StepData:
    """What step `step` (updates done before it) trains on; every array is (R, T), as `corpus.py` says of a row.

    `samples` are the rows of the corpus, in order, fewer than R where the batch is filled up; `first` is how many rows
    the steps before have read over all epochs, and `tokens` how many targets have a weight.
    """

    step: int
    epoch: int
    first: int
    samples: tuple[int, ...]
    ids_RT: Ints
    targets_RT: Ints
    weights_RT: Floats
    positions_RT: Ints
    segments_RT: Ints
    tokens: int


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a corpus; without `shuffle`, each epoch has the order of the file."""

    corpus: Corpus
    batch_size: int
    seed: int
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.corpus), self.batch_size)

    def samples_before(self, step: int) -> int:
        """Return the sample counter that goes with a step: rows read before it, over all epochs."""
        return samples_before(step, len(self.corpus), self.batch_size)

    def at(self, step: int) -> StepData:
        """Return the batch of a step, in arrays of its own; ValueError for a step below 0."""
        rows = len(self.corpus)
        position = position_of(step, rows, self.batch_size)
        samples = rows_of(position, rows, seed=self.seed, shuffle=self.shuffle)
        shape = (self.batch_size, self.corpus.seq_length)
        ids_RT, targets_RT, positions_RT, segments_RT = (np.zeros(shape, np.int32) for _ in range(4))
        weights_RT = np.zeros(shape, np.float32)
        for place, sample in enumerate(samples):
            row = self.corpus.row(sample)
            ids_RT[place], targets_RT[place], weights_RT[place] = row.ids_T, row.targets_T, row.weights_T
            positions_RT[place], segments_RT[place] = row.positions_T, row.segments_T
        return StepData(
            step, position.epoch, self.samples_before(step), samples,
            ids_RT, targets_RT, weights_RT, positions_RT, segments_RT, int(np.count_nonzero(weights_RT)),
        )  # fmt: skip

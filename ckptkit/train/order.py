"""Which rows a step reads: a pure function of (seed, epoch, step), so that a resumed run has nothing to restore.

The rows of an epoch are permuted by a Feistel network (Luby and Rackoff, 1988) over the smallest even number of bits
that holds them; a value that is no row is put through the network again until it is one ("cycle walking", Black and
Rogaway, 2002), which keeps it a bijection. The values are frozen: another round function would be another order, and
no run of before could go on. What does not live here: reading the rows (`corpus.py`), making a batch (`batches.py`).
Everything is about the global batch: how many ranks share it is not known here, and must not alter it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

ROUNDS = 8  # four are enough in theory for large halves; those of a small corpus are of three bits
_MASK = (1 << 64) - 1
_LEAST_HALF = 3  # bits; with two, the orders of three rows are not equally frequent


@dataclass(frozen=True, slots=True)
class Position:
    """Where a step reads: `count` rows of `epoch` (from 0), from the `first` of its order on."""

    epoch: int
    first: int
    count: int


def steps_per_epoch(rows: int, batch: int) -> int:
    """Return how many steps an epoch of `rows` rows has, `batch` of them a step; the last may be short."""
    _check(rows, batch)
    return -(-rows // batch)


def position_of(step: int, rows: int, batch: int) -> Position:
    """Return where step `step` reads, which is the number of updates done before it; ValueError below 0.

    With S steps an epoch, step s reads the rows (s mod S) * batch and on of epoch s div S. The last batch of an epoch
    is short where `batch` does not divide `rows`: no row waits for the next epoch, and none is left out.
    """
    if step < 0:
        raise ValueError(f"step {step} is below 0")
    epoch, offset = divmod(step, steps_per_epoch(rows, batch))
    first = offset * batch
    return Position(epoch, first, min(batch, rows - first))


def samples_before(step: int, rows: int, batch: int) -> int:
    """Return how many rows the steps before `step` have read, over all epochs: the sample counter of a checkpoint."""
    position = position_of(step, rows, batch)
    return position.epoch * rows + position.first


def rows_of(position: Position, rows: int, *, seed: int, shuffle: bool) -> tuple[int, ...]:
    """Return the rows that a step reads, in its order; without `shuffle`, that of the file, in every epoch."""
    indices = range(position.first, position.first + position.count)
    if not shuffle:
        return tuple(indices)
    keys = _round_keys(seed, position.epoch)
    return tuple(_walk(keys, index, rows) for index in indices)


def _check(rows: int, batch: int) -> None:
    if rows < 1 or batch < 1:
        raise ValueError(f"{rows} rows in batches of {batch}: both must be 1 or more")


def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Return the keys of the rounds, 64 bits each. The numbers are hashed as text: a seed has no largest value."""
    digest = hashlib.blake2b(f"ckptkit order 1: seed {seed}, epoch {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(ROUNDS))


def _walk(keys: tuple[int, ...], index: int, rows: int) -> int:
    """Permute range(4 ** half), which is less than 4 times `rows` for more than 16 of them, until a row comes out."""
    half = max(_LEAST_HALF, ((rows - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & low
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & low)
        value = left << half | right
        if value < rows:
            return value


def _mixed(value: int) -> int:
    """Return 64 bits, each of which depends on all of `value` (the end of SplitMix64: Steele and others, 2014)."""
    value &= _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31

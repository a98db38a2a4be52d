"""Damaged copies of a file, for the contract that every `read_index` keeps: a valid index, or a ckptkit error.

Generic: it knows no format. The same seed gives the same mutations, so that a failure can be replayed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

EXTREMES = tuple(
    value.to_bytes(size, order, signed=value < 0)
    for size in (1, 2, 4, 8)
    for order in ("little", "big")
    for value in (0, 1, -1, 2 ** (8 * size - 1) - 1, -(2 ** (8 * size - 1)), 2 ** (8 * size) - 2)
)


def mutations(data: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Yield `count` damaged copies of `data`: cut, flipped, overwritten, grown, shrunk, shuffled; one to four times."""
    chance = random.Random(seed)
    for _ in range(count):
        mutant = bytearray(data)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            chance.choice(_MUTATORS)(mutant, chance)
        yield bytes(mutant)


def _place(mutant: bytearray, chance: random.Random) -> int:
    """Return an offset; often near the start or the end, where files keep their structure."""
    last = max(0, len(mutant) - 1)
    near = min(last, 512)
    return chance.choice((chance.randint(0, last), chance.randint(0, near), last - chance.randint(0, near)))


def _cut(mutant: bytearray, chance: random.Random) -> None:
    del mutant[_place(mutant, chance) :]


def _flip(mutant: bytearray, chance: random.Random) -> None:
    if mutant:
        mutant[_place(mutant, chance)] ^= 1 << chance.randrange(8)


def _overwrite(mutant: bytearray, chance: random.Random) -> None:
    if mutant:
        mutant[_place(mutant, chance)] = chance.randrange(256)


def _extreme(mutant: bytearray, chance: random.Random) -> None:
    at, value = _place(mutant, chance), chance.choice(EXTREMES)
    mutant[at : at + len(value)] = value


def _insert(mutant: bytearray, chance: random.Random) -> None:
    at = _place(mutant, chance)
    mutant[at:at] = chance.randbytes(chance.randint(1, 16))


def _delete(mutant: bytearray, chance: random.Random) -> None:
    at = _place(mutant, chance)
    del mutant[at : at + chance.randint(1, 32)]


def _copy(mutant: bytearray, chance: random.Random) -> None:
    """Copy one stretch over or before another."""
    source, at, size = _place(mutant, chance), _place(mutant, chance), chance.randint(1, 64)
    mutant[at : at + chance.choice((0, size))] = mutant[source : source + size]


_MUTATORS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _cut,
    _flip,
    _flip,
    _overwrite,
    _overwrite,
    _extreme,
    _extreme,
    _insert,
    _delete,
    _copy,
)

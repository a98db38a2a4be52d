"""Sizes and sets of numbers as people write them: `5GB`, `0,2,5-9`. What they are for, and the error: with who asks."""

from __future__ import annotations

import re
from collections.abc import Collection

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MOST_LAYERS = 100_000  # no model has so many
_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?", re.ASCII)


def parse_bytes(text: str) -> int:
    """Return the bytes that `6GB`, `500 MB`, `2GiB`, `1.5k` or `1000` stand for; ValueError for anything else, or 0."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"`{text}` is not a size")
    number, unit, binary = found.groups()
    try:
        size = int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])
    except OverflowError:
        raise ValueError(f"`{text}` is not a size") from None
    if size < 1:
        raise ValueError(f"`{text}` is no bytes at all")
    return size


def parse_numbers(text: str, below: int, of: str) -> tuple[int, ...]:
    """Return the numbers that `0-3,7` names, ascending, both ends meant; ValueError for anything else.

    `below` is more than the largest may be: `0-99999999999` is a slip, and no reason to fill the memory. `of` is what
    they are numbers of, for the error: `layer`.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if not found:
            raise ValueError(f"`{part.strip()}` is neither a {of} nor a range of {of}s")
        first, last = (int(end) for end in (found[1], found[2] or found[1]))
        if last < first or last >= below:
            raise ValueError(f"`{part.strip()}` is no range of {of}s from 0 to {below - 1}")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the layers that `0,1,40-43` names, ascending; ValueError for anything else."""
    return parse_numbers(text, _MOST_LAYERS, "layer")


def numbers_text(numbers: Collection[int]) -> str:
    """Return numbers as `parse_numbers` reads them, the shortest so: `0-3,6`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)

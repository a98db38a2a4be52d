"""What a framework gives a runner: a `Net`, a network that is loaded and run block by block.

What does not live here: who loads and runs it (`run_net.py`, `computing.py`), and any framework. Shapes: T tokens, H
hidden, V the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from ckptkit.verification.runners.job import Floats

WHOLE = "all"  # the block that is the whole network
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")  # in names of parameters, in every dialect

Tap: TypeAlias = Callable[[str, Any], None]  # the name of an output inside of the network, and its values (T, H)
Watch: TypeAlias = Callable[[str, str, Any], None]  # the name of such an output, what is on the way to it, its values
Walk: TypeAlias = Generator[
    str, None, Floats
]  # the name of each block, before it is run; then the logits, as the iterator's value


class Net(Protocol):
    """A network in fp32, ready to run forward: no dropout, plain attention, no cache, no reduced matmul precision.

    Names of parameters are those of the checkpoint's dialect; a parameter that two names share has one here.
    `constants` are no parameters of a checkpoint but enter the arithmetic (rotary frequencies): `get` and `put` take
    their names too. `reading` is what the network takes config.json for, with the keys and types of `Facts.reading`.
    """

    runner: str
    versions: dict[str, str]
    settings: dict[str, Any]
    reading: dict[str, Any]
    notes: list[str]
    takes_positions: bool
    constants: Sequence[str]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every parameter with its shape."""

    def blocks(self) -> Sequence[tuple[str, Sequence[str]]]:
        """Return what runs one after another, each with the names of the parameters that it needs.

        It is one block, or, where the job says `stream`, the embedding, each layer, and the head.
        """

    def benign(self, name: str) -> str | None:
        """Say why a parameter may be in no checkpoint; None when it must be loaded."""

    def twin(self, name: str) -> str | None:
        """Return the parameter that a tensor `name`, which has none of its own, must equal (a tied head); or None."""

    def put(self, name: str, values: Floats) -> None:
        """Set a parameter, of the same shape."""

    def get(self, name: str) -> Floats:
        """Return a copy of a parameter that is set."""

    def free(self, names: Sequence[str]) -> None:
        """Give back the memory of parameters until they are set again."""

    def walk(self, ids: Sequence[int], positions: Sequence[int] | None, tap: Tap | None) -> Walk:
        """Run one sequence: yield each block's name before it runs, return the logits (T, V).

        `tap` is given `embedding`, for each layer `layers.N.attention` and `layers.N.mlp` (what each adds) and
        `layers.N` (the block's output), and `norm` (of the last one), in float32.
        """


@runtime_checkable
class Computes(Net, Protocol):
    """A `Net` that can run in a dtype of fewer bits, too, as its framework's networks do in the field.

    `kept` says what stays in float32 then, and why.
    """

    kept: Sequence[str]

    def lowered(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Hold the set parameters `names` in the job's `compute` dtype; afterwards they are as before, to the bit."""

    def watched(
        self, ids: Sequence[int], positions: Sequence[int] | None, tap: Tap | None, watch: Watch, *, low: bool
    ) -> Walk:
        """Run one sequence like `walk`; with `low`, whose blocks run while their parameters are `lowered`, in the
        job's `compute` dtype. `watch` is told of what a matrix product takes and gives on the way to each output."""


def as_one(walk: Walk) -> Walk:
    """Return a walk that runs all blocks as one."""
    yield WHOLE
    while True:
        try:
            next(walk)
        except StopIteration as end:
            logits_TV: Floats = end.value
            return logits_TV


def as_floats(values: Any) -> Floats:
    """Return the values that a framework gives, (T, H), as an array of our own."""
    array = values.asnumpy() if hasattr(values, "asnumpy") else values.detach().float().cpu().numpy()
    return np.array(array, np.float32).reshape(-1, array.shape[-1])

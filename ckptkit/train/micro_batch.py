"""A micro-batch: its rows, and their way through one layer of a network after the other.

What does not live here: the layers (`blocks.py`), the loop over them and the loss (`net.py`).

Shapes: R rows of a micro-batch, T tokens of a row.
"""

# ruff: noqa: N815 - fields name their axes, as variables do

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckptkit.train.arrays import Floats, Ints
from ckptkit.train.pieces import Tensor

if TYPE_CHECKING:
    from ckptkit.train.net import TrainNet


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The rows of one micro-batch, each array (R, T); `counters` are the rows' sample counters, which key dropout."""

    ids_RT: Ints
    targets_RT: Ints
    weights_RT: Floats
    positions_RT: Ints
    segments_RT: Ints
    counters: tuple[int, ...]


class Pass:
    """One micro-batch on its way through the layers."""

    def __init__(self, net: TrainNet, slot: Slot, *, dropping: bool) -> None:
        self.net, self.slot, self._dropping = net, slot, dropping
        self.ids = net.mindspore.Tensor(slot.ids_RT.reshape(-1).astype(np.int32))
        self._tables = net.tables(slot)

    def embed(self) -> Tensor:
        return self.net.embed(self.ids)

    def layer(self, index: int, x: Tensor) -> Sequence[Tensor]:
        """Return a layer's output, then what its gradient needs."""
        block, parameters, window = self.net.block(index, dropping=self._dropping)
        out: Sequence[Tensor] = block.forward(x, *self._tables[window], *self._dropped(index), *parameters)
        return out

    def layer_back(self, index: int, dy: Tensor, x: Tensor, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradient of a layer's input, then those of its parameters."""
        block, parameters, window = self.net.block(index, dropping=self._dropping)
        rest = (*kept, *self._tables[window], *self._dropped(index), *parameters)
        out: Sequence[Tensor] = block.backward(dy, x, *rest)
        return out

    def _dropped(self, index: int) -> list[Tensor]:
        """Return masks, made again for the gradient: that costs less than keeping them."""
        return self.net.dropped(self.slot, index) if self._dropping else []

"""What a micro-batch gives every layer beside its input: rotary tables and attention masks, made on the host.

Both have the shape of what they meet in a graph (see `pieces.py`), and the tensors of the micro-batch before are kept
for the next where it has the same positions and segments, as unpacked rows always do.

Shapes: R rows, T tokens of a row, N = R * T, Q query heads, K key heads, D a head's size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptkit.errors import UsageError
from ckptkit.train.arrays import Floats, Ints
from ckptkit.train.pieces import Tensor
from ckptkit.verification.runners.attention import may_look
from ckptkit.verification.runners.facts import Facts
from ckptkit.verification.runners.rope import inverse_frequencies, rotary_table


def attention_mask(segments_RT: Ints, window: int | None, heads: int, groups: int) -> Floats:
    """Return what is added to the scores, (R * K, Q / K * T, T): 0 where a token may look, else float32's minimum.

    A token sees itself and what came before it in its own segment of its own row; with a window, no more than `window`
    tokens, itself included. Padding is a segment, too, so that no row of the softmax is empty.
    """
    rows, tokens = segments_RT.shape
    seen_RTT = (segments_RT[:, :, None] == segments_RT[:, None, :]) & may_look(tokens, window)
    mask_RTT = np.where(seen_RTT, np.float32(0), np.finfo(np.float32).min)
    every = np.broadcast_to(mask_RTT[:, None], (rows, heads, tokens, tokens))
    return np.ascontiguousarray(every).reshape(rows * groups, heads // groups * tokens, tokens)


def half_swap(head_dim: int) -> Floats:
    """Return the matrix, (D, D), with x @ matrix = (-x[D/2:], x[:D/2])."""
    half = head_dim // 2
    swap_DD = np.zeros((head_dim, head_dim), np.float32)
    for index in range(half):
        swap_DD[half + index, index], swap_DD[index, half + index] = -1, 1
    return swap_DD


class Tables:
    """Makes them for a network; `mindspore` is the package."""

    def __init__(self, mindspore: Any, facts: Facts) -> None:
        self._ms, self._facts = mindspore, facts
        self._swap = mindspore.Tensor(half_swap(facts.head_dim))
        self._cos_TD = self._sin_TD = np.zeros((0, facts.head_dim), np.float32)
        self._positions_RT: Ints | None = None
        self._segments_RT: Ints | None = None
        self._rotary: tuple[Tensor, ...] = ()
        self._masks: dict[int | None, Tensor] = {}

    def make(self, positions_RT: Ints, segments_RT: Ints) -> dict[int | None, tuple[Tensor, ...]]:
        """Return the tables of a micro-batch for each window that a layer has; see `blocks.NUM_TABLES`."""
        if self._positions_RT is None or not np.array_equal(positions_RT, self._positions_RT):
            self._rotary = tuple(self._ms.Tensor(array) for array in self.rotary(positions_RT.reshape(-1)))
            self._positions_RT = positions_RT.copy()
        if self._segments_RT is None or not np.array_equal(segments_RT, self._segments_RT):
            facts, self._masks = self._facts, {}
            for window in set(facts.window):
                mask = attention_mask(segments_RT, window, facts.heads, facts.kv_heads)
                self._masks[window] = self._ms.Tensor(mask)
            self._segments_RT = segments_RT.copy()
        return {window: (*self._rotary, mask, self._swap) for window, mask in self._masks.items()}

    def rotary(self, positions_N: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """Return cosines and sines of all query heads, (N, Q * D), then of all key heads, (N, K * D).

        Those of queries are times D ** -0.5, what scores are scaled by.
        """
        facts = self._facts
        self._grow(int(positions_N.max()) + 1)
        cos_ND, sin_ND = self._cos_TD[positions_N], self._sin_TD[positions_N]
        scale = np.float32(facts.head_dim**-0.5)
        return (
            np.tile(cos_ND * scale, (1, facts.heads)),
            np.tile(sin_ND * scale, (1, facts.heads)),
            np.tile(cos_ND, (1, facts.kv_heads)),
            np.tile(sin_ND, (1, facts.kv_heads)),
        )

    def _grow(self, positions: int) -> None:
        rope = self._facts.rope
        if rope.type == "dynamic" and positions > rope.original:
            raise UsageError(
                f"a document of {positions} tokens is longer than the {rope.original} of `dynamic` rotary scaling",
                why="its frequencies would depend on the longest document beside it, and the loss on the micro-batch",
                hint="set `data.seq_length` to that length or less",
            )
        if positions > len(self._cos_TD):
            frequencies_F = inverse_frequencies(rope, self._facts.head_dim)
            self._cos_TD, self._sin_TD = rotary_table(frequencies_F, range(positions), rope.attention_factor)

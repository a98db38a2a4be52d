"""Dropout masks made on the host from counters: a pure function of (seed, sample counter, layer, place).

No generator has a state, so a mask is the same under any micro-batch, after any restart, and when a layer is computed
again. The generator is Philox 4x64 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"), whose stream numpy
promises to keep; the seed and a constant are its key, the rest its counter. An element is dropped where 16 of its bits,
as a number, lie below share * 65536, so shares are multiples of 2 ** -16.

What does not live here: what a mask is multiplied with (`blocks.py`). Shapes: N tokens of all rows, T of one, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ATTENTION, MLP = 0, 1  # the two places of a layer
_STEPS = 1 << 16
_KEY = 0x636B70746B6974  # tells these streams from others that have the same seed
_PER_DRAW = 4  # 16-bit numbers in one of Philox's


def rounded_share(share: float) -> float:
    """Return the share that is really dropped: the nearest multiple of 2 ** -16 below 1."""
    return min(round(share * _STEPS), _STEPS - 1) / _STEPS


def keeps(
    seed: int, counters: Sequence[int], layer: int, place: int, tokens: int, hidden: int, share: float
) -> NDArray[np.uint8]:
    """Return 1 where an element is kept and 0 where it is dropped, (N, H), for rows with these sample counters."""
    below = np.uint16(rounded_share(share) * _STEPS)
    out_RTH = np.empty((len(counters), tokens, hidden), np.uint8)
    for row, counter in enumerate(counters):
        draws = -(-tokens * hidden // _PER_DRAW)
        philox = np.random.Philox(key=[seed, _KEY], counter=[0, counter, layer, place])
        numbers = philox.random_raw(draws).astype("<u8", copy=False).view("<u2")[: tokens * hidden]
        out_RTH[row] = (numbers >= below).reshape(tokens, hidden)
    return out_RTH.reshape(len(counters) * tokens, hidden)

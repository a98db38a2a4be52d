"""How documents lie in rows of T tokens: cut into pieces, a piece a row (padded) or several (packed).

A document longer than T is cut into pieces of T tokens. The target of a piece's last token is the first token of the
next, so no target is lost at a cut: targets overlap by one. A piece is a segment of its own: its positions start at 0
and its tokens see no other piece's. Pieces whose targets all have no weight are left out.

Packing takes the very same pieces, in the order of the file, and a piece that does not fit behind those of the row
starts the next row. So whatever counts in the loss is predicted from the same tokens, packed or padded, and both have
the same loss up to rounding. Splitting a document to fill rows would lose some of its context; a search for the row
that fits best would move documents away from their neighbours. Both would fill more; `Statistics.fill` is the price.

What does not live here: what rows look like to the network (`corpus.py`).

Shapes: P pieces, R1 one more than there are rows.
"""

# ruff: noqa: N815 - fields name their axes, as variables do

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ckptkit.train.arrays import Flags, Ints, Longs
from ckptkit.train.documents import Documents


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of documents: tokens starts_P[p] to starts_P[p] + counts_P[p], and nexts_P: has its last token a target?

    `cut` documents are in several pieces; `left_out` pieces had no target with a weight, and are not here.
    """

    starts_P: Longs
    counts_P: Ints
    nexts_P: Flags
    cut: int
    left_out: int

    def __len__(self) -> int:
        return len(self.starts_P)


def cut_documents(documents: Documents, seq_length: int) -> Pieces:
    """Cut documents into pieces of at most `seq_length` tokens, and leave out those that have nothing to learn.

    A document of n tokens has n - 1 targets, so one of seq_length + 1 is a single piece, and its last token a target.
    """
    starts, counts, nexts = array("q"), array("i"), bytearray()
    cut = left_out = 0
    learned_N = documents.learned_N
    bounds = documents.offsets_D1.tolist()
    for begin, end in pairwise(bounds):
        cut += end - begin > seq_length + 1
        for start in range(begin, end - 1, seq_length):
            stop = min(start + seq_length, end)
            if not learned_N[start + 1 : min(stop + 1, end)].any():
                left_out += 1
                continue
            starts.append(start)
            counts.append(stop - start)
            nexts.append(stop < end)
    return Pieces(
        np.array(starts, np.int64), np.array(counts, np.int32), np.frombuffer(bytes(nexts), np.bool_), cut, left_out
    )


def pad_pieces(pieces: Pieces) -> Longs:
    """Return the first piece of each row, (R1,), where every piece is a row."""
    return np.arange(len(pieces) + 1, dtype=np.int64)


def pack_pieces(pieces: Pieces, seq_length: int) -> Longs:
    """Return the first piece of each row, (R1,): a row takes pieces in their order as long as they fit."""
    firsts = array("q", [0])
    used = 0
    for piece, count in enumerate(pieces.counts_P.tolist()):
        if used + count > seq_length:
            firsts.append(piece)
            used = 0
        used += count
    if used:
        firsts.append(len(pieces))
    return np.array(firsts, np.int64)

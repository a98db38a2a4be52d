"""A corpus: rows of T tokens, made once and the same every time, with what the network needs to know of each token.

    position t of a row          a document's token      a masked one      fill
    ids_T        int32           its id                  its id            0
    targets_T    int32           the id that follows     0                 0
    weights_T    float32         1                       0                 0
    positions_T  int32           0, 1, .. in its piece   the same          0
    segments_T   int32           1, 2, .. piece of row   the same          0

A token may look at those of its own segment that are not after it. The last token of a document has no token that
follows: target 0, weight 0. `packing.py` says which pieces of documents share a row.

All tokens are in memory, 5 bytes each, and rows are made when they are asked for. Nothing here knows of ranks, batches
or the order of rows (`order.py`, `batches.py`). What does not live here: reading (`jsonl.py`, `mindrecord.py`).

Shapes: T tokens of a row (`seq_length`), P pieces, R1 one more than there are rows.
"""

# ruff: noqa: N815 - fields name their axes, as variables do

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ckptkit.errors import UsageError
from ckptkit.train.arrays import Floats, Ints, Longs
from ckptkit.train.documents import DataSettings, Documents
from ckptkit.train.packing import Pieces, cut_documents, pack_pieces, pad_pieces
from ckptkit.train.reading import read_documents

_LAYOUT = 1  # to be counted up when the same documents and settings give other rows


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One row; every array is (T,)."""

    ids_T: Ints
    targets_T: Ints
    weights_T: Floats
    positions_T: Ints
    segments_T: Ints


@dataclass(frozen=True, slots=True)
class Statistics:
    """What became of a file. `fill` is the share of the rows' places that hold tokens."""

    documents: int
    rows: int
    tokens: int
    targets: int
    fill: float
    empty: int
    untaught: int
    cut: int
    left_out: int
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return what a user should know, a line each; what did not happen is not said."""
        found = [
            f"{self.documents} documents in {self.rows} rows, {self.fill:.1%} full: "
            f"{self.tokens} tokens, {self.targets} of them count in the loss"
        ]
        counted = (
            (self.empty, "documents were empty, and skipped"),
            (self.untaught, "documents have no token that counts in the loss, and were skipped"),
            (self.cut, "documents are longer than a row, and were cut into several"),
            (self.left_out, "pieces of cut documents have no token that counts in the loss, and were left out"),
        )
        return found + [f"{count} {what}" for count, what in counted if count] + list(self.notes)


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The rows of a file, read-only. Row r has the pieces firsts_R1[r] to firsts_R1[r + 1]."""

    documents: Documents
    pieces: Pieces
    firsts_R1: Longs
    seq_length: int
    statistics: Statistics
    fingerprint: str  # of the tokens, their weights, and how they lie in rows: equal for equal rows alone

    def __len__(self) -> int:
        return len(self.firsts_R1) - 1

    def row(self, index: int) -> Row:
        """Return row `index`, in arrays of its own; IndexError outside of 0 to len - 1."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} is not in 0..{len(self) - 1}")
        row = self._empty_row()
        at = 0
        for segment, piece in enumerate(range(int(self.firsts_R1[index]), int(self.firsts_R1[index + 1])), 1):
            count = int(self.pieces.counts_P[piece])
            self._put(row, piece, slice(at, at + count), segment)
            at += count
        return row

    def _empty_row(self) -> Row:
        ids_T, targets_T, positions_T, segments_T = np.zeros((4, self.seq_length), np.int32)
        return Row(ids_T, targets_T, np.zeros(self.seq_length, np.float32), positions_T, segments_T)

    def _put(self, row: Row, piece: int, places: slice, segment: int) -> None:
        start, count = int(self.pieces.starts_P[piece]), int(self.pieces.counts_P[piece])
        known = count if self.pieces.nexts_P[piece] else count - 1  # targets that there are
        follows = slice(start + 1, start + 1 + known)
        learned = self.documents.learned_N[follows]
        row.ids_T[places] = self.documents.ids_N[start : start + count]
        row.targets_T[places.start : places.start + known] = self.documents.ids_N[follows] * learned
        row.weights_T[places.start : places.start + known] = learned
        row.positions_T[places] = np.arange(count)
        row.segments_T[places] = segment


def make_corpus(documents: Documents, *, seq_length: int, packing: bool, source: str, notes: Iterable[str]) -> Corpus:
    """Lay documents in rows of `seq_length` tokens; UsageError when none is left. `source` names them in the error."""
    pieces = cut_documents(documents, seq_length)
    if not len(pieces):
        raise UsageError(
            f"{source} gives no row to learn from",
            items=[
                f"{documents.empty} documents are empty",
                f"{documents.untaught} have no token that counts in the loss: one token, or a mask over all",
            ],
            hint="a document needs two tokens, of which the second counts in the loss",
        )
    firsts_R1 = pack_pieces(pieces, seq_length) if packing else pad_pieces(pieces)
    return _corpus(documents, pieces, firsts_R1, seq_length, tuple(notes))


def first_rows(corpus: Corpus, count: int) -> Corpus:
    """Return a corpus of the first `count` rows, or of all where there are fewer; ValueError below 1."""
    if count < 1:
        raise ValueError(f"{count} rows are none")
    firsts_R1 = corpus.firsts_R1[: count + 1]
    return _corpus(corpus.documents, corpus.pieces, firsts_R1, corpus.seq_length, corpus.statistics.notes)


def _corpus(documents: Documents, pieces: Pieces, firsts_R1: Longs, seq_length: int, notes: tuple[str, ...]) -> Corpus:
    used = int(firsts_R1[-1])
    tokens = int(pieces.counts_P[:used].sum(dtype=np.int64))
    rows = len(firsts_R1) - 1
    statistics = Statistics(
        documents=len(documents), rows=rows, tokens=tokens, targets=_count_targets(documents, pieces, used),
        fill=tokens / (rows * seq_length), empty=documents.empty, untaught=documents.untaught,
        cut=pieces.cut, left_out=pieces.left_out, notes=notes,
    )  # fmt: skip
    return Corpus(
        documents, pieces, firsts_R1, seq_length, statistics, _fingerprint(documents, pieces, firsts_R1, seq_length)
    )


def _count_targets(documents: Documents, pieces: Pieces, used: int) -> int:
    """Return how many targets of the first `used` pieces have a weight."""
    starts = pieces.starts_P[:used].tolist()
    counts, nexts = pieces.counts_P[:used].tolist(), pieces.nexts_P[:used].tolist()
    return sum(
        int(np.count_nonzero(documents.learned_N[start + 1 : start + count + has_next]))
        for start, count, has_next in zip(starts, counts, nexts, strict=True)
    )


def _fingerprint(documents: Documents, pieces: Pieces, firsts_R1: Longs, seq_length: int) -> str:
    """Return the XXH3-128, in hex, of everything that rows are made of, in their order.

    Tokens of the same documents in rows of another length, packed otherwise or masked otherwise give another one.
    Integers are hashed as little-endian, so that machines agree.
    """
    used = int(firsts_R1[-1])
    end = int(pieces.starts_P[used - 1]) + int(pieces.counts_P[used - 1]) + int(pieces.nexts_P[used - 1])
    state = xxhash.xxh3_128(json.dumps({"layout": _LAYOUT, "seq_length": seq_length, "tokens": end}).encode())
    parts = (
        (documents.ids_N[:end], "<i4"), (documents.learned_N[:end], "u1"), (pieces.starts_P[:used], "<i8"),
        (pieces.counts_P[:used], "<i4"), (pieces.nexts_P[:used], "u1"), (firsts_R1, "<i8"),
    )  # fmt: skip
    for values, dtype in parts:
        state.update(np.ascontiguousarray(values.astype(dtype, copy=False)).data)
    return str(state.hexdigest())


def open_corpus(data: DataSettings, model_folder: Path, vocab: int, *, path: Path | None = None) -> Corpus:
    """Return the rows of `data.path`, or of `path` (an evaluation set) by the same settings.

    `vocab` is how many rows the embedding has. UsageError for what the user can set right (files, keys, ids, a file
    without a usable row), CorruptError for a damaged line or record, which it names.
    """
    documents, notes = read_documents(data, path, model_folder, vocab)
    return make_corpus(
        documents, seq_length=data.seq_length, packing=data.packing, source=f"`{path or data.path}`", notes=notes
    )

"""The contract: packed or padded, a token that counts in the loss is predicted once, from the same tokens before it.

That is why packed loss = unpacked loss: of a token, a causal network sees its position and the tokens of its segment up
to it, and these are the same. Bits are compared: nothing here computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_corpora import corpus_of, documents

from ckptkit.train.corpus import Corpus
from ckptkit.train.packing import cut_documents, pack_pieces

LISTS = st.lists(st.lists(st.integers(1, 99), min_size=2, max_size=30), min_size=1, max_size=12)


def predictions(corpus: Corpus) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Return (the ids that a position sees, their positions, its target) of each target with a weight, in order."""
    found = []
    for index in range(len(corpus)):
        row = corpus.row(index)
        for place in np.flatnonzero(row.weights_T):
            seen = np.flatnonzero(row.segments_T[: place + 1] == row.segments_T[place])
            found.append((tuple(row.ids_T[seen]), tuple(row.positions_T[seen]), int(row.targets_T[place])))
    return found


def targets(lists: Sequence[Sequence[int]]) -> list[int]:
    return [token for ids in lists for token in ids[1:]]


@settings(deadline=None)  # a busy machine is no fault
@given(LISTS, st.integers(2, 12))
def test_packed_and_padded_rows_predict_the_same_from_the_same(lists: list[list[int]], length: int) -> None:
    assert predictions(corpus_of(lists, length)) == predictions(corpus_of(lists, length, packing=False))


def test_packing_that_splits_a_document_to_fill_a_row_is_seen() -> None:
    """The control: what a splitting packer would make of two documents of five tokens in rows of eight."""
    split = corpus_of([[1, 2, 3, 4, 5], [6, 7, 8, 9], [9, 10]], 8)
    assert predictions(split) != predictions(corpus_of([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], 8, packing=False))


@settings(deadline=None)  # a busy machine is no fault
@given(LISTS, st.integers(2, 12), st.booleans())
def test_no_target_is_lost_or_doubled(lists: list[list[int]], length: int, packing: bool) -> None:
    corpus = corpus_of(lists, length, packing=packing)
    assert [target for _, _, target in predictions(corpus)] == targets(lists)
    assert corpus.statistics.targets == len(targets(lists))


@settings(deadline=None)  # a busy machine is no fault
@given(LISTS, st.integers(2, 12), st.booleans())
def test_rows_keep_the_rules_of_their_arrays(lists: list[list[int]], length: int, packing: bool) -> None:
    corpus = corpus_of(lists, length, packing=packing)
    for index in range(len(corpus)):
        row = corpus.row(index)
        arrays = (row.ids_T, row.targets_T, row.positions_T, row.segments_T)
        assert {(a.shape, a.dtype.str) for a in arrays} == {((length,), "<i4")}
        assert (row.weights_T.shape, row.weights_T.dtype.str) == ((length,), "<f4")
        full = row.segments_T > 0
        assert full[: full.sum()].all(), "fill is at the end"
        for array in (row.ids_T, row.targets_T, row.positions_T, row.weights_T):
            assert not array[~full].any()
        assert not row.targets_T[row.weights_T == 0].any()
        starts = np.flatnonzero(np.diff(row.segments_T[full], prepend=0))
        assert row.segments_T[starts].tolist() == list(range(1, len(starts) + 1))
        assert not row.positions_T[starts].any()
        inside = np.setdiff1d(np.flatnonzero(full), starts)
        assert (row.positions_T[inside] == row.positions_T[inside - 1] + 1).all()
        assert packing or len(starts) == 1


def test_a_packed_row_is_what_the_docstring_says() -> None:
    row = corpus_of([[11, 12, 13], [21, 22, 23, 24]], 8, learned=[[True, False, True], [True] * 4]).row(0)
    assert row.ids_T.tolist() == [11, 12, 13, 21, 22, 23, 24, 0]
    assert row.targets_T.tolist() == [0, 13, 0, 22, 23, 24, 0, 0]
    assert row.weights_T.tolist() == [0, 1, 0, 1, 1, 1, 0, 0]
    assert row.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert row.segments_T.tolist() == [1, 1, 1, 2, 2, 2, 2, 0]


def test_a_long_document_is_cut_and_its_targets_overlap_by_one() -> None:
    corpus = corpus_of([list(range(1, 11))], 4, packing=False)
    rows = [corpus.row(index) for index in range(len(corpus))]
    assert [row.ids_T.tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert [row.targets_T.tolist() for row in rows] == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 0, 0, 0]]
    assert [row.positions_T.tolist() for row in rows] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 0]]
    assert corpus.statistics.cut == 1


def test_a_document_of_one_token_more_than_a_row_is_one_row() -> None:
    """As MindFormers keeps its corpora: seq_length + 1 ids, of which the last is a target alone."""
    corpus = corpus_of([[1, 2, 3, 4, 5]], 4)
    assert (len(corpus), corpus.statistics.cut) == (1, 0)
    assert corpus.row(0).targets_T.tolist() == [2, 3, 4, 5]
    assert corpus_of([[1, 2, 3, 4, 5, 6]], 4).statistics.cut == 1


def test_a_document_that_does_not_fit_starts_the_next_row() -> None:
    corpus = corpus_of([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]], 8)
    assert [corpus.row(index).ids_T.tolist() for index in range(2)] == [
        [1, 2, 3, 4, 5, 6, 0, 0],
        [7, 8, 9, 10, 11, 0, 0, 0],
    ]
    assert corpus.statistics.fill == 11 / 16


def test_the_rest_of_a_long_document_shares_its_row() -> None:
    corpus = corpus_of([[1, 2, 3, 4, 5, 6], [7, 8]], 4)
    assert corpus.row(1).ids_T.tolist() == [5, 6, 7, 8]
    assert corpus.row(1).segments_T.tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("packing", [True, False])
def test_pieces_with_nothing_to_learn_are_left_out_and_counted(packing: bool) -> None:
    """A prompt that is longer than a row: its first piece has no target with a weight."""
    learned: Any = [[False] * 6 + [True] * 2]
    corpus = corpus_of([[1, 2, 3, 4, 5, 6, 7, 8]], 4, packing=packing, learned=learned)
    assert (len(corpus), corpus.statistics.left_out) == (1, 1)
    assert corpus.row(0).ids_T.tolist() == [5, 6, 7, 8]
    assert corpus.row(0).weights_T.tolist() == [0, 1, 1, 0]


def test_the_first_token_of_the_next_piece_counts_as_a_target_of_this_one() -> None:
    """Its weight is that of the token it predicts, also over a cut."""
    pieces = cut_documents(documents([[1, 2, 3, 4, 5, 6]], [[False] * 4 + [True] * 2]), 4)
    assert (pieces.starts_P.tolist(), pieces.left_out) == ([0, 4], 0)
    pieces = cut_documents(documents([[1, 2, 3, 4, 5, 6]], [[False] * 5 + [True]]), 4)
    assert (pieces.starts_P.tolist(), pieces.left_out) == ([4], 1)


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=8), min_size=1, max_size=30))
def test_a_row_is_closed_only_when_the_next_piece_does_not_fit(lists: list[list[int]]) -> None:
    pieces = cut_documents(documents(lists), 8)
    firsts = pack_pieces(pieces, 8).tolist()
    assert (firsts[0], firsts[-1]) == (0, len(pieces))
    sizes = [int(pieces.counts_P[a:b].sum()) for a, b in pairwise(firsts)]
    assert all(0 < size <= 8 for size in sizes)
    opened = [int(pieces.counts_P[first]) for first in firsts[1:-1]]
    assert all(size + following > 8 for size, following in zip(sizes, opened, strict=False))

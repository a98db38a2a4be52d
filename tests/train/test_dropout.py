"""The contract of dropout masks: a row's is a function of seed, sample counter, layer and place alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from ckptkit.train.dropout import ATTENTION, MLP, keeps, rounded_share

SIZE = (7, 13)  # tokens, hidden: no multiple of the numbers in one draw


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def test_a_row_has_the_same_mask_in_any_micro_batch() -> None:
    whole = keeps(5, (3, 4, 5, 6), 1, ATTENTION, *SIZE, 0.3)
    halves = [keeps(5, rows, 1, ATTENTION, *SIZE, 0.3) for rows in ((3, 4), (5, 6))]
    assert np.array_equal(whole, np.concatenate(halves))
    moved = keeps(5, (4, 3, 5, 6), 1, ATTENTION, *SIZE, 0.3)
    assert not np.array_equal(whole, moved)  # the control: masks go with rows, not with places


def test_seed_counter_layer_and_place_each_give_another_mask() -> None:
    cases = [
        (5, (3,), 1, ATTENTION), (6, (3,), 1, ATTENTION), (5, (4,), 1, ATTENTION), (5, (3,), 2, ATTENTION),
        (5, (3,), 1, MLP), (3, (5,), 1, ATTENTION), (5, (1,), 3, ATTENTION),
    ]  # fmt: skip
    assert len({digest(keeps(*case, *SIZE, 0.5)) for case in cases}) == len(cases)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_one_asked_for(share: float) -> None:
    """Of n elements the share varies by sqrt(share * (1 - share) / n); five times that happens by no chance."""
    kept = keeps(0, range(4), 0, MLP, 256, 128, share)
    count = kept.size
    assert kept.shape == (4 * 256, 128)
    assert abs(1 - kept.mean() - share) < 5 * np.sqrt(share * (1 - share) / count)
    assert abs(1 - kept.mean() - share * 1.1) > 5 * np.sqrt(share * (1 - share) / count)


def test_rows_and_layers_are_independent() -> None:
    """Two independent masks of one half agree at one half of the places."""
    one, other = (keeps(0, (row,), 0, MLP, 256, 128, 0.5) for row in (0, 1))
    assert abs((one == other).mean() - 0.5) < 5 * 0.5 / np.sqrt(one.size)


def test_no_bit_depends_on_when_or_where_it_is_made() -> None:
    """The numbers are Philox's, which numpy keeps: another digest is another run after an update of numpy."""
    assert digest(keeps(7, (0, 2**40), 3, MLP, *SIZE, 0.25)) == "b4281c8b5253823d"


def test_shares_are_rounded_to_what_sixteen_bits_say() -> None:
    assert rounded_share(0.1) == 6554 / 65536
    assert rounded_share(0.25) == 0.25
    assert rounded_share(1 - 1e-9) == 65535 / 65536
    assert keeps(0, (0,), 0, MLP, *SIZE, 0.0).all()

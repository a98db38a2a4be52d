"""The contract: which rows a step reads follows from (seed, epoch, step) alone, and an epoch has each row once.

That is why a resumed run repeats no sample and skips none: it has no iterator to restore.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.train import order
from ckptkit.train.order import Position, position_of, rows_of, samples_before, steps_per_epoch

SEEDS = st.integers(0, 2**63 - 1)
ROWS = st.integers(1, 300)
BATCHES = st.integers(1, 320)


def is_bijection(at: Callable[[int], int], rows: int) -> bool:
    return sorted(at(index) for index in range(rows)) == list(range(rows))


def row_at(seed: int, epoch: int, index: int, rows: int) -> int:
    """Return the row that is at `index` of an epoch's order."""
    return rows_of(Position(epoch, index, 1), rows, seed=seed, shuffle=True)[0]


def samples(step: int, rows: int, batch: int, seed: int = 3, *, shuffle: bool = True) -> tuple[int, ...]:
    return rows_of(position_of(step, rows, batch), rows, seed=seed, shuffle=shuffle)


@pytest.mark.parametrize("rows", range(1, 301))
def test_an_epoch_has_each_row_once(rows: int) -> None:
    assert is_bijection(lambda index: row_at(7, rows % 5, index, rows), rows)


def test_an_order_without_cycle_walking_is_seen() -> None:
    """The control: values that are folded into the rows hit some twice."""
    assert not is_bijection(lambda index: row_at(7, 0, index, 1024) % 300, 300)


@settings(deadline=None)  # a busy machine is no fault
@given(SEEDS, st.integers(0, 10**6), ROWS)
def test_any_seed_and_epoch_gives_each_row_once(seed: int, epoch: int, rows: int) -> None:
    assert is_bijection(lambda index: row_at(seed, epoch, index, rows), rows)


@settings(deadline=None)  # a busy machine is no fault
@given(SEEDS, st.integers(0, 10**6), st.integers(50, 300))
def test_epochs_and_seeds_have_orders_of_their_own(seed: int, epoch: int, rows: int) -> None:
    """Of fifty rows there are 3e64 orders: two that are equal by chance will not be met."""
    first = [row_at(seed, epoch, index, rows) for index in range(rows)]
    assert first != [row_at(seed, epoch + 1, index, rows) for index in range(rows)]
    assert first != [row_at(seed + 1, epoch, index, rows) for index in range(rows)]
    assert first != list(range(rows))


def unevenness(rows: int) -> float:
    """Return chi squared of the orders of a few rows, over 1000 epochs for each order that there is."""
    orders = math.factorial(rows)
    found = Counter(rows_of(Position(epoch, 0, rows), rows, seed=5, shuffle=True) for epoch in range(1000 * orders))
    return sum((count - 1000) ** 2 / 1000 for count in found.values()) + 1000 * (orders - len(found))


@pytest.mark.parametrize(("rows", "most"), [(2, 29), (3, 43), (4, 75)])
def test_all_orders_of_a_few_rows_are_equally_frequent(rows: int, most: float) -> None:
    """`most` is what chance passes once in ten million, with n! - 1 degrees of freedom."""
    assert unevenness(rows) < most


def test_orders_that_are_not_equally_frequent_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_LEAST_HALF", 2)
    assert unevenness(4) > 75


def test_the_order_of_a_version_is_that_of_every_later_one() -> None:
    """Frozen: a run that was started before an upgrade must go on in the same order."""
    assert [row_at(7, 0, index, 10) for index in range(10)] == [1, 2, 9, 8, 3, 6, 4, 5, 7, 0]
    assert [row_at(0, 3, index, 1000) for index in (0, 1, 500, 999)] == [812, 273, 194, 110]
    assert row_at(2**63 - 1, 12, 123456789, 10**9) == 322382729


@settings(deadline=None)  # a busy machine is no fault
@given(SEEDS, ROWS, BATCHES, st.integers(0, 4))
def test_the_steps_of_an_epoch_read_each_row_once(seed: int, rows: int, batch: int, epoch: int) -> None:
    steps = steps_per_epoch(rows, batch)
    read = [row for step in range(epoch * steps, (epoch + 1) * steps) for row in samples(step, rows, batch, seed)]
    assert sorted(read) == list(range(rows))


@settings(deadline=None)  # a busy machine is no fault
@given(ROWS, BATCHES)
def test_only_the_last_batch_of_an_epoch_is_short(rows: int, batch: int) -> None:
    steps = steps_per_epoch(rows, batch)
    counts = [position_of(step, rows, batch).count for step in range(2 * steps)]
    last = rows - (steps - 1) * batch
    assert counts == 2 * [*[batch] * (steps - 1), last]
    assert 0 < last <= batch


@settings(deadline=None)  # a busy machine is no fault
@given(ROWS, BATCHES, st.integers(0, 1000))
def test_the_sample_counter_is_the_sum_of_what_the_steps_before_have_read(rows: int, batch: int, step: int) -> None:
    assert samples_before(step, rows, batch) == sum(position_of(s, rows, batch).count for s in range(step))


@pytest.mark.parametrize("stop", [5, 21, 37])
def test_a_run_that_goes_on_reads_what_the_straight_one_reads(stop: int) -> None:
    """T01 and T02: 64 samples, batches of 4, stopped in epoch 0, 1 and 2, and a second time after that."""
    straight = [samples(step, 64, 4) for step in range(48)]
    for resumed in (stop, stop + 3):
        assert [samples(step, 64, 4) for step in range(resumed, 48)] == straight[resumed:]
    for epoch in range(3):
        assert sorted(sum(straight[16 * epoch : 16 * (epoch + 1)], ())) == list(range(64))


def test_without_shuffling_every_epoch_has_the_order_of_the_file() -> None:
    read = [samples(step, 10, 4, shuffle=False) for step in range(6)]
    assert read == 2 * [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert read != [samples(step, 10, 4) for step in range(6)]


@pytest.mark.parametrize(("step", "rows", "batch"), [(-1, 4, 2), (0, 0, 2), (0, 4, 0)])
def test_a_position_that_cannot_be_is_an_error(step: int, rows: int, batch: int) -> None:
    with pytest.raises(ValueError):
        position_of(step, rows, batch)


def test_the_order_does_without_numpy() -> None:
    code = "import sys, ckptkit.train.order; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"

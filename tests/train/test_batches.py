"""The contract: a batch is a function of its step, so a resumed run trains on the very bits of the straight one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tiny_corpora import corpus_of, numbered

from ckptkit.train import prefetch
from ckptkit.train.batches import Batches, StepData
from ckptkit.train.prefetch import Prefetch

ARRAYS = ("ids_RT", "targets_RT", "weights_RT", "positions_RT", "segments_RT")
NUMBERS = ("step", "epoch", "first", "samples", "tokens")


def bits(data: StepData) -> tuple[object, ...]:
    return (*(getattr(data, key) for key in NUMBERS), *(getattr(data, key).tobytes() for key in ARRAYS))


def batches(rows: int = 10, batch_size: int = 4, seed: int = 3, *, shuffle: bool = True) -> Batches:
    return Batches(numbered(rows), batch_size, seed, shuffle)


def test_a_batch_has_the_rows_that_it_names() -> None:
    made = batches()
    for step in range(9):
        data = made.at(step)
        for place, sample in enumerate(data.samples):
            row = made.corpus.row(sample)
            for key in ARRAYS:
                assert getattr(data, key)[place].tobytes() == getattr(row, key.replace("_RT", "_T")).tobytes()
        assert data.ids_RT[: len(data.samples), 0].tolist() == list(data.samples)


def test_the_last_batch_of_an_epoch_is_filled_with_rows_of_no_weight() -> None:
    data = batches().at(2)
    assert (len(data.samples), data.ids_RT.shape) == (2, (4, 4))
    for key in ARRAYS:
        assert not getattr(data, key)[2:].any()
    assert data.tokens == 2 * 3 == data.weights_RT.sum()
    assert batches().at(1).tokens == 4 * 3


def test_a_batch_may_be_larger_than_the_corpus() -> None:
    made = batches(3, 8)
    assert made.steps_per_epoch == 1
    assert [sorted(made.at(step).samples) for step in range(3)] == [[0, 1, 2]] * 3


def test_a_step_asked_for_twice_or_out_of_order_has_the_same_bits() -> None:
    straight = [bits(batches().at(step)) for step in range(9)]
    again = batches()
    assert [bits(again.at(step)) for step in reversed(range(9))] == straight[::-1]
    assert len(set(straight)) == 9


def test_another_seed_or_no_shuffling_is_another_order() -> None:
    """The control of the tests of equal bits."""
    assert bits(batches().at(0)) != bits(batches(seed=4).at(0)) != bits(batches(shuffle=False).at(0))
    assert batches(shuffle=False).at(4).samples == (4, 5, 6, 7)


def test_arrays_of_a_batch_are_its_own() -> None:
    made = batches()
    before = bits(made.at(0))
    data = made.at(0)
    for key in ARRAYS:
        getattr(data, key)[...] = 77
    assert bits(made.at(0)) == before


def test_counters_go_on_over_epochs() -> None:
    """T04: step, epoch and sample counter agree, whatever the last batch of an epoch holds."""
    made = batches()
    found = [made.at(step) for step in range(7)]
    assert [(data.step, data.epoch, data.first) for data in found] == [
        (0, 0, 0), (1, 0, 4), (2, 0, 8), (3, 1, 10), (4, 1, 14), (5, 1, 18), (6, 2, 20),
    ]  # fmt: skip
    assert [made.samples_before(step) for step in range(7)] == [data.first for data in found]


def test_tokens_are_those_that_count() -> None:
    corpus = corpus_of([[1, 2, 3], [4, 5, 6, 7]], 8, learned=[[True, False, True], [True] * 4])
    assert Batches(corpus, 2, 0).at(0).tokens == 4


@pytest.mark.parametrize("start", [0, 5])
def test_a_prefetch_gives_the_batches_in_order(start: int) -> None:
    with Prefetch(batches(), start) as ahead:
        found = [ahead.next()[0] for _ in range(8)]
    assert [bits(data) for data in found] == [bits(batches().at(step)) for step in range(start, start + 8)]


class Slow:
    """Makes a batch when it is let: each `turn` is one."""

    def __init__(self) -> None:
        self.inner, self.turns, self.asked = batches(), threading.Semaphore(0), list[int]()

    def at(self, step: int) -> StepData:
        self.asked.append(step)
        self.turns.acquire()
        if step == 2:
            raise OSError("the disk is gone")
        return self.inner.at(step)


@pytest.fixture
def slow() -> Iterator[Slow]:
    source = Slow()
    yield source
    source.turns.release(100)


def wait_until(slow: Slow, asked: list[int]) -> None:
    end = time.monotonic() + 60
    while slow.asked != asked and time.monotonic() < end:
        time.sleep(0.001)
    assert slow.asked == asked


def test_one_batch_is_made_ahead_and_no_more(slow: Slow) -> None:
    slow.turns.release(100)
    with Prefetch(slow, 0) as ahead:
        wait_until(slow, [0])
        time.sleep(0.05)
        assert slow.asked == [0]
        assert ahead.next()[0].step == 0
        wait_until(slow, [0, 1])


def test_an_error_comes_where_its_batch_would_have_been_and_again_after_it(slow: Slow) -> None:
    slow.turns.release(3)
    with Prefetch(slow, 0) as ahead:
        assert [ahead.next()[0].step for _ in range(2)] == [0, 1]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                ahead.next()


def test_the_time_of_a_wait_is_told(slow: Slow) -> None:
    ticks = iter((10.0, 12.5, 20.0, 20.25))
    slow.turns.release(2)
    with Prefetch(slow, 0, clock=lambda: next(ticks)) as ahead:
        assert [ahead.next()[1] for _ in range(2)] == [2.5, 0.25]


def test_a_close_ends_the_thread_and_may_come_twice() -> None:
    ahead = Prefetch(batches(), 0)
    ahead.next()
    ahead.close()
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch" and thread.is_alive()]
    with pytest.raises(ValueError, match="closed"):
        ahead.next()


def test_a_close_does_not_wait_for_a_batch_that_never_comes(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_PATIENCE", 0.1)
    ahead = Prefetch(slow, 0)
    wait_until(slow, [0])
    begin = time.monotonic()
    ahead.close()
    assert time.monotonic() - begin < 30


def test_a_close_from_elsewhere_ends_a_wait(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_PATIENCE", 0.1)
    ahead = Prefetch(slow, 0)
    timer = threading.Timer(0.1, ahead.close)
    timer.start()
    with pytest.raises(ValueError, match="closed"):
        ahead.next()
    timer.join()


def test_batches_are_of_the_same_types_as_rows() -> None:
    data = batches().at(0)
    assert [getattr(data, key).dtype for key in ARRAYS] == [np.int32, np.int32, np.float32, np.int32, np.int32]

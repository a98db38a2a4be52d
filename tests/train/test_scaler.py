"""The contract of the loss scale: it halves at an overflow, doubles after a while without, and says when it cannot."""

from __future__ import annotations

import pytest

from ckptkit.errors import CorruptError, DivergedError
from ckptkit.train.scaler import HIGHEST, LOWEST, Scaler, make_scaler


def test_a_dynamic_scale_doubles_after_its_interval_and_halves_at_an_overflow() -> None:
    scaler = Scaler(1024.0, growth_interval=3)
    scales = []
    for overflows in (0, 0, 0, 0, 1, 0, 0, 0):
        scaler.overflowed(0) if overflows else scaler.good()
        scales.append(scaler.scale)
    assert scales == [1024, 1024, 2048, 2048, 1024, 1024, 1024, 2048]
    assert scaler.state() == {"scale": 2048.0, "counter": 0, "skipped": 1}


def test_an_overflow_begins_the_count_anew() -> None:
    scaler = Scaler(1024.0, growth_interval=2)
    scaler.good()
    scaler.overflowed(0)
    scaler.good()
    assert scaler.scale == 512.0  # with the count before the overflow it would have doubled


def test_a_dynamic_scale_stays_between_its_ends() -> None:
    high = Scaler(HIGHEST, growth_interval=1)
    high.good()
    assert high.scale == HIGHEST
    low = Scaler(LOWEST * 1.5, growth_interval=1)
    low.overflowed(0)
    assert low.scale == LOWEST


def test_a_scale_at_its_lowest_that_overflows_is_an_error() -> None:
    with pytest.raises(DivergedError, match="of step 7 overflows float16 even at the loss scale 1"):
        Scaler(LOWEST, growth_interval=1).overflowed(7)


def test_a_static_scale_never_moves_and_an_overflow_is_an_error() -> None:
    scaler = Scaler(256.0)
    for _ in range(5):
        scaler.good()
    assert scaler.state() == {"scale": 256.0, "counter": 0, "skipped": 0}
    with pytest.raises(DivergedError, match="of step 3 overflows float16 at the static loss scale 256"):
        scaler.overflowed(3)


def test_a_scaler_goes_on_from_its_state() -> None:
    whole, first, second = (Scaler(64.0, growth_interval=3) for _ in range(3))
    for scaler in (whole, first):
        scaler.good()
        scaler.overflowed(0)
        scaler.good()
    second.load(first.state())
    for scaler in (whole, second):
        scaler.good()
        scaler.good()
    assert second.state() == whole.state() == {"scale": 64.0, "counter": 0, "skipped": 1}
    forgetful = Scaler(32.0, growth_interval=3)  # the control: without the count it would double later
    forgetful.good()
    forgetful.good()
    assert forgetful.scale != second.scale


def test_a_static_scale_is_the_configs_whatever_the_state_says() -> None:
    scaler = Scaler(256.0)
    scaler.load({"scale": 8.0, "counter": 5, "skipped": 2})
    assert scaler.state() == {"scale": 256.0, "counter": 0, "skipped": 2}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scale": 8.0, "counter": 1},
        {"scale": float("nan"), "counter": 1, "skipped": 0},
        {"scale": 0.5, "counter": 1, "skipped": 0},
        {"scale": 8.0, "counter": -1, "skipped": 0},
        {"scale": "eight", "counter": 1, "skipped": 0},
    ],
)
def test_what_is_no_state_is_refused(state: dict[str, float]) -> None:
    with pytest.raises(CorruptError, match="the loss scale's state"):
        Scaler(8.0, growth_interval=1).load(state)


def test_the_config_chooses_the_scaler() -> None:
    assert make_scaler("fp32", "dynamic", 65536.0, 10) == Scaler(1.0)
    assert make_scaler("fp16", "dynamic", 65536.0, 10) == Scaler(65536.0, 10)
    assert make_scaler("fp16", 1024.0, 65536.0, 10) == Scaler(1024.0)
    assert make_scaler("fp16", "dynamic", 1e30, 10) == Scaler(HIGHEST, 10)

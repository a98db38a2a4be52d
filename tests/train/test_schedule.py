"""The contract: the learning rate is a function of the step alone, so no restart can shift, repeat or shrink it."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.train.schedule import lr_at


@dataclass(frozen=True)
class Plan:
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 4
    total_steps: int = 20
    min_lr: float = 1e-5


LR = 3e-4
KINDS: tuple[Literal["cosine", "linear", "constant"], ...] = ("cosine", "linear", "constant")


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def straight(plan: Plan) -> list[bytes]:
    return [bits(lr_at(plan, LR, step)) for step in range(plan.total_steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_of_a_warm_up_is_above_zero_and_its_last_is_the_base_rate(kind: str) -> None:
    plan = Plan(kind=kind)  # type: ignore[arg-type]
    assert lr_at(plan, LR, 0) == LR / 4 > 0
    assert lr_at(plan, LR, 3) == LR
    assert lr_at(plan, LR, 4) == LR, "the fall begins at the top"


def test_each_kind_is_the_formula_of_the_docs() -> None:
    """Half-way (step 12 of 4..20): exact for linear; the cosine of pi/2 is 6e-17 off zero, so within an ulp or two."""
    assert lr_at(Plan("linear"), LR, 12) == LR - (LR - 1e-5) * 0.5
    assert lr_at(Plan("cosine"), LR, 12) == pytest.approx(LR - (LR - 1e-5) * 0.5, rel=4 * 2**-52)
    assert lr_at(Plan("cosine"), LR, 8) == LR - (LR - 1e-5) * (1 - math.cos(math.pi * 0.25)) / 2
    assert lr_at(Plan("constant"), LR, 19) == LR


@pytest.mark.parametrize(("kind", "end"), [("cosine", 1e-5), ("linear", 1e-5), ("constant", LR)])
def test_after_its_end_a_schedule_stays_where_it_is(kind: str, end: float) -> None:
    """T24: more steps after the end would train at the lowest rate for ever; the driver makes none."""
    plan = Plan(kind=kind)  # type: ignore[arg-type]
    assert [lr_at(plan, LR, step) for step in (20, 21, 10**9)] == [end] * 3


def test_t05_a_run_that_stops_at_9_has_the_rates_of_the_straight_run() -> None:
    plan = Plan()
    resumed = [bits(lr_at(plan, LR, step)) for part in (range(9), range(9, 20)) for step in part]
    assert resumed == straight(plan)


def test_t05_a_schedule_that_began_with_the_epoch_would_be_seen() -> None:
    """The control: warm-up again after a stop, as a schedule seeded with the epoch's number has it."""
    plan = Plan()
    wrong = [bits(lr_at(plan, LR, step)) for part in (range(9), range(11)) for step in part]
    assert wrong != straight(plan)


def test_t07_three_restarts_during_the_warm_up_leave_the_rate_as_it_is() -> None:
    plan = Plan(warmup_steps=10)
    rates = []
    for start, stop in [(0, 2), (2, 3), (3, 7), (7, 20)]:
        plan = replace(plan)  # each process makes its own
        rates += [bits(lr_at(plan, LR, step)) for step in range(start, stop)]
    assert rates == straight(plan)


def test_t07_a_factor_that_is_applied_to_the_current_rate_would_be_seen() -> None:
    """The control: the stored rate taken for the base rate at each restart."""
    plan, base, rates = Plan(warmup_steps=10), LR, []
    for start, stop in [(0, 2), (2, 3), (3, 7), (7, 20)]:
        rates += [bits(lr_at(plan, base, step)) for step in range(start, stop)]
        base = lr_at(plan, base, stop - 1)
    assert rates != straight(plan)


@given(
    st.sampled_from(KINDS), st.integers(0, 50), st.integers(1, 200), st.floats(1e-8, 1.0), st.floats(0.0, 1.0),
    st.integers(0, 400),
)  # fmt: skip
def test_a_rate_lies_between_zero_and_the_base_and_never_rises_after_the_warm_up(
    kind: Literal["cosine", "linear", "constant"], warmup: int, more: int, base: float, share: float, step: int
) -> None:
    plan = Plan(kind, warmup, warmup + more, base * share)
    now, then = lr_at(plan, base, step), lr_at(plan, base, step + 1)
    assert 0 <= now <= base
    if step >= warmup:
        assert plan.min_lr <= now
        # two cosines whose steps are closer than their rounding may change places, by an ulp of the base
        assert then <= now + 2 * math.ulp(base)
    else:
        assert then > now or step + 1 == warmup


def test_a_step_below_zero_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        lr_at(Plan(), LR, -1)

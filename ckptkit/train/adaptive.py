"""The adaptive micro-batch: which settings a step may have, and a pure function that goes from one to the next.

The settings are a ladder, from what the config says to what needs the least memory: first recompute of every layer,
then micro-batches that are smaller divisors of the batch, down to `min_micro_batch`. A step whose peak memory is over
the limit goes one notch down. `patience` steps in a row below `grow_below` of the limit go one notch up: what was
taken last is given back first. The batch stays the same: a smaller micro-batch is accumulated more often.

Hysteresis, so that it does not swing: between the two marks nothing happens, and the calm count begins anew; the
first step after a change, which compiles anew, counts neither way; and a setting that was gone back to and was over
the limit again is barred, with those above it, for the rest of the run. At the floor there is nothing left to take:
that is said once.

What a step will need is not known before it ran, so one step of a setting that is too large has to fit all the same.
What does not live here: how memory is measured (`memory.py`), and how decisions survive a kill (`decisions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckptkit.errors import CorruptError
from ckptkit.report import human_bytes

Act = Literal["recompute_on", "recompute_off", "cut", "grow", "at_floor"]
_SETTLING_STEPS = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """What a step runs with: rows at a time, and whether every layer is recomputed (else those of the config)."""

    micro_batch: int
    recompute: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """The ladder, largest setting first, and when to move on it; `limit_bytes` is the most memory of a step."""

    ladder: tuple[Setting, ...]
    limit_bytes: int
    grow_below: float
    patience: int


@dataclass(frozen=True, slots=True)
class State:
    """Where a run is: its setting, and what it remembers.

    `calm` counts calm steps in a row; `settling` the steps that still count neither way; `regrown` are settings that
    were gone back to, and `barred` those of them that were over the limit again.
    """

    setting: Setting
    calm: int = 0
    settling: int = 0
    regrown: frozenset[Setting] = frozenset()
    barred: frozenset[Setting] = frozenset()
    floor_said: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `state_from_json` makes the same state of it."""
        return {
            "micro_batch": self.setting.micro_batch,
            "recompute": self.setting.recompute,
            "calm": self.calm,
            "settling": self.settling,
            "regrown": _pairs(self.regrown),
            "barred": _pairs(self.barred),
            "floor_said": self.floor_said,
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided after `step` for the steps that follow, and the peak that led to it."""

    step: int
    act: Act
    peak_bytes: int
    before: Setting
    after: Setting

    def text(self, limit_bytes: int) -> str:
        """Return it in one line for people."""
        peak = f"step {self.step} took {human_bytes(self.peak_bytes)} of memory"
        limit = human_bytes(limit_bytes)
        if self.act == "at_floor":
            return (
                f"{peak}, over the limit of {limit}, and no setting takes less: micro-batch {self.after.micro_batch} "
                "with recompute; lower `training.adaptive.min_micro_batch` or `data.seq_length`, or raise the limit"
            )
        change = {
            "recompute_on": "every layer is recomputed from now on",
            "recompute_off": "recompute goes back to what the config says",
        }.get(self.act, f"the micro-batch goes from {self.before.micro_batch} to {self.after.micro_batch}")
        side = "over" if self.act in ("recompute_on", "cut") else "well below"
        return f"{peak}, {side} the limit of {limit}: {change}"


def ladder(batch_size: int, micro_batch: int, min_micro_batch: int, *, recomputes_all: bool) -> tuple[Setting, ...]:
    """Return the settings from the config's to the smallest; ValueError unless `micro_batch` divides `batch_size`.

    `recomputes_all`: the config recomputes every layer already, so that there is nothing to turn on.
    """
    if batch_size % micro_batch:
        raise ValueError(f"{micro_batch} does not divide {batch_size}")
    first = [] if recomputes_all else [Setting(micro_batch, recompute=False)]
    smaller = [n for n in range(micro_batch - 1, min_micro_batch - 1, -1) if batch_size % n == 0]
    return (*first, *(Setting(rows, recompute=True) for rows in (micro_batch, *smaller)))


def decide(policy: Policy, state: State, step: int, peak_bytes: int) -> tuple[State, Decision | None]:
    """Return the state after `step`, whose most memory was `peak_bytes`, and what was decided, if anything.

    Pure: the same arguments give the same result. The setting of the new state is that of the next step.
    """
    if state.settling:
        return replace(state, settling=state.settling - 1), None
    if peak_bytes > policy.limit_bytes:
        return _go_down(policy, state, step, peak_bytes)
    calm = state.calm + 1 if peak_bytes < policy.grow_below * policy.limit_bytes else 0
    target = _above(policy, state)
    if calm < policy.patience or target is None:
        return replace(state, calm=min(calm, policy.patience)), None
    act: Act = "recompute_off" if state.setting.recompute and not target.recompute else "grow"
    moved = replace(state, setting=target, calm=0, settling=_SETTLING_STEPS, regrown=state.regrown | {target})
    return moved, Decision(step, act, peak_bytes, state.setting, target)


def _go_down(policy: Policy, state: State, step: int, peak_bytes: int) -> tuple[State, Decision | None]:
    here = state.setting
    barred = state.barred | ({here} & state.regrown)
    place = policy.ladder.index(here)
    if place + 1 == len(policy.ladder):
        still = replace(state, calm=0, barred=barred, floor_said=True)
        return still, None if state.floor_said else Decision(step, "at_floor", peak_bytes, here, here)
    below = policy.ladder[place + 1]
    act: Act = "cut" if below.micro_batch < here.micro_batch else "recompute_on"
    moved = replace(state, setting=below, calm=0, settling=_SETTLING_STEPS, barred=barred)
    return moved, Decision(step, act, peak_bytes, here, below)


def _above(policy: Policy, state: State) -> Setting | None:
    """Return the setting one notch up; None at the top, or where it or one that needs less memory is barred."""
    place = policy.ladder.index(state.setting)
    if place == 0 or state.barred & set(policy.ladder[place - 1 :]):
        return None
    return policy.ladder[place - 1]


def state_from_json(data: object) -> State:
    """Return the state that `State.to_json` wrote; CorruptError for anything else."""
    try:
        if not isinstance(data, Mapping):
            raise TypeError
        state = State(
            Setting(_number(data["micro_batch"]), _flag(data["recompute"])),
            _number(data["calm"]),
            _number(data["settling"]),
            _settings(data["regrown"]),
            _settings(data["barred"]),
            _flag(data["floor_said"]),
        )
    except (KeyError, TypeError, ValueError):
        raise CorruptError(
            "the state of the adaptive micro-batch does not read", hint="go on from an older checkpoint"
        ) from None
    return state


def _pairs(settings: frozenset[Setting]) -> list[list[int | bool]]:
    return sorted([setting.micro_batch, setting.recompute] for setting in settings)


def _settings(pairs: Any) -> frozenset[Setting]:
    return frozenset(Setting(_number(rows), _flag(recompute)) for rows, recompute in pairs)


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value

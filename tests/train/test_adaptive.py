"""The contract: memory decides when a step gets smaller, and a decision once taken is repeated, so the bits are too.

The controller is pure, so its peaks are numbers here. Memory that is really taken: test_memory.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import CorruptError, ResourceError, UsageError
from ckptkit.train.adaptive import Decision, Policy, Setting, State, decide, ladder, state_from_json
from ckptkit.train.decisions import DECISIONS, open_adaptive

GB = 10**9
POLICY = Policy(ladder(12, 12, 1, recomputes_all=False), limit_bytes=10 * GB, grow_below=0.6, patience=3)
TOP = State(POLICY.ladder[0])
OVER, CALM, BETWEEN = 11 * GB, GB, 8 * GB


def walk(policy: Policy, state: State, peaks: Sequence[int], first: int = 1) -> tuple[State, list[Decision]]:
    made = []
    for step, peak in enumerate(peaks, first):
        state, decision = decide(policy, state, step, peak)
        made += [decision] if decision else []
    return state, made


def acts(decisions: Sequence[Decision]) -> list[tuple[int, str, int, bool]]:
    return [(d.step, d.act, d.after.micro_batch, d.after.recompute) for d in decisions]


def test_the_ladder_is_recompute_first_then_the_divisors() -> None:
    assert [(s.micro_batch, s.recompute) for s in POLICY.ladder] == [
        (12, False), (12, True), (6, True), (4, True), (3, True), (2, True), (1, True),
    ]  # fmt: skip
    assert ladder(12, 6, 3, recomputes_all=True) == (Setting(6, True), Setting(4, True), Setting(3, True))
    assert ladder(7, 7, 2, recomputes_all=False) == (Setting(7, False), Setting(7, True))
    with pytest.raises(ValueError, match="does not divide"):
        ladder(12, 5, 1, recomputes_all=False)


def test_over_the_limit_recompute_comes_first_then_cuts_with_a_step_to_settle_between() -> None:
    _, made = walk(POLICY, TOP, [OVER] * 6)
    assert acts(made) == [(1, "recompute_on", 12, True), (3, "cut", 6, True), (5, "cut", 4, True)]


def test_the_floor_is_said_once() -> None:
    state, made = walk(POLICY, TOP, [OVER] * 40)
    assert [d.act for d in made] == ["recompute_on"] + ["cut"] * 5 + ["at_floor"]
    assert state.setting == Setting(1, True)
    assert "no setting takes less: micro-batch 1 with recompute" in made[-1].text(POLICY.limit_bytes)


def test_it_grows_back_in_the_reverse_order_after_calm_steps() -> None:
    state, _ = walk(POLICY, TOP, [OVER, CALM, OVER])
    assert state.setting == Setting(6, True)
    _, made = walk(POLICY, state, [CALM] * 12, 4)
    assert acts(made) == [(7, "grow", 12, True), (11, "recompute_off", 12, False)]


def test_a_step_between_the_marks_begins_the_count_of_calm_steps_anew() -> None:
    state, _ = walk(POLICY, TOP, [OVER, CALM])
    _, made = walk(POLICY, state, [CALM, CALM, BETWEEN, CALM, CALM], 3)
    assert made == []
    _, made = walk(POLICY, state, [CALM, CALM, CALM], 3)
    assert acts(made) == [(5, "recompute_off", 12, False)], "the control: three in a row do grow"


def test_exactly_at_a_mark_nothing_happens() -> None:
    assert walk(POLICY, TOP, [10 * GB] * 9)[1] == []
    state, _ = walk(POLICY, TOP, [OVER, CALM])
    assert walk(POLICY, state, [6 * GB] * 9, 3)[1] == []


def test_a_setting_that_was_gone_back_to_and_overflowed_again_is_not_tried_a_third_time() -> None:
    """Without the bar it would swing for ever: memory needs 11 GB at the top, and 1 GB one notch below."""

    def run(bar: bool) -> list[Decision]:
        state, made = TOP, []
        for step in range(1, 60):
            state, decision = decide(POLICY, state, step, CALM if state.setting.recompute else OVER)
            if not bar:
                state = replace(state, barred=frozenset())
            made += [decision] if decision else []
        return made

    assert [d.act for d in run(bar=True)] == ["recompute_on", "recompute_off", "recompute_on"]
    assert len(run(bar=False)) > 10, "the control: it swings"


def test_a_barred_setting_bars_what_needs_more_and_not_what_needs_less() -> None:
    barred = replace(TOP, setting=POLICY.ladder[4], barred=frozenset({POLICY.ladder[2]}))
    state, made = walk(POLICY, barred, [CALM] * 30)
    assert acts(made) == [(3, "grow", 4, True)]
    assert state.setting == POLICY.ladder[3]


@given(st.lists(st.sampled_from([OVER, CALM, BETWEEN]), max_size=80), st.sampled_from([1, 2, 6, 12, 24]))
def test_every_setting_divides_the_batch_and_moves_are_one_notch(peaks: list[int], batch: int) -> None:
    policy = replace(POLICY, ladder=ladder(batch, batch, 1, recomputes_all=False))
    state = State(policy.ladder[0])
    for step, peak in enumerate(peaks, 1):
        before = policy.ladder.index(state.setting)
        state, decision = decide(policy, state, step, peak)
        after = policy.ladder.index(state.setting)
        assert batch % state.setting.micro_batch == 0
        assert abs(after - before) <= 1
        assert (decision is not None and decision.act != "at_floor") == (before != after)
        assert state_from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize("change", [{"calm": -1}, {"micro_batch": "1"}, {"recompute": 1}, {"barred": [[1]]}, {"x": 0}])
def test_a_state_that_does_not_read_is_refused(change: dict[str, object]) -> None:
    data = {**TOP.to_json(), **change}
    if "x" in change:
        del data["calm"]
        del data["x"]
    with pytest.raises(CorruptError, match="does not read"):
        state_from_json(data)


# the journal


def peaks_of(salt: int) -> Callable[[int, Setting], int]:
    """Memory that a machine might measure: it depends on the setting, and on the moment (`salt`), too."""

    def peak(step: int, setting: Setting) -> int:
        noise = random.Random(f"{salt} {step}").randrange(8)
        return GB * setting.micro_batch // (2 if setting.recompute else 1) + noise * GB

    return peak


def settings_of(run: Path, last: int, state: State | None, start: int, salt: int) -> tuple[list[Setting], State]:
    """Run steps start+1..last, and return the setting that each had."""
    adaptive = open_adaptive(run, POLICY, state, start)
    peak, used = peaks_of(salt), []
    for step in range(start + 1, last + 1):
        used.append(adaptive.setting)
        adaptive.after(step, peak(step, adaptive.setting))
    adaptive.close()
    return used, adaptive.state


@pytest.mark.parametrize(
    ("checkpoint", "killed_after"),
    [(saved, killed) for saved in (0, 1, 4, 12) for killed in (1, 2, 3, 5, 8, 13, 19) if saved <= killed],
)
def test_steps_that_are_run_again_have_the_settings_that_they_had(
    tmp_path: Path, checkpoint: int, killed_after: int
) -> None:
    """The second process measures other memory (another salt), and obeys the journal as far as it goes."""
    saved = settings_of(tmp_path, checkpoint, None, 0, salt=1)[1] if checkpoint else None
    first, _ = settings_of(tmp_path, killed_after, saved, checkpoint, salt=1)
    again, _ = settings_of(tmp_path, 30, saved, checkpoint, salt=2)
    assert again[: len(first)] == first
    third, _ = settings_of(tmp_path, 30, saved, checkpoint, salt=3)
    assert third == again
    steps = [json.loads(line)["step"] for line in (tmp_path / DECISIONS).read_text().splitlines()]
    assert steps == list(range(1, 31)), "a line a step, none twice"


def test_without_the_journal_the_settings_would_differ(tmp_path: Path) -> None:
    """The control of the test above."""
    first, _ = settings_of(tmp_path, 19, None, 0, salt=1)
    (tmp_path / DECISIONS).unlink()
    assert settings_of(tmp_path, 19, None, 0, salt=2)[0] != first


@pytest.mark.parametrize("cut", [1, 7, 40])
@pytest.mark.parametrize("after", [b"", b"\0" * 9, b'{"step": 6}\n'])
def test_a_torn_last_line_is_ignored_and_cut_off(tmp_path: Path, cut: int, after: bytes) -> None:
    first, _ = settings_of(tmp_path, 5, None, 0, salt=1)
    journal = tmp_path / DECISIONS
    journal.write_bytes(journal.read_bytes()[:-cut] + after)
    again, _ = settings_of(tmp_path, 5, None, 0, salt=1)
    assert again == first
    assert [json.loads(line)["step"] for line in journal.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_a_decision_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write, fsync = os.write, os.fsync
    adaptive = open_adaptive(tmp_path, POLICY, None, 0)
    monkeypatch.setattr(os, "write", lambda fd, data: (order.append("write"), write(fd, data))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd))[1])
    assert adaptive.after(1, OVER) is not None
    assert order == ["write", "fsync"]
    assert adaptive.after(2, OVER) is None
    assert order == ["write", "fsync", "write"], "nothing was decided: nothing waits for the disk"
    adaptive.close()


def test_a_disk_that_fails_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot write"):
        open_adaptive(tmp_path / "none", POLICY, None, 0)
    adaptive = open_adaptive(tmp_path, POLICY, None, 0)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, adaptive.fd)
    os.close(full)
    with pytest.raises(ResourceError, match="no space is left"):
        adaptive.after(1, OVER)
    adaptive.close()


def test_a_file_of_somebody_else_is_not_cut_off(tmp_path: Path) -> None:
    (tmp_path / DECISIONS).write_text("we decided to go home\n")
    with pytest.raises(UsageError, match="no journal"):
        open_adaptive(tmp_path, POLICY, None, 0)
    assert (tmp_path / DECISIONS).read_text() == "we decided to go home\n"


def test_another_batch_makes_another_ladder_and_old_lines_are_dropped(tmp_path: Path) -> None:
    _, state = settings_of(tmp_path, 6, None, 0, salt=1)
    other = replace(POLICY, ladder=ladder(10, 5, 1, recomputes_all=False))
    adaptive = open_adaptive(tmp_path, other, state, 6)
    assert adaptive.setting == Setting(5, recompute=False)
    adaptive.close()
    assert (tmp_path / DECISIONS).read_bytes() == b""


def test_decisions_of_other_maths_are_forgotten_on_request(tmp_path: Path) -> None:
    settings_of(tmp_path, 8, None, 0, salt=1)
    open_adaptive(tmp_path, POLICY, None, 3, forget=True).close()
    steps = [json.loads(line)["step"] for line in (tmp_path / DECISIONS).read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_a_step_out_of_order_is_a_mistake(tmp_path: Path) -> None:
    adaptive = open_adaptive(tmp_path, POLICY, None, 4)
    with pytest.raises(ValueError, match="does not follow"):
        adaptive.after(6, CALM)
    adaptive.close()


_KILLED = """
import sys
from pathlib import Path
from ckptkit.train.adaptive import Policy, ladder
from ckptkit.train.decisions import open_adaptive
policy = Policy(ladder(12, 12, 1, recomputes_all=False), 10**10, 0.6, 3)
adaptive = open_adaptive(Path(sys.argv[1]), policy, None, 0)
for step in range(1, 10**6):
    decision = adaptive.after(step, 11 * 10**9 if step % 50 < 6 else 10**9)
    if decision:
        print(step, adaptive.setting.micro_batch, adaptive.setting.recompute, flush=True)
"""


def test_a_decision_that_was_seen_outlives_a_kill(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    seen = [run.stdout.readline().split() for _ in range(7)]
    run.send_signal(signal.SIGKILL)
    run.communicate()
    adaptive = open_adaptive(tmp_path, POLICY, None, 0)
    for step, rows, recompute in seen:
        setting = adaptive.recorded[int(step)].state.setting
        assert (str(setting.micro_batch), str(setting.recompute)) == (rows, recompute)
    adaptive.close()

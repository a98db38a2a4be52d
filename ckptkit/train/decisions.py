"""`RUN/decisions.jsonl`: what the adaptive micro-batch saw and decided after each step, for a resumed run to repeat.

A line is `{"step", "peak_bytes", "act", "state"}`; `act` is null where nothing was decided, and `state` is the one that
the next step begins with. A decision is fsynced before it counts. A step without one is written without a wait: that
outlives a kill of the process, and after a loss of power the lines that are gone are made again.

    A run that goes on from step M takes the state after each step > M from its line, as long as there is one, whatever
    that step's memory is this time, and decides by itself from there on.

So a step that ran once has the same micro-batch whenever it is run again, and the same bits. A torn line, and what
comes after it, is cut off. What does not live here: how it is decided (`adaptive.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from ckptkit.errors import CorruptError, UsageError
from ckptkit.formats.disk import appended, disk_error, fsync_folder, write_all
from ckptkit.train.adaptive import Act, Decision, Policy, Setting, State, decide, state_from_json

DECISIONS = "decisions.jsonl"
_WHY = "a run that went on without its decisions could not be repeated"
_THEN = "then run the same command again: it goes on from the newest checkpoint"


@dataclass(frozen=True, slots=True)
class _Line:
    step: int
    peak_bytes: int
    act: Act | None
    state: State


@dataclass(slots=True)
class Adaptive:
    """The settings of a run, step by step; use `open_adaptive`, and `close` at the end."""

    policy: Policy
    state: State
    step: int
    path: Path
    fd: int
    recorded: dict[int, _Line] = field(default_factory=dict)

    @property
    def setting(self) -> Setting:
        """The setting of the next step."""
        return self.state.setting

    def after(self, step: int, peak_bytes: int) -> Decision | None:
        """Note that `step` ran and took at most `peak_bytes`; return what was decided for the steps that follow.

        `step` counts from 1, and each comes once. A line that was written before a kill is obeyed, not written again.
        """
        if step != self.step + 1:
            raise ValueError(f"step {step} does not follow step {self.step}")
        before, line = self.setting, self.recorded.pop(step, None)
        if line is None:
            self.state, decision = decide(self.policy, self.state, step, peak_bytes)
            self._write(_Line(step, peak_bytes, decision.act if decision else None, self.state), decision is not None)
        else:
            self.state = line.state
            decision = Decision(step, line.act, line.peak_bytes, before, line.state.setting) if line.act else None
        self.step = step
        return decision

    def _write(self, line: _Line, durable: bool) -> None:
        data = {"step": line.step, "peak_bytes": line.peak_bytes, "act": line.act, "state": line.state.to_json()}
        text = (json.dumps(data, separators=(",", ":")) + "\n").encode()
        try:
            write_all(self.fd, text)
            if durable:
                os.fsync(self.fd)
        except OSError as error:
            raise disk_error(error, self.path, why=_WHY, then=_THEN) from error

    def close(self) -> None:
        os.close(self.fd)


def open_adaptive(run: Path, policy: Policy, state: State | None, step: int, *, forget: bool = False) -> Adaptive:
    """Open the journal of `run`, to go on after `step` in the state that its checkpoint holds (None: from the top).

    With `forget` the decisions of later steps are cut off: for a run whose maths were changed on purpose. So are lines
    of settings that the ladder does not have, from the first one on. A state with such a setting, which another batch
    or micro-batch in the config leads to, begins at the top. ResourceError when the journal cannot be written.
    """
    path = run / DECISIONS
    if state is None or state.setting not in policy.ladder:
        state = State(policy.ladder[0])
    with appended(path, why=_WHY, then=_THEN) as fd:
        recorded = _read(path, fd, policy, after=step if forget else None)
        fsync_folder(run)
    known = {line.step: line for line in recorded if line.step > step}
    return Adaptive(policy, state, step, path, fd, known)


def _read(path: Path, fd: int, policy: Policy, after: int | None) -> list[_Line]:
    """Return the sound lines from the first on, and cut off the rest."""
    data = b""
    while block := os.pread(fd, 1 << 20, len(data)):
        data += block
    lines: list[_Line] = []
    sound = 0
    for text in data.splitlines(keepends=True):
        line = _line(text)
        if line is None and not lines and text.strip(b"\0"):
            _refuse_foreign(path, text)
        stale = line is not None and (
            line.state.setting not in policy.ladder or (after is not None and line.step > after)
        )
        if line is None or stale or (lines and line.step <= lines[-1].step):
            break
        lines.append(line)
        sound += len(text)
    if sound < len(data):
        os.ftruncate(fd, sound)
        os.fsync(fd)
    return lines


def _refuse_foreign(path: Path, text: bytes) -> None:
    """A first line that is not even the beginning of ours: the file is somebody else's, and is not cut off."""
    if not text.startswith(b'{"step":'[: len(text)]):
        raise UsageError(f"`{path}` is no journal of a run", hint="move it, or choose another `checkpoint.folder`")


def _line(text: bytes) -> _Line | None:
    try:
        data = json.loads(text) if text.endswith(b"\n") else None
        if not isinstance(data, Mapping) or data["act"] not in (None, *get_args(Act)):
            return None
        return _Line(_whole(data["step"]), _whole(data["peak_bytes"]), data["act"], state_from_json(data["state"]))
    except (KeyError, TypeError, ValueError, RecursionError, CorruptError):
        return None


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError
    return value

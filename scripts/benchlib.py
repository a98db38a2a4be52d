"""Measure child processes and compare them, round by round.

A subject runs as a process of its own, once a round. Its CPU seconds are what the kernel charges to it and to the
children that it waited for (`wait4`), all threads included: the figure to trust on a machine that others use too.
Its memory is the peak of its anonymous resident bytes, children included, sampled every few milliseconds: file pages
that the system may drop at will are not counted. A subject may print its own figures for a part of its work on the
last line of its output, as JSON: `{"inner_cpu_s": 1.5, "lazy_cpu_s": 0.2}`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SAMPLE_SECONDS = 0.004
READ_BYTES = 1 << 20
MIB = 1 << 20
INNER = "inner_cpu_s"
LAZY = "lazy_cpu_s"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a subject. What it says itself: `inner_cpu_s` is its work alone, `lazy_cpu_s` what it imports late."""

    cpu_s: float
    wall_s: float
    anonymous_bytes: int
    resident_bytes: int
    output_bytes: int
    inner_cpu_s: float | None = None
    lazy_cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: `command(source, target)` makes the folder `target` out of `source`.

    `source` is the input of the measured runs; `tiny` one for a first run that is not recorded, which warms the
    caches of programs and libraries; `least_bytes` is what the output must have, or the run counts as failed.
    """

    name: str
    note: str
    command: Callable[[Path, Path], list[str]]
    source: Path
    tiny: Path
    least_bytes: int = 0


@dataclass(slots=True)
class Measured:
    """A subject's runs, one a round, or the reason why there are none."""

    name: str
    note: str
    runs: list[Run] = field(default_factory=list)
    missing: str = ""

    def values(self, figure: str) -> list[float]:
        return [value for run in self.runs if (value := getattr(run, figure)) is not None]


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure, one value a round. Their median is compared with `limit`; None where no goal is set."""

    text: str
    values: tuple[float, ...]
    limit: float | None = None
    at_least: bool = True
    unit: str = ""

    @property
    def state(self) -> str:
        if not self.values:
            return "not measured"
        if self.limit is None:
            return ""
        median = statistics.median(self.values)
        return "met" if (median >= self.limit if self.at_least else median <= self.limit) else "missed"


class FailedError(Exception):
    """A subject did not do its work; the text says what it printed last."""


def run_child(command: Sequence[str], *, scratch: Path, env: Mapping[str, str]) -> Run:
    """Run `command` in the folder `scratch` and return its figures; raise FailedError when it fails."""
    out_file, err_file = scratch / "stdout.txt", scratch / "stderr.txt"
    with open(out_file, "wb") as out, open(err_file, "wb") as err:
        started = time.perf_counter()
        child = subprocess.Popen(command, cwd=scratch, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        peak = 0
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            peak = max(peak, anonymous_bytes(child.pid))
            time.sleep(SAMPLE_SECONDS)
        wall = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    text = out_file.read_text(errors="replace")
    if child.returncode:
        said = (err_file.read_text(errors="replace") or text).strip().splitlines()
        raise FailedError(f"exit code {child.returncode}: {said[-1] if said else 'no message'}")
    cpu = usage.ru_utime + usage.ru_stime
    said_itself = own_figures(text)
    own = (said_itself.get(INNER), said_itself.get(LAZY))
    return Run(cpu, wall, peak, usage.ru_maxrss * 1024, 0, *own)


def own_figures(output: str) -> dict[str, float]:
    """Return the figures that a subject printed on its last line, if it did."""
    lines = output.strip().splitlines()
    if not lines or not lines[-1].startswith(f'{{"{INNER}"'):
        return {}
    return {name: float(value) for name, value in json.loads(lines[-1]).items()}


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous resident bytes of a process and of its descendants; 0 for one that has ended."""
    total = 0
    for process in _family(pid):
        try:
            with open(f"/proc/{process}/status", "rb") as file:
                _, found, rest = file.read().partition(b"RssAnon:")
        except OSError:
            continue
        total += int(rest.split(None, 1)[0]) * 1024 if found else 0
    return total


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            children = (task / "children").read_bytes().split()
        except OSError:
            continue
        for child in children:
            yield from _family(int(child))


def warm(folder: Path) -> None:
    """Read every file of `folder` once, so that the runs find it in the page cache."""
    buffer = bytearray(READ_BYTES)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs subjects in a `scratch` folder of its own, which it empties after each run."""

    scratch: Path
    env: Mapping[str, str]
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)

    def rounds(self, subjects: Sequence[Subject], count: int) -> list[Measured]:
        """Run every subject once a round, in an order that turns from round to round, and return all figures."""
        results = {subject.name: Measured(subject.name, subject.note) for subject in subjects}
        for subject in subjects:
            self._try(results[subject.name], subject, subject.tiny, record=False)
        for number in range(count):
            for subject in turned(subjects, number):
                if not results[subject.name].missing:
                    self.say(f"round {number + 1} of {count}: {subject.name}")
                    self._try(results[subject.name], subject, subject.source, record=True)
        return list(results.values())

    def _try(self, result: Measured, subject: Subject, source: Path, *, record: bool) -> None:
        try:
            run = self.once(subject, source, least_bytes=subject.least_bytes if record else 0)
        except (FailedError, OSError) as error:
            self.say(f"{subject.name} is not measured: {error}")
            result.missing = str(error)
            result.runs.clear()
            return
        if record:
            result.runs.append(run)

    def once(self, subject: Subject, source: Path, *, least_bytes: int) -> Run:
        """Run one subject on `source`, warmed, and remove what it wrote."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        target = self.scratch / "out"
        warm(source)
        try:
            run = run_child(subject.command(source, target), scratch=self.scratch, env=self.env)
            written = folder_bytes(target)
            if written < least_bytes:
                raise FailedError(f"it wrote {written} bytes where {least_bytes} are due")
        finally:
            shutil.rmtree(self.scratch)
        return Run(**{**asdict(run), "output_bytes": written})


def turned(items: Sequence[T], number: int) -> list[T]:
    """Return the order of round `number`: it begins one later each time, and every second one runs backwards."""
    start = number % len(items)
    order = [*items[start:], *items[:start]]
    return order[::-1] if number % 2 else order


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    """Return the quotient of each round; empty when one of the two was not measured."""
    return tuple(a / b for a, b in zip(above, below, strict=False) if b > 0)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return `median (min-max)`."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(values) > 1 else middle


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table whose columns line up; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def results_table(results: Sequence[Measured]) -> str:
    rows = [["subject", "CPU s", "of it the work alone", "wall s", "anonymous MiB", "note"]]
    for result in results:
        if result.missing:
            rows.append([result.name, "not measured", "", "", "", result.missing])
            continue
        anonymous = [value / MIB for value in result.values("anonymous_bytes")]
        figures = [spread(result.values(f)) for f in ("cpu_s", INNER, "wall_s")]
        rows.append([result.name, *figures, spread(anonymous, 0), result.note])
    return table(rows)


def goals_table(goals: Sequence[Goal]) -> str:
    rows = [["figure", "goal", "measured", ""]]
    for goal in goals:
        if not goal.values and goal.limit is None:
            continue
        sign = ">=" if goal.at_least else "<="
        limit = "" if goal.limit is None else f"{sign} {goal.limit:g} {goal.unit}".strip()
        rows.append([goal.text, limit, spread(goal.values), goal.state])
    return table(rows)


def to_data(results: Sequence[Measured], goals: Sequence[Goal]) -> dict[str, Any]:
    """Return a section's figures as plain data."""
    return {
        "subjects": [asdict(result) for result in results],
        "goals": [asdict(goal) | {"state": goal.state} for goal in goals],
    }

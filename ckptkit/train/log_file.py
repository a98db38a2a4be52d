"""`log.jsonl` of a run: one JSON object a line, added to at the end, and read back.

A kill may tear the last line: it is cut off when the file is opened again. A run that goes on from step M runs the
steps that come after it again, and their lines are there once more, equal but for times and memory; a reader takes the
last. JSON has no NaN: such a number is null, and `not_finite` says which it was, as {"loss": "nan"}. Other floats are
written in the shortest form that reads back as the same bits. What does not live here: what a line holds (`log.py`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CorruptError, UsageError
from ckptkit.formats.disk import appended, disk_error, write_all

LOG = "log.jsonl"
AFTER = "after_step"  # of what is no update: lines with `step` are those of updates, one each
_BLOCK = 1 << 16
_WHY = "a run without its log could not be compared with another one"
_THEN = "or choose another `log.file`; the same command goes on from the newest checkpoint"
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunLog:
    """What a run wrote down: the last line of each step, of each step's evaluation, in the order of steps; notes."""

    steps: dict[int, Line]
    evals: dict[int, Line]
    notes: tuple[Line, ...]


_HEAD = b'{"kind": '  # of every line


def open_lines(path: Path) -> int:
    """Return a descriptor that adds lines to `path`, made if need be, a torn last line cut off.

    UsageError for a file with something else in it, ResourceError where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, path, why=_WHY, then=_THEN) from error
    with appended(path, why=_WHY, then=_THEN) as fd:
        head = os.pread(fd, len(_HEAD), 0)
        if not _HEAD.startswith(head) and head[:1] != b"\0":
            raise UsageError(
                f"`{path}` is no log of a run: lines are not added to it", hint="choose another `log.file`"
            )
        _cut_torn_line(fd)
    return fd


def add_line(path: Path, fd: int, line: Line) -> None:
    """Add one line; it is the kernel's when this returns, so that a kill of the process cannot take it back."""
    data = (json.dumps(_strict(line), allow_nan=False, separators=(", ", ": ")) + "\n").encode()
    try:
        write_all(fd, data)
    except OSError as error:
        raise disk_error(error, path, why=_WHY, then=_THEN) from error


def read_log(path: Path) -> RunLog:
    """Read a log; UsageError where there is none, CorruptError for a line inside of it that does not read."""
    steps: dict[int, Line] = {}
    evals: dict[int, Line] = {}
    notes = []
    for line in _lines(path):
        if line["kind"] == "step":
            steps[line["step"]] = line
        elif line["kind"] == "eval":
            evals[line[AFTER]] = line
        else:
            notes.append(line)
    return RunLog(dict(sorted(steps.items())), dict(sorted(evals.items())), tuple(notes))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read `{path}`: {reason}", hint="name the folder of a run, or its log file") from error
    for number, text in enumerate(data.splitlines(keepends=True), 1):
        if not text.endswith(b"\n"):
            return  # torn by a kill, or being written
        line = _parsed(text)
        if line is None:
            raise CorruptError(f"line {number} of `{path}` is no line of a log", hint="remove the line")
        yield line


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return None
    key = {"step": "step", "eval": AFTER}.get(line["kind"])
    if key is not None and type(line.get(key)) is not int:
        return None
    return line


def _strict(line: Line) -> dict[str, Any]:
    odd = {key: str(value) for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
    clean = {key: None if key in odd else value for key, value in line.items()}
    return {**clean, "not_finite": odd} if odd else clean


def _cut_torn_line(fd: int) -> None:
    """Cut off what comes after the last line break; only the end of the file is read."""
    size = end = os.fstat(fd).st_size
    while end:
        start = max(0, end - _BLOCK)
        place = os.pread(fd, end - start, start).rfind(b"\n")
        if place >= 0:
            end = start + place + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)

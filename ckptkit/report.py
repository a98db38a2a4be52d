"""A command's result as data, and as text for a terminal.

Every command returns a `Report`; the command line prints it to stdout, as text or with `--json`. The JSON form is
`{"schema": 1, "command": ..., "ok": ..., ...data}`; its keys are documented in docs/api.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from ckptkit.errors import printable

REPORT_SCHEMA = 1
_SHOWN_ROWS = 12
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,17})(?![^.])")  # a whole dotted word, spelled as str(int) does


@dataclass(slots=True)
class Report:
    """What a command did or found.

    `rows` are (label, text) lines for people, `data` is the same for programs. `exit_code` is 0, or 1 when a
    difference was found. `fill` makes data that is long (a row for each tensor) when somebody asks for it.
    """

    command: str
    headline: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    exit_code: int = 0
    fill: Callable[[], dict[str, Any]] | None = None
    _data: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> dict[str, Any]:
        """What the command found, as plain data."""
        if self.fill is not None:
            fill, self.fill = self.fill, None
            self._data = fill() | self._data
        return self._data

    @data.setter
    def data(self, data: dict[str, Any]) -> None:
        self._data = data

    def add(self, label: str, text: str) -> None:
        self.rows.append((label, text))

    def to_json(self) -> str:
        head = {"schema": REPORT_SCHEMA, "command": self.command, "ok": self.exit_code == 0}
        return json.dumps(head | self.data, indent=1)  # ASCII: a name may hold what no encoding can

    def to_text(self) -> str:
        width = max((len(label) for label, _ in self.rows), default=0)
        lines = [printable(self.headline)]
        last = None
        for label, text in self.rows:
            shown = "" if label == last else label
            lines.append(f"  {shown:<{width}}  {printable(text)}".rstrip())
            last = label
        return "\n".join(lines)


def fold_names(names: Iterable[str]) -> list[tuple[str, int]]:
    """Fold names that differ in numbers only: `layers.{0..31}.wq` stands for 32; (pattern, count), first seen first.

    A set of numbers with gaps is listed, not spanned: `{0,2,5}`.
    """
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(int(n) for n in _NUMBER.findall(name))
        groups.setdefault(tuple(_NUMBER.split(name)), []).append(numbers)
    found = []
    for pieces, rows in groups.items():
        spans = [_span(sorted(set(column))) for column in zip(*rows, strict=True)]
        found.append(("".join(piece + span for piece, span in zip(pieces, [*spans, ""], strict=True)), len(rows)))
    return found


def times(pattern: str, count: int) -> str:
    """Return `layers.{0..31}.wq x 32`, or a name that stands for itself."""
    return f"{pattern} x {count}" if count > 1 else pattern


def folded(names: Iterable[str]) -> list[str]:
    """Return the names as `fold_names` folds them, each with its count."""
    return [times(pattern, count) for pattern, count in fold_names(names)]


def finite(data: Any) -> Any:
    """Return data as JSON can hold it: null for a number that is none, and lists."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not isfinite(data) else data


def _span(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    shown = [str(n) for n in numbers[:6]] + (["..."] if len(numbers) > 6 else [])
    return "{" + ",".join(shown) + "}"


def tensors(number: int, one: str, more: str) -> str:
    """Return `1 tensor <one>` or `3 tensors <more>`: the verb goes with the number."""
    return f"1 tensor {one}" if number == 1 else f"{number} tensors {more}"


def human_bytes(count: int) -> str:
    """Return a byte count as people write it: `269.1 MB` (powers of 1000)."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def listed(items: Sequence[str]) -> list[str]:
    """Return at most a dozen items, then a count of the rest."""
    rest = len(items) - _SHOWN_ROWS
    return [*items[:_SHOWN_ROWS], *([f"... and {rest} more"] if rest > 0 else [])]

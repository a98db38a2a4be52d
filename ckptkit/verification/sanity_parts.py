"""What the page of `ckptkit verify --sanity --html` says of the report's data: verdict, losses, weights of each side.

All of it is taken from `Report.data` alone, whose keys docs/api.md has. What does not live here: HTML (`page.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.verification import page_parts as parts
from ckptkit.verification.page_parts import Data, Group
from ckptkit.verification.statistics import Strange
from ckptkit.verification.strange_lines import folded

_SEVERITIES = ("wrong", "suspect", "note")  # the worst first


@dataclass(frozen=True, slots=True)
class Side:
    """A side: its data, its parameters by layer, the strange ones first, and what is strange in as few lines."""

    label: str
    data: Data
    rows: list[dict[str, Any]]
    groups: list[Group]
    lines: dict[str, list[str]]

    @property
    def wrong(self) -> bool:
        return self.data["loss"] is None or bool(self.lines["wrong"])


def words(data: Data) -> dict[str, Any]:
    """Return what the template `sanity.html.j2` is filled with."""
    sides = [_side(label, data[label]) for label in "ab" if label in data]
    sane = not (data["failed"] or any(side.wrong for side in sides))
    return {
        "title": f"{'Sane' if sane else 'Not sane'}: {' and '.join(side.data['path'] for side in sides)}",
        "sane": sane,
        "verdict": _verdict(data, sides),
        "sides": sides,
        "counts": parts.counts(row for side in sides for row in side.rows),
        "losses": _losses(sides),
        "versions": list(dict.fromkeys(name for side in sides for name in side.data["versions"])),
    }


def _verdict(data: Data, sides: Sequence[Side]) -> str:
    """Return the verdict in a line, without the paths."""
    wrong = [side.label for side in sides if side.wrong or data["failed"]]
    if wrong:
        return f"Something is wrong with {' and '.join(wrong)}"
    odd = sum(row["status"] == "suspect" for side in sides for row in side.rows)
    does = f"{' and '.join(side.label for side in sides)} look{'s' if len(sides) == 1 else ''}"
    return f"{does} like a trained model{f', but {odd} parameters look odd' if odd else ''}"


def _side(label: str, data: Data) -> Side:
    lines = [Strange(tuple(row["names"]), row["severity"], row["kind"], row["text"]) for row in data["strange"]]
    rows = _rows(data, lines)
    told = {severity: list(folded([line for line in lines if line.severity == severity])) for severity in _SEVERITIES}
    return Side(label.upper(), data, rows, parts.groups(rows), told)


def _rows(data: Data, lines: list[Strange]) -> list[dict[str, Any]]:
    """Return the parameters with what is strange about each; the last ones are those that are in no file."""
    found = {row["name"]: {**row, "status": "fine", "texts": []} for row in data["parameters"]}
    for line in sorted(lines, key=lambda line: _SEVERITIES.index(line.severity)):
        for name in line.names:
            row = found.setdefault(name, {"name": name, "status": "fine", "texts": []})
            row["status"] = line.severity if row["status"] == "fine" else row["status"]
            others = [other for other in line.names if other != name]
            equals = f": {', '.join(others[:3])}" if others and line.kind in ("duplicate", "tied") else ""
            row["texts"].append(line.text + equals)
    return list(found.values())


def _losses(sides: Sequence[Side]) -> list[tuple[str, int, list[Any]]]:
    """Return a row for each line of text, (name, tokens, a loss of each side), then that of all; none without a run."""
    ran = next((side.data for side in sides if side.data["lines"]), None)
    if ran is None:
        return []
    lines = [side.data["lines"] for side in sides]
    rows = [
        (line["name"], line["tokens"], [its[at]["loss"] if its else None for its in lines])
        for at, line in enumerate(ran["lines"])
    ]
    return [*rows, ("all", ran["tokens"], [side.data["loss"] for side in sides])]

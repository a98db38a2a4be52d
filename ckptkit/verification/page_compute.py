"""What the page of `ckptkit verify --html` says of the runs in fp16 or bf16, of `Report.data` alone.

What does not live here: HTML (`templates/compute.html.j2`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Data = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SideText:
    """What is said of a side in a line; `kept` is what it keeps in float32."""

    label: str
    text: str
    wrong: bool
    kept: Sequence[str]


@dataclass(frozen=True, slots=True)
class Compute:
    """The section's words. `rows` are (name, part, a row of the data for each side), `inputs` (name, tokens, same)."""

    dtype: str
    limit: float
    sides: list[SideText]
    rows: list[tuple[str, str, list[Data]]]
    inputs: list[tuple[str, int, list[Data]]]

    @property
    def limit_text(self) -> str:
        return f"{self.limit:.6g}"

    def share_text(self, share: float) -> str:
        """Return a part of the range as people read it."""
        return f"{share:.1%}" if share >= 1e-3 else f"{share:.1e}"


def compute_of(data: Data) -> Compute | None:
    """Return the words of the section; None when no other dtype was asked for."""
    found = data.get("compute")
    if found is None:
        return None
    labels = [label for label in "ab" if label in found]
    sides = [_side(label, found) for label in labels]
    return Compute(found["dtype"], found["limit"], sides, _merged(found, labels, "rows", "part"),
                   _merged(found, labels, "inputs", "tokens"))  # fmt: skip


def _side(label: str, found: Data) -> SideText:
    side = found[label]
    wrong = bool(side["verdict"])
    return SideText(label.upper(), side["verdict"] or f"nothing overflows in {found['dtype']}", wrong, side["kept"])


def _merged(found: Data, labels: Sequence[str], key: str, second: str) -> list[tuple[str, Any, list[Data]]]:
    """Return the rows that all sides have, by name, in the order of the first one."""
    named = [{row["name"]: row for row in found[label][key]} for label in labels]
    if not named:
        return []
    return [
        (name, row[second], [rows[name] for rows in named])
        for name, row in named[0].items()
        if all(name in rows for rows in named)
    ]


def verdicts(data: Data) -> list[str]:
    """Return what overflows, by side, in a few words each."""
    found = data.get("compute") or {}
    return [f"{label.upper()}: {found[label]['verdict']}" for label in "ab" if found.get(label, {}).get("verdict")]


def state(data: Data) -> str:
    """Return what became of the runs in another dtype, in the words of the levels."""
    found = data["compute"]
    return "failed" if verdicts(data) else "passed" if {"a", "b"} & found.keys() else "not tried"

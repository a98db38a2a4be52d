"""What the page of `ckptkit verify --html` says of the report's data: verdict, levels, layers of parameters, sides.

All of it is taken from `Report.data` alone, whose keys docs/api.md has. What does not live here: HTML (`page.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.verification.page_compute import state as compute_state
from ckptkit.verification.page_compute import verdicts

Data = Mapping[str, Any]

STATUS = {
    "value": "values differ",
    "shape": "other shape",
    "missing": "missing in B",
    "unexpected": "unexpected",
    "dtype": "other dtype",
    "loaded": "loaded",
    # those of `--sanity`
    "wrong": "wrong",
    "suspect": "suspect",
    "note": "noted",
    "fine": "nothing odd",
}
_RANKS = {"suspect": 1, "note": 2, "loaded": 3, "dtype": 3, "fine": 3}  # what comes first; all others are 0
_OPEN_GROUPS = 3  # layers with something wrong that are shown unfolded at first
_NO_LAYER = "outside of the layers"
_DIGITS = 18  # of a layer's number; a longer one is a name
_LEVELS = {"files": "files", "weights": "parameters", "forward": "forward", "layers": "layers"}  # and their data's key


@dataclass(frozen=True, slots=True)
class Level:
    """A level, and what became of it: `passed`, `failed`, `not tried` or `not asked for`."""

    name: str
    state: str


@dataclass(slots=True)
class Group:
    """The parameters of one layer, each with its row in the data; `unfolded` when the page shows them at first."""

    title: str
    rows: list[tuple[int, Data]] = field(default_factory=list)
    unfolded: bool = False

    @property
    def counts(self) -> dict[str, int]:
        return counts(parameter for _, parameter in self.rows)

    @property
    def rank(self) -> int:
        return min(_rank(parameter) for _, parameter in self.rows)

    @property
    def sound(self) -> bool:
        return self.rank >= _RANKS["note"]


@dataclass(frozen=True, slots=True)
class Side:
    """A side that ran: what its runner reports, and why it was that runner, where this report's run chose it."""

    label: str
    why: str
    result: Data

    @property
    def trouble(self) -> list[tuple[str, list[str]]]:
        """What was not loaded, as (what it is, names)."""
        result = self.result
        shapes = [f"{name}: {net} in the network, {file} stored" for name, net, file in result.get("shapes", [])]
        found = [
            ("missing, NaN before loading and after", list(result.get("missing", []))),
            ("unexpected, no parameter takes it", list(result.get("unexpected", []))),
            ("not what its file holds, once all is loaded", list(result.get("altered", []))),
            ("of another shape", shapes),
        ]
        return [(what, names) for what, names in found if names]


def verdict(data: Data) -> str:
    """Return the verdict in a line, without the paths."""
    part = f" ({data['part']} alone)" if data.get("part") else ""
    return "; ".join([_compared(data) + part, *verdicts(data)])


def mark(data: Data) -> str:
    """Return the verdict in a word."""
    if _failed_levels(data):
        return "Differs"
    return "Overflows" if data["failed"] else "Passed"


def _failed_levels(data: Data) -> list[str]:
    return [name for name in data["failed"] if name != "compute"]


def _compared(data: Data) -> str:
    failed, level = _failed_levels(data), data["level"]
    if "format" not in data["a"]:  # one side alone
        if "b" not in data.get("forward", {}):
            return "A's forward pass could not be run soundly" if failed else "A's forward pass was run and kept"
        return "The forward passes differ" if failed else "The forward passes agree"
    if not failed:
        return f"A and B are equal at level {level}"
    return f"A and B differ at level {', '.join([*failed[:-2], ' and '.join(failed[-2:])])}"


def levels(data: Data) -> list[Level]:
    """Return the levels in order; one that failed ends a run, so that the others may not have been tried."""
    names = list(_LEVELS)
    asked = names.index(data["level"]) if data["level"] in names else len(names) - 1
    found = []
    for number, (name, key) in enumerate(_LEVELS.items()):
        if name in data["failed"]:
            state = "failed"
        elif data.get(key):
            state = "passed"
        else:
            state = "not tried" if number <= asked else "not asked for"
        found.append(Level(name, state))
    if "compute" in data:
        found.append(Level(data["compute"]["dtype"], compute_state(data)))
    return found


def counts(parameters: Iterable[Data]) -> dict[str, int]:
    """Return how many parameters have each status, the worst first."""
    found = Counter(str(parameter["status"]) for parameter in parameters)
    order = [*STATUS, *(status for status in found if status not in STATUS)]
    return {status: found[status] for status in order if found[status]}


def groups(parameters: Sequence[Data]) -> list[Group]:
    """Return the parameters by layer: those of none, then by number; what is wrong comes first, layers and rows."""
    found: dict[tuple[str, int], Group] = {}
    stacks: dict[str, int] = {"": 0}
    for row, parameter in enumerate(parameters):
        key = _layer(parameter["name"])
        stacks.setdefault(key[0], len(stacks))
        title = f"{key[0]}.{key[1]}".removeprefix(".") if key != ("", -1) else _NO_LAYER
        found.setdefault(key, Group(title)).rows.append((row, parameter))
    ordered = [found[key] for key in sorted(found, key=lambda key: (stacks[key[0]], key[1]))]
    ordered.sort(key=lambda group: group.rank)
    for group in ordered:
        group.rows.sort(key=lambda row: _rank(row[1]))
    for group in ordered[:_OPEN_GROUPS]:
        group.unfolded = not group.sound
    return ordered


def _rank(parameter: Data) -> int:
    return _RANKS.get(parameter["status"], 0)


def _layer(name: str) -> tuple[str, int]:
    """Return what stands before a name's first number, and that number; ("", -1) for a name without one."""
    words = name.split(".")
    for at, word in enumerate(words):
        if word.isascii() and word.isdigit() and len(word) <= _DIGITS:
            return ".".join(words[:at]), int(word)
    return "", -1


def sides(data: Data) -> list[Side]:
    """Return the sides that ran; of two, the dump that another run made has no reason for its runner."""
    forward = data.get("forward", {})
    labels = [label for label in "ab" if label in forward]
    runners = forward.get("runners", [])
    reasons = (
        ["", *(runner["why"] for runner in runners)] if len(runners) < len(labels) else [r["why"] for r in runners]
    )
    return [Side(label.upper(), why, forward[label]) for label, why in zip(labels, reasons, strict=False)]


def rows_of(sides: Sequence[Side], key: str) -> list[tuple[str, list[Any]]]:
    """Return what the sides report under `key` as rows of a table: (name, a value for each side, empty for none)."""
    names = dict.fromkeys(name for side in sides for name in side.result[key])
    return [(name, [side.result[key].get(name, "") for side in sides]) for name in names]


def notes(data: Data) -> list[str]:
    """Return the notes of the report and of both runners."""
    return [*data["notes"], *(f"{side.label}: {note}" for side in sides(data) for note in side.result["notes"])]

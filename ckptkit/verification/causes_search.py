"""Trying hypotheses on a replay: which of them bring a part back to within rounding, and the cause that they name.

What does not live here: the hypotheses, and in which order they are tried (`causes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from ckptkit.verification.causes_case import FAR, Case, Repair, coarse_rounding_at, rounding_at
from ckptkit.verification.causes_match import Difference
from ckptkit.verification.logits import UNIT
from ckptkit.verification.replay import Setting

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a part is off. `name` is short and stable, `text` one sentence; of two causes that explain it equally well,
    both are in each. `tensors` are B's, under B's names, empty when the config is the cause. `before` and `after` are
    the replay's distances from A's output, relative to its largest number, as B is and once repaired; for `unknown`,
    `after` is that of the best hypothesis. `differs` says of each tensor what it is to A's, where they were compared:
    with A's weights at hand, and when no hypothesis about the part as a whole explained it."""

    name: str
    text: str
    tensors: tuple[str, ...]
    before: float
    after: float
    hint: str
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A hypothesis, or two, with what is left of the distance."""

    repairs: tuple[Repair, ...]
    after: float


@dataclass(frozen=True, slots=True)
class Search:
    """A case, its first tokens that show the fault, and the distance as B is."""

    case: Case
    short: Case
    before: float
    bound: float

    def restored(self, repairs: Sequence[Repair], unit: float = UNIT) -> list[Found]:
        """Return the hypotheses that restore the part, the best first: far nearer than before, and within rounding.

        One that rounding allows is left out where another is nearer by far.
        """
        found = [one for repair in repairs if (one := self.tried((repair,), unit))]
        found.sort(key=lambda one: one.after)
        if len(found) < 2:
            return found
        room = max(FAR * found[0].after, rounding_at(self.short, self.short.wrong))
        return [one for one in found if one.after <= room]

    def tried(self, repairs: tuple[Repair, ...], unit: float = UNIT) -> Found | None:
        """Return what is left with these repairs made, None when it is not rounding alone.

        The first tokens sift out most; whether rounding explains what is left is measured with the repairs made.
        """
        limit, setting = self.before / FAR, changed(repairs, self.case.wrong)
        if not self.short.off(setting) <= limit:
            return None
        after = self.case.off(setting)
        if not (after <= limit and isfinite(after)):
            return None
        room = max(rounding_at(self.case, setting), self.bound)
        if unit > UNIT:
            room = max(room, coarse_rounding_at(self.case, setting, unit))
        return Found(repairs, after) if after <= room else None


def changed(repairs: Sequence[Repair], setting: Setting) -> Setting:
    for repair in repairs:
        setting = repair.change(setting)
    return setting


def cause_of(search: Search, found: Sequence[Found], differs: Sequence[Difference] = ()) -> Cause:
    """Return the cause that the hypotheses name; equally good ones are all named."""
    every = [repair for one in found for repair in one.repairs]
    joined = [" and ".join(dict.fromkeys(repair.name for repair in one.repairs)) for one in found]
    texts = ["; and ".join(_sentence(search.case, repair) for repair in one.repairs) for one in found]
    return Cause(
        name=" or ".join(dict.fromkeys(joined)),
        text="; or, which fits as well: ".join(dict.fromkeys(texts)),
        tensors=search.case.names([field for repair in every for field in repair.fields]),
        before=search.before,
        after=found[0].after,
        hint="; ".join(dict.fromkeys(repair.hint for repair in every)),
        differs=tuple(difference.text for difference in differs),
    )


def _sentence(case: Case, repair: Repair) -> str:
    names = case.names(repair.fields)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{repair.text} ({', '.join(f'`{name}`' for name in names[:_SHOWN])}{more})" if names else repair.text

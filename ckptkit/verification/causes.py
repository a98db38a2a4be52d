"""Why a part of B's network does not give what A's gives: hypotheses, tried on a replay of that part alone.

B's weights under B's config get what A's network had there. If that is A's output to within rounding, the fault is
not in this part. Else each hypothesis changes B's weights or config; one whose replay comes back to within rounding is
the cause. First those about the part alone; then another layer's weights; then, where A's weights are at hand, what
each tensor of B is to A's; then pairs of hypotheses, as far as a budget goes. What nothing explains is `unknown`, with
its figures. The tolerance is measured (`causes_case.rounding_at`): the part's own sensitivity to one unit in the last
place, times what a sum of many roundings is. What does not live here: the hypotheses (`causes_*.py`), the replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from ckptkit.verification.causes_case import (
    BF16,
    Case,
    Evidence,
    Repair,
    case_at,
    coarse_rounding_at,
    grain,
    is_rounded,
    rounding_at,
)
from ckptkit.verification.causes_config import config_repairs
from ckptkit.verification.causes_experts import expert_repairs
from ckptkit.verification.causes_layout import layout_repairs
from ckptkit.verification.causes_match import Difference, differences, unused
from ckptkit.verification.causes_search import Cause, Search, cause_of
from ckptkit.verification.causes_vectors import constant_repairs, end_repairs, vector_repairs
from ckptkit.verification.layer_weights import Weights
from ckptkit.verification.logits import UNIT
from ckptkit.verification.replay import Place, Setting

UNKNOWN = "unknown"
ROUNDED = "rounded weights"
_PAIR_PRODUCTS = 2e11  # multiplications that the search over pairs may take: some minutes at most
_MOST_PAIRS = 2000


def find_cause(part: str, layer: int, evidence: Evidence, *, bound: float = 0.0) -> Cause | None:
    """Return why B's part is off, or None when it is not: fed with what A had, it gives what A gave.

    `part` is `embedding`, `attention`, `mlp`, `norm` or `logits`; `layer` counts from 0. `bound` is a relative
    distance that the caller takes for rounding there, if it is more than what is measured here. The weights of the
    part are held in memory twice, with A's three times (`layer_weights.py` says what that is).
    """
    with np.errstate(all="ignore"):  # weights that are wrong may give any number, and none
        case = case_at(Place(part, layer), evidence)
        before = case.off(case.wrong)
        if before <= max(rounding_at(case, case.wrong), bound):
            return _from_reading(Search(case, case.shortened(), before, bound))
        return _cause(Search(case, case.shortened(), before, bound))


def _cause(search: Search) -> Cause:
    case, repairs = search.case, list(_repairs(search.case))
    for unit in _units(case):
        found = search.restored(repairs, unit)
        if found:
            return cause_of(search, found)
        if unit > UNIT and _is_rounding_alone(case, search.before, unit):
            return _rounded(search, unit)
    known = _from_layers(search) or _from_match(search, repairs) or _from_constant(search)
    return known or _from_pairs(search, repairs) or _unknown(search, repairs)


def _from_reading(search: Search) -> Cause | None:
    """Return what B's config.json says otherwise, where A's word brings the part far nearer.

    Rounding has room for both, but somebody found the network off, and this is known to differ.
    """
    case = search.case
    for repair in config_repairs(case):
        found = search.tried((repair,))
        if found:
            return cause_of(search, [found])
    return None


def _is_rounding_alone(case: Case, before: float, unit: float) -> bool:
    """Tell whether B differs by rounding only. Where tensors and config say so, it need not be measured."""
    if not is_rounded(case, unit):
        return False
    certain = case.right is not None and not any(config_repairs(case))
    return certain or before <= coarse_rounding_at(case, case.wrong, unit)


def _repairs(case: Case) -> Iterator[Repair]:
    """Yield every hypothesis about the part alone, the likelier ones first."""
    yield from config_repairs(case)
    yield from layout_repairs(case)
    yield from vector_repairs(case)
    yield from end_repairs(case)
    if case.place.part == "mlp":
        yield from expert_repairs(case)


def _units(case: Case) -> list[float]:
    """Return the last places that may explain what is left: float32's, and that of a dtype that B alone is rounded to.

    Where A's weights are not at hand, it is not known whether A is rounded to it too.
    """
    own = grain(case.wrong.weights)
    is_coarser = case.right is None or own > grain(case.right)
    return [UNIT, own] if own > UNIT and is_coarser else [UNIT]


def _rounded(search: Search, unit: float) -> Cause:
    dtype = "BF16" if unit == BF16 else "F16"
    known = search.case.right is not None
    whose = "A's are not" if known else "if A's are not, that explains it"
    return Cause(
        ROUNDED,
        f"all values of B's weights here are {dtype} numbers, and {whose}: rounding moves this part by as much",
        (), search.before, search.before,
        "compare with a checkpoint of A in the same dtype",
    )  # fmt: skip


def _from_layers(search: Search) -> Cause | None:
    """Ask whether another layer of B holds what this one should."""
    case = search.case
    place, side = case.place, case.evidence.weights_b
    if place.part not in ("attention", "mlp"):
        return None
    kinds = case.facts_b.sparse_layers
    for layer in range(case.facts_b.layers):
        if layer == place.layer or (place.part == "mlp" and kinds[layer] != kinds[place.layer]):
            continue

        def change(setting: Setting, layer: int = layer) -> Setting:
            return replace(setting, weights=side.part(place.part, layer))

        repair = Repair(
            name="layers exchanged",
            text=f"what layer {place.layer} should have lies in layer {layer}",
            fields=tuple(name for name in case.wrong.weights if name not in unused(case)),
            hint="layers were numbered otherwise: by pipeline stage, or sorted by name (10 before 2)",
            change=change,
        )
        found = search.tried((repair,))
        if found:
            return cause_of(search, [found])
    return None


def _from_match(search: Search, repairs: Sequence[Repair]) -> Cause | None:
    """Ask what each of B's tensors is to A's, and whether A's in their place restore the part.

    Several faults at once are told apart so: a hypothesis that gives its tensors A's bits is right about them. With
    the tensors right, one thing in config.json may still be wrong.
    """
    case, right = search.case, search.case.right
    found = differences(case)
    if right is None or not found:
        return None
    chosen, left = _exact(case, right, repairs, {difference.field for difference in found})
    rest = [difference for difference in found if difference.field in left]
    if not all(difference.name for difference in rest):
        return None
    if rest:
        chosen = [*chosen, _taken(right, rest)]
    for config in ((), *((repair,) for repair in repairs if not repair.fields)):
        restored = search.tried((*config, *chosen))
        if restored:
            return cause_of(search, [restored], found)
    return None


def _exact(case: Case, right: Weights, repairs: Sequence[Repair], left: set[str]) -> tuple[list[Repair], set[str]]:
    """Return the hypotheses that give their tensors A's bits, and the fields in which B differs apart from these."""
    chosen = []
    for repair in repairs:
        fields = set(repair.fields) - set(unused(case))
        if fields and fields <= left:
            changed = repair.change(case.wrong).weights
            if all(name in right and np.array_equal(changed[name], right[name]) for name in fields):
                chosen.append(repair)
                left = left - fields
    return chosen, left


def _taken(right: Weights, rest: Sequence[Difference]) -> Repair:
    """Return the repair in which A's tensors take the place of B's."""
    fields = tuple(difference.field for difference in rest)

    def change(setting: Setting) -> Setting:
        kept = {name: values for name, values in setting.weights.items() if name not in fields}
        taken: Weights = {name: right[name] for name in fields if name in right}
        return replace(setting, weights={**kept, **taken})

    names = dict.fromkeys(difference.name for difference in rest)
    text = "; ".join(difference.text for difference in rest)
    hint = "look at the rows of the mapping table for these tensors, and at what was done to them since"
    return Repair(name=" and ".join(names), text=text, fields=fields, hint=hint, change=change)


def _from_constant(search: Search) -> Cause | None:
    found = search.restored(list(constant_repairs(search.case)))
    return cause_of(search, found) if found else None


def _from_pairs(search: Search, repairs: Sequence[Repair]) -> Cause | None:
    """Ask whether two faults at once explain it, as far as the budget goes."""
    case = search.case
    cost = len(search.short.given.ids) * sum(values.size for values in case.wrong.weights.values())
    most = int(min(_MOST_PAIRS, _PAIR_PRODUCTS / max(1, cost)))
    tried = 0
    for one, other in sorted(combinations(range(len(repairs)), 2), key=sum):
        pair = repairs[one], repairs[other]
        if pair[0].name == pair[1].name:
            continue
        overlap = set(pair[0].fields) & set(pair[1].fields)
        for ordered in (pair, pair[::-1]) if overlap else (pair,):
            if tried >= most:
                return None
            tried += 1
            found = search.tried(ordered)
            if found:
                return cause_of(search, [found])
    return None


def _unknown(search: Search, repairs: Sequence[Repair]) -> Cause:
    """Say that no hypothesis restores the part, what the best one leaves, and which tensors differ."""
    case = search.case
    found = differences(case)
    left = [(search.short.off(repair.change(case.wrong)), repair.name) for repair in repairs]
    after, best = min([(search.before, ""), *left])
    nearest = f"the nearest, `{best}`, leaves {after:.1e}" if best else "none comes nearer"
    if case.right is None:
        which, fields = "the fault is in one of ", [name for name in case.wrong.weights if name not in unused(case)]
    else:
        which, fields = "not A's: ", [difference.field for difference in found]
    names = case.names(fields)
    shown = ", ".join(f"`{name}`" for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    where = f"{which}{shown}" if names else "all of its tensors are A's, so it is something else"
    return Cause(
        UNKNOWN,
        f"none of {len(repairs)} hypotheses brings this part back ({search.before:.1e} off; {nearest}); {where}",
        names, search.before, after,
        "compare these tensors with those that B was made of (`ckptkit diff`), and the readings of config.json",
        tuple(difference.text for difference in found),
    )  # fmt: skip

"""What the casts of a conversion did: for the report, its JSON, and the manifest.

Counts are by output name; a plan that has not run yet has None for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.cast import CastCount, is_lossy, largest_finite
from ckptkit.plan.plan import OutputTensor, Plan, tensor_name
from ckptkit.report import listed
from ckptkit.types import DTYPES

Counts = Mapping[str, CastCount]


def cast_data(plan: Plan, counts: Counts | None) -> dict[str, Any]:
    """Return the casts as data, {} when no dtype was asked for: (from, to) pairs, totals, and what was kept."""
    if "cast" not in plan.facts:
        return {}
    pairs = [{"from": old, "to": new, "tensors": number} for (old, new), number in _pairs(plan).items()]
    kept = [[fate.name, fate.reason] for fate in plan.kept]
    return {"cast": {**plan.facts["cast"], "pairs": pairs, "kept": kept, **_totals(counts)}}


def cast_tensors(plan: Plan, counts: Counts | None) -> dict[str, dict[str, Any]]:
    """Return {output: {"from", "to", "overflowed", "flushed"}} for each output that is cast."""
    if "cast" not in plan.facts:
        return {}
    return {
        o.spec.name: {"from": o.cast_from, "to": o.spec.dtype, **_losses(counts, o.spec.name)}
        for o in plan.outputs
        if o.cast_from
    }


def cast_rows(plan: Plan, counts: Counts | None) -> Iterator[str]:
    """Yield the report's lines: how many tensors went from which dtype to which, and what was lost."""
    if "cast" not in plan.facts:
        return
    pairs = _pairs(plan)
    if not pairs:
        yield f"none: no tensor that may be cast has another dtype than {DTYPES[plan.facts['cast']['dtype']].torch}"
        return
    for (old, new), number in pairs.items():
        yield f"{' and '.join(_word(d) for d in old.split('+'))} -> {_word(new)}: {_tensors(number)}"
    if not any(is_lossy(o.moved_as, o.spec.dtype) for o in plan.outputs):
        yield "every value has room in the new dtype: none can overflow or become zero"
    elif counts is None:
        yield "the values that overflow or become zero are counted when it runs"
    else:
        yield from _loss_rows(plan, counts)


def counts_of(manifest: Mapping[str, Any] | None) -> dict[str, CastCount]:
    """Return the counts that the manifest of a finished result holds."""
    rows = manifest["tensors"] if manifest else {}
    return {
        tensor_name(name, row): CastCount(row["cast"]["overflowed"], row["cast"]["flushed"])
        for name, row in rows.items()
        if "cast" in row
    }


def _pairs(plan: Plan) -> Counter[tuple[str, str]]:
    return Counter((o.cast_from, o.spec.dtype) for o in plan.outputs if o.cast_from)


def _totals(counts: Counts | None) -> dict[str, int | None]:
    if counts is None:
        return {"overflowed": None, "flushed": None}
    return {
        "overflowed": sum(count.overflowed for count in counts.values()),
        "flushed": sum(count.flushed for count in counts.values()),
    }


def _losses(counts: Counts | None, name: str) -> dict[str, int | None]:
    return _totals(None if counts is None else {name: counts.get(name, CastCount())})


def _loss_rows(plan: Plan, counts: Counts) -> Iterator[str]:
    totals = _totals(counts)
    dtype = plan.facts["cast"]["dtype"]
    done = f" and were clamped to {largest_finite(dtype):.6g}" if totals["overflowed"] else ""
    yield f"values lost: {totals['overflowed']} overflowed{done}, {totals['flushed']} became zero"
    yield from listed([_loss_row(o, counts[o.spec.name]) for o in plan.outputs if _lost(counts.get(o.spec.name))])


def _lost(count: CastCount | None) -> bool:
    return count is not None and bool(count.overflowed or count.flushed)


def _loss_row(output: OutputTensor, count: CastCount) -> str:
    return f"{output.spec.name}: {count.overflowed} overflowed, {count.flushed} became zero"


def _tensors(number: int) -> str:
    return f"{number} tensor{'' if number == 1 else 's'}"


def _word(dtype: str) -> str:
    return DTYPES[dtype].torch or dtype

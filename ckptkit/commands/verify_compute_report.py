"""The runs in fp16 or bf16 in the report of `ckptkit verify`, as text and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckptkit.report import Report, folded, listed
from ckptkit.verification.compute import SideComputed, number
from ckptkit.verification.layers import place
from ckptkit.verification.runners.job import ComputedRow

_SHOWN = 12  # rows of the text's table; all are in --json and on the page


def add_compute(report: Report, dtype: str, sides: Sequence[SideComputed]) -> None:
    """Say what the dtype costs each side, and where it overflows."""
    if not sides:
        report.add(dtype, "no side was run in it")
        return
    for side in sides:
        for line in _lines(side):
            report.add(dtype, f"{side.label}: {line}")
    for line in _table(sides):
        report.add("", f"  {line}")
    for side in sides:
        for at, line in enumerate(side.found.kept):
            report.add("", f"  {side.label} keeps in float32: {line}" if at == 0 else f"    {line}")


def _lines(side: SideComputed) -> Iterator[str]:
    found, first = side.found, side.first
    if found.unfit:
        names = ", ".join(listed(folded(found.unfit)))
        yield f"WRONG: weights that it does not hold, for a number is beyond its range or all become 0: {names}"
    if first is not None and side.overflows(first):
        yield f"WRONG: overflows in {first.name}: {_place(side, first)}"
        others = [row.name for row in found.rows if side.overflows(row) and row is not first]
        if others:
            yield f"beyond its range, too: {', '.join(listed(others))}"
    elif first is not None:
        yield f"WRONG: {first.not_finite} numbers of {first.name} are inf or NaN, first {first.lost}"
    else:
        worst = max(found.rows, key=lambda row: row.largest)
        yield f"nothing overflows; the largest number is in {worst.name}: {_place(side, worst)}"
    errors = [f"{row.name} {_figure(row.relative)}" for row in (found.rows[0], found.rows[-1])]
    alike, tokens = (sum(getattr(item, key) for item in found.inputs) for key in ("top1", "tokens"))
    yield f"error against float32: {', '.join(errors)}; {alike} of {tokens} positions have the same likeliest token"


def _place(side: SideComputed, row: ComputedRow) -> str:
    share = row.largest / side.format.limit
    text = f"{number(row.largest)} of at most {number(side.format.limit)}"
    text += f" ({share:.1%})" if 1e-3 <= share < 1 else ""
    return f"{text} ({row.at}; input `{row.input}`)"


def _figure(relative: float | None) -> str:
    return "no number" if relative is None else f"{relative:.1e}"


def _table(sides: Sequence[SideComputed]) -> Iterator[str]:
    """Yield the errors and largest numbers of the blocks, and of whatever is wrong, as lines of a table."""
    names = [row.name for row in sides[0].found.rows]
    blocks = [name for name in names if place(name)[1] not in ("attention", "mlp")]
    if len(blocks) > _SHOWN:
        blocks = [*blocks[: _SHOWN // 2], *blocks[-_SHOWN // 2 :]]
    firsts = {side.first.name for side in sides if side.first is not None}
    shown = [name for name in names if name in {*blocks, *firsts}]
    width = max(len(name) for name in shown)
    heads = [f"{what + ' ' + side.label:>10}" for what in ("error", "largest") for side in sides]
    yield f"{'output':<{width}}  {'  '.join(heads)}"
    for name in shown:
        rows = [next((row for row in side.found.rows if row.name == name), None) for side in sides]
        cells = ["" if row is None else _figure(row.relative) for row in rows]
        cells += ["" if row is None else number(row.largest) for row in rows]
        yield f"{name:<{width}}  {'  '.join(f'{cell:>10}' for cell in cells)}".rstrip()


def compute_data(dtype: str, sides: Sequence[SideComputed]) -> dict[str, Any]:
    """Return the runs in another dtype as data."""
    return {
        "dtype": dtype,
        "limit": sides[0].format.limit if sides else None,
        **{side.label.lower(): _side_data(side) for side in sides},
    }


def _side_data(side: SideComputed) -> dict[str, Any]:
    found = side.found
    rows = []
    for row in found.rows:
        layer, part = place(row.name)
        rows.append({
            "name": row.name, "layer": layer, "part": part, "relative": row.relative, "largest": row.largest,
            "share": row.largest / side.format.limit, "at": row.at, "input": row.input, "not_finite": row.not_finite,
            "lost": row.lost, "wrong": side.is_wrong(row),
        })  # fmt: skip
    inputs = [
        {"name": item.name, "tokens": item.tokens, "relative": item.relative, "top1": item.top1,
         "not_finite": item.not_finite}
        for item in found.inputs
    ]  # fmt: skip
    first = side.first
    return {"rows": rows, "first": first.name if first else None, "verdict": side.verdict, "inputs": inputs,
            "unfit": list(found.unfit), "kept": list(found.kept)}  # fmt: skip

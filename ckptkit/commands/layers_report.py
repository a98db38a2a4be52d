"""Level layers in the report of `ckptkit verify`, as text and as data."""

from __future__ import annotations

from typing import Any

from ckptkit.report import Report
from ckptkit.verification.layers import LayerRow, Layers


def add_layers(report: Report, layers: Layers) -> None:
    """Say where B first goes wrong and why, or how near to it the worst output is."""
    report.add("layers", f"{len(layers.rows)} outputs inside of both networks, for the input `{layers.input}`")
    if layers.first is None:
        worst = max(layers.rows, key=lambda row: row.relative / row.bound)
        report.add("layers", f"all agree; the nearest to its bound is {_text(worst)}")
        return
    before = layers.rows[: layers.rows.index(layers.first)]
    report.add("layers", f"the first that is off is {_text(layers.first)}; {len(before)} before it agree")
    cause = layers.cause
    if cause is None:
        report.add("cause", "unknown: B's weights, fed with what A had there, give what A gave, so B's network differs")
        return
    report.add("cause", f"{cause.name}: {cause.text}")
    if cause.tensors:
        report.add("cause", f"in {', '.join(cause.tensors[:4])}{' ...' if len(cause.tensors) > 4 else ''}")
    report.add("cause", f"relative distance of this part alone {cause.before:.1e}, and {cause.after:.1e} once repaired")
    for line in cause.differs:
        report.add("cause", line)
    if cause.hint:
        report.add("hint", cause.hint)


def _text(row: LayerRow) -> str:
    return f"{row.name} (relative {row.relative:.1e}, bound {row.bound:.1e})"


def layers_data(layers: Layers) -> dict[str, Any]:
    """Return level layers as data; a figure may be infinite or NaN."""
    cause = layers.cause
    return {
        "input": layers.input,
        "rows": [
            {
                "name": row.name,
                "layer": row.layer,
                "part": row.part,
                "relative": row.relative,
                "bound": row.bound,
                "max_abs": row.max_abs,
                "largest": row.largest,
                "wrong": row.wrong,
            }
            for row in layers.rows
        ],
        "first": layers.first.name if layers.first else None,
        "cause": None
        if cause is None
        else {
            "name": cause.name,
            "text": cause.text,
            "tensors": list(cause.tensors),
            "before": cause.before,
            "after": cause.after,
            "hint": cause.hint,
            "differs": list(cause.differs),
        },
    }

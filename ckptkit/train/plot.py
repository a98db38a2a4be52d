"""A picture of a run: loss, learning rate, gradient norm and memory over its steps, from `log.jsonl`.

The same log gives the same bytes. matplotlib is imported where it draws, without a window system and without its global
state. What does not live here: reading the log (`log_file.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.formats.disk import disk_error
from ckptkit.train.log_file import LOG, Line, RunLog, read_log
from ckptkit.verification.runners.frameworks import framework

_DOTS_PER_INCH = 100
_INCHES = (11.0, 7.0)


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve: the steps and their values, in order; steps without a finite value are left out."""

    label: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One part of the picture."""

    title: str
    curves: tuple[Curve, ...]


def plot_run(run: Path, out: Path) -> None:
    """Draw the log of a run, which is its folder or the log file, as a PNG `out`, which appears when it is complete.

    UsageError for a log that is missing or has no step, and without matplotlib; ResourceError where `out` cannot be
    written.
    """
    path = run / LOG if run.is_dir() else run
    log = read_log(path)
    if not log.steps:
        raise UsageError(f"`{path}` has no step to draw", hint="wait until the run has done its first update")
    figure = draw(panels(log), run.name)
    partial = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        # no date and no version: the same log, the same bytes
        figure.savefig(partial, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise disk_error(error, out, why="", then="or choose a file in another folder") from error


def panels(log: RunLog) -> tuple[Panel, ...]:
    """Return what is drawn, as data."""
    return (
        Panel("loss", (_curve("training", log.steps, "loss"), _curve("held out", log.evals, "loss"))),
        Panel("learning rate", (_curve("learning rate", log.steps, "lr"),)),
        Panel("gradient norm", (_curve("gradient norm", log.steps, "grad_norm"),)),
        Panel("memory of a step, GB", (_curve("memory", log.steps, "memory_bytes", 1e-9),)),
    )


def draw(parts: tuple[Panel, ...], title: str) -> Any:
    """Return a matplotlib Figure, a panel a part, two in a row; a line a curve that has any point."""
    figure_class, canvas_class = _matplotlib()
    figure = figure_class(figsize=_INCHES, layout="constrained")
    canvas_class(figure)
    figure.suptitle(title)
    grid = figure.subplots(-(-len(parts) // 2), 2, squeeze=False)
    for panel, axes in zip(parts, grid.flat, strict=False):
        axes.set_title(panel.title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        drawn = [curve for curve in panel.curves if curve.steps]
        for curve in drawn:
            marker = "o" if len(curve.steps) < 30 else ""
            axes.plot(curve.steps, curve.values, label=curve.label, marker=marker, markersize=3, linewidth=1)
        if len(drawn) > 1:
            axes.legend()
    return figure


def _curve(label: str, lines: Mapping[int, Line], key: str, factor: float = 1.0) -> Curve:
    points = [(step, line[key]) for step, line in lines.items() if isinstance(line.get(key), (int, float))]
    values = tuple(value if factor == 1.0 else value * factor for _, value in points)
    return Curve(label, tuple(step for step, _ in points), values)


def _matplotlib() -> tuple[Any, Any]:
    backend, figure = (
        framework(f"matplotlib.{name}", extra="train", asked_by="a plot") for name in ("backends.backend_agg", "figure")
    )
    return figure.Figure, backend.FigureCanvasAgg

"""`ckptkit diff`: two checkpoints of any formats and namings, tensor by tensor, from their bytes.

Two checkpoints in one naming are compared by equal names; a HuggingFace and a MindSpore one, or two layouts of
fused tensors, by running the conversion of A into a sink that compares (`compare.py`). A missing tensor is a
difference, and never an error: a comparison is to tell of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptkit.commands.diff_report import report_on
from ckptkit.commands.sides import asked_of, open_sides
from ckptkit.plan.pair import Finding
from ckptkit.report import Report
from ckptkit.verification.weights import Progress, compare


def diff(
    a: str | Path,
    b: str | Path,
    *,
    model: str | None = None,
    config: str | Path | None = None,
    table: str | Path | Sequence[str | Path] = (),
    dialect_a: str | None = None,
    dialect_b: str | None = None,
    variant_a: str | None = None,
    variant_b: str | None = None,
    strategy_a: str | Path | None = None,
    strategy_b: str | Path | None = None,
    step_a: int | None = None,
    step_b: int | None = None,
    workers: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Compare the checkpoints `a` and `b` and return a report; its exit code is 0 if they are equal, else 1.

    Equal means: the same tensors, with equal shapes, dtypes and bytes. Two things without a partner count as no
    difference, and are named: a head that is bit-equal to its embedding where the other side's config.json says
    that they are tied, and what a table ignores for a written reason. For tensors that differ the report gives
    max |a - b| and, as the relative difference, max |a - b| / max |a| over the tensor, or over those of its shards
    that differ.

    `model`, `config` and `table` are as for `convert`; `dialect_a`, `variant_a` and their twins settle the naming
    of a side that its names or manifest do not; `strategy_a` and `step_a` are the strategy files and the step of a
    side that is cut over ranks, where it does not tell them itself. Raises UsageError, CorruptError or ResourceError;
    CoverageError when a side was fused with other sizes than config.json gives, or its ranks do not go together.
    """
    asked = asked_of(
        model, config, table, (dialect_a, dialect_b), (variant_a, variant_b), (strategy_a, strategy_b), (step_a, step_b)
    )
    sides = open_sides(Path(a), Path(b), asked)
    compared = compare(sides.pair(), sides.a.joined, sides.b.joined, workers=workers, progress=progress)
    for part, tally in compared.replicas:
        rank, first = part.stored.partition(":")[0], "the rank that is read"
        text = f"{tally.changed} elements of {rank} in A are not those of {first}"
        compared.pairing.findings.append(Finding("replica", part.name, text))
    return report_on(Path(a), Path(b), sides, compared)

"""The options about the two sides of a comparison that `diff` and `verify` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str | None, typer.Option("--model", help="Family or alias; config.json decides without it.")]
DialectA = Annotated[str | None, typer.Option("--dialect-a", help="Naming of A, if its names do not tell.")]
DialectB = Annotated[str | None, typer.Option("--dialect-b", help="Naming of B, if its names do not tell.")]
VariantA = Annotated[str | None, typer.Option("--variant-a", help="Layout of fused tensors in A (qkv_concat, ...).")]
VariantB = Annotated[str | None, typer.Option("--variant-b", help="Layout of fused tensors in B (qkv_concat, ...).")]
StrategyA = Annotated[
    Path | None, typer.Option("--strategy-a", help="Strategy file, or folder of them, of the ranks in A.")
]
StrategyB = Annotated[
    Path | None, typer.Option("--strategy-b", help="Strategy file, or folder of them, of the ranks in B.")
]
StepA = Annotated[int | None, typer.Option("--step-a", help="The step to take when A's ranks hold several.")]
StepB = Annotated[int | None, typer.Option("--step-b", help="The step to take when B's ranks hold several.")]
Workers = Annotated[int, typer.Option("--workers", min=1, max=64, help="Threads that read and compare.")]

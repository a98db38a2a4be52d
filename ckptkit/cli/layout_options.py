"""The options about parallel layouts that `convert` and `reshard` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Mp = Annotated[int | None, typer.Option("--mp", help="Tensor-parallel degree of DST.")]
Pp = Annotated[int | None, typer.Option("--pp", help="Pipeline stages of DST.")]
Dp = Annotated[int | None, typer.Option("--dp", help="Data-parallel degree of DST; the smallest possible without it.")]
Ep = Annotated[int | None, typer.Option("--ep", help="Expert-parallel degree of DST.")]
Devices = Annotated[int | None, typer.Option("--devices", help="Number of ranks of DST; --dp is what remains of it.")]
OptimizerShard = Annotated[
    bool | None,
    typer.Option("--optimizer-shard/--no-optimizer-shard", help="Cut what data-parallel ranks share (ZeRO)."),
]
PpLayers = Annotated[str | None, typer.Option("--pp-layers", help="Layers of each stage: 8,9,9,6.")]
PpInterleave = Annotated[int | None, typer.Option("--pp-interleave", help="Virtual stages of each pipeline stage.")]
ShardEmbedding = Annotated[
    bool | None,
    typer.Option("--shard-embedding/--no-shard-embedding", help="Cut embedding and head, or keep them whole."),
]
PadVocab = Annotated[int | None, typer.Option("--pad-vocab-to", help="Add rows of zeros to embedding and head.")]
ReplicateKv = Annotated[bool, typer.Option("--replicate-kv", help="Copy KV heads that are fewer than --mp.")]
ParallelConfig = Annotated[
    Path | None, typer.Option("--parallel-config", help="Layout of DST from a MindFormers run YAML.")
]
DstStrategy = Annotated[
    Path | None, typer.Option("--dst-strategy", help="Layout of DST from strategy files: a file or a folder.")
]
SrcStrategy = Annotated[
    Path | None, typer.Option("--src-strategy", help="Strategy files of SRC, when they do not lie in it.")
]
Step = Annotated[int | None, typer.Option("--step", help="Which saved step of SRC's ranks; the newest without it.")]
Ranks = Annotated[
    str | None,
    typer.Option("--ranks", help="Write these ranks alone: 0-7 or 0,2,5-9. The runs for the others join them in DST."),
]
NoOptimizer = Annotated[bool, typer.Option("--no-optimizer", help="Leave training state out: moments, steps, scales.")]

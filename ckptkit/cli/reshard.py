"""`ckptkit reshard` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.app import Json, NoProgress, Table, app, emit, from_settings, progress_bar
from ckptkit.cli.convert import (
    AllowUnmapped,
    Config,
    DryRun,
    MaxShardSize,
    Model,
    NoDigest,
    Overwrite,
    PlanFile,
    TieEmbeddings,
    Workers,
)
from ckptkit.cli.layout_options import (
    Devices,
    Dp,
    DstStrategy,
    Ep,
    Mp,
    NoOptimizer,
    OptimizerShard,
    PadVocab,
    ParallelConfig,
    Pp,
    PpInterleave,
    PpLayers,
    Ranks,
    ReplicateKv,
    ShardEmbedding,
    SrcStrategy,
    Step,
)


@app.command("reshard")
def reshard_command(
    context: typer.Context,
    src: Annotated[
        Path, typer.Argument(help="A MindSpore checkpoint: a folder of rank_N, or a whole one.", metavar="SRC")
    ],
    dst: Annotated[Path, typer.Argument(help="The folder to make. It appears when it is complete.", metavar="DST")],
    mp: Mp = None,
    pp: Pp = None,
    dp: Dp = None,
    ep: Ep = None,
    devices: Devices = None,
    optimizer_shard: OptimizerShard = None,
    pp_layers: PpLayers = None,
    pp_interleave: PpInterleave = None,
    shard_embedding: ShardEmbedding = None,
    pad_vocab_to: PadVocab = None,
    replicate_kv: ReplicateKv = False,
    parallel_config: ParallelConfig = None,
    dst_strategy: DstStrategy = None,
    src_strategy: SrcStrategy = None,
    step: Step = None,
    ranks: Ranks = None,
    no_optimizer: NoOptimizer = False,
    model: Model = None,
    variant: Annotated[
        str | None, typer.Option("--variant", help="Layout of fused tensors in SRC, when its names do not tell.")
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="safetensors, ckpt or mindformers; that of SRC without it.")
    ] = None,
    max_shard_size: MaxShardSize = None,
    table: Table = None,
    config: Config = None,
    tie_embeddings: TieEmbeddings = False,
    allow_unmapped: AllowUnmapped = False,
    dry_run: DryRun = False,
    plan_file: PlanFile = None,
    overwrite: Overwrite = False,
    workers: Workers = None,
    no_digest: NoDigest = False,
    as_json: Json = False,
    no_progress: NoProgress = False,
) -> None:
    """Write a MindSpore checkpoint under another parallel layout; with no layout for DST, merge it."""
    from ckptkit.commands.parallel import Parallel
    from ckptkit.commands.reshard import reshard

    parallel = Parallel(
        mp=mp, pp=pp, dp=dp, ep=ep, devices=devices, optimizer_shard=optimizer_shard, pp_layers=pp_layers,
        pp_interleave=pp_interleave, shard_embedding=shard_embedding, pad_vocab_to=pad_vocab_to,
        replicate_kv=replicate_kv, parallel_config=parallel_config, dst_strategy=dst_strategy,
        src_strategy=src_strategy, step=step, ranks=ranks,
    )  # fmt: skip
    emit(
        reshard(
            src, dst, parallel, model=model, variant=variant, format=format, max_shard_size=max_shard_size,
            table=table or (), config=config, tie_embeddings=tie_embeddings, allow_unmapped=allow_unmapped,
            no_optimizer=no_optimizer, dry_run=dry_run, overwrite=overwrite, workers=workers,
            digests=not no_digest, plan_file=plan_file, progress=progress_bar(not no_progress),
            defaults=from_settings(context),
        ),
        as_json,
    )  # fmt: skip

"""`ckptkit convert` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.app import Json, NoProgress, Table, app, emit, from_settings, progress_bar
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

Model = Annotated[
    str | None, typer.Option("--model", help="Family or alias (llama2, ...); config.json decides without it.")
]
From = Annotated[
    str | None, typer.Option("--from", help="Naming of SRC: hf, mindformers, ...; found by its names without it.")
]
To = Annotated[str | None, typer.Option("--to", help="Naming of DST: hf, mindformers, ...; the other side without it.")]
Variant = Annotated[
    str | None, typer.Option("--variant", help="Layout of fused tensors on the MindSpore side (qkv_concat, ...).")
]
FromVariant = Annotated[
    str | None, typer.Option("--from-variant", help="Layout of fused tensors in SRC, when both sides have one.")
]
Format = Annotated[
    str | None,
    typer.Option("--format", help="MindSpore output: safetensors (default), ckpt or mindformers (its newer folders)."),
]
TieEmbeddings = Annotated[bool, typer.Option("--tie-embeddings", help="A head that is not stored is the embedding.")]
AllowUnmapped = Annotated[
    bool, typer.Option("--allow-unmapped", help="Leave out tensors that match no row, and report them.")
]
Config = Annotated[
    Path | None, typer.Option("--config", help="Folder or config.json of the model, when SRC has none beside it.")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Cast floating-point tensors: bf16, fp16, fp32; none is cast without.")
]

MaxShardSize = Annotated[
    str | None, typer.Option("--max-shard-size", help="Largest safetensors file: 500MB, 2GiB; 5GB without it.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan; write nothing.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Write the plan as JSON to this file.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace DST, if it holds a result of ckptkit and nothing else.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, max=64, help="Threads that read and write; without it 2, or 1 for a result of one file."
    ),
]
NoDigest = Annotated[
    bool, typer.Option("--no-digest", help="Compute no digests: a little faster, and `check` cannot help.")
]


@app.command("convert")
def convert_command(
    context: typer.Context,
    src: Annotated[Path, typer.Argument(help="A HuggingFace folder, a MindSpore folder, or a file.", metavar="SRC")],
    dst: Annotated[Path, typer.Argument(help="The folder to make. It appears when it is complete.", metavar="DST")],
    model: Model = None,
    from_dialect: From = None,
    to_dialect: To = None,
    variant: Variant = None,
    from_variant: FromVariant = None,
    format: Format = None,
    max_shard_size: MaxShardSize = None,
    table: Table = None,
    config: Config = None,
    tie_embeddings: TieEmbeddings = False,
    allow_unmapped: AllowUnmapped = False,
    dtype: Dtype = None,
    clamp: Annotated[
        bool, typer.Option("--clamp", help="With --dtype: values that overflow become the largest finite one.")
    ] = False,
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
    dry_run: DryRun = False,
    plan_file: PlanFile = None,
    overwrite: Overwrite = False,
    workers: Workers = None,
    no_digest: NoDigest = False,
    as_json: Json = False,
    no_progress: NoProgress = False,
) -> None:
    """Convert weights, both ways, exactly."""
    from ckptkit.commands.convert import convert
    from ckptkit.commands.parallel import Parallel

    parallel = Parallel(
        mp=mp, pp=pp, dp=dp, ep=ep, devices=devices, optimizer_shard=optimizer_shard, pp_layers=pp_layers,
        pp_interleave=pp_interleave, shard_embedding=shard_embedding, pad_vocab_to=pad_vocab_to,
        replicate_kv=replicate_kv, parallel_config=parallel_config, dst_strategy=dst_strategy,
        src_strategy=src_strategy, step=step, ranks=ranks,
    )  # fmt: skip
    emit(
        convert(
            src, dst, model=model, from_dialect=from_dialect, to_dialect=to_dialect, variant=variant,
            from_variant=from_variant, format=format, max_shard_size=max_shard_size, table=table or (),
            config=config, tie_embeddings=tie_embeddings, allow_unmapped=allow_unmapped, dtype=dtype,
            clamp=clamp, no_optimizer=no_optimizer, parallel=parallel, dry_run=dry_run, overwrite=overwrite,
            workers=workers, digests=not no_digest,
            plan_file=plan_file, progress=progress_bar(not no_progress), defaults=from_settings(context),
        ),
        as_json,
    )  # fmt: skip

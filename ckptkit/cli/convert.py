"""`ckptkit convert` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.app import Json, NoProgress, Table, app, emit, from_settings, progress_bar

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
Format = Annotated[str | None, typer.Option("--format", help="MindSpore output: safetensors (default) or ckpt.")]
Config = Annotated[
    Path | None, typer.Option("--config", help="Folder or config.json of the model, when SRC has none beside it.")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Cast floating-point tensors: bf16, fp16, fp32; none is cast without.")
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
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="Largest safetensors file: 500MB, 2GiB; 5GB without it.")
    ] = None,
    table: Table = None,
    config: Config = None,
    tie_embeddings: Annotated[
        bool, typer.Option("--tie-embeddings", help="A head that is not stored is the embedding.")
    ] = False,
    allow_unmapped: Annotated[
        bool, typer.Option("--allow-unmapped", help="Leave out tensors that match no row, and report them.")
    ] = False,
    dtype: Dtype = None,
    clamp: Annotated[
        bool, typer.Option("--clamp", help="With --dtype: values that overflow become the largest finite one.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; write nothing.")] = False,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Write the plan as JSON to this file.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST, if it holds a result of ckptkit and nothing else.")
    ] = False,
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Threads that read and write.")] = 2,
    no_digest: Annotated[
        bool, typer.Option("--no-digest", help="Compute no digests: a little faster, and `check` cannot help.")
    ] = False,
    as_json: Json = False,
    no_progress: NoProgress = False,
) -> None:
    """Convert weights, both ways, exactly."""
    from ckptkit.commands.convert import convert

    emit(
        convert(
            src, dst, model=model, from_dialect=from_dialect, to_dialect=to_dialect, variant=variant,
            from_variant=from_variant, format=format, max_shard_size=max_shard_size, table=table or (),
            config=config, tie_embeddings=tie_embeddings, allow_unmapped=allow_unmapped, dtype=dtype,
            clamp=clamp, dry_run=dry_run, overwrite=overwrite, workers=workers, digests=not no_digest,
            plan_file=plan_file, progress=progress_bar(not no_progress), defaults=from_settings(context),
        ),
        as_json,
    )  # fmt: skip

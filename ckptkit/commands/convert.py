"""`ckptkit convert`: a checkpoint into another naming, layout or file format, exactly."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ckptkit.cast import parse_dtype
from ckptkit.commands.choose import Choice, choose
from ckptkit.commands.common import Task, begin, file_layout, finish
from ckptkit.commands.convert_report import naming_rows
from ckptkit.commands.defaults import Defaults
from ckptkit.commands.parallel import WHOLE, Parallel
from ckptkit.commands.plan_file import check_plan_file
from ckptkit.commands.sharding import Sharding, arranger
from ckptkit.commands.source import (
    SideFiles,
    Source,
    as_list,
    check_rules,
    find_config,
    load_own_tables,
    refuse_part,
)
from ckptkit.commands.write import Options, Progress
from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.files import paused_gc
from ckptkit.mapping.pad import pad, pad_vocabulary
from ckptkit.mapping.rules import resolve
from ckptkit.mapping.state import add_state
from ckptkit.plan.build import Target, build_plan, rules_digest
from ckptkit.plan.plan import Plan
from ckptkit.report import Report


@paused_gc()
def convert(
    src: str | Path,
    dst: str | Path,
    *,
    model: str | None = None,
    from_dialect: str | None = None,
    to_dialect: str | None = None,
    variant: str | None = None,
    from_variant: str | None = None,
    format: str | None = None,
    max_shard_size: str | int | None = None,
    table: Sequence[str | Path] = (),
    config: str | Path | None = None,
    tie_embeddings: bool = False,
    allow_unmapped: bool = False,
    no_optimizer: bool = False,
    dtype: str | None = None,
    clamp: bool = False,
    parallel: Parallel = WHOLE,
    dry_run: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    digests: bool = True,
    plan_file: str | Path | None = None,
    progress: Progress | None = None,
    defaults: Collection[str] = (),
) -> Report:
    """Convert the checkpoint `src` into the folder `dst` and return a report.

    `src` is a HuggingFace folder, a MindSpore folder (one with a folder for each rank, too) or a file; `dst` is
    always a folder, and appears only when it is complete. `model` is a family or an alias (config.json decides
    without it); `from_dialect` and `to_dialect` are `hf`, `mindformers` or a dialect's own name; `format` is
    `safetensors`, `ckpt` or `mindformers` (its newer folders), for MindSpore output; `table` are mapping files of your
    own. `dtype` (`bf16`, `fp16`, `fp32`, or torch's names) casts floating-point tensors, and `clamp` lets values that
    overflow become the largest finite one. `parallel` says how the result, on the MindSpore side, is cut over ranks,
    and how the source was; training state comes along, with the weights' rules, unless `no_optimizer` leaves it out.
    `dry_run` plans and proves, and writes nothing but `plan_file`. `progress(total_bytes, done_bytes)` returns a
    function that is told of bytes done. `defaults` names the options that nobody asked for: one that does nothing is
    passed over with a note, not refused.

    Raises UsageError (2), CoverageError (3), ResourceError (4), CorruptError (5); before the first byte is written
    for everything that can be known by then.
    """
    table = as_list(table)
    options = Options(dry_run, overwrite, workers, digests, Path(plan_file) if plan_file else None)
    task = Task("convert", Path(src), Path(dst), options, progress, Defaults(defaults), time.perf_counter())
    sharding, source, read = begin(task, parallel, table, config)
    wanted = _dtype(dtype, clamp, source.checkpoint, task.given)
    settings, side, notes = find_config(source, Path(config) if config else None)
    if options.plan_file:
        check_plan_file(options.plan_file, task.dst, [*read, *(path for path, _ in side)])
    tables = load_own_tables(table)
    choice = choose(
        source, settings, tables, model=model, from_dialect=from_dialect, to_dialect=to_dialect,
        variant=variant, from_variant=from_variant, given=task.given,
    )  # fmt: skip
    kind, size = file_layout(choice.target[0], format, max_shard_size, task.given, sharding)
    arrange = arranger(sharding, kind, source, drop_state=no_optimizer)
    target = Target(kind, size, tie_embeddings, allow_unmapped, wanted, clamp, arrange, no_optimizer)
    plan = plan_by_tables(source, choice, settings, side, target, sharding)
    return finish(task, plan, source, naming_rows(plan, choice), notes, sharding)


def plan_by_tables(
    source: Source, choice: Choice, settings: dict[str, Any], side: SideFiles, target: Target, sharding: Sharding
) -> Plan:
    """Return the plan that takes `source` from one spoke of its family to the other, training state included."""
    checkpoint = source.checkpoint
    source_rules, target_rules = (resolve(choice.family, settings, *spoke) for spoke in (choice.source, choice.target))
    source_rules = pad(source_rules, source.padded)
    if sharding.pad_vocab_to is not None:
        target_rules = pad_vocabulary(target_rules, sharding.pad_vocab_to)
    if source.manifest is not None and source.manifest["to"]["dialect"]:
        refuse_part(source)
        check_rules(source, source_rules.dims, rules_digest(source_rules, checkpoint.tensors))
    if not target.drop_state:
        source_rules, target_rules = add_state(source_rules, target_rules, checkpoint.tensors)
    return build_plan(
        checkpoint, source_rules, target_rules, target, config=settings, side=side, notes=choice.notes,
        joined=source.joined,
    )  # fmt: skip


def _dtype(text: str | None, clamp: bool, checkpoint: Checkpoint, given: Defaults) -> str | None:
    """Return the dtype to cast to, None for none; UsageError or CoverageError when the cast makes no sense."""
    if text is None:
        if clamp:
            what = "`--clamp` does nothing without `--dtype`"
            given.pass_over("clamp", UsageError(what, hint="add `--dtype fp16`, or leave it out"))
        return None
    wanted = parse_dtype(text)
    scaled = [f"{t.name}  {t.dtype}" for t in checkpoint.tensors.values() if t.dtype.startswith("F8_")]
    if scaled:
        raise CoverageError(
            f"`{checkpoint.path.name}` has {len(scaled)} FP8 tensors, and ckptkit does not apply their scale",
            items=scaled,
            why="an FP8 weight means something only times its scale: cast alone, it would be wrong by that factor",
            hint="dequantise the model first, then convert it with `--dtype`",
        )
    return wanted

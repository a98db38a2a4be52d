"""What `convert` and `reshard` do alike: open SRC, look at DST, settle the format, write the plan and report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.commands.convert_report import convert_report, dtype_notes
from ckptkit.commands.defaults import Defaults
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.plan_file import write_plan_file
from ckptkit.commands.ranks import open_sharded
from ckptkit.commands.sharding import Sharding
from ckptkit.commands.source import Source, open_source
from ckptkit.commands.write import Options, Progress, write_plan
from ckptkit.errors import UsageError
from ckptkit.formats.mindspore_ckpt import verify_crc
from ckptkit.formats.parts import check_part
from ckptkit.formats.rank_folders import find_ranks
from ckptkit.formats.registry import CKPT, HF, MINDFORMERS, MINDSPORE_SAFETENSORS
from ckptkit.formats.target import check_place, check_replaceable
from ckptkit.plan.part import take_ranks
from ckptkit.plan.plan import Plan
from ckptkit.quantities import parse_bytes
from ckptkit.report import Report

DEFAULT_SHARD = "5GB"


@dataclass(frozen=True, slots=True)
class Task:
    """One run of `convert` or `reshard`: from where, to where, how, and since when."""

    command: str
    src: Path
    dst: Path
    options: Options
    progress: Progress | None
    given: Defaults
    started: float


def open_input(src: Path, parallel: Parallel) -> Source:
    """Open SRC, whole or cut over ranks; UsageError when an option speaks of ranks and there are none."""
    if src.is_dir() and find_ranks(src):
        strategy = Path(parallel.src_strategy) if parallel.src_strategy else None
        source = open_sharded(src, strategy=strategy, step=parallel.step)
    else:
        for option, told in (("--src-strategy", parallel.src_strategy), ("--step", parallel.step)):
            if told is not None:
                raise UsageError(
                    f"`{option}` is about a checkpoint that is cut over ranks, and `{src}` has no `rank_N` folders",
                    hint="leave it out, or name the folder that holds `rank_0`",
                )
        source = open_source(src, unwrapped=True)
    for file in source.checkpoint.files:
        if source.checkpoint.kind == "ckpt":
            verify_crc(file)
    return source


def begin(
    task: Task, parallel: Parallel, table: Sequence[Path], config: str | Path | None
) -> tuple[Sharding, Source, list[Path]]:
    """Return the target's layout, SRC, and all that is read; UsageError when no result may go to DST."""
    given = [Path(config)] if config else []
    sharding = parallel.target(task.given, given[0] if given else task.src)
    source = open_input(task.src, parallel)
    read = [*inputs(task, source, parallel), *table, *given]
    check_output(task.dst, read, task.options, sharding)
    return sharding, source, read


def inputs(task: Task, source: Source, parallel: Parallel) -> list[Path]:
    """Return what is read, and may not be written over."""
    more = (parallel.src_strategy, parallel.dst_strategy, parallel.parallel_config)
    return [task.src, *source.checkpoint.files, *(Path(path) for path in more if path)]


def check_output(dst: Path, sources: Sequence[Path], options: Options, sharding: Sharding) -> None:
    """Raise UsageError when no result may go to `dst`; a dry run only notes that it may not be replaced."""
    check_place(dst, sources)
    if options.dry_run:
        return
    if sharding.only is None:
        check_replaceable(dst, overwrite=options.overwrite)
    else:
        check_part(dst, None, sharding.only, overwrite=options.overwrite)


def finish(
    task: Task, plan: Plan, source: Source, heading: Sequence[tuple[str, str]], notes: Sequence[str],
    sharding: Sharding,
) -> Report:  # fmt: skip
    """Write the plan, unless it is only to be printed, and report; `heading` are the report's first rows."""
    options = task.options
    notes = [*notes, *task.given.notes, *dtype_notes(plan), *_step_notes(plan, source)]
    if sharding.only is not None:
        plan = take_ranks(plan, sharding.only)
    plan = replace(plan, notes=(*plan.notes, *notes, *_digest_notes(source, options, plan)))
    if options.plan_file:
        write_plan_file(options.plan_file, plan, overwrite=options.overwrite)
    counts = None if options.dry_run else write_plan(plan, source, task.dst, options, task.progress)
    return convert_report(
        plan, task.command, task.src, task.dst, heading, options, counts, time.perf_counter() - task.started
    )


def _step_notes(plan: Plan, source: Source) -> list[str]:
    """Return a note when the names of the ranks' files say a step, and no name of the result does."""
    saved = source.ranks.saved if source.ranks else None
    if saved is None or plan.facts["to"]["format"] == MINDFORMERS:
        return []
    if any(f"-{saved[0]}_{saved[1]}." in file.name for file in plan.files):
        return []
    return [f"SRC was saved at epoch {saved[0]}, step {saved[1]}; no file of DST says so"]


def _digest_notes(source: Source, options: Options, plan: Plan) -> list[str]:
    if plan.whole is not None and source.promised_digests and options.digests:
        return ["what the other ranks read too was not compared with the digests of SRC: `ckptkit check` does it"]
    if options.digests or options.dry_run or not source.promised_digests:
        return []
    return ["`--no-digest`: the tensors read were not compared with the digests in the ckptkit.json of SRC"]


def file_layout(
    dialect: str, format: str | None, size: str | int | None, given: Defaults, sharding: Sharding
) -> tuple[str, int]:
    """Return the kind of the result, and the most bytes of a file; UsageError for what does nothing in this one."""
    if format not in (None, "safetensors", CKPT, MINDFORMERS):
        raise UsageError(f"unknown format `{format}`", hint="`safetensors`, `ckpt` or `mindformers`")
    kind = format if format in (CKPT, MINDFORMERS) else MINDSPORE_SAFETENSORS
    if kind == MINDFORMERS and sharding.only is not None:
        raise UsageError(
            "`--ranks` does nothing with `--format mindformers`",
            why="the files of all ranks lie in one folder, with one `metadata.json`",
            hint="leave out `--ranks`: one run writes all ranks",
        )
    if dialect == "hf":
        if format in (CKPT, MINDFORMERS):
            what = "HuggingFace weights are not stored " + ("as .ckpt" if kind == CKPT else "in folders of MindFormers")
            given.pass_over("format", UsageError(what, hint=f"leave out `--format {format}`"))
        if not sharding.is_whole:
            raise UsageError(
                "HuggingFace weights are not cut over ranks",
                why="a parallel layout is one of MindSpore's checkpoints",
                hint="leave out the parallel degrees, or name a MindSpore dialect with `--to`",
            )
        kind = HF
    if size is not None and (kind in (CKPT, MINDFORMERS) or not sharding.is_whole):
        whole = sharding.is_whole and kind == CKPT
        error = UsageError(
            "`--max-shard-size` does nothing " + ("with `--format ckpt`" if whole else "to files of ranks"),
            why="no loader joins .ckpt files, so there is always one" if whole else "each rank has its own",
            hint="leave it out" + (", or write `--format safetensors`" if sharding.is_whole else ""),
        )
        given.pass_over("max_shard_size", error)
    return kind, parse_size(DEFAULT_SHARD if size is None else size)


def parse_size(text: str | int) -> int:
    """Return the bytes that `5GB`, `500MiB` or `1000` stand for; UsageError for anything else."""
    if isinstance(text, int):
        return text
    try:
        return parse_bytes(text)
    except ValueError:
        raise UsageError(f"`{text}` is not a size", hint="write it like `5GB`, `500MB` or `2GiB`") from None

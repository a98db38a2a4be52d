"""`ckptkit convert`: a checkpoint into another naming, layout or file format, exactly."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.cast import CastCount, parse_dtype
from ckptkit.commands.cast_report import cast_data, cast_rows, cast_tensors
from ckptkit.commands.choose import Choice, choose
from ckptkit.commands.defaults import Defaults
from ckptkit.commands.plan_file import check_plan_file, write_plan_file
from ckptkit.commands.source import (
    SideFiles,
    Source,
    as_list,
    check_rules,
    find_config,
    load_own_tables,
    open_source,
    refuse_part,
)
from ckptkit.commands.write import Options, Progress, write_plan
from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.files import paused_gc
from ckptkit.formats.manifest import MANIFEST
from ckptkit.formats.mindspore_ckpt import verify_crc
from ckptkit.formats.target import check_place, check_replaceable
from ckptkit.mapping.rules import resolve
from ckptkit.plan.build import Target, build_plan, rules_digest
from ckptkit.plan.plan import Plan
from ckptkit.report import Report, fold_names, human_bytes, listed

DEFAULT_SHARD = "5GB"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


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
    dtype: str | None = None,
    clamp: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    workers: int = 2,
    digests: bool = True,
    plan_file: str | Path | None = None,
    progress: Progress | None = None,
    defaults: Collection[str] = (),
) -> Report:
    """Convert the checkpoint `src` into the folder `dst` and return a report.

    `src` is a HuggingFace folder, a MindSpore folder or a file; `dst` is always a folder, and appears only when it
    is complete. `model` is a family or an alias (config.json decides without it); `from_dialect` and `to_dialect`
    are `hf`, `mindformers` or a dialect's own name; `format` is `safetensors` or `ckpt`, for MindSpore output;
    `table` are mapping files of your own. `dtype` (`bf16`, `fp16`, `fp32`, or torch's names) casts floating-point
    tensors, and `clamp` lets values that overflow become the largest finite one. `dry_run` plans and proves, and
    writes nothing but `plan_file`. `progress(total_bytes, done_bytes)` returns a function that is told of bytes done.
    `defaults` names the options that nobody asked for: one that does nothing is passed over with a note, not refused.

    Raises UsageError (2), CoverageError (3), ResourceError (4), CorruptError (5); before the first byte is written
    for everything that can be known by then.
    """
    table = as_list(table)
    options = Options(dry_run, overwrite, workers, digests, Path(plan_file) if plan_file else None)
    src, dst = Path(src), Path(dst)
    started = time.perf_counter()
    source = _open(src)
    read = [src, *source.checkpoint.files, *(Path(path) for path in (*table, *([config] if config else [])))]
    _check_target(dst, read, options)
    given = Defaults(defaults)
    wanted = _dtype(dtype, clamp, source.checkpoint, given)
    settings, side, notes = find_config(source, Path(config) if config else None)
    if options.plan_file:
        check_plan_file(options.plan_file, dst, [*read, *(path for path, _ in side)])
    tables = load_own_tables(table)
    choice = choose(
        source, settings, tables, model=model, from_dialect=from_dialect, to_dialect=to_dialect,
        variant=variant, from_variant=from_variant, given=given,
    )  # fmt: skip
    kind, size = _layout(choice, format, max_shard_size, given)
    target = Target(kind, size, tie_embeddings, allow_unmapped, wanted, clamp)
    plan = _plan(source, choice, settings, side, target)
    notes += [*given.notes, *_dtype_notes(plan), *_digest_notes(source, options)]
    plan = replace(plan, notes=(*plan.notes, *notes))
    if options.plan_file:
        write_plan_file(options.plan_file, plan, overwrite=overwrite)
    counts = None if options.dry_run else write_plan(plan, source, dst, options, progress)
    return _report(plan, src, dst, choice, options, counts, time.perf_counter() - started)


def _check_target(dst: Path, sources: Sequence[Path], options: Options) -> None:
    """Raise UsageError when no result may go to `dst`; a dry run only notes that it may not be replaced."""
    check_place(dst, sources)
    if not options.dry_run:
        check_replaceable(dst, overwrite=options.overwrite)


def _open(src: Path) -> Source:
    source = open_source(src, unwrapped=True)
    for file in source.checkpoint.files:
        if source.checkpoint.kind == "ckpt":
            verify_crc(file)
    return source


def _plan(source: Source, choice: Choice, settings: dict[str, Any], side: SideFiles, target: Target) -> Plan:
    checkpoint = source.checkpoint
    source_rules, target_rules = (resolve(choice.family, settings, *spoke) for spoke in (choice.source, choice.target))
    if source.manifest is not None:
        refuse_part(source)
        check_rules(source, source_rules.dims, rules_digest(source_rules, checkpoint.tensors))
    return build_plan(checkpoint, source_rules, target_rules, target, config=settings, side=side, notes=choice.notes)


def _dtype_notes(plan: Plan) -> Iterator[str]:
    """Yield a note for each dtype of the result that a model's weights do not have unless they are quantised.

    Tensors that a cast left alone are in the report already, with their dtype.
    """
    kept = {fate.name for fate in plan.kept}
    for dtype, number in Counter(o.spec.dtype for o in plan.outputs if o.spec.name not in kept).items():
        what = f"{number} tensors are {dtype}" if number > 1 else f"1 tensor is {dtype}"
        if dtype.startswith("F8_"):
            unknown = ", a dtype that MindSpore does not have" if plan.facts["to"]["dialect"] != "hf" else ""
            yield f"{what}{unknown}: the scales of FP8 weights are not applied"
        elif not dtype.startswith(("F", "BF")):
            yield f"{what}, where a model has floating-point weights: if they are quantised, no scale is applied"


def _digest_notes(source: Source, options: Options) -> list[str]:
    if options.digests or options.dry_run or not source.promised_digests:
        return []
    return ["`--no-digest`: the tensors read were not compared with the digests in the ckptkit.json of SRC"]


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


def _layout(choice: Choice, format: str | None, size: str | int | None, given: Defaults) -> tuple[str, int]:
    """Return the kind of the result, and the most bytes of a file; UsageError for what does nothing in this one."""
    if format not in (None, "safetensors", "ckpt"):
        raise UsageError(f"unknown format `{format}`", hint="`safetensors` or `ckpt`")
    kind = "ckpt" if format == "ckpt" else "mindspore-safetensors"
    if choice.target[0] == "hf":
        if format == "ckpt":
            what = "HuggingFace weights are not stored as .ckpt"
            given.pass_over("format", UsageError(what, hint="leave out `--format ckpt`"))
        kind = "hf"
    if size is not None and kind == "ckpt":
        error = UsageError(
            "`--max-shard-size` does nothing with `--format ckpt`",
            why="no loader joins .ckpt files, so there is always one",
            hint="leave it out, or write `--format safetensors`",
        )
        given.pass_over("max_shard_size", error)
    return kind, parse_size(DEFAULT_SHARD if size is None else size)


def parse_size(text: str | int) -> int:
    """Return the bytes that `5GB`, `500MiB` or `1000` stand for; UsageError for anything else."""
    if isinstance(text, int):
        return text
    number = text.strip().rstrip("BbKkMmGgIi ")
    unit = text.strip()[len(number) :].strip().upper()
    with contextlib.suppress(ValueError, OverflowError):
        if unit in _UNITS and (size := int(float(number) * _UNITS[unit])) > 0:
            return size
    raise UsageError(f"`{text}` is not a size", hint="write it like `5GB`, `500MB` or `2GiB`")


def _report(
    plan: Plan, src: Path, dst: Path, choice: Choice, options: Options, counts: dict[str, CastCount] | None,
    seconds: float,
) -> Report:  # fmt: skip
    verb = "would convert" if options.dry_run else "converted"
    report = Report("convert", f"{verb} `{src}` -> `{dst}`")
    report.add("family", f"{choice.family.name} ({choice.family_from})")
    for label, side in (("from", plan.facts["from"]), ("to", plan.facts["to"])):
        variant = f", variant {side['variant']}" if side["variant"] else ""
        report.add(label, f"{side['dialect']}{variant}, {side['format']} ({', '.join(side['tables'])})")
    report.add("tensors", f"{len(plan.outputs)}, {human_bytes(plan.tensor_bytes)} in {len(plan.files)} file(s)")
    for text in listed([f"{f.name}  {human_bytes(f.size)}" for f in plan.files]):
        report.add("files", text)
    report.add("beside", ", ".join(sorted([name for _, name in plan.side] + [*plan.extra, MANIFEST])))
    for text in cast_rows(plan, counts):
        report.add("cast", text)
    fates_of = {key: getattr(plan, key) for key in ("kept", "ignored", "dropped", "unmapped")}
    for label, fates in fates_of.items():
        for reason in dict.fromkeys(fate.reason for fate in fates):
            for pattern, count in fold_names(fate.name for fate in fates if fate.reason == reason):
                report.add(label, f"{count} x {pattern}: {reason}" if count > 1 else f"{pattern}: {reason}")
    for note in plan.notes:
        report.add("note", note)
    for note in _refusal(dst, options) if options.dry_run else []:
        report.add("note", note)
    report.add("cost", _cost(plan, options, seconds))
    casts = cast_data(plan, counts)
    report.data = {"source": str(src), "target": str(dst), "dry_run": options.dry_run}
    report.fill = lambda: (
        plan.to_json() | {key: {**value, "tensors": cast_tensors(plan, counts)} for key, value in casts.items()}
    )
    return report


def _refusal(dst: Path, options: Options) -> list[str]:
    """Return a note when the run that a dry run is about would not be allowed to write to `dst`."""
    try:
        check_replaceable(dst, overwrite=options.overwrite)
    except UsageError as error:
        return [f"the run itself will be refused: {' '.join((error.what, ', '.join(error.items)))}; {error.hint}"]
    return []


def _cost(plan: Plan, options: Options, seconds: float) -> str:
    text = (
        f"reads {human_bytes(plan.bytes_read)} (amplification {plan.read_amplification:.2f}), "
        f"writes {human_bytes(plan.bytes_written)}, memory below {human_bytes(plan.peak_memory_bytes)}"
    )
    return text if options.dry_run else f"{text}; {seconds:.1f} s"

"""`ckptkit convert`: a checkpoint into another naming, layout or file format, exactly."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ckptkit import __version__
from ckptkit.cast import CastCount, parse_dtype
from ckptkit.commands.cast_report import cast_data, cast_rows, cast_tensors, counts_of
from ckptkit.commands.choose import Choice, choose
from ckptkit.commands.source import Source, find_config, open_source
from ckptkit.errors import CoverageError, UsageError
from ckptkit.execute import execute
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.file_sink import FileSink
from ckptkit.formats.manifest import MANIFEST, SCHEMA, dump_manifest, read_manifest
from ckptkit.formats.mindspore_ckpt import verify_crc
from ckptkit.formats.result_folder import ResultFolder, check_space, check_target
from ckptkit.mapping.rules import resolve
from ckptkit.mapping.tables import load_tables
from ckptkit.plan.build import Target, build_plan
from ckptkit.plan.plan import Plan
from ckptkit.report import Report, fold_names, human_bytes, listed

DEFAULT_SHARD = "5GB"
Progress = Callable[[int, int], Callable[[int], None]]
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True, slots=True)
class Options:
    """How to run, apart from what to make: none of these changes a byte of the result's tensors."""

    dry_run: bool = False
    overwrite: bool = False
    workers: int = 2
    digests: bool = True
    plan_file: Path | None = None


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
    max_shard_size: str | int = DEFAULT_SHARD,
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
) -> Report:
    """Convert the checkpoint `src` into the folder `dst` and return a report.

    `src` is a HuggingFace folder, a MindSpore folder or a file; `dst` is always a folder, and appears only when it
    is complete. `model` is a family or an alias (config.json decides without it); `from_dialect` and `to_dialect`
    are `hf`, `mindformers` or a dialect's own name; `format` is `safetensors` or `ckpt`, for MindSpore output;
    `table` are mapping files of your own. `dtype` (`bf16`, `fp16`, `fp32`, or torch's names) casts floating-point
    tensors, and `clamp` lets values that overflow become the largest finite one. `dry_run` plans and proves, and
    writes nothing but `plan_file`.
    `progress(total_bytes, done_bytes)` returns a function that is told of bytes done.

    Raises UsageError (2), CoverageError (3), ResourceError (4), CorruptError (5); before the first byte is written
    for everything that can be known by then.
    """
    options = Options(dry_run, overwrite, workers, digests, Path(plan_file) if plan_file else None)
    src, dst = Path(src), Path(dst)
    started = time.perf_counter()
    source = open_source(src, unwrapped=True)
    for file in source.checkpoint.files:
        if source.checkpoint.kind == "ckpt":
            verify_crc(file)
    check_target(dst, [src, *source.checkpoint.files], overwrite=options.overwrite or options.dry_run)
    wanted = _dtype(dtype, clamp, source.checkpoint)
    settings, side = find_config(source, Path(config) if config else None)
    tables = load_tables([Path(t) for t in table])
    choice = choose(
        source, settings, tables, model=model, from_dialect=from_dialect, to_dialect=to_dialect,
        variant=variant, from_variant=from_variant,
    )  # fmt: skip
    size = parse_size(max_shard_size)
    target = Target(_kind(choice, format), size, tie_embeddings, allow_unmapped, wanted, clamp)
    plan = _plan(source.checkpoint, choice, settings, side, target)
    if options.plan_file:
        _write_plan(options.plan_file, plan)
    counts = None if options.dry_run else _write(plan, source, dst, options, progress)
    return _report(plan, src, dst, choice, options, counts, time.perf_counter() - started)


def _plan(
    checkpoint: Checkpoint, choice: Choice, settings: dict[str, Any], side: Sequence[Path], target: Target
) -> Plan:
    source_rules, target_rules = (resolve(choice.family, settings, *spoke) for spoke in (choice.source, choice.target))
    return build_plan(checkpoint, source_rules, target_rules, target, config=settings, side=side, notes=choice.notes)


def _dtype(text: str | None, clamp: bool, checkpoint: Checkpoint) -> str | None:
    """Return the dtype to cast to, None for none; UsageError or CoverageError when the cast makes no sense."""
    if text is None:
        if clamp:
            raise UsageError("`--clamp` does nothing without `--dtype`", hint="add `--dtype fp16`, or leave it out")
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


def _kind(choice: Choice, format: str | None) -> str:
    if format not in (None, "safetensors", "ckpt"):
        raise UsageError(f"unknown format `{format}`", hint="`safetensors` or `ckpt`")
    if choice.target[0] == "hf":
        if format == "ckpt":
            raise UsageError("HuggingFace weights are not stored as .ckpt", hint="leave out `--format ckpt`")
        return "hf"
    return "ckpt" if format == "ckpt" else "mindspore-safetensors"


def parse_size(text: str | int) -> int:
    """Return the bytes that `5GB`, `500MiB` or `1000` stand for; UsageError for anything else."""
    if isinstance(text, int):
        return text
    number = text.strip().rstrip("BbKkMmGgIi ")
    unit = text.strip()[len(number) :].strip().upper()
    with contextlib.suppress(ValueError):
        if unit in _UNITS and (size := int(float(number) * _UNITS[unit])) > 0:
            return size
    raise UsageError(f"`{text}` is not a size", hint="write it like `5GB`, `500MB` or `2GiB`")


def _write_plan(path: Path, plan: Plan) -> None:
    import json

    path.write_text(json.dumps(plan.to_json(), indent=1) + "\n")


def _write(
    plan: Plan,
    source: Source,
    dst: Path,
    options: Options,
    progress: Progress | None,
) -> dict[str, CastCount]:
    """Execute `plan` into `dst`, all of it or nothing under that name, and return what its casts lost."""
    check_target(dst, [], overwrite=options.overwrite)
    digest = plan.digest()
    folder = ResultFolder(dst, digest, options.overwrite)
    check_space(folder.target, plan.bytes_written - _already_written(folder))
    folder.open()
    try:
        if folder.complete:
            counts = counts_of(read_manifest(folder.partial))
        else:
            with _sink(folder, plan, options) as sink:
                done = sink.finished_files()
                done_bytes = sum(o.spec.num_bytes for o in plan.outputs if o.file in done)
                counts = execute(
                    plan, sink, workers=options.workers, digests=options.digests, skip_files=done,
                    source_digests=source.promised_digests,
                    progress=progress(plan.tensor_bytes, done_bytes) if progress else lambda _: None,
                )  # fmt: skip
            _write_small_files(plan, source, folder, sink.digests, counts)
        folder.commit()
    except CoverageError:  # values that overflow: no run of this plan can end otherwise, so nothing is kept for one
        shutil.rmtree(folder.partial)
        raise
    finally:
        folder.close()
    return counts


def _already_written(folder: ResultFolder) -> int:
    partial = folder.partial
    return sum(f.stat().st_blocks * 512 for f in partial.rglob("*") if f.is_file()) if partial.is_dir() else 0


@contextlib.contextmanager
def _sink(folder: ResultFolder, plan: Plan, options: Options) -> Iterator[FileSink]:
    outputs = [(output.spec.name, output.file) for output in plan.outputs]
    sink = FileSink(folder, plan.files, outputs, digests=options.digests)
    try:
        yield sink
    finally:
        sink.close()


def _write_small_files(
    plan: Plan, source: Source, folder: ResultFolder, digests: dict[str, str], counts: dict[str, CastCount]
) -> None:
    side = {}
    for path, name in plan.side:
        folder.copy(path, name)
        side[name] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    for name, data in plan.extra.items():
        folder.add(name, data)
        side[name] = xxhash.xxh3_128_hexdigest(data)
    manifest = _manifest(plan, source, folder.digest, digests, side) | cast_data(plan, counts)
    for name, cast in cast_tensors(plan, counts).items():
        manifest["tensors"][name]["cast"] = cast
    folder.add(MANIFEST, dump_manifest(manifest))


def _manifest(
    plan: Plan, source: Source, plan_digest: str, digests: dict[str, str], side: dict[str, str]
) -> dict[str, Any]:
    checkpoint = source.checkpoint
    return {
        "schema": SCHEMA,
        "tool": f"ckptkit {__version__}",
        "plan": plan_digest,
        **plan.facts,
        "source": {
            "name": checkpoint.path.resolve().name,
            "files": [{"name": f.name, "bytes": f.stat().st_size} for f in checkpoint.files],
            "tensors": _source_digests(plan, source, digests),
        },
        "files": [{"name": f.name, "bytes": f.size} for f in plan.files],
        "side_files": side,
        **{key: [[f.name, f.reason] for f in getattr(plan, key)] for key in ("ignored", "dropped", "unmapped")},
        "tensors": {
            o.spec.name: {
                "shape": list(o.spec.shape),
                "dtype": o.spec.dtype,
                "file": plan.files[o.file].name,
                "xxh3_128": digests.get(o.spec.name),
            }
            for o in plan.outputs
        },
    }


def _source_digests(plan: Plan, source: Source, digests: dict[str, str]) -> dict[str, str]:
    """Return what is known of the source's bytes: its own manifest, and the tensors that moved whole and uncast."""
    from ckptkit.mapping.expr import Leaf

    known = source.promised_digests
    for output in plan.outputs:
        if isinstance(output.expr, Leaf) and output.spec.name in digests and not output.cast_from:
            known[output.expr.name] = digests[output.spec.name]
    return known


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
    if plan.side or plan.extra:
        report.add("beside", ", ".join(sorted([name for _, name in plan.side] + list(plan.extra))))
    for text in cast_rows(plan, counts):
        report.add("cast", text)
    fates_of = {key: getattr(plan, key) for key in ("kept", "ignored", "dropped", "unmapped")}
    for label, fates in fates_of.items():
        for reason in dict.fromkeys(fate.reason for fate in fates):
            for pattern, count in fold_names(fate.name for fate in fates if fate.reason == reason):
                report.add(label, f"{count} x {pattern}: {reason}" if count > 1 else f"{pattern}: {reason}")
    for note in plan.notes:
        report.add("note", note)
    report.add("cost", _cost(plan, options, seconds))
    report.data = plan.to_json() | {"source": str(src), "target": str(dst), "dry_run": options.dry_run}
    for key, value in cast_data(plan, counts).items():
        report.data[key] = {**value, "tensors": cast_tensors(plan, counts)}
    return report


def _cost(plan: Plan, options: Options, seconds: float) -> str:
    text = (
        f"reads {human_bytes(plan.bytes_read)} (amplification {plan.read_amplification:.2f}), "
        f"writes {human_bytes(plan.bytes_written)}, memory below {human_bytes(plan.peak_memory_bytes)}"
    )
    return text if options.dry_run else f"{text}; {seconds:.1f} s"

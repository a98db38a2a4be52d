"""Write a plan into a folder: tensors, side files, manifest; all of it, or nothing under the folder's name."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ckptkit import __version__
from ckptkit.cast import CastCount, CastOverflow
from ckptkit.commands.cast_report import cast_data, cast_tensors, counts_of
from ckptkit.commands.source import Source
from ckptkit.execute import execute
from ckptkit.formats.file_sink import FileSink
from ckptkit.formats.manifest import MANIFEST, SCHEMA, dump_manifest, header_digest, read_manifest
from ckptkit.formats.result_folder import ResultFolder, check_space, check_target
from ckptkit.mapping.expr import Leaf
from ckptkit.plan.plan import Plan, SourceChanged

Progress = Callable[[int, int], Callable[[int], None]]


@dataclass(frozen=True, slots=True)
class Options:
    """How to run, apart from what to make: none of these changes a byte of the result's tensors."""

    dry_run: bool = False
    overwrite: bool = False
    workers: int = 2
    digests: bool = True
    plan_file: Path | None = None


def write_plan(
    plan: Plan, source: Source, dst: Path, options: Options, progress: Progress | None
) -> dict[str, CastCount]:
    """Execute `plan` into `dst`, all of it or nothing under that name, and return what its casts lost."""
    check_target(dst, [], overwrite=options.overwrite)
    digest = plan.digest()
    folder = ResultFolder(dst, digest, options.overwrite)
    check_space(folder.target, plan.bytes_written - already_written(folder))
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
            plan.check_sources()
            _write_small_files(plan, source, folder, sink.digests, counts)
        folder.commit()
    except (CastOverflow, SourceChanged):  # no run of this plan can end otherwise, so nothing is kept for one
        shutil.rmtree(folder.partial)
        raise
    finally:
        folder.close()
    return counts


def already_written(folder: ResultFolder) -> int:
    """Return the bytes that an earlier run left on disk; none, when another run gives them their name just now."""
    try:
        return sum(f.stat().st_blocks * 512 for f in folder.partial.rglob("*") if f.is_file())
    except FileNotFoundError:
        return 0


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
    side = {name: folder.copy(path, name) for path, name in plan.side}
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
        "files": [{"name": f.name, "bytes": f.size, "header": header_digest(f)} for f in plan.files],
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
    """Return what was seen of the source's bytes: promises that held, and the tensors that moved whole and uncast."""
    read = {info.name for output in plan.outputs for info in output.inputs.values()}
    known = {name: digest for name, digest in source.promised_digests.items() if digests and name in read}
    casts = "cast" in plan.facts
    for output in plan.outputs:
        if isinstance(output.expr, Leaf) and output.spec.name in digests and not (casts and output.cast_from):
            known[output.expr.name] = digests[output.spec.name]
    return known

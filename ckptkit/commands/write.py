"""Write a plan into a folder: tensors, side files, manifest; all of it, or nothing under the folder's name."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ckptkit import __version__
from ckptkit.cast import CastCount, CastOverflow
from ckptkit.commands.cast_report import cast_data, cast_tensors, counts_of
from ckptkit.commands.replicas import compare_replicas
from ckptkit.commands.source import Source
from ckptkit.execute import Outcome, execute
from ckptkit.formats.disk import allow_open_files
from ckptkit.formats.file_sink import FileSink
from ckptkit.formats.manifest import MANIFEST, SCHEMA, dump_manifest, header_digest, read_manifest, tensor_rows
from ckptkit.formats.mindformers_write import rank_of
from ckptkit.formats.result_folder import ResultFolder, check_space
from ckptkit.mapping.expr import Leaf
from ckptkit.plan.plan import Plan, SourceChanged, stored_name
from ckptkit.types import TensorSpec

Progress = Callable[[int, int], Callable[[int], None]]


@dataclass(frozen=True, slots=True)
class Options:
    """How to run, apart from what to make: none of these changes a byte of the result's tensors.

    Without `workers` there are two, or one where they would only wait for each other: the kernel lets one write to a
    file at a time.
    """

    dry_run: bool = False
    overwrite: bool = False
    workers: int | None = None
    digests: bool = True
    plan_file: Path | None = None


def write_plan(
    plan: Plan, source: Source, dst: Path, options: Options, progress: Progress | None
) -> dict[str, CastCount]:
    """Execute `plan` into `dst`, all of it or nothing under that name, and return what its casts lost."""
    only = plan.facts["layout"].get("only") if plan.whole is not None else None
    folder = ResultFolder(dst, plan.digest(), options.overwrite, None if only is None else tuple(only))
    folder.check()
    allow_open_files(len(plan.files))
    compare_replicas(plan, options.workers or 2, progress)
    check_space(folder.target, plan.bytes_written - already_written(folder))
    folder.open()
    try:
        if folder.complete:
            counts = _noted_counts(folder.partial)
        else:
            with _sink(folder, plan, options) as sink:
                done = sink.finished_files()
                done_bytes = sum(o.spec.num_bytes for o in plan.outputs if o.file in done)
                outcome = execute(
                    plan, sink, workers=options.workers or min(2, len(plan.files)), digests=options.digests,
                    skip_files=done,
                    source_digests=source.promised_digests,
                    progress=progress(plan.tensor_bytes, done_bytes) if progress else lambda _: None,
                )  # fmt: skip
            sink.check_complete()
            plan.check_sources()
            counts = outcome.counts
            _write_small_files(plan, source, folder, sink.digests, outcome)
        folder.commit()
    except (CastOverflow, SourceChanged):  # no run of this plan can end otherwise, so nothing is kept for one
        shutil.rmtree(folder.partial)
        raise
    finally:
        folder.close()
    return counts


def _noted_counts(folder: Path) -> dict[str, CastCount]:
    """Return what the casts of a finished result lost, by the tensors' own names."""
    found = counts_of(read_manifest(folder))
    in_ranks = any(rank_of(path.relative_to(folder).as_posix()) is not None for path in folder.glob("*/*"))
    return {name.partition(":")[2] if in_ranks else name: count for name, count in found.items()}


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
    plan: Plan, source: Source, folder: ResultFolder, digests: Sequence[Mapping[str, str]], outcome: Outcome
) -> None:
    counts = outcome.counts
    for name, file in plan.links.items():
        folder.link(name, file)
    side = {name: folder.copy(path, name) for path, name in plan.side}
    for name, data in plan.extra.items():
        folder.add(name, data)
        side[name] = xxhash.xxh3_128_hexdigest(data)
    manifest = _manifest(plan, source, folder.digest, digests, side, outcome.compared) | cast_data(plan, counts)
    rows = tensor_rows(_tensors(plan, digests), cast_tensors(plan, counts))
    folder.add(MANIFEST, dump_manifest(manifest, rows))


def _manifest(
    plan: Plan,
    source: Source,
    plan_digest: str,
    digests: Sequence[Mapping[str, str]],
    side: dict[str, str],
    compared: Set[str],
) -> dict[str, Any]:
    """Return the manifest but for the rows of its tensors."""
    checkpoint = source.checkpoint
    return {
        "schema": SCHEMA,
        "tool": f"ckptkit {__version__}",
        "plan": plan_digest,
        **plan.facts,
        "source": {
            "name": checkpoint.path.resolve().name,
            "files": [{"name": f.name, "bytes": f.stat().st_size} for f in checkpoint.files],
            "tensors": _source_digests(plan, source, digests, compared),
        },
        "files": list(_files(plan)),
        "side_files": side,
        **{key: [[f.name, f.reason] for f in getattr(plan, key)] for key in ("ignored", "dropped", "unmapped")},
    }


def _files(plan: Plan) -> Iterator[dict[str, Any]]:
    rows = {f.name: {"bytes": f.size, "header": header_digest(f)} for f in plan.files}
    for name, row in rows.items():
        yield {"name": name, **row}
    for name, file in plan.links.items():
        yield {"name": name, **rows[file]}


def _tensors(plan: Plan, digests: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, TensorSpec, str, str | None]]:
    """Yield each stored tensor as the manifest calls it, its spec, its file and its digest; linked files included."""
    names = [[(file.name, _prefix(file.name))] for file in plan.files]
    numbers = {file.name: number for number, file in enumerate(plan.files)}
    for name, file in plan.links.items():
        names[numbers[file]].append((name, _prefix(name)))
    for output in plan.outputs:
        spec = output.spec
        digest = digests[output.file].get(spec.name)
        for name, prefix in names[output.file]:
            yield prefix + spec.name, spec, name, digest


def _prefix(file: str) -> str:
    """Return what a manifest puts before the names of a file's tensors: `rank_3:` where the file is a rank's."""
    rank = rank_of(file)
    return stored_name(file if rank is None else f"rank_{rank}/", "")


def _source_digests(
    plan: Plan, source: Source, digests: Sequence[Mapping[str, str]], compared: Set[str]
) -> dict[str, str]:
    """Return what was seen of the source's bytes: promises that held, and the tensors that moved whole and uncast."""
    promised = source.promised_digests if compared else {}
    known = {name: digest for name, digest in promised.items() if name in compared}
    casts = "cast" in plan.facts
    for output in plan.outputs:
        expr, digest = output.expr, digests[output.file].get(output.spec.name)
        if digest and isinstance(expr, Leaf) and output.region is None and not (casts and output.cast_from):
            known[expr.name] = digest
    return known

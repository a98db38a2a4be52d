"""`ckptkit check`: re-read a folder that ckptkit wrote or adopted, and compare every byte with its manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckptkit.commands.adopt import make_manifest, refuse_adopted, write_manifest
from ckptkit.commands.ranks import open_sharded, open_stored, refuse_others
from ckptkit.commands.replicas import compare_replicas
from ckptkit.commands.source import Source, open_source
from ckptkit.errors import CorruptError
from ckptkit.formats.manifest import MANIFEST
from ckptkit.formats.mindspore_ckpt import verify_crc
from ckptkit.formats.rank_folders import find_ranks
from ckptkit.formats.registry import CKPT
from ckptkit.plan.plan import Plan
from ckptkit.report import Report, human_bytes
from ckptkit.verification.files import Sound, check_files

Progress = Callable[[int, int], Callable[[int], None]]


def check(path: str | Path, *, adopt: bool = False, progress: Progress | None = None) -> Report:
    """Read all of the checkpoint at `path` and compare it with its `ckptkit.json`.

    Without a manifest only the structure (and a `.ckpt` file's crc) can be checked, and the report says so; in a newer
    folder of MindFormers also that ranks with the same slice of a tensor have the same bytes. `adopt` then writes a
    manifest beside the checkpoint, and changes nothing else. Raises CorruptError naming the tensors and side files
    whose bytes changed, CoverageError when ranks differ.
    """
    path = Path(path)
    source = open_stored(path) if path.is_dir() and find_ranks(path) else open_source(path)
    if adopt:
        return _adopt(path, source, progress)
    sound = check_source(source, progress)
    replicas = 0 if sound.compared == sound.tensors else _compare_ranks(path, source, progress)
    report = Report("check", f"`{path}` is sound")
    report.add("tensors", f"{sound.tensors}, {human_bytes(sound.num_bytes)}: structure as the format demands")
    if sound.compared:
        if sound.compared < sound.tensors:
            report.headline = (
                f"`{path}`: structure checked, and the bytes of {sound.compared} of {sound.tensors} tensors"
            )
        report.add("digests", f"{sound.compared} of {sound.tensors} tensors have the bytes that {MANIFEST} promises")
    else:
        report.headline = f"`{path}`: structure checked, bytes not"
        report.add(
            "digests", f"none to compare with: no digests in {MANIFEST}" if source.manifest else f"no {MANIFEST}"
        )
    if replicas:
        report.add("replicas", f"{replicas} slices that more than one rank holds are equal")
    for note in (*source.checkpoint.notes, *sound.added):
        report.add("note", note)
    report.data = {
        "path": str(path),
        "tensors": sound.tensors,
        "bytes": sound.num_bytes,
        "digests_compared": sound.compared,
    }
    return report


def _adopt(path: Path, source: Source, progress: Progress | None) -> Report:
    """Give a sound checkpoint without a manifest one."""
    refuse_adopted(path, source)
    for file in source.checkpoint.files:
        if source.checkpoint.kind == CKPT:
            verify_crc(file)
    replicas = _compare_ranks(path, source, progress)
    total = sum(info.num_bytes for info in source.checkpoint.tensors.values())
    manifest = make_manifest(path, source, progress(total, 0) if progress else lambda _: None)
    refuse_others(path, manifest)
    write_manifest(path, manifest)
    report = Report("check", f"adopted `{path}`: {MANIFEST} has its digests, and nothing else was changed")
    report.add("tensors", f"{len(manifest['tensors'])}, {human_bytes(total)}")
    if replicas:
        report.add("replicas", f"{replicas} slices that more than one rank holds are equal")
    report.add("beside", ", ".join(manifest["side_files"]) or "nothing")
    for note in source.checkpoint.notes:
        report.add("note", note)
    report.data = {"path": str(path), "tensors": len(manifest["tensors"]), "bytes": total, "adopted": True}
    return report


def _compare_ranks(path: Path, source: Source, progress: Progress | None) -> int:
    """Compare what several ranks of a newer folder of MindFormers hold; return the number of slices compared."""
    if source.ranks is None or source.ranks.iteration is None:
        return 0
    joined = open_sharded(path).joined
    assert joined is not None, "it is a set of ranks"
    names = frozenset(joined.tensors)
    plan = Plan((), (), {}, (), (), (), (), (), {}, compared=names, replicas=joined.replicas)
    compare_replicas(plan, 2, progress)
    return len(joined.replicas)


def check_source(source: Source, progress: Progress | None) -> Sound:
    """Read a checkpoint that was opened as it is stored; CorruptError when it is not what its manifest promises."""
    total = sum(t.num_bytes for t in source.checkpoint.tensors.values())
    advance = progress(total, 0) if progress else lambda _: None
    sound = check_files(source.checkpoint, source.manifest, source.promised_digests, advance)
    if sound.wrong:
        raise CorruptError(
            f"{len(sound.wrong)} items of `{source.checkpoint.path}` are not what {MANIFEST} promises",
            items=sound.wrong,
            why=f"bytes changed after {MANIFEST} was written",
            hint="convert again, or restore the folder from a copy",
        )
    return sound

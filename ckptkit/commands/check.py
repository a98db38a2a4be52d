"""`ckptkit check`: re-read a folder that ckptkit wrote and compare every byte with its manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import xxhash

from ckptkit.commands.ranks import open_stored
from ckptkit.commands.source import Source, open_source
from ckptkit.errors import CorruptError
from ckptkit.formats.disk import file_digest
from ckptkit.formats.files import opened, pread, size_of
from ckptkit.formats.io import FilePool, extents_digest
from ckptkit.formats.manifest import MANIFEST, named_files
from ckptkit.formats.mindspore_ckpt import verify_crc
from ckptkit.formats.rank_folders import find_ranks
from ckptkit.report import Report, human_bytes
from ckptkit.types import Extent, TensorInfo

_BLOCK_BYTES = 256 << 10


def check(path: str | Path, *, progress: Callable[[int, int], Callable[[int], None]] | None = None) -> Report:
    """Read all of the checkpoint at `path` and compare it with its `ckptkit.json`.

    Without a manifest only the structure (and a `.ckpt` file's crc) can be checked, and the report says so. Raises
    CorruptError naming the tensors and side files whose bytes changed.
    """
    path = Path(path)
    source = open_stored(path) if path.is_dir() and find_ranks(path) else open_source(path)
    tensors = source.checkpoint.tensors
    total = sum(t.num_bytes for t in tensors.values())
    advance = progress(total, 0) if progress else lambda _: None
    for file in source.checkpoint.files:
        if source.checkpoint.kind == "ckpt":
            verify_crc(file)
    promised = source.promised_digests
    wrong = _wrong_tensors(tensors, promised, advance) + _wrong_headers(source) + _wrong_side_files(source)
    if wrong:
        raise CorruptError(
            f"{len(wrong)} items of `{path}` are not what {MANIFEST} promises",
            items=wrong,
            why="bytes changed after ckptkit wrote them",
            hint="convert again, or restore the folder from a copy",
        )
    report = Report("check", f"`{path}` is sound")
    report.add("tensors", f"{len(tensors)}, {human_bytes(total)}: structure as the format demands")
    if promised:
        if len(promised) < len(tensors):
            report.headline = f"`{path}`: structure checked, and the bytes of {len(promised)} of {len(tensors)} tensors"
        report.add("digests", f"{len(promised)} of {len(tensors)} tensors have the bytes that {MANIFEST} promises")
    else:
        report.headline = f"`{path}`: structure checked, bytes not"
        report.add(
            "digests", f"none to compare with: no digests in {MANIFEST}" if source.manifest else f"no {MANIFEST}"
        )
    for note in (*source.checkpoint.notes, *_added(source)):
        report.add("note", note)
    report.data = {"path": str(path), "tensors": len(tensors), "bytes": total, "digests_compared": len(promised)}
    return report


def _wrong_tensors(
    tensors: Mapping[str, TensorInfo], promised: dict[str, str], advance: Callable[[int], None]
) -> list[str]:
    wrong = []
    with FilePool() as pool:
        for info in tensors.values():
            digest = extents_digest(info.file, info.extents, pool)
            advance(info.num_bytes)
            if promised.get(info.name, digest) != digest:
                wrong.append(f"{info.name} in {info.file.name}")
    return wrong


def _wrong_headers(source: Source) -> list[str]:
    """Compare the bytes of each weight file that belong to no tensor, where the manifest has their digest."""
    rows = {row["name"]: row for row in (source.manifest or {}).get("files", [])}
    used: dict[Path, list[Extent]] = {file: [] for file in source.checkpoint.files}
    for info in source.checkpoint.tensors.values():
        used[info.file] += info.extents
    return [
        f"the header of {file.name}"
        for file, extents in used.items()
        if (promised := rows.get(_name_in(source, file), {}).get("header"))
        and promised != _digest_around(file, extents)
    ]


def _name_in(source: Source, file: Path) -> str:
    """Return what a manifest calls a weight file: its path in the folder."""
    folder = source.checkpoint.folder
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else file.name


def _digest_around(file: Path, extents: list[Extent]) -> str:
    """Return the digest of all bytes of a file outside `extents`."""
    state = xxhash.xxh3_128()
    with opened(file) as descriptor:
        position = 0
        for offset, size in [*sorted(extents), (size_of(descriptor), 0)]:
            for start in range(position, offset, _BLOCK_BYTES):
                state.update(pread(file, descriptor, min(_BLOCK_BYTES, offset - start), start))
            position = offset + size
    return state.hexdigest()


def _added(source: Source) -> list[str]:
    """Say which files lie in a folder of ours that ckptkit did not put there."""
    folder, manifest = source.checkpoint.path, source.manifest
    if manifest is None or not folder.is_dir():
        return []
    ours = named_files(manifest)
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    added = sorted(name for path in found if (name := path.relative_to(folder).as_posix()) not in ours)
    return [f"not written by ckptkit: {', '.join(added)}"] if added else []


def _wrong_side_files(source: Source) -> list[str]:
    wrong = []
    for name, digest in (source.manifest or {}).get("side_files", {}).items():
        file = source.checkpoint.folder / name
        if not file.is_file():
            wrong.append(f"{name} is gone")
        elif file_digest(file) != digest:
            wrong.append(name)
    return wrong

"""`ckptkit check --adopt`: a manifest for a checkpoint that ckptkit did not write, so that `check` tells its changes.

The manifest has the digests of all tensors and of the files beside them. It says `adopted`: what has one is still a
foreign folder, which `--overwrite` never replaces, and whose naming nobody promises. What does not live here: opening
and comparing (`check.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ckptkit import __version__
from ckptkit.commands.source import Source
from ckptkit.errors import UsageError
from ckptkit.formats.disk import file_digest, fsync_folder, write_file
from ckptkit.formats.files import opened, pread, size_of
from ckptkit.formats.folder import file_names, is_index
from ckptkit.formats.io import FilePool, extents_digest
from ckptkit.formats.manifest import MANIFEST, SCHEMA, dump_manifest
from ckptkit.formats.mindformers_folder import COMMON, METADATA, TRACKER
from ckptkit.formats.mindspore_strategy import STRATEGY
from ckptkit.formats.model_config import side_files
from ckptkit.formats.rank_folders import META
from ckptkit.types import Extent

_BLOCK_BYTES = 256 << 10
_UNFINISHED = f"{MANIFEST}.tmp"


def refuse_adopted(path: Path, source: Source) -> None:
    """Raise UsageError where no manifest can be given: to a file, and to a folder that has one."""
    if not path.is_dir():
        raise UsageError(f"`{path}` is a file", why="a manifest lies in a folder", hint="name the folder it is in")
    if source.manifest is not None or (path / MANIFEST).exists():
        raise UsageError(
            f"`{path}` has a {MANIFEST} already",
            hint=f"`ckptkit check` compares it; remove {MANIFEST} first to adopt the folder as it is now",
        )


def make_manifest(path: Path, source: Source, advance: Callable[[int], None]) -> dict[str, Any]:
    """Return the manifest of a checkpoint that was opened as it is stored, in the folder `path`; reads all of it."""
    checkpoint = source.checkpoint
    rows: dict[str, Any] = {}
    used: dict[Path, list[Extent]] = {file: [] for file in checkpoint.files}
    with FilePool() as pool:
        for name, info in checkpoint.tensors.items():
            digest = extents_digest(info.file, info.extents, pool)
            file = _name_in(path, info.file)
            rows[name] = {"shape": list(info.shape), "dtype": info.dtype, "file": file, "xxh3_128": digest}
            used[info.file] += info.extents
            advance(info.num_bytes)
    format = "mindformers" if source.ranks is not None and source.ranks.iteration is not None else checkpoint.kind
    return {
        "schema": SCHEMA,
        "tool": f"ckptkit {__version__}",
        "plan": "",
        "adopted": True,
        "family": "",
        "to": {"dialect": "", "variant": "", "format": format},
        "layout": {},
        "files": [
            {"name": _name_in(path, file), "bytes": file.stat().st_size, "header": _digest_around(file, extents)}
            for file, extents in used.items()
        ],
        "side_files": {_name_in(path, file): file_digest(file) for file in _beside(path, checkpoint.files)},
        "tensors": rows,
    }


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Put a manifest into a folder, all at once."""
    write_file(path / _UNFINISHED, dump_manifest(manifest))
    (path / _UNFINISHED).rename(path / MANIFEST)
    fsync_folder(path)


def _beside(path: Path, weights: Sequence[Path]) -> Iterator[Path]:
    """Yield the small files that say something of a checkpoint: beside its weights, above them, and strategy files."""
    taken = {file.resolve() for file in weights}
    folders = dict.fromkeys([path, *(file.parent for file in weights)])
    for folder in folders:
        names = [name for name in file_names(folder) if is_index(name) or name in (METADATA, COMMON, TRACKER, META)]
        found = [folder / name for name in names]
        if folder == path:
            found += [file for file in side_files(path) if file.name not in (*names, _UNFINISHED)]
        yield from (file for file in found if file.resolve() not in taken)
    if (path / STRATEGY).is_dir():
        yield from (path / STRATEGY / name for name in file_names(path / STRATEGY))


def _name_in(path: Path, file: Path) -> str:
    """Return what a manifest in the folder `path` calls a file: as it lies there, wherever a link of its path leads."""
    if file.is_relative_to(path):
        return file.relative_to(path).as_posix()
    return Path(os.path.relpath(file.parent.resolve(), path.resolve())).joinpath(file.name).as_posix()


def _digest_around(file: Path, extents: Sequence[Extent]) -> str:
    """Return the digest of the bytes of a file that belong to no tensor."""
    state = xxhash.xxh3_128()
    with opened(file) as descriptor:
        position = 0
        for offset, size in [*sorted(extents), Extent(size_of(descriptor), 0)]:
            for start in range(position, offset, _BLOCK_BYTES):
                state.update(pread(file, descriptor, min(_BLOCK_BYTES, offset - start), start))
            position = max(position, offset + size)
    return state.hexdigest()

"""Level files: structure, digests, headers and side files of one checkpoint, and the shapes that its config.json asks.

What does not live here: opening (which checks the structure, the index and that the ranks are complete) and text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ckptkit.formats.base import Checkpoint
from ckptkit.formats.disk import file_digest
from ckptkit.formats.files import opened, pread, size_of
from ckptkit.formats.io import FilePool, extents_digest
from ckptkit.formats.manifest import named_files
from ckptkit.formats.mindspore_ckpt import verify_crc
from ckptkit.formats.registry import CKPT
from ckptkit.mapping.rules import RuleSet
from ckptkit.types import Extent, TensorInfo

Manifest = Mapping[str, Any] | None
_BLOCK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Sound:
    """What was read of a checkpoint: `compared` of `tensors` have a digest in the manifest; `wrong` are the items that
    are not what it promises; `added` are files in a folder of ours that ckptkit did not write."""

    tensors: int
    num_bytes: int
    compared: int
    wrong: tuple[str, ...]
    added: tuple[str, ...]


def check_files(
    stored: Checkpoint, manifest: Manifest, promised: Mapping[str, str], advance: Callable[[int], None]
) -> Sound:
    """Read all of a checkpoint, its tensors as they are stored, and compare it with its manifest.

    `promised` are the digests by tensor. Raises CorruptError for a `.ckpt` file whose crc is wrong.
    """
    for file in stored.files:
        if stored.kind == CKPT:
            verify_crc(file)
    wrong = _wrong_tensors(stored.tensors, promised, advance)
    wrong += _wrong_headers(stored, manifest) + _wrong_side_files(stored, manifest)
    total = sum(t.num_bytes for t in stored.tensors.values())
    compared = sum(name in promised for name in stored.tensors)
    return Sound(len(stored.tensors), total, compared, tuple(wrong), tuple(_added(stored, manifest)))


def unlike_config(tensors: Mapping[str, TensorInfo], rules: RuleSet, others: RuleSet) -> list[str]:
    """Return the tensors, whole ones, whose shape is not the one that config.json and the tables ask.

    `rules` are by the side's own config.json, `others` by the other side's. Where the two name other tensors, those
    that are missing, or unexpected, by its own are named, too; else that is for level weights to tell.
    """
    lines = [
        f"{rule.target} is {info.shape}, by config.json {rule.expr.shape}"
        for rule in rules.rules
        if (info := tensors.get(rule.target)) is not None and info.shape != rule.expr.shape
    ]
    asked, known = ({rule.target: rule for rule in its.rules} for its in (rules, others))
    more = [name for name, rule in asked.items() if name not in known and not rule.optional]
    lines += [f"{name} is missing, and its own config.json asks for it" for name in more if name not in tensors]
    odd = [name for name in known if name not in asked and name in tensors]
    return lines + [f"{name} is there, and its own config.json knows no such tensor" for name in odd]


def _wrong_tensors(
    tensors: Mapping[str, TensorInfo], promised: Mapping[str, str], advance: Callable[[int], None]
) -> list[str]:
    wrong = []
    with FilePool() as pool:
        for info in tensors.values():
            digest = extents_digest(info.file, info.extents, pool)
            advance(info.num_bytes)
            if promised.get(info.name, digest) != digest:
                wrong.append(f"{info.name} in {info.file.name}")
    return wrong


def _wrong_headers(stored: Checkpoint, manifest: Manifest) -> list[str]:
    """Compare the bytes of each weight file that belong to no tensor, where the manifest has their digest."""
    rows = {row["name"]: row for row in (manifest or {}).get("files", [])}
    used: dict[Path, list[Extent]] = {file: [] for file in stored.files}
    for info in stored.tensors.values():
        used[info.file] += info.extents
    return [
        f"the header of {file.name}"
        for file, extents in used.items()
        if (promised := rows.get(_name_in(stored, file), {}).get("header"))
        and promised != _digest_around(file, extents)
    ]


def _name_in(stored: Checkpoint, file: Path) -> str:
    """Return what a manifest calls a weight file: its path in the folder."""
    folder = stored.folder
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


def _added(stored: Checkpoint, manifest: Manifest) -> list[str]:
    """Say which files lie in a folder of ours that ckptkit did not put there; a rank's folder may be a link."""
    folder = stored.path
    if manifest is None or not folder.is_dir():
        return []
    ours = named_files(manifest)
    ours |= {name.rpartition("/")[0] for name in ours}
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    added = sorted(name for path in found if (name := path.relative_to(folder).as_posix()) not in ours)
    return [f"not written by ckptkit: {', '.join(added)}"] if added else []


def _wrong_side_files(stored: Checkpoint, manifest: Manifest) -> list[str]:
    wrong = []
    for name, digest in (manifest or {}).get("side_files", {}).items():
        file = stored.folder / name
        if not file.is_file():
            wrong.append(f"{name} is gone")
        elif file_digest(file) != digest:
            wrong.append(name)
    return wrong

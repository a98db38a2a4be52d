"""Read one checkpoint of a run: is it whole, and what does it hold.

It is whole when its manifest is sealed and names a state, when every file that it names is there with its size, and
when the names, shapes and dtypes in their headers are those of the manifest; with `digests`, when every byte is, too.
What does not live here: which checkpoint of several (`step_scan.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.errors import CorruptError
from ckptkit.formats import files, safetensors
from ckptkit.formats.disk import file_digest
from ckptkit.formats.file_pool import FilePool
from ckptkit.formats.io import extents_digest, read_region
from ckptkit.formats.manifest import MANIFEST, read_manifest
from ckptkit.formats.registry import STATE
from ckptkit.train.arrays import Floats
from ckptkit.train.state import STATE_FILE, RunState, read_state
from ckptkit.train.step_bytes import digest_of
from ckptkit.train.step_files import MOMENTS
from ckptkit.train.step_folders import StepFolder
from ckptkit.types import Extent, Shape, TensorInfo

_REMEDY = "restore the folder from a copy, or go on from another step"


@dataclass(frozen=True, slots=True)
class StepContent:
    """A whole checkpoint: where its tensors lie and which digests they have, and which files hold frozen ones.

    `notes` say what was passed over where damaged optimizer state was allowed.
    """

    path: Path
    state: RunState
    tensors: Mapping[str, TensorInfo]
    digests: Mapping[str, str]
    frozen_files: frozenset[str]
    num_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the weights, by name."""
        return {name: info.shape for name, info in self.tensors.items() if not name.startswith(MOMENTS)}

    @property
    def trained(self) -> list[str]:
        """The names of the weights that training alters."""
        return [name for name in self.shapes if self.tensors[name].file.name not in self.frozen_files]

    def lacking(self, trained: Sequence[str]) -> list[str]:
        """Return the moments of `trained` weights that are not there."""
        return [prefix + name for name in trained for prefix in MOMENTS if prefix + name not in self.tensors]


def open_step(folder: StepFolder, *, digests: bool = True, without_optimizer: bool = False) -> StepContent:
    """Return what a step's folder holds; CorruptError when it is not whole, UsageError for a newer version's state.

    `without_optimizer` passes over the moments, all of them, where they are damaged or gone. ResourceError when
    something that is there cannot be read.
    """
    path = folder.path
    manifest = _manifest(path)
    side_bytes = _check_side_files(path, manifest, digests=digests)
    state = read_state(path)
    if state.step != folder.step:
        raise CorruptError(f"`{path.name}` holds the state of step {state.step}", hint="give it its name again")
    rows: dict[bool, list[Mapping[str, Any]]] = {False: [], True: []}
    for row in manifest["files"]:
        rows[row["name"].startswith(f"{STATE}/")].append(row)
    tensors, notes = _tensors(path, manifest, rows[False], digests=digests), []
    try:
        tensors |= _tensors(path, manifest, rows[True], digests=digests)
    except CorruptError as error:
        if not without_optimizer:
            raise
        notes.append(f"`{path.name}`: {error.what}; all moments start at zero")
    return StepContent(
        path,
        state,
        tensors,
        {name: row["xxh3_128"] for name, row in manifest["tensors"].items()},
        frozenset(manifest["train"]["frozen"]),
        sum(row["bytes"] for row in manifest["files"]) + side_bytes,
        tuple(notes),
    )


def tensors_in(content: StepContent, *, moments: bool = True) -> Iterator[tuple[str, Floats]]:
    """Yield each tensor with its name, one at a time: weights first, then `exp_avg.NAME` and `exp_avg_sq.NAME`.

    Raises CorruptError when what is read now has not the digest that the manifest promises.
    """
    with FilePool() as pool:
        for name, info in content.tensors.items():
            if name.startswith(MOMENTS) and not moments:
                continue
            array = read_region(info, pool=pool).view(np.float32)
            if digest_of(array) != content.digests[name]:
                raise _damaged(content.path, f"tensor `{name}` has not the bytes that were written")
            yield name, array


def _manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a step's folder; CorruptError when it has none, or one of something else."""
    manifest = read_manifest(path)
    if manifest is None:
        raise _damaged(path, f"there is no {MANIFEST}: it was not finished, or somebody else made it")
    train = manifest.get("train")
    if not isinstance(train, dict) or STATE_FILE not in manifest["side_files"]:
        raise _damaged(path, f"its {MANIFEST} is of no checkpoint of a run")
    return manifest


def _check_side_files(path: Path, manifest: Mapping[str, Any], *, digests: bool) -> int:
    """Raise CorruptError unless all files without tensors are there, with their sizes; return their bytes."""
    sizes: dict[str, int] = manifest["train"]["side_bytes"]
    for name, digest in manifest["side_files"].items():
        _check_size(path, name, sizes[name])
        if digests and file_digest(path / name) != digest:
            raise _damaged(path, f"`{name}` has not the bytes that were written")
    return sum(sizes.values()) + (path / MANIFEST).stat().st_size


def _check_size(path: Path, name: str, size: int) -> None:
    found = files.look(path / name)
    if found is None or not (path / name).is_file():
        raise _damaged(path, f"`{name}` is gone")
    if found.st_size != size:
        raise _damaged(path, f"`{name}` has {found.st_size} bytes; {size} were written")


def _tensors(
    path: Path, manifest: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *, digests: bool
) -> dict[str, TensorInfo]:
    """Return the tensors of some files; CorruptError unless they are what the manifest says."""
    found: dict[str, TensorInfo] = {}
    with FilePool(1) as pool:
        for row in rows:
            file = path / row["name"]
            _check_size(path, row["name"], row["bytes"])
            tensors = {info.name: info for info in safetensors.read_index(file).tensors}
            promised = {n: r for n, r in manifest["tensors"].items() if r["file"] == row["name"]}
            now = {name: [list(info.shape), info.dtype] for name, info in tensors.items()}
            if now != {name: [r["shape"], r["dtype"]] for name, r in promised.items()}:
                raise _damaged(path, f"the header of `{row['name']}` is not the one that was written")
            if digests:
                header = Extent(0, row["bytes"] - sum(info.num_bytes for info in tensors.values()))
                if extents_digest(file, [header], pool) != row["header"]:
                    raise _damaged(path, f"the header of `{row['name']}` is not the one that was written")
                for name, info in tensors.items():
                    if extents_digest(file, info.extents, pool) != promised[name]["xxh3_128"]:
                        raise _damaged(path, f"tensor `{name}` has not the bytes that were written")
            found |= tensors
    return found


def _damaged(path: Path, what: str) -> CorruptError:
    return CorruptError(f"`{path.name}` is not whole: {what}", hint=_REMEDY)

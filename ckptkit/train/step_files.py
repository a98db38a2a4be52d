"""The files of a checkpoint of a run, as layouts and as a manifest: an ordinary HuggingFace folder.

    model.safetensors, or model-0000N-of-0000M.safetensors and their index     fp32 masters; frozen ones in files apart
    training_state/state-0000N-of-0000M.safetensors     `exp_avg.NAME` and `exp_avg_sq.NAME` of each that is trained
    state.json     where the run stands
    config.json, tokenizer and what else lies beside the model's weights
    ckptkit.json   the manifest: what each of these holds, its size and digest; `train` has what only runs have

    train          {"step", "frozen": [file], "side_bytes": {side file: bytes}}

What does not live here: how they come to be on the disk (`step_write.py`), and reading them (`step_scan.py`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ckptkit import __version__
from ckptkit.errors import InternalError
from ckptkit.formats.base import OutputFile
from ckptkit.formats.files import read_error
from ckptkit.formats.folder import HF_INDEX
from ckptkit.formats.manifest import MANIFEST, SCHEMA, dump_manifest, header_digest, tensor_rows
from ckptkit.formats.model_config import side_files
from ckptkit.formats.registry import HF, STATE, lay_out_checkpoint, name_shards
from ckptkit.train.arrays import Floats as Floats
from ckptkit.train.state import STATE_FILE
from ckptkit.types import TensorSpec

Tensors = Mapping[str, Floats]
SideFiles = Mapping[str, bytes]  # what they hold, by name

MOMENTS = ("exp_avg.", "exp_avg_sq.")
SHARD_BYTES = 5 * 10**9
RESERVED = (MANIFEST, STATE_FILE, HF_INDEX)


@dataclass(frozen=True, slots=True)
class StepFile:
    """A file of tensors; a frozen one holds no tensor that training alters."""

    layout: OutputFile
    specs: tuple[TensorSpec, ...]
    frozen: bool = False

    @property
    def row(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {"name": self.layout.name, "bytes": self.layout.size, "header": header_digest(self.layout)}


def lay_out_step(
    weights: Tensors, moments: Tensors, frozen: Collection[str], *, max_shard_bytes: int = SHARD_BYTES
) -> tuple[list[StepFile], dict[str, bytes]]:
    """Return the files of tensors, and the index where the weights have more than one file.

    Shards are filled as those of any HuggingFace result. InternalError for tensors that do not go together.
    """
    _check(weights, moments, frozen)
    trained = [_spec(name, array) for name, array in weights.items() if name not in frozen]
    fixed = [_spec(name, array) for name, array in weights.items() if name in frozen]
    state = [_spec(name, array) for name, array in moments.items()]
    files = [*_lay_out(trained, state, max_shard_bytes), *_lay_out(fixed, [], max_shard_bytes, frozen=True)]
    numbers = [number for number, file in enumerate(files) if not file.layout.name.startswith(f"{STATE}/")]
    total_size = sum(array.nbytes for array in weights.values())
    named, index = name_shards([files[number].specs for number in numbers], total_size)
    for number, name in zip(numbers, named, strict=True):
        files[number] = replace(files[number], layout=replace(files[number].layout, name=name))
    return files, index


def _lay_out(
    weights: Sequence[TensorSpec], state: Sequence[TensorSpec], max_bytes: int, *, frozen: bool = False
) -> list[StepFile]:
    """Return the files of some of the weights as if there were no others, and of the moments."""
    if not weights:
        return []
    specs = {spec.name: spec for spec in (*weights, *state)}
    apart = {spec.name for spec in state}
    layouts, _ = lay_out_checkpoint(HF, [*specs.values()], max_shard_bytes=max_bytes, state=apart)
    return [StepFile(layout, tuple(specs[name] for name in layout.extents), frozen) for layout in layouts]


def _spec(name: str, array: Floats) -> TensorSpec:
    return TensorSpec(name, array.shape, "F32")


def _check(weights: Tensors, moments: Tensors, frozen: Collection[str]) -> None:
    """Raise InternalError unless each trained weight has both moments, of its shape, and no other has any."""
    trained = {name: array for name, array in weights.items() if name not in frozen}
    due = {prefix + name: array.shape for prefix in MOMENTS for name, array in trained.items()}
    odd = [f"{name} is {array.dtype}" for name, array in {**weights, **moments}.items() if array.dtype != np.float32]
    odd += [f"{name} is frozen and no weight" for name in frozen if name not in weights]
    odd += [f"{name} is missing" for name in due if name not in moments]
    odd += [f"{name} is of no trained weight" for name in moments if name not in due]
    odd += [
        f"{name} is {a.shape}, its weight {due[name]}"
        for name, a in moments.items()
        if a.shape != due.get(name, a.shape)
    ]
    if odd:
        raise InternalError("the tensors of a checkpoint do not go together", items=odd)


def dump_step_manifest(
    step: int,
    files: Sequence[StepFile],
    digests: Mapping[str, str],
    side: Mapping[str, tuple[str, int]],
    facts: Mapping[str, Any],
) -> bytes:
    """Return the manifest as bytes.

    `digests` are those of all tensors by name; `side` has digest and size of each other file; `facts`: see `facts_in`.
    """
    names = [spec.name for file in files for spec in file.specs]
    kinds = {prefix: sum(name.startswith(prefix) for name in names) for prefix in MOMENTS}
    manifest = {
        "schema": SCHEMA,
        "tool": f"ckptkit {__version__}",
        "plan": "",
        "family": "",
        "from": {},
        "layout": {},
        **facts,
        "to": {"dialect": HF, "variant": "", "tables": []} | dict(facts.get("to", {})) | {"format": "safetensors"},
        "state": {prefix: number for prefix, number in kinds.items() if number},
        "train": {
            "step": step,
            "frozen": [file.layout.name for file in files if file.frozen],
            "side_bytes": {name: size for name, (_, size) in side.items()},
        },
        "files": [file.row for file in files],
        "side_files": {name: digest for name, (digest, _) in side.items()},
        "ignored": [],
        "dropped": [],
        "unmapped": [],
    }
    manifest["plan"] = xxhash.xxh3_128_hexdigest(json.dumps([facts, side], sort_keys=True, default=str).encode())
    rows = [(spec.name, spec, file.layout.name, digests[spec.name]) for file in files for spec in file.specs]
    return dump_manifest(manifest, tensor_rows(rows, {}))


def facts_in(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a plan, or a manifest, says of weights that all checkpoints of a run say, too.

    That is `family`, perhaps `dims`, and `to` with HuggingFace's `variant` and `tables`.
    """
    return {key: told[key] for key in ("family", "dims", "to") if key in told}


def side_files_in(folder: Path) -> dict[str, bytes]:
    """Return what lies beside the weights of a checkpoint and goes beside those of the next one, by name."""
    return read_side_files({path.name: path for path in side_files(folder)})


def read_side_files(paths: Mapping[str, Path]) -> dict[str, bytes]:
    """Return the bytes of these files, but for those that each checkpoint has of its own.

    They are held in memory, for the folder that they come from may be pruned before they are written again.
    ResourceError when one cannot be read.
    """
    found = {}
    for name, path in paths.items():
        if name in RESERVED:
            continue
        try:
            found[name] = path.read_bytes()
        except OSError as error:
            raise read_error(path, error) from error
    return found

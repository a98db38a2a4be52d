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
from numpy.typing import NDArray

from ckptkit import __version__
from ckptkit.errors import InternalError
from ckptkit.formats.base import OutputFile
from ckptkit.formats.folder import HF_INDEX
from ckptkit.formats.manifest import MANIFEST, SCHEMA, dump_manifest, header_digest, tensor_rows
from ckptkit.formats.model_config import CONFIG, read_config, side_files
from ckptkit.formats.registry import HF, STATE, lay_out_checkpoint
from ckptkit.train.state import STATE_FILE
from ckptkit.types import TensorSpec

Floats = NDArray[np.float32]
Tensors = Mapping[str, Floats]
SideFiles = Mapping[str, Path | bytes]  # by name: a file to be copied, or what it shall hold

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
    if len(numbers) == 1:
        return files, {}
    for count, number in enumerate(numbers, start=1):
        name = f"model-{count:05d}-of-{len(numbers):05d}.safetensors"
        files[number] = replace(files[number], layout=replace(files[number].layout, name=name))
    place = {spec.name: file.layout.name for file in (files[number] for number in numbers) for spec in file.specs}
    index = {"metadata": {"total_size": sum(array.nbytes for array in weights.values())}, "weight_map": place}
    return files, {HF_INDEX: (json.dumps(index, indent=2) + "\n").encode()}


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

    `digests` are those of all tensors by name; `side` has digest and size of each other file. `facts` say what the plan
    that took the weights in knew of them: `family`, perhaps `dims`, and `to` with HuggingFace's `variant` and `tables`.
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


def model_side_files(model: Path) -> dict[str, Path | bytes]:
    """Return what goes beside the weights of each checkpoint: what lies beside those of the model, but for its dtype.

    A checkpoint's weights are float32, so config.json says that; nothing else in it is changed. `model` is a folder, or
    a file of weights. Raises UsageError where there is no config.json.
    """
    folder = model if model.is_dir() else model.parent
    found: dict[str, Path | bytes] = {path.name: path for path in side_files(folder) if path.name not in RESERVED}
    config = read_config(folder)
    told = {key: "float32" for key in ("torch_dtype", "dtype") if config.get(key, "float32") != "float32"}
    if told:
        found[CONFIG] = (json.dumps(config | told, indent=2, ensure_ascii=False) + "\n").encode()
    return found

"""Small checkpoints for the tests of opening: each tensor has four bytes, all of one value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from format_contract import assemble

from ckptkit.errors import CkptkitError
from ckptkit.formats import mindspore_ckpt, safetensors
from ckptkit.formats.io import read_region
from ckptkit.formats.registry import open_checkpoint
from ckptkit.types import TensorSpec

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456\n"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def put(file: Path, values: Mapping[str, int], metadata: Mapping[str, str] | None = None) -> Path:
    """Write a safetensors or .ckpt file of small tensors, each filled with its value."""
    specs = [TensorSpec(name, (4,), "U8") for name in values]
    if file.suffix == ".ckpt":
        output = mindspore_ckpt.lay_out(file.name, specs)
    else:
        output = safetensors.lay_out(file.name, specs, metadata or {})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(assemble(output, {name: bytes([value]) * 4 for name, value in values.items()}))
    return file


def put_index(file: Path, weight_map: object, **metadata: object) -> None:
    file.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def put_sharded(path: Path) -> dict[str, str]:
    """Write two shards, `a` `b` and `c`, with an index; return the map."""
    put(path / SHARDS[0], {"a": 1, "b": 2})
    put(path / SHARDS[1], {"c": 3})
    weight_map = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}
    put_index(path / "model.safetensors.index.json", weight_map, total_size=12)
    return weight_map


def values(path: Path) -> dict[str, int]:
    """Return what `open_checkpoint` finds, by the value that each tensor is filled with."""
    return {name: int(read_region(info)[0]) for name, info in open_checkpoint(path).tensors.items()}


def notes(path: Path) -> str:
    return "\n".join(open_checkpoint(path).notes)


def refusal(path: Path, kind: type[CkptkitError]) -> str:
    """Return the message with which `path` is refused; it must say how to go on."""
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    assert type(caught.value) is kind
    assert caught.value.hint
    return str(caught.value)

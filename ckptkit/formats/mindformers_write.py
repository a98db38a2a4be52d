"""Write MindFormers' newer checkpoint folders: the names of files, metadata.json, common.json and the tracker.

The form is what MindFormers 1.9 reads, and later releases too: the keys of a layout in its order, a `rank_group` in
each entry, six keys in common.json. It is that of a save with redundancy: a model file and an optimizer file for each
rank, numbered by rank. A sole rank has no metadata.json. What does not live here: which rank holds what
(`plan/shard.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

from ckptkit.formats.mindformers_folder import COMMON, COMMON_KEYS, METADATA, TRACKER, iteration_name
from ckptkit.types import DTYPES, Shape, TensorLayout, TensorSpec

PREFIX = "CKP"
MODEL, OPTIMIZER = "model", "opt"
_FILE = re.compile(r"iteration_\d{8,}/CKP-(?:model|opt)-(\d{7,})-\d{7,}\.safetensors")


@dataclass(frozen=True, slots=True)
class Saved:
    """The moment of training that a result is of: its iteration, and what common.json says (see `COMMON_KEYS`)."""

    iteration: int
    common: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor as ranks hold it: `parts` is its grid of slices, `layout` and `ranks` are those of one stage.

    `slices` has for each rank, of all stages, the number of its slice; `kind` says in which of its files it is.
    """

    spec: TensorSpec
    parts: Shape
    layout: TensorLayout
    ranks: Sequence[int]
    slices: Mapping[int, int]
    kind: str


def weight_file(iteration: int, kind: str, rank: int, num_ranks: int) -> str:
    """Return the name of a rank's file, seen from the folder around the iteration."""
    return f"{iteration_name(iteration)}/{_file_name(kind, rank, num_ranks)}"


def _file_name(kind: str, rank: int, num_ranks: int) -> str:
    return f"{PREFIX}-{kind}-{rank:07d}-{num_ranks:07d}.safetensors"


def rank_of(file: str) -> int | None:
    """Return the rank of a file that `weight_file` names; None for any other name."""
    match = _FILE.fullmatch(file)
    return int(match[1]) if match else None


def small_files(saved: Saved, num_ranks: int, tensors: Iterable[Held]) -> dict[str, bytes]:
    """Return what lies beside the weights, by name: the tracker comes last."""
    folder = iteration_name(saved.iteration)
    found = {f"{folder}/{METADATA}": _metadata(num_ranks, tensors)} if num_ranks > 1 else {}
    common = {key: saved.common.get(key) for key in COMMON_KEYS}
    found[f"{folder}/{COMMON}"] = json.dumps(common, indent=4).encode()
    return {**found, TRACKER: str(saved.iteration).encode()}


def _metadata(num_ranks: int, tensors: Iterable[Held]) -> bytes:
    described, storage = {}, {}
    for held in tensors:
        described[held.spec.name] = _description(held)
        groups: dict[int, list[int]] = {}
        for rank, number in held.slices.items():
            groups.setdefault(number, []).append(rank)
        for number, group in groups.items():
            storage[str((held.spec.name, (number,)))] = [
                {"file_name": _file_name(held.kind, rank, num_ranks), "storage_rank": rank, "rank_group": group}
                for rank in group
            ]
    content = {"state_dict_metadata": described, "storage_data": storage}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def _description(held: Held) -> dict[str, Any]:
    spec, layout = held.spec, held.layout
    local = [size // count for size, count in zip(spec.shape, held.parts, strict=True)]
    return {
        "properties": {
            "dtype": DTYPES[spec.dtype].mindspore or spec.dtype,
            "replica_id": _replica_ids(held),
            "allow_shape_mismatch": False,
            "allow_to_save": True,
        },
        "global_shape": spec.shape,
        "axis_fragmentations": held.parts,
        "layout": {
            "device_matrix": layout.dev_matrix,
            "tensor_map": [_map_entry(axes) for axes in layout.tensor_map],
            "interleaved_parallel": False,
            "alias_name": list(ascii_lowercase[: len(layout.dev_matrix)]),
            "rank_list": list(held.ranks),
        },
        "chunk": [
            {"global_offset": [number], "local_shape": local} for number in dict.fromkeys(held.slices.values())
        ],
    }  # fmt: skip


def _map_entry(axes: Shape) -> int | Shape:
    if len(axes) > 1:
        return axes
    return axes[0] if axes else -1


def _replica_ids(held: Held) -> list[int]:
    """Return for each rank of the layout how many before it hold the same slice."""
    seen: dict[int, int] = {}
    found = []
    for rank in held.ranks:
        number = held.slices[rank]
        found.append(seen.get(number, 0))
        seen[number] = found[-1] + 1
    return found

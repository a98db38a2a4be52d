"""Strategy files written out byte by byte, without the writer that is tested."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptkit.formats.mindspore_strategy import (
    Strategy,
    read_strategies,
)
from ckptkit.types import TensorLayout

GOLDEN = Path(__file__).parent.parent / "golden" / "mindspore"
CUT = TensorLayout((2, 2), ((0,), ()))


def field(key: int, content: bytes | int) -> bytes:
    """Return one protobuf field; an int is up to 127, or -1."""
    if isinstance(content, int):
        return bytes((key,)) + (bytes((content,)) if content >= 0 else b"\xff" * 9 + b"\x01")
    size = len(content)
    return bytes((key,)) + (bytes((size,)) if size < 128 else bytes((size & 127 | 128, size >> 7))) + content


def dims(*values: int) -> bytes:
    return b"".join(field(0x08, value) for value in values)


def layout_bytes(dev: bytes = dims(2, 2), maps: Sequence[bytes] = (dims(0, -1),), more: bytes = b"") -> bytes:
    parts = [field(0x0A, dev), *(field(0x12, m) for m in maps), field(0x28, 0), field(0x30, 0), field(0x38, 0), more]
    return b"".join(parts)


def layout_item(name: bytes = b"w", layout: bytes | None = None) -> bytes:
    return field(0x1A, field(0x0A, name) + field(0x12, layout_bytes() if layout is None else layout))


def stage_item(stage: int = 0) -> bytes:
    return field(0x12, field(0x0A, b"MatMul_w") + field(0x12, field(0x08, stage)))


def file_bytes(*items: bytes) -> bytes:
    return b"\x08\x02" + b"".join(items)


def json_bytes(stage: int | None = 0, plain: bool = True, **items: dict[str, Any]) -> bytes:
    """Return a JSON strategy file of tensors that are cut as `CUT`, but for what `items` says otherwise."""
    base = {"dev_matrix": [2, 2], "tensor_map": [0, -1], "tensor_shape": [8, 4], "field": 0}
    base |= {"opt_weight_shard_step": 0, "opt_weight_shard_size": 0}
    whole: dict[str, Any] = {"current_stage": 2, "parallel_layout_item": {n: base | i for n, i in items.items()}}
    if stage is not None:
        cuts = [[2, 1]] if plain else []
        whole["parallel_strategy_item"] = {f"MatMul_{n}": {"stage": stage, "parallel_strategy": cuts} for n in items}
    return json.dumps(whole).encode()


def read(folder: Path, data: bytes, **options: Any) -> tuple[Strategy, ...]:
    file = folder / "strategy.ckpt"
    file.write_bytes(data)
    return read_strategies(file, **options)


def stage_of(stage: int | None, **tensors: TensorLayout) -> Strategy:
    return Strategy(stage, tensors or {"w": CUT}, {})

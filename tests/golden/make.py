"""Make the golden files of safetensors and .ckpt with the real frameworks: `python tests/golden/make.py`.

Writes `safetensors/`, `ckpt/` and `unified/` beside this script, and `expected.json`: for each file each tensor's
shape, dtype and bytes (hex), as they were given to the framework and not as any reader found them. Needs torch,
safetensors and mindspore. The encrypted files differ in each run, the others do not.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import torch
from mindspore.train import serialization
from mindspore.train.node_strategy_pb2 import ParallelStrategyMap
from safetensors.torch import save_file

HERE = Path(__file__).parent
Expected = dict[str, dict[str, list[Any]]]

TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
MINDSPORE = {
    "BOOL": "Bool",
    "U8": "UInt8",
    "I8": "Int8",
    "I16": "Int16",
    "U16": "UInt16",
    "I32": "Int32",
    "U32": "UInt32",
    "I64": "Int64",
    "U64": "UInt64",
    "F16": "Float16",
    "BF16": "BFloat16",
    "F32": "Float32",
    "F64": "Float64",
}


def pattern(dtype: str, elements: int, width: int) -> bytes:
    """Return fixed bytes, another run of them for each dtype; bools are 0 and 1."""
    start = sum(dtype.encode())
    data = bytes((start + 37 * i) % 256 for i in range(elements * width))
    return bytes(byte & 1 for byte in data) if dtype == "BOOL" else data


def torch_file(file: Path, expected: Expected) -> None:
    tensors, facts = {}, {}
    for dtype, kind in TORCH.items():
        data = pattern(dtype, 6, kind.itemsize)
        tensors[f"t.{dtype}"] = torch.frombuffer(bytearray(data), dtype=kind).reshape(2, 3)
        facts[f"t.{dtype}"] = [[2, 3], dtype, data.hex()]
    tensors["scalar"] = torch.tensor(1.5)
    facts["scalar"] = [[], "F32", "0000c03f"]
    tensors["empty"] = torch.zeros(0, 3)
    facts["empty"] = [[0, 3], "F32", ""]
    tensors["\u5c42.\u00e9"] = torch.tensor([7], dtype=torch.int8)
    facts["\u5c42.\u00e9"] = [[1], "I8", "07"]
    save_file(tensors, file, metadata={"format": "pt"})
    expected[f"{file.parent.name}/{file.name}"] = facts


def mindspore_tensors(skip: tuple[str, ...] = ()) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    saved, facts = [], {}
    for dtype, kind in MINDSPORE.items():
        if dtype in skip:
            continue
        for shape in ((2, 3), (1,), ()):
            name = f"t{len(shape)}.{dtype}"
            width = TORCH[dtype].itemsize
            data = pattern(dtype, int(np.prod(shape)), width)
            make = serialization.Tensor_.convert_bytes_to_tensor
            tensor = make(data, shape, serialization.tensor_to_ms_type[kind])
            saved.append({"name": name, "data": mindspore.Parameter(tensor, name=name)})
            facts[name] = [list(shape), dtype, data.hex()]
    return saved, facts


def save(file: Path, saved: list[dict[str, Any]], **options: Any) -> None:
    mindspore.save_checkpoint(saved, str(file), **options)


def ckpt_files(folder: Path, expected: Expected) -> None:
    saved, facts = mindspore_tensors()
    save(folder / "all.ckpt", saved)
    expected["ckpt/all.ckpt"] = facts
    values = {"epoch": 3, "lr": 0.5, "done": True, "note": "h\u00e9", "empty": ""}
    save(folder / "appended.ckpt", saved[:1], append_dict=values, crc_check=True)
    expected["ckpt/appended.ckpt"] = {
        saved[0]["name"]: facts[saved[0]["name"]],
        "epoch": [[], "I64", "0300000000000000"],
        "lr": [[], "F32", "0000003f"],
        "done": [[], "BOOL", "01"],
        "note": [[2], "STR", "68000000e9000000"],
        "empty": [[1], "STR", "00000000"],
    }
    for mode in ("AES-GCM", "AES-CBC", "SM4-CBC"):
        save(folder / f"encrypted-{mode}.ckpt", saved[:2], enc_key=b"0123456789abcdef", enc_mode=mode)


def mindspore_safetensors(file: Path, expected: Expected) -> None:
    saved, facts = mindspore_tensors()
    save(file, saved, format="safetensors")
    expected[f"{file.parent.name}/{file.name}"] = facts


def strategy(file: Path, ranks: dict[str, int]) -> None:
    """Write a strategy file of one device for tensors of the given number of axes."""
    content = ParallelStrategyMap(current_stage=1)
    item = content.parallel_strategy_item.add(node_name="op")
    item.parallel_strategys.stage = 0
    item.parallel_strategys.parallel_strategy.add(dim=[1])
    for name, axes in ranks.items():
        layout = content.parallel_layout_item.add(param_name=name).parallel_layouts
        layout.dev_matrix.add(dim=[1])
        layout.tensor_map.add(dim=[-1] * axes)
        layout.param_split_shape.add()
        layout.indices_offset.add()
        layout.field = layout.opt_weight_shard_step = layout.opt_weight_shard_size = 0
    file.write_bytes(content.SerializeToString())


def unified(folder: Path, expected: Expected) -> None:
    """Write MindSpore's unified layout through its own tool; scalars are left to `hyper_param.safetensors`."""
    saved, facts = mindspore_tensors(skip=("BF16",))
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source" / "rank_0"
        source.mkdir(parents=True)
        save(source / "net.safetensors", saved, format="safetensors")
        axes = {name: len(shape) for name, (shape, _, _) in facts.items() if shape}
        strategy(Path(name) / "strategy.ckpt", axes)
        mindspore.unified_safetensors(str(source.parent), str(Path(name) / "strategy.ckpt"), str(folder))
    expected["unified"] = facts


def main() -> None:
    expected: Expected = {}
    for name in ("safetensors", "ckpt", "unified"):
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
    torch_file(HERE / "safetensors" / "torch.safetensors", expected)
    mindspore_safetensors(HERE / "safetensors" / "mindspore.safetensors", expected)
    ckpt_files(HERE / "ckpt", expected)
    unified(HERE / "unified", expected)
    for folder in ("safetensors", "ckpt", "unified"):
        for file in (HERE / folder).iterdir():
            file.chmod(0o644)
    versions = {name: version(name) for name in ("mindspore", "safetensors", "torch")}
    text = json.dumps({"versions": versions, "files": expected}, indent=1)
    (HERE / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

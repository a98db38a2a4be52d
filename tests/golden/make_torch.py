"""Make `torch/zip.bin`, `torch/legacy.bin` and `torch/expected.json`: run `python make_torch.py` beside them.

Made with PyTorch 2.13.0 on Linux x86-64. A legacy file names its storages by address, so another run gives another
file with the same tensors.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "torch"


def tensors() -> dict[str, torch.Tensor]:
    """Return a small state dict with one of each kind of tensor."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 8
    shared = torch.arange(10, dtype=torch.int64)
    weight = torch.nn.Parameter(base.to(torch.bfloat16))
    weight.note = "a parameter with an attribute"  # type: ignore[attr-defined]
    return OrderedDict(
        {
            "f32": base,
            "bf16.parameter": weight,
            "f16": base.to(torch.float16),
            "f8": base.to(torch.float8_e4m3fn),
            "u16": torch.tensor([0, 1, 65535], dtype=torch.uint16),
            "bool": torch.tensor([True, False, True]),
            "c64": torch.tensor([1 + 2j, -3.5j]),
            "scalar": torch.tensor(1e300, dtype=torch.float64),
            "empty": torch.empty(0, 3),
            "view.transposed": base.t(),
            "view.columns": base[:, 1:4:2],
            "view.expanded": torch.tensor([7, 8], dtype=torch.int32).expand(3, 2),
            "shared.head": shared[:4],
            "shared.tail": shared[4:],
        }
    )


def expected(state: dict[str, torch.Tensor]) -> dict[str, object]:
    """Return shape, dtype and the bytes in C order, as hexadecimal text, of each tensor."""
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "bytes": tensor.detach()
            .clone(memory_format=torch.contiguous_format)
            .reshape(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes()
            .hex(),
        }
        for name, tensor in state.items()
    }


def main() -> None:
    state = tensors()
    FOLDER.mkdir(exist_ok=True)
    torch.save(state, FOLDER / "zip.bin")
    torch.save({"state_dict": state, "epoch": 3}, FOLDER / "legacy.bin", _use_new_zipfile_serialization=False)
    (FOLDER / "expected.json").write_text(json.dumps(expected(state), indent=1) + "\n")


if __name__ == "__main__":
    main()

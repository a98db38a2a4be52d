"""The tiny models that tests are made of are what transformers itself would write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_hf, make_hf_plain

pytestmark = pytest.mark.frameworks

SHAPES: list[dict[str, Any]] = [
    {"layers": 3, "hidden": 24, "heads": 6, "kv_heads": 3},
    {"tied": True, "dtype": "BF16", "shards": 3},
    {"bias": True, "dtype": "F16", "head_dim": 6},
    {"family": "qwen2", "kv_heads": 1, "dtype": "BF16"},
    {"family": "mistral", "shards": 2},
]


def read_tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors of every safetensors file of a folder."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_folder_written_without_frameworks_holds_what_transformers_writes(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    import torch

    plain, hf = make_hf_plain(tmp_path / "plain", **shape), make_hf(tmp_path / "hf", **shape)
    ours, theirs = read_tensors(plain), read_tensors(hf)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name
    config, written = (json.loads((folder / "config.json").read_text()) for folder in (plain, hf))
    config["dtype"] = config.pop("torch_dtype")
    assert {name: written[name] for name in config} == config


def test_a_folder_in_shards_has_an_index_of_every_tensor(tmp_path: Path) -> None:
    folder = make_hf_plain(tmp_path, shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read_tensors(folder).keys()
    assert set(index["weight_map"].values()) == {file.name for file in folder.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) == 3


def test_another_seed_gives_other_values(tmp_path: Path) -> None:
    import torch

    one, other = (read_tensors(make_hf_plain(tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    assert all(not torch.equal(one[name], other[name]) for name in one)

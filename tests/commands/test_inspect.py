"""The contract: `inspect` says what is there, from headers, and refuses what contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit import CorruptError, CoverageError, convert, inspect
from ckptkit.report import Report, fold_names
from tests.tiny_models import make_hf_plain, write_safetensors


def rows(report: Report, label: str) -> list[str]:
    return [text for name, text in report.rows if name == label]


def test_an_hf_folder_is_described(tmp_path: Path) -> None:
    report = inspect(make_hf_plain(tmp_path / "hf", layers=3, shards=2))
    assert rows(report, "naming") == ["llama, hf"]
    assert rows(report, "dtypes") == ["F32 x 30"]
    assert "model.layers.{0..2}.mlp.up_proj.weight  (40, 32)  F32  x 3" in rows(report, "holds")
    assert len(report.data["tensors"]) == 30
    assert len(report.data["files"]) == 2


def test_our_own_folder_says_its_variant(tmp_path: Path) -> None:
    convert(make_hf_plain(tmp_path / "hf"), tmp_path / "ms", variant="qkv_concat-1.4")
    assert rows(inspect(tmp_path / "ms"), "naming") == [
        "llama, mindformers-legacy, variant qkv_concat-1.4 (ckptkit.json)"
    ]


def test_equal_fits_are_both_named(tmp_path: Path) -> None:
    convert(make_hf_plain(tmp_path / "hf"), tmp_path / "ms", variant="qkv_concat")
    (tmp_path / "ms" / "ckptkit.json").unlink()
    (naming,) = rows(inspect(tmp_path / "ms"), "naming")
    assert naming == "llama, mindformers-legacy, variant qkv_concat or mindformers-legacy, variant qkv_concat-1.4"


def test_expected_names_and_shapes_are_compared(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    expected = {name: entry["shape"] for name, entry in inspect(source).data["tensors"].items()}
    file = tmp_path / "names.json"
    file.write_text(json.dumps(expected))
    inspect(source, expect=file)
    file.write_text(json.dumps(list(expected)))
    inspect(source, expect=file)
    for wrong, word in (
        (expected | {"more.weight": [1]}, "missing: more.weight"),
        ({k: v for k, v in expected.items() if k != "model.norm.weight"}, "unexpected: model.norm.weight"),
        (expected | {"model.norm.weight": [33]}, "shape: model.norm.weight"),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(CoverageError, match="differs from `names.json` in 1 tensors") as caught:
            inspect(source, expect=file)
        assert word in caught.value.items[0]


def test_a_file_removed_from_our_folder_is_noticed(tmp_path: Path) -> None:
    convert(make_hf_plain(tmp_path / "hf"), tmp_path / "ms", max_shard_size="20kB")
    names = json.loads((tmp_path / "ms" / "param_name_map.json").read_text())
    moved = {name: file for name, file in names["weight_map"].items() if file != "part1.safetensors"}
    (tmp_path / "ms" / "part1.safetensors").unlink()
    (tmp_path / "ms" / "param_name_map.json").write_text(json.dumps(names | {"weight_map": moved}))
    with pytest.raises(CorruptError, match=r"does not hold what its ckptkit.json says"):
        inspect(tmp_path / "ms")


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq, 4 bits"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"bits": 8}}, "by a method that is not named, 8 bits"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": "awq"}, "awq"),
        ({"quantization_config": None}, None),
        ({}, None),
    ],
)
def test_quantised_weights_are_called_so(tmp_path: Path, changes: dict[str, Any], said: str | None) -> None:
    source = make_hf_plain(tmp_path / "hf")
    edit(source, **changes)
    for path in (source, source / "model.safetensors"):
        report = inspect(path)
        assert rows(report, "quantised") == ([] if said is None else [f"{said} (config.json)"])
        assert report.data["quantization"] == said


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    assert rows(inspect(source), "adapter") == []
    assert inspect(source).data["adapter"] is None
    (source / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    report = inspect(source)
    assert rows(report, "adapter") == ["LORA of `org/base` (adapter_config.json): not merged, so `convert` refuses it"]
    assert report.data["adapter"] == {"type": "LORA", "base": "org/base", "tensors": 0}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB"]
    write_safetensors(adapter / "adapter_model.safetensors", dict.fromkeys(names, np.zeros(3, np.uint32)), "F32")
    report = inspect(adapter / "adapter_model.safetensors")
    assert rows(report, "adapter") == ["LoRA, 2 of 2 tensors: not merged, so `convert` refuses it"]
    (adapter / "adapter_config.json").write_text("{}")
    assert rows(inspect(adapter), "adapter")[0].startswith("LoRA (adapter_config.json), 2 of 2 tensors")
    with pytest.raises(CoverageError, match="not merged"):
        convert(adapter, tmp_path / "out", config=source)


def test_names_fold_by_their_numbers() -> None:
    names = [f"a.{i}.b.{j}.w" for i in range(3) for j in (0, 2)] + ["a.w", "layer2.w", "odd{0}.3"]
    assert fold_names(names) == [("a.{0..2}.b.{0,2}.w", 6), ("a.w", 1), ("layer2.w", 1), ("odd{0}.3", 1)]

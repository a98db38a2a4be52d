"""Opening a single file, and laying out new checkpoints; `test_folder.py` opens folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from format_contract import FORMATS, assemble, check_read_back, random_contents
from small_checkpoints import SHARDS, notes, put, put_sharded, refusal, values

from ckptkit.errors import CorruptError, UsageError
from ckptkit.formats import registry
from ckptkit.formats.io import read_region
from ckptkit.formats.registry import lay_out_checkpoint, open_checkpoint
from ckptkit.types import TensorSpec


@pytest.mark.parametrize("name", ["x.safetensors", "x.ckpt"])
def test_a_single_file_is_a_checkpoint(tmp_path: Path, name: str) -> None:
    file = put(tmp_path / name, {"a": 1})
    checkpoint = open_checkpoint(file)
    assert (checkpoint.path, checkpoint.folder, checkpoint.files) == (file, tmp_path, (file,))
    assert (checkpoint.kind, checkpoint.notes) == (name.split(".")[1], ())
    assert values(file) == {"a": 1}


def test_the_first_bytes_count_more_than_the_suffix(tmp_path: Path) -> None:
    file = put(tmp_path / "x.safetensors", {"a": 1}).rename(tmp_path / "x.ckpt")
    assert open_checkpoint(file).kind == "safetensors"
    assert "`x.ckpt` is a safetensors file" in notes(file)


@pytest.mark.parametrize(("name", "words"), [("x.ckpt", "no MindSpore .ckpt"), ("x.safetensors", "not a safetensors")])
def test_a_first_byte_alone_does_not_outweigh_the_suffix(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_bytes(b"\n" + b"\xff" * 40)
    assert words in refusal(tmp_path / name, CorruptError)


def test_a_cut_safetensors_file_whose_length_looks_like_a_pickle_is_called_cut(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes((0x280).to_bytes(8, "little") + b'{"a":')
    assert "is cut: its header ends" in refusal(tmp_path / "x.bin", CorruptError)


def test_a_file_of_no_known_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(40))
    assert "a GGUF file" in refusal(tmp_path / "x.gguf", UsageError)


def test_an_index_is_not_a_checkpoint_but_its_folder_is(tmp_path: Path) -> None:
    put_sharded(tmp_path)
    assert "is an index" in refusal(tmp_path / "model.safetensors.index.json", UsageError)


def test_a_path_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        open_checkpoint(tmp_path / "none")


def sizes(*counts: int) -> list[TensorSpec]:
    return [TensorSpec(f"t{number}", (count,), "U8") for number, count in enumerate(counts)]


def names_by_file(kind: str, specs: Sequence[TensorSpec], limit: int) -> list[list[str]]:
    outputs, _ = lay_out_checkpoint(kind, specs, max_shard_bytes=limit)
    return [list(output.extents) for output in outputs]


@pytest.mark.parametrize("kind", [registry.HF, registry.MINDSPORE_SAFETENSORS])
@pytest.mark.parametrize(
    ("counts", "limit", "want"),
    [
        ((4, 4, 2), 10, [["t0", "t1", "t2"]]),
        ((4, 4, 3), 10, [["t0", "t1"], ["t2"]]),
        ((4, 40, 4, 4), 10, [["t0"], ["t1"], ["t2", "t3"]]),
        ((40,), 10, [["t0"]]),
        ((0, 10, 0), 10, [["t0", "t1", "t2"]]),
    ],
)
def test_shards_are_filled_in_order(kind: str, counts: tuple[int, ...], limit: int, want: list[list[str]]) -> None:
    assert names_by_file(kind, sizes(*counts), limit) == want


def test_a_small_hf_checkpoint_is_one_file_without_index() -> None:
    (output,), small = lay_out_checkpoint(registry.HF, sizes(4, 4), max_shard_bytes=8)
    assert (output.name, small) == ("model.safetensors", {})
    assert b'"format":"pt"' in output.fixed[0][1]


def test_a_large_hf_checkpoint_has_an_index() -> None:
    outputs, small = lay_out_checkpoint(registry.HF, sizes(4, 4), max_shard_bytes=4)
    assert [output.name for output in outputs] == list(SHARDS)
    assert json.loads(small["model.safetensors.index.json"]) == {
        "metadata": {"total_size": 8},
        "weight_map": {"t0": SHARDS[0], "t1": SHARDS[1]},
    }


def test_the_unified_layout_has_its_map_and_no_name_that_hf_would_take() -> None:
    outputs, small = lay_out_checkpoint(registry.MINDSPORE_SAFETENSORS, sizes(4, 4), max_shard_bytes=4)
    assert [output.name for output in outputs] == ["part0.safetensors", "part1.safetensors"]
    assert all(b'"format":"ms"' in output.fixed[0][1] for output in outputs)
    assert small == {
        "param_name_map.json": json.dumps(
            {
                "metadata": {"total_size": 8},
                "weight_map": {"t0": "part0.safetensors", "t1": "part1.safetensors"},
            },
            indent=4,
        ).encode()
    }


@pytest.mark.parametrize(("kind", "indent"), [(registry.HF, 2), (registry.MINDSPORE_SAFETENSORS, 4)])
def test_an_index_is_the_text_that_json_dumps_writes(kind: str, indent: int) -> None:
    odd = ["plain", 'with "quotes" and \\', "line\nbreak", "\u00e9\u4e2d\U0001f600"]
    _, small = lay_out_checkpoint(kind, [TensorSpec(name, (4,), "U8") for name in odd], max_shard_bytes=4)
    (text,) = (data.decode() for data in small.values())
    assert text.rstrip("\n") == json.dumps(json.loads(text), indent=indent)
    assert list(json.loads(text)["weight_map"]) == odd


def test_a_map_without_tensors_is_an_empty_object() -> None:
    _, small = lay_out_checkpoint(registry.MINDSPORE_SAFETENSORS, [], max_shard_bytes=4)
    (text,) = (data.decode() for data in small.values())
    assert text == json.dumps({"metadata": {"total_size": 0}, "weight_map": {}}, indent=4)


def test_a_ckpt_is_one_file_whatever_its_size() -> None:
    (output,), small = lay_out_checkpoint(registry.CKPT, sizes(4, 4, 40), max_shard_bytes=4)
    assert (output.name, small) == ("model.ckpt", {})


@pytest.mark.parametrize("kind", [registry.HF, registry.MINDSPORE_SAFETENSORS, registry.CKPT])
@pytest.mark.parametrize("limit", [1, 30, 10**9])
def test_what_is_laid_out_is_opened_without_a_note(tmp_path: Path, kind: str, limit: int) -> None:
    specs = [TensorSpec(f"t{n}", (n + 1, 3), dtype) for n, dtype in enumerate(("BF16", "F32", "BF16", "I64", "BOOL"))]
    contents = random_contents(specs)
    outputs, small = lay_out_checkpoint(kind, specs, max_shard_bytes=limit)
    for output in outputs:
        (tmp_path / output.name).write_bytes(assemble(output, contents))
    for name, data in small.items():
        (tmp_path / name).write_bytes(data)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.notes == ()
    assert {name: info.spec for name, info in checkpoint.tensors.items()} == {spec.name: spec for spec in specs}
    assert {name: read_region(info).tobytes() for name, info in checkpoint.tensors.items()} == contents


def test_an_unknown_kind_and_a_shard_of_no_size_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="unknown kind"):
        lay_out_checkpoint("gguf", [], max_shard_bytes=1)
    with pytest.raises(UsageError, match="a shard cannot have 0 bytes"):
        lay_out_checkpoint(registry.HF, [], max_shard_bytes=0)


def test_the_check_of_what_is_read_back_can_fail(tmp_path: Path) -> None:
    file = put(tmp_path / "x.safetensors", {"a": 1})
    with pytest.raises(AssertionError):
        check_read_back(FORMATS[0], file, [TensorSpec("a", (4,), "U8")], {"a": bytes(4)})

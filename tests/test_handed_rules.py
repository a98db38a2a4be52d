"""Rules that people learned from real failures, and that no other test file states: one test each.

The rule's own words stand in the test's name; what each once cost is in the project's case list.
"""

from __future__ import annotations

import ast
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ckptkit import CoverageError, UsageError, convert, open_checkpoint
from ckptkit.formats.io import read_region
from tests.tiny_models import TinyModel, make_hf_plain, tensors_of, write_safetensors

PACKAGE = Path(__file__).parent.parent / "ckptkit"


def with_tensors(folder: Path, extra: dict[str, str]) -> Path:
    """Write a tiny llama whose tensors include copies under further names: new name -> name of the original."""
    make_hf_plain(folder)
    tensors = tensors_of(TinyModel())
    tensors |= {name: tensors[original] for name, original in extra.items()}
    write_safetensors(folder / "model.safetensors", tensors, "F32")
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_unmatched_groups_are_an_error_that_names_their_common_prefix(tmp_path: Path) -> None:
    """N27: a vision tower under another name than the model's stays random in silence."""
    source = make_hf_plain(tmp_path / "hf")
    tensors = {f"language_model.{name}": array for name, array in tensors_of(TinyModel()).items()}
    keep = "language_model.model.norm.weight"
    tensors["model.norm.weight"] = tensors.pop(keep)
    write_safetensors(source / "model.safetensors", tensors, "F32")
    with pytest.raises(CoverageError, match="tensors are missing") as caught:
        convert(source, tmp_path / "out", from_dialect="hf", to_dialect="hf")
    assert "begin with `language_model." in caught.value.hint


@pytest.mark.parametrize(
    "name", ["x.model.norm.weight", "model.norm.weight.scale", "model.layers.0.self_attn.inv_freq"]
)
def test_a_name_counts_whole_or_not_at_all(tmp_path: Path, name: str) -> None:
    """N33, N34: buffers are ignored by their exact name, and an equal suffix is another name."""
    source = with_tensors(tmp_path / "hf", {name: "model.norm.weight"})
    with pytest.raises(CoverageError, match="match(es)? no row") as caught:
        convert(source, tmp_path / "out")
    assert name in caught.value.items[0]


@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_bfloat16_is_written_in_both_formats_bit_for_bit(tmp_path: Path, format: str) -> None:
    """D02: a framework's writer could do one format and not the other."""
    source = make_hf_plain(tmp_path / "hf", dtype="BF16")
    convert(source, tmp_path / "ms", format=format)
    written = open_checkpoint(tmp_path / "ms").tensors
    stored = open_checkpoint(source).tensors
    assert {info.dtype for info in written.values()} == {"BF16"}
    norm, original = written["model.norm_out.weight"], stored["model.norm.weight"]
    assert read_region(norm).tobytes() == read_region(original).tobytes()


def test_nothing_is_memory_mapped() -> None:
    """F11, F12: on some mounts a mapping fails, or a file that shrinks kills the process with a signal."""
    for path in PACKAGE.rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"mmap", "memmap"}, path


def test_results_have_the_umasks_mode(tmp_path: Path) -> None:
    """F29: read-only results cannot be replaced or cleaned up by their owner."""
    source = make_hf_plain(tmp_path / "hf")
    before = os.umask(0o027)
    try:
        convert(source, tmp_path / "ms")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ms").iterdir()}
    assert modes == {0o640}
    assert stat.S_IMODE((tmp_path / "ms").stat().st_mode) == 0o750


def test_a_result_of_read_only_files_is_replaced(tmp_path: Path) -> None:
    """F29, the other half: MindSpore's own files are 0400."""
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms", format="ckpt")
    for path in (tmp_path / "ms").iterdir():
        path.chmod(0o400)
    convert(source, tmp_path / "ms", overwrite=True)
    assert (tmp_path / "ms" / "part0.safetensors").is_file()
    assert not (tmp_path / "ms" / "model.ckpt").exists()


def test_heads_that_do_not_divide_need_head_dim(tmp_path: Path) -> None:
    """S23: the quotient is only a fallback."""
    source = make_hf_plain(tmp_path / "hf")
    edit_config(source, num_attention_heads=5, num_key_value_heads=5)
    with pytest.raises(UsageError, match="head_dim"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"])
def test_a_missing_field_is_an_error_that_names_it(tmp_path: Path, key: str) -> None:
    """V10: a field under another name was silently taken as absent."""
    source = make_hf_plain(tmp_path / "hf")
    edit_config(source, **{key: None})
    with pytest.raises(UsageError, match=key):
        convert(source, tmp_path / "out")


def test_a_layer_beyond_the_configs_number_is_not_dropped(tmp_path: Path) -> None:
    """N12: the weights of a further layer were silently unused."""
    source = make_hf_plain(tmp_path / "hf", layers=3)
    edit_config(source, num_hidden_layers=2)
    with pytest.raises(CoverageError, match="match(es)? no row") as caught:
        convert(source, tmp_path / "out")
    assert "model.layers.2." in caught.value.items[0]


def test_layers_keep_their_numbers_above_ninety_nine(tmp_path: Path) -> None:
    """N30: sorted as text, 10 comes before 2."""
    source = make_hf_plain(tmp_path / "hf", layers=103, hidden=8, heads=2, kv_heads=1, intermediate=8, vocab=11)
    convert(source, tmp_path / "ms", variant="qkv_concat")
    convert(tmp_path / "ms", tmp_path / "back")
    stored, back = open_checkpoint(source).tensors, open_checkpoint(tmp_path / "back").tensors
    assert stored.keys() == back.keys()
    assert all(read_region(stored[name]).tobytes() == read_region(back[name]).tobytes() for name in stored)


def test_total_size_is_recomputed(tmp_path: Path) -> None:
    """N18: a wrong counter is no reason to refuse, and no reason to copy it."""
    source = make_hf_plain(tmp_path / "hf", shards=2)
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": {"total_size": 1}}))
    report = convert(source, tmp_path / "out", to_dialect="hf", max_shard_size="20kB")
    assert any("total_size" in text for _, text in report.rows)
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert written["metadata"]["total_size"] == sum(a.nbytes for a in tensors_of(TinyModel()).values())

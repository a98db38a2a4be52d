"""Which files of a folder are the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from small_checkpoints import SHARDS, notes, put, put_index, put_sharded, refusal, values

from ckptkit.errors import CorruptError, CoverageError, UsageError
from ckptkit.formats import folder
from ckptkit.formats.registry import open_checkpoint


def test_an_index_decides(tmp_path: Path) -> None:
    put_sharded(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert [file.name for file in checkpoint.files] == list(SHARDS)
    assert checkpoint.notes == ()
    assert values(tmp_path) == {"a": 1, "b": 2, "c": 3}


def test_vendor_files_beside_an_index_are_ignored_with_a_note(tmp_path: Path) -> None:
    put_sharded(tmp_path)
    put(tmp_path / "consolidated.safetensors", {"norm": 9})
    assert values(tmp_path) == {"a": 1, "b": 2, "c": 3}
    assert "`consolidated.safetensors` ignored: a vendor's own layout" in notes(tmp_path)


def test_files_that_no_entry_of_the_index_names_are_ignored_with_a_note(tmp_path: Path) -> None:
    put_sharded(tmp_path)
    put(tmp_path / "adapter_model.safetensors", {"a": 9})
    assert values(tmp_path)["a"] == 1
    assert "`adapter_model.safetensors` ignored: `model.safetensors.index.json` does not name it" in notes(tmp_path)


def test_safetensors_are_preferred_over_bin_and_never_mixed(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", {"a": 1})
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    (tmp_path / "pytorch_model.bin.index.json").write_bytes(b"never opened")
    assert values(tmp_path) == {"a": 1}
    assert "`pytorch_model.bin` ignored: safetensors files were chosen" in notes(tmp_path)


def test_subfolders_are_never_looked_into(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", {"a": 1})
    put(tmp_path / "original" / "consolidated.00.safetensors", {"a": 9})
    put(tmp_path / "metal" / "model.safetensors", {"a": 8, "b": 8})
    put(tmp_path / "folder.safetensors" / "x.safetensors", {"z": 8})
    assert values(tmp_path) == {"a": 1}
    assert notes(tmp_path) == ""


@pytest.mark.parametrize(
    "name",
    [
        "training_args.bin",
        "optimizer.pt",
        "optimizer.safetensors",
        "optimizer.bin",
        "scheduler.pt",
        "rng_state_0.pth",
        "scaler.pt",
    ],
)
def test_training_state_is_never_opened(tmp_path: Path, name: str) -> None:
    put(tmp_path / "model.safetensors", {"a": 1})
    os.mkfifo(tmp_path / name)  # reading it would give an error
    assert values(tmp_path) == {"a": 1}
    assert notes(tmp_path) == f"`{name}` not opened: training state"


def test_a_folder_of_training_state_alone_holds_no_weights(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(b"x")
    assert "holds no weights" in refusal(tmp_path, UsageError)


def test_unfinished_downloads_are_noted(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", {"a": 1})
    (tmp_path / "model-2.safetensors.incomplete").write_bytes(b"")
    assert "`model-2.safetensors.incomplete` is an unfinished download" in notes(tmp_path)


def test_model_safetensors_is_preferred_without_an_index(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", {"a": 1})
    put(tmp_path / "model.fp16.safetensors", {"a": 9})
    assert values(tmp_path) == {"a": 1}
    assert "`model.fp16.safetensors` ignored" in notes(tmp_path)


def test_a_numbered_set_without_index_is_joined(tmp_path: Path) -> None:
    put(tmp_path / SHARDS[0], {"a": 1})
    put(tmp_path / SHARDS[1], {"b": 2})
    put(tmp_path / "adapter_model.safetensors", {"a": 9})
    assert values(tmp_path) == {"a": 1, "b": 2}
    assert "`adapter_model.safetensors` ignored" in notes(tmp_path)


def test_a_numbered_set_with_gaps_is_refused_and_all_gaps_are_named(tmp_path: Path) -> None:
    put(tmp_path / "model-00002-of-00004.safetensors", {"a": 1})
    message = refusal(tmp_path, CoverageError)
    for number in (1, 3, 4):
        assert f"model-0000{number}-of-00004.safetensors" in message


def test_a_numbered_set_may_count_from_zero(tmp_path: Path) -> None:
    put(tmp_path / "model-00000-of-00002.safetensors", {"a": 1})
    put(tmp_path / "model-00001-of-00002.safetensors", {"b": 2})
    assert values(tmp_path) == {"a": 1, "b": 2}


def test_two_numbered_sets_without_index_are_refused(tmp_path: Path) -> None:
    for stem in ("model", "other"):
        for number in (1, 2):
            put(tmp_path / f"{stem}-0000{number}-of-00002.safetensors", {"a": 1})
    assert "2 numbered sets" in refusal(tmp_path, UsageError)


def test_unnumbered_files_are_joined_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        put(tmp_path / f"layer{number}.safetensors", {f"t{number}": number})
    assert values(tmp_path) == {"t2": 2, "t9": 9, "t10": 10}
    assert [file.name for file in open_checkpoint(tmp_path).files] == [f"layer{n}.safetensors" for n in (2, 9, 10)]


def test_equal_copies_over_files_without_index_are_noted(tmp_path: Path) -> None:
    put(tmp_path / "x.safetensors", {"a": 1, "b": 2})
    put(tmp_path / "y.safetensors", {"b": 2, "c": 3})
    assert values(tmp_path) == {"a": 1, "b": 2, "c": 3}
    assert "1 equal copies of tensors passed over: `b`" in notes(tmp_path)


def test_different_copies_over_files_without_index_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "x.safetensors", {"a": 1, "b": 2})
    put(tmp_path / "y.safetensors", {"b": 7, "c": 3})
    message = refusal(tmp_path, CorruptError)
    assert "duplicate tensor `b`" in message
    assert "x.safetensors" in message
    assert "y.safetensors" in message


def test_files_of_several_indexes_are_refused_unless_one_is_the_usual(tmp_path: Path) -> None:
    for name in ("x", "y"):
        put_index(tmp_path / f"{name}.safetensors.index.json", {"a": SHARDS[0]})
    assert "2 index files" in refusal(tmp_path, UsageError)
    put_sharded(tmp_path)
    assert values(tmp_path) == {"a": 1, "b": 2, "c": 3}


def test_an_index_of_another_name_counts(tmp_path: Path) -> None:
    put_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "model.fp16.safetensors.index.json")
    assert values(tmp_path) == {"a": 1, "b": 2, "c": 3}


def test_a_single_vendor_file_is_a_checkpoint(tmp_path: Path) -> None:
    put(tmp_path / "consolidated.safetensors", {"norm": 1})
    assert values(tmp_path) == {"norm": 1}


def test_several_vendor_files_are_refused(tmp_path: Path) -> None:
    for number in (0, 1):
        put(tmp_path / f"consolidated.0{number}.safetensors", {"norm": 1})
    assert "2 vendor files" in refusal(tmp_path, UsageError)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "holds no weights" in refusal(tmp_path, UsageError)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_pipe_or_folder_in_place_of_a_shard_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    put_sharded(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    make(tmp_path / SHARDS[1])
    with pytest.raises(UsageError, match=r"model-00002.* is a folder|not a regular file"):
        open_checkpoint(tmp_path)


def put_unified(path: Path) -> None:
    put(path / "part0.safetensors", {"a": 1}, {"format": "ms"})
    put(path / "part1.safetensors", {"b": 2}, {"format": "ms"})
    put_index(path / "param_name_map.json", {"a": "part0.safetensors", "b": "part1.safetensors"}, total_size=8)


def test_the_unified_layout_is_read_with_its_hyper_parameters(tmp_path: Path) -> None:
    put_unified(tmp_path)
    put(tmp_path / "hyper_param.safetensors", {"global_step": 5}, {"format": "ms"})
    assert values(tmp_path) == {"a": 1, "b": 2, "global_step": 5}
    assert open_checkpoint(tmp_path).metadata == {"format": "ms"}
    assert notes(tmp_path) == ""


def test_the_unified_map_may_be_bare(tmp_path: Path) -> None:
    put_unified(tmp_path)
    (tmp_path / "param_name_map.json").write_text('{"a": "part0.safetensors", "b": "part1.safetensors"}')
    assert values(tmp_path) == {"a": 1, "b": 2}


def test_a_hyper_parameter_that_the_map_places_elsewhere_is_passed_over(tmp_path: Path) -> None:
    put_unified(tmp_path)
    put(tmp_path / "hyper_param.safetensors", {"a": 9})
    assert values(tmp_path) == {"a": 1, "b": 2}
    assert "`a`: also in a file that the index does not name" in notes(tmp_path)


def test_a_single_ckpt_file_is_read_and_strategy_files_are_not(tmp_path: Path) -> None:
    put(tmp_path / "net.ckpt", {"a": 1})
    (tmp_path / "strategy.ckpt").write_bytes(b"\x08\x02")
    assert values(tmp_path) == {"a": 1}
    assert "`strategy.ckpt` is a strategy file" in notes(tmp_path)


def test_several_ckpt_files_are_refused_by_name(tmp_path: Path) -> None:
    put(tmp_path / "net-1.ckpt", {"a": 1})
    put(tmp_path / "net-2.ckpt", {"a": 1})
    message = refusal(tmp_path, UsageError)
    assert "net-1.ckpt" in message
    assert "net-2.ckpt" in message


def test_rank_folders_are_refused_for_reshard(tmp_path: Path) -> None:
    for rank in (10, 2):
        put(tmp_path / f"rank_{rank}" / "net.ckpt", {"a": 1})
    assert folder.rank_folders(tmp_path) == ["rank_2", "rank_10"]
    assert "reshard" in refusal(tmp_path, UsageError)


@pytest.mark.parametrize("name", ["CKP-model-0000000-0000002.safetensors", "model-0000001-0000002.safetensors"])
def test_per_rank_files_of_mindformers_are_refused_for_reshard(tmp_path: Path, name: str) -> None:
    put(tmp_path / name, {"a": 1})
    assert "reshard" in refusal(tmp_path, UsageError)


def test_a_root_of_iteration_folders_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "iteration_00000008" / "CKP-model-0000000-0000002.safetensors", {"a": 1})
    assert "iteration_00000008" in refusal(tmp_path, UsageError)


def test_the_default_names_win_over_variants_and_vendor_files(tmp_path: Path) -> None:
    put(tmp_path / "model.fp16.safetensors", {"a": 8})
    put_index(tmp_path / "model.fp16.safetensors.index.json", {"a": "model.fp16.safetensors"})
    assert values(tmp_path) == {"a": 8}
    put(tmp_path / "consolidated.safetensors", {"norm": 9})
    put_index(tmp_path / "consolidated.safetensors.index.json", {"norm": "consolidated.safetensors"})
    assert values(tmp_path) == {"a": 8}
    put(tmp_path / "model.safetensors", {"a": 1})
    assert values(tmp_path) == {"a": 1}
    assert "`model.fp16.safetensors.index.json`" in notes(tmp_path)
    put(tmp_path / "model-00001-of-00001.safetensors", {"a": 2})
    put_index(tmp_path / "model.safetensors.index.json", {"a": "model-00001-of-00001.safetensors"})
    assert values(tmp_path) == {"a": 2}
    for name in ("model.safetensors.index.json", "model-00001-of-00001.safetensors", "model.safetensors"):
        (tmp_path / name).unlink()
    for path in tmp_path.glob("model.fp16*"):
        path.unlink()
    assert values(tmp_path) == {"norm": 9}


@pytest.mark.parametrize("whole", ["model.safetensors", "pytorch_model.bin"])
def test_a_map_of_another_checkpoint_is_passed_over_by_name(tmp_path: Path, whole: str) -> None:
    put_index(tmp_path / "param_name_map.json", {"a": "part0.safetensors"})
    assert "part0.safetensors" in refusal(tmp_path, CoverageError)
    put(tmp_path / whole, {"a": 1})
    assert values(tmp_path) == {"a": 1}
    assert "`param_name_map.json`" in notes(tmp_path)
    put(tmp_path / "part1.safetensors", {"a": 1})
    assert "`param_name_map.json`" in refusal(tmp_path, CoverageError)

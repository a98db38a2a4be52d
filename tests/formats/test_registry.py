"""Opening checkpoints: which file or files, the index against the headers, and laying out new ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from format_contract import assemble, check_read_back, random_contents

from ckptkit.errors import CkptkitError, CorruptError, CoverageError, UsageError
from ckptkit.formats import folder, mindspore_ckpt, registry, safetensors
from ckptkit.formats.io import read_region
from ckptkit.formats.registry import lay_out_checkpoint, open_checkpoint
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


# One file


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


# Which files of a folder


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


# MindSpore


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


# The index against the files


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    weight_map = put_sharded(tmp_path) | {"d": "model-3.safetensors"}
    put_index(tmp_path / "model.safetensors.index.json", weight_map)
    (tmp_path / SHARDS[0]).unlink()
    message = refusal(tmp_path, CoverageError)
    assert SHARDS[0] in message
    assert "model-3.safetensors" in message
    assert SHARDS[1] not in message
    assert "download may be incomplete" in message


def test_a_dangling_link_says_where_it_points(tmp_path: Path) -> None:
    put_sharded(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    (tmp_path / SHARDS[1]).symlink_to("../../blobs/gone")
    assert f"link {SHARDS[1]} points to missing ../../blobs/gone" in refusal(tmp_path, CoverageError)


def test_a_dangling_link_without_index_says_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../gone")
    assert "points to missing `../gone`" in refusal(tmp_path, CoverageError)


def test_links_into_a_cache_are_followed(tmp_path: Path) -> None:
    put_sharded(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    assert values(tmp_path / "snapshot") == {"a": 1, "b": 2, "c": 3}


def test_absent_and_misplaced_tensors_are_told_apart(tmp_path: Path) -> None:
    weight_map = put_sharded(tmp_path) | {"a": SHARDS[1], "mtp.fc": SHARDS[1]}
    put_index(tmp_path / "model.safetensors.index.json", weight_map)
    message = refusal(tmp_path, CoverageError)
    assert f"absent: mtp.fc: said to be in {SHARDS[1]}, is in no file" in message
    assert f"misplaced: a: said to be in {SHARDS[1]}, is in {SHARDS[0]}" in message


def test_both_kinds_show_even_if_one_is_large(tmp_path: Path) -> None:
    weight_map = put_sharded(tmp_path) | {f"n{n}": SHARDS[1] for n in range(50)} | {"a": SHARDS[1]}
    put_index(tmp_path / "model.safetensors.index.json", weight_map)
    message = refusal(tmp_path, CoverageError)
    assert "50 absent, 1 misplaced" in message
    assert "misplaced: a" in message


def test_a_tensor_that_is_not_indexed_is_refused(tmp_path: Path) -> None:
    put_sharded(tmp_path)
    put(tmp_path / SHARDS[1], {"c": 3, "extra": 4})
    message = refusal(tmp_path, CoverageError)
    assert f"extra in {SHARDS[1]}" in message
    assert "would be lost" in message


def test_stale_copies_are_passed_over_and_counted_in_one_note(tmp_path: Path) -> None:
    put_sharded(tmp_path)
    put(tmp_path / SHARDS[1], {"a": 9, "b": 9, "c": 3})
    assert values(tmp_path) == {"a": 1, "b": 2, "c": 3}
    (note,) = open_checkpoint(tmp_path).notes
    assert "stale copies of tensors passed over: 2" in note
    assert f"a in {SHARDS[1]}" in note


@pytest.mark.parametrize(
    "metadata",
    [{}, {"total_size": None}, {"total_size": 13}, {"total_size": 12.0}, {"total_size": True}],
)
def test_a_wrong_total_size_is_only_noted(tmp_path: Path, metadata: dict[str, object]) -> None:
    weight_map = put_sharded(tmp_path)
    put_index(tmp_path / "model.safetensors.index.json", weight_map, **metadata)
    assert values(tmp_path) == {"a": 1, "b": 2, "c": 3}
    assert "total_size" in notes(tmp_path)
    assert "the tensors have 12 bytes" in notes(tmp_path)


@pytest.mark.parametrize("metadata", [None, [], 3])
def test_metadata_of_an_index_that_is_missing_or_odd_is_only_noted(tmp_path: Path, metadata: object) -> None:
    weight_map = put_sharded(tmp_path)
    text = json.dumps({"weight_map": weight_map} | ({} if metadata is None else {"metadata": metadata}))
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "states no total_size" in notes(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        POINTER,
        '{"metadata":{}}',
        '{"weight_map":null}',
        '{"weight_map":[]}',
        '{"weight_map":{}}',
        '{"weight_map":{"a":1}}',
        '{"weight_map":{"a":null}}',
        '{"weight_map":{"a":""}}',
        '{"weight_map":{"a":".."}}',
        '{"weight_map":{"a":"../x.safetensors"}}',
        '{"weight_map":{"a":"/x.safetensors"}}',
        '{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}',
        '{"weight_map":{"a":"x\\u0000"}}',
    ],
)
def test_an_index_that_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    put_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(tmp_path, CorruptError)


@pytest.mark.parametrize("content", [b"", POINTER.encode(), b"PK\x03\x04"])
def test_a_shard_that_is_empty_or_a_pointer_or_of_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    put_sharded(tmp_path)
    (tmp_path / SHARDS[1]).write_bytes(content)
    with pytest.raises(CorruptError, match=r"model-00002"):
        open_checkpoint(tmp_path)


def test_shards_of_two_formats_are_refused(tmp_path: Path) -> None:
    weight_map = put_sharded(tmp_path)
    put(tmp_path / "odd.ckpt", {"d": 3})
    put_index(tmp_path / "model.safetensors.index.json", weight_map | {"d": "odd.ckpt"})
    assert "odd.ckpt is a ckpt file" in refusal(tmp_path, CorruptError)


def test_a_single_file_under_a_wrong_name_is_opened_as_what_it_is(tmp_path: Path) -> None:
    put(tmp_path / "x.safetensors", {"a": 1}).rename(tmp_path / "x.ckpt")
    assert open_checkpoint(tmp_path).kind == "safetensors"


def test_a_difference_in_metadata_is_noted(tmp_path: Path) -> None:
    put(tmp_path / "x.safetensors", {"a": 1}, {"format": "pt"})
    put(tmp_path / "y.safetensors", {"b": 1}, {"format": "ms"})
    assert open_checkpoint(tmp_path).metadata == {"format": "pt"}
    assert "the files' metadata differ in `format`" in notes(tmp_path)


def test_empty_tensors_are_indexed(tmp_path: Path) -> None:
    specs = [TensorSpec("e", (0,), "F32"), TensorSpec("a", (4,), "F32")]
    data = assemble(safetensors.lay_out("x", specs, {}), random_contents(specs))
    (tmp_path / "model.safetensors").write_bytes(data)
    assert open_checkpoint(tmp_path).tensors["e"].shape == (0,)


def test_the_input_folder_is_left_as_it_was(tmp_path: Path) -> None:
    put_sharded(tmp_path)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir())
    stamp = tmp_path.stat().st_mtime_ns
    values(tmp_path)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir()) == before
    assert tmp_path.stat().st_mtime_ns == stamp


# Laying out


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
    from format_contract import FORMATS

    file = put(tmp_path / "x.safetensors", {"a": 1})
    with pytest.raises(AssertionError):
        check_read_back(FORMATS[0], file, [TensorSpec("a", (4,), "U8")], {"a": bytes(4)})

"""An index held against the headers of its files, both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from format_contract import assemble, random_contents
from small_checkpoints import POINTER, SHARDS, notes, put, put_index, put_sharded, refusal, values

from ckptkit.errors import CorruptError, CoverageError
from ckptkit.formats import safetensors
from ckptkit.formats.registry import open_checkpoint
from ckptkit.types import TensorSpec


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


@pytest.mark.parametrize("name", ["pytorch_model.bin", "net.ckpt", "model.safetensors", "x.pth"])
def test_a_single_weight_file_that_is_a_pointer_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POINTER)
    for path in (tmp_path, tmp_path / name):
        assert f"{name}` is a git-lfs pointer, not the file itself: it should have 123456" in refusal(
            path, CorruptError
        )


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

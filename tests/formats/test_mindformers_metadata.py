"""The contract: a metadata.json is read as MindFormers of every release writes it, and whatever contradicts itself is
told before a file is opened.

What is tried is one matrix over four ranks (two device axes), as a dictionary that each test changes in one place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import CkptkitError, CorruptError, CoverageError
from ckptkit.formats.mindformers_metadata import Stored, read_metadata
from ckptkit.types import TensorLayout

GOLDEN = Path(__file__).parent.parent / "golden" / "mindformers"
Change = Callable[[dict[str, Any]], Any]


def content() -> dict[str, Any]:
    """Return what MindFormers 1.9 writes for `w` (8, 6), cut in four rows by both device axes."""
    return {
        "state_dict_metadata": {
            "w": {
                "properties": {
                    "dtype": "Float32", "replica_id": [0, 0, 0, 0], "allow_shape_mismatch": False,
                    "allow_to_save": True,
                },
                "global_shape": [8, 6],
                "axis_fragmentations": [4, 1],
                "layout": {
                    "device_matrix": [2, 2], "tensor_map": [[0, 1], -1], "interleaved_parallel": False,
                    "alias_name": ["dp", "tp"], "rank_list": [0, 1, 2, 3],
                },
                "chunk": [{"global_offset": [k], "local_shape": [2, 6]} for k in (0, 2, 1, 3)],
            }
        },
        "storage_data": {
            f"('w', ({k},))": [{"file_name": f"CKP-model-{r:07d}-0000004.safetensors", "storage_rank": r,
                                "rank_group": [r]}]
            for k, r in ((0, 0), (2, 1), (1, 2), (3, 3))
        },
    }  # fmt: skip


def put(folder: Path, *changes: Change, indent: int | None = 4) -> Path:
    changed = content()
    for change in changes:
        change(changed)
    (folder / "metadata.json").write_text(json.dumps(changed, indent=indent))
    return folder


def entry(of: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = of["state_dict_metadata"]["w"]
    return found


def test_several_device_axes_on_one_tensor_axis_are_read(tmp_path: Path) -> None:
    metadata = read_metadata(put(tmp_path))
    (w,) = metadata.entries.values()
    assert (w.dtype, w.shape, w.parts, w.ranks) == ("Float32", (8, 6), (4, 1), (0, 1, 2, 3))
    assert w.layout == TensorLayout((2, 2), ((0, 1), ()))
    assert dict(w.shapes) == dict.fromkeys(range(4), (2, 6))
    assert w.stored[2] == [Stored("CKP-model-0000001-0000004.safetensors", 1, (1,))]
    assert (metadata.devices, metadata.num_ranks, metadata.notes) == (4, 4, ())


def test_the_compact_form_of_2_1_says_the_same(tmp_path: Path) -> None:
    other = tmp_path / "compact"
    other.mkdir()
    assert read_metadata(put(tmp_path)) == read_metadata(put(other, indent=None))


def test_1_8_writes_no_rank_group(tmp_path: Path) -> None:
    put(tmp_path, lambda c: [row.pop("rank_group") for rows in c["storage_data"].values() for row in rows])
    (w,) = read_metadata(tmp_path).entries.values()
    assert w.stored[0] == [Stored("CKP-model-0000000-0000004.safetensors", 0, ())]


def test_reordered_keys_are_read_and_noted(tmp_path: Path) -> None:
    def reorder(c: dict[str, Any]) -> None:
        entry(c)["layout"] = dict(sorted(entry(c)["layout"].items()))

    (tmp_path / "sorted").mkdir()
    plain, changed = read_metadata(put(tmp_path)), read_metadata(put(tmp_path / "sorted", reorder))
    assert changed.entries == plain.entries
    assert plain.notes == ()
    assert "not in MindFormers' order" in changed.notes[0]


def test_a_null_layout_is_whole_on_the_ranks_that_have_it(tmp_path: Path) -> None:
    def whole(c: dict[str, Any]) -> None:
        entry(c).update(layout=None, axis_fragmentations=[1, 1])
        entry(c)["chunk"] = [{"global_offset": [0], "local_shape": [8, 6]}]
        c["storage_data"] = {"('w', (0,))": [{"file_name": "a.safetensors", "storage_rank": 1, "rank_group": [0, 1]}]}

    metadata = read_metadata(put(tmp_path, whole))
    (strategy,) = metadata.strategies()
    assert strategy.tensors == {"w": TensorLayout((2,), ((), ()))}
    assert strategy.shapes == {"w": (8, 6)}


def test_a_counter_of_all_stages_is_in_each_whatever_its_rank_list_says() -> None:
    metadata = read_metadata(GOLDEN / "pp2" / "iteration_00000008")
    assert metadata.entries["global_step"].ranks == (0,)
    first, last = metadata.strategies()
    assert "global_step" in first.tensors.keys() & last.tensors.keys()
    assert "output_layer.weight" not in first.tensors
    assert "embedding.word_embeddings.weight" not in last.tensors


def delete(*path: Any) -> Change:
    def change(c: Any) -> None:
        for key in path[:-1]:
            c = c[key]
        del c[path[-1]]

    return change


def setting(value: Any, *path: Any) -> Change:
    def change(c: Any) -> None:
        for key in path[:-1]:
            c = c[key]
        c[path[-1]] = value

    return change


W = ("state_dict_metadata", "w")
WRONG: dict[str, tuple[Change, type[CkptkitError], str]] = {
    "no tensors": (setting({}, "state_dict_metadata"), CorruptError, "needs the objects"),
    "no storage": (delete("storage_data"), CorruptError, "needs the objects"),
    "no chunk": (delete(*W, "chunk"), CorruptError, "`w` has no sound entry"),
    "a negative length": (setting([-8, 6], *W, "global_shape"), CorruptError, "`w` has no sound entry"),
    "a grid of other axes": (setting([4], *W, "axis_fragmentations"), CorruptError, "`w` has no sound entry"),
    "an offset of elements": (
        setting([{"global_offset": [0, 0], "local_shape": [2, 6]}], *W, "chunk"), CorruptError, "no sound entry"
    ),
    "no device matrix": (delete(*W, "layout", "device_matrix"), CorruptError, "no sound layout"),
    "a device axis that is not there": (setting([5, -1], *W, "layout", "tensor_map"), CorruptError, "no sound layout"),
    "a key that is code": (
        setting([], "storage_data", "__import__('os').system('true')"), CorruptError, "`storage_data` has no sound"
    ),
    "a file elsewhere": (
        setting([{"file_name": "../a", "storage_rank": 0}], "storage_data", "('w', (0,))"), CorruptError, "no sound"
    ),
    "a flag that is none": (
        setting(float("nan"), *W, "layout", "interleaved_parallel"), CorruptError, "no sound layout"
    ),
    "a flag that is a number": (setting(1, *W, "layout", "interleaved_parallel"), CorruptError, "no sound layout"),
    "too few names of axes": (setting(["dp"], *W, "layout", "alias_name"), CorruptError, "no sound layout"),
    "a name of two axes": (setting(["dp", "dp"], *W, "layout", "alias_name"), CorruptError, "no sound layout"),
    "names that are none": (setting([0, 1], *W, "layout", "alias_name"), CorruptError, "no sound layout"),
    "a list as layout": (setting([], *W, "layout"), CorruptError, "no sound layout"),
    "replicas that are none": (setting([0.5], *W, "properties", "replica_id"), CorruptError, "`w` has no sound entry"),
    "a word as flag": (setting("no", *W, "properties", "allow_to_save"), CorruptError, "`w` has no sound entry"),
    "devices that are no ranks": (
        setting([2, 4], *W, "layout", "device_matrix"), CoverageError, "contradicts itself"
    ),
    "a map of other axes": (setting([0], *W, "layout", "tensor_map"), CoverageError, "contradicts itself"),
    "a device axis twice": (setting([0, 0], *W, "layout", "tensor_map"), CoverageError, "contradicts itself"),
    "a slice that is not described": (
        setting([{"global_offset": [0], "local_shape": [2, 6]}], *W, "chunk"), CoverageError, "do not make a tensor"
    ),
    "a slice that no file has": (delete("storage_data", "('w', (3,))"), CoverageError, "do not make a tensor"),
    "a slice beyond the grid": (
        setting([{"file_name": "a", "storage_rank": 0}], "storage_data", "('w', (4,))"), CoverageError, "do not make"
    ),
    "a null layout of a cut tensor": (setting(None, *W, "layout"), CoverageError, "do not make a tensor"),
    "storage of an unknown tensor": (
        setting([{"file_name": "a", "storage_rank": 0}], "storage_data", "('v', (0,))"), CoverageError,
        "does not describe",
    ),
    "ranks in another order": (
        setting([0, 2, 1, 3], *W, "layout", "rank_list"), CoverageError, "not those of pipeline stages"
    ),
    "ranks across stages": (
        setting([2, 3, 4, 5], *W, "layout", "rank_list"), CoverageError, "not those of pipeline stages"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_sound_is_refused(tmp_path: Path, name: str) -> None:
    change, error, words = WRONG[name]
    read_metadata(put(tmp_path))
    with pytest.raises(error, match=words) as caught:
        read_metadata(put(tmp_path, change))
    assert type(caught.value) is error


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each value in a JSON value."""
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in pairs:
        yield from places(child, (*path, key))


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    10**18,
    1.5,
    "",
    "x",
    "('w', (1,))",
    [],
    {},
    [0],
    [[]],
    [10**9, 10**9],
    {"a": 1},
]


@pytest.mark.parametrize("path", list(places(content())), ids=str)
def test_whatever_stands_there_is_read_or_refused_in_words(tmp_path: Path, path: tuple[Any, ...]) -> None:
    """No other exception comes, and no memory is taken by a number in the file."""
    for odd in ODD:
        with suppress(CkptkitError):
            read_metadata(put(tmp_path, setting(odd, *path))).strategies()
    with suppress(CkptkitError):
        read_metadata(put(tmp_path, delete(*path))).strategies()


def test_a_slice_of_two_shapes_is_refused(tmp_path: Path) -> None:
    put(tmp_path, lambda c: entry(c)["chunk"].append({"global_offset": [1], "local_shape": [3, 6]}))
    with pytest.raises(CoverageError, match="two shapes"):
        read_metadata(tmp_path)

"""The contract: an optimizer shard, which MindFormers' layouts have no word for, is said by their map alone; and the
small files of a result are as MindFormers 1.9 wants them.

That the map gives each device the same part is a law over random layouts; `slices.py` itself is held against
MindSpore's formula elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptkit.errors import CoverageError
from ckptkit.formats.mindformers_write import MODEL, Held, Saved, rank_of, small_files, weight_file
from ckptkit.layout.layout import slice_number, without_opt_shard
from ckptkit.layout.slices import num_parts, shard_index, unused_axes
from ckptkit.types import TensorLayout, TensorSpec


@st.composite
def sharded_layouts(draw: st.DrawFn) -> TensorLayout:
    """Draw a layout of up to four device axes, each used at most once, with an optimizer shard of some size."""
    matrix = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(matrix))))
    counts = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    axes, at = [], 0
    for count in counts:
        axes.append(tuple(order[at : at + count]))
        at += count
    size = draw(st.sampled_from([-1, 0, 1, 2, 3, 4, 6, 8, 12]))
    layout = TensorLayout(matrix, tuple(axes), opt_step=1, opt_size=size)
    try:
        num_parts(layout)
    except CoverageError:  # a size that the devices cannot share
        assume(False)
    return layout


@given(sharded_layouts())
def test_the_map_alone_gives_each_device_the_same_part(layout: TensorLayout) -> None:
    plain = without_opt_shard(layout)
    devices = 1
    for size in layout.dev_matrix:
        devices *= size
    assert (plain.opt_step, plain.opt_size) == (0, 0)
    assert num_parts(plain) == num_parts(layout)
    assert [shard_index(plain, d) for d in range(devices)] == [shard_index(layout, d) for d in range(devices)]


def test_the_forms_are_those_of_mindformers() -> None:
    zero = TensorLayout((2, 2), ((0,), ()), opt_step=2, opt_size=-1)
    assert without_opt_shard(zero) == TensorLayout((2, 2), ((0, 1), ()))  # [[0, 1], -1]
    vector = TensorLayout((2, 2), ((),), opt_step=1, opt_size=-1)
    assert without_opt_shard(vector) == TensorLayout((2, 2), ((1, 0),))  # [[1, 0]]
    part = TensorLayout((6, 2), ((0,), ()), opt_step=2, opt_size=3)
    assert without_opt_shard(part) == TensorLayout((2, 3, 2), ((0, 1), ()))  # the axis of six is split


def test_a_map_in_another_order_gives_other_parts() -> None:
    zero = TensorLayout((2, 2), ((0,), ()), opt_step=2, opt_size=-1)
    turned = replace(without_opt_shard(zero), tensor_map=((1, 0), ()))
    assert num_parts(turned) == num_parts(zero)
    assert [slice_number(turned, d) for d in range(4)] != [slice_number(zero, d) for d in range(4)]
    assert unused_axes(turned) == []


def held(layout: TensorLayout, devices: int) -> Held:
    spec = TensorSpec("w", (8, 6), "BF16")
    slices = {rank: slice_number(layout, rank % devices) for rank in range(2 * devices)}
    return Held(spec, num_parts(layout), layout, range(devices), slices, MODEL)


def test_metadata_lists_every_holder_and_the_layout_in_its_order() -> None:
    files = small_files(
        Saved(7, {"global_step": 7, "consumed_samples": 3}), 8, [held(TensorLayout((2, 2), ((0,), ())), 4)]
    )
    assert list(files) == [
        "iteration_00000007/metadata.json", "iteration_00000007/common.json", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    content = json.loads(files["iteration_00000007/metadata.json"])
    entry = content["state_dict_metadata"]["w"]
    assert list(entry["layout"].items()) == [
        ("device_matrix", [2, 2]), ("tensor_map", [0, -1]), ("interleaved_parallel", False),
        ("alias_name", ["a", "b"]), ("rank_list", [0, 1, 2, 3]),
    ]  # fmt: skip
    assert entry["properties"]["replica_id"] == [0, 0, 1, 1]
    assert entry["chunk"] == [{"global_offset": [k], "local_shape": [4, 6]} for k in (0, 1)]
    found = content["storage_data"]["('w', (1,))"]
    assert [row["storage_rank"] for row in found] == [1, 3, 5, 7]
    assert all(row["rank_group"] == [1, 3, 5, 7] for row in found)
    assert found[1]["file_name"] == "CKP-model-0000003-0000008.safetensors"
    common = json.loads(files["iteration_00000007/common.json"])
    assert common == {
        "epoch_num": None, "step_num": None, "global_step": 7, "loss_scale": None, "global_batch_size": None,
        "ckpt_status": None,
    }  # fmt: skip
    assert files["latest_checkpointed_iteration.txt"] == b"7"


def test_one_rank_has_no_metadata() -> None:
    assert list(small_files(Saved(0, {}), 1, [])) == [
        "iteration_00000000/common.json", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


@pytest.mark.parametrize("rank", [0, 3, 12_345_678])
def test_the_name_of_a_file_tells_its_rank(rank: int) -> None:
    assert rank_of(weight_file(8, MODEL, rank, 100_000_000)) == rank


@pytest.mark.parametrize("name", ["rank_0/checkpoint_0.safetensors", "CKP-model-0000000-0000002.safetensors", "a/b"])
def test_other_names_tell_none(name: str) -> None:
    assert rank_of(name) is None

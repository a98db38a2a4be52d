"""Strategy files: what MindSpore's compiler saved is read, what is written is the same bytes, and lies are refused.

Each refusal is of one file whose bytes are written out here; the files that are read come from MindSpore itself
(`tests/golden/mindspore`). That MindSpore reads ours is in `test_mindspore_strategy_itself.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategy_bytes import (
    CUT,
    GOLDEN,
    json_bytes,
    read,
    stage_of,
)

from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats import mindspore_layouts
from ckptkit.formats.mindspore_layouts import without_unit_axes
from ckptkit.formats.mindspore_strategy import (
    Strategy,
    dump_json,
    dump_merged,
    dump_strategy,
    is_strategy_file,
    read_strategies,
)
from ckptkit.types import TensorLayout

SINGLE = ["dp2mp2", "dp2mp2_opt", "dp2mp2_train", "dp4_opt", "ep4", "interleave", "layout", "mp4"]
FILES = sorted(file.relative_to(GOLDEN) for file in GOLDEN.glob("*/strategy*"))


# ---- what MindSpore saved


@pytest.mark.parametrize("name", [file for file in FILES if "stage1" not in file.name], ids=str)
def test_a_file_that_mindspore_saved_is_read(name: Path) -> None:
    assert is_strategy_file(GOLDEN / name)
    if name == Path("layout/strategy_stage0.json") or name.parent.name == "pp2dp2mp2":
        return  # ambiguous, see below; stage 1 is missing without its folder, and stage 0 alone is one stage
    (strategy,) = read_strategies(GOLDEN / name)
    assert strategy.stage == 0
    assert len(strategy.tensors) in (11, 15, 33)
    assert strategy.shapes.keys() == (strategy.tensors.keys() if name.suffix == ".json" else set())


def test_layouts_are_what_the_compiler_was_told() -> None:
    (opt,) = read_strategies(GOLDEN / "dp2mp2_opt" / "strategy_stage0.ckpt")
    assert opt.tensors["layers.0.wq"] == TensorLayout((2, 2), ((0,), ()), 2, -1)
    assert opt.tensors["layers.0.wo"] == TensorLayout((2, 2), ((), (0,)), 2, -1)
    assert opt.tensors["norm_out.weight"] == TensorLayout((2, 2), ((),), 1, -1)
    (experts,) = read_strategies(GOLDEN / "ep4" / "strategy_stage0.json")
    assert experts.tensors["layers.0.we"] == TensorLayout((4,), ((0,), (), ()))
    assert experts.shapes["layers.0.we"] == (4, 16, 32)
    (layout,) = read_strategies(GOLDEN / "layout" / "strategy_stage0.ckpt")
    assert layout.tensors["layers.0.wq"] == TensorLayout((2, 2, 2), ((1, 0), ()))
    assert layout.tensors["layers.0.wo"] == TensorLayout((2, 2, 2), ((), (1, 0)))
    assert layout.tensors["layers.0.bias"] == TensorLayout((2, 2, 2), ((1, 0),))
    assert layout.tensors["layers.0.norm"] == TensorLayout((2, 4), ((),))
    (interleave,) = read_strategies(GOLDEN / "interleave" / "strategy_stage0.ckpt")
    assert interleave.tensors["layers.0.wq"] == TensorLayout((2, 2, 1), ((1,), ()))
    assert without_unit_axes(interleave.tensors["layers.0.wq"]) == CUT


@pytest.mark.parametrize("name", SINGLE)
def test_both_forms_in_one_folder_are_one_stage(name: str) -> None:
    (strategy,) = read_strategies(GOLDEN / name)
    (protobuf,) = read_strategies(GOLDEN / name / "strategy_stage0.ckpt")
    assert strategy.tensors == protobuf.tensors
    assert strategy.shapes.keys() == strategy.tensors.keys()


def test_a_pipeline_is_its_stages_in_order() -> None:
    one, two = read_strategies(GOLDEN / "pp2dp2mp2")
    assert (one.stage, two.stage) == (0, 1)
    assert (len(one.tensors), len(two.tensors)) == (36, 40)
    assert two.shapes["out.head"] == (64, 16)
    assert {"moment1.out.head", "accu_grads.out.head"} <= two.tensors.keys()


@pytest.mark.parametrize("name", [file for file in FILES if file.suffix == ".ckpt"], ids=str)
def test_layouts_are_written_byte_for_byte_as_mindspore_saved_them(name: Path) -> None:
    data = (GOLDEN / name).read_bytes()
    (strategy,) = (s for s in read_strategies(GOLDEN / name.parent) if name.stem.endswith(str(s.stage)))
    ours = dump_strategy(strategy)
    assert ours.count(b'\x1a\x00"\x00') == len(strategy.tensors) > 10
    assert data.endswith(ours[ours.index(b"\x1a") :])
    assert data[:2] == ours[:2]


@pytest.mark.parametrize("name", [file for file in FILES if file.suffix == ".json"], ids=str)
def test_layouts_are_written_in_json_as_mindspore_saved_them(name: Path) -> None:
    (strategy,) = (s for s in read_strategies(GOLDEN / name.parent) if name.stem.endswith(str(s.stage)))
    if name.parent.name == "layout":
        with pytest.raises(UsageError, match=r"cannot say that several(.|\n)*protobuf form"):
            dump_json(strategy)
        return
    flat = {n: without_unit_axes(layout) for n, layout in strategy.tensors.items()}
    ours, theirs = (json.loads(d) for d in (dump_json(replace(strategy, tensors=flat)), (GOLDEN / name).read_bytes()))
    assert ours["parallel_layout_item"] == theirs["parallel_layout_item"]
    assert ours["current_stage"] == theirs["current_stage"]


# ---- JSON, and axes that several device axes cut


def test_a_json_file_that_can_be_read_in_two_ways_is_refused() -> None:
    with pytest.raises(
        CoverageError, match=r"several ways for `layers.0.bias`(.|\n)*\[2, 8\](.|\n)*\[16\](.|\n)*protob"
    ):
        read_strategies(GOLDEN / "layout" / "strategy_stage0.json")


def test_a_json_file_is_read_with_the_number_of_axes_as_its_protobuf_form() -> None:
    (protobuf,) = read_strategies(GOLDEN / "layout" / "strategy_stage0.ckpt")
    axes = {name: len(layout.tensor_map) for name, layout in protobuf.tensors.items()}
    (strategy,) = read_strategies(GOLDEN / "layout" / "strategy_stage0.json", num_axes=axes)
    assert strategy.tensors == protobuf.tensors
    assert strategy.shapes["layers.0.wq"] == strategy.shapes["layers.0.wo"] == (16, 16)
    assert strategy.shapes["layers.0.bias"] == (16,)


EXPERTS: dict[str, Any] = {"dev_matrix": [2, 2], "tensor_map": [1, 0, -1], "tensor_shape": [2, 8, 16]}
AS_IT_STANDS = (TensorLayout((2, 2), ((1,), (0,), ())), (2, 8, 16))
JOINED = (TensorLayout((2, 2), ((1, 0), ())), (16, 16))


def test_an_operator_with_a_plain_strategy_tells_that_a_tensor_is_read_as_it_stands(tmp_path: Path) -> None:
    (strategy,) = read(tmp_path, json_bytes(w=EXPERTS))
    assert (strategy.tensors["w"], strategy.shapes["w"]) == AS_IT_STANDS
    mixed = json.loads(json_bytes(w=EXPERTS))
    mixed["parallel_strategy_item"]["Mul_w"] = {"stage": 0, "parallel_strategy": []}
    shapeless = json.loads(json_bytes(plain=False, w=EXPERTS))
    del shapeless["parallel_layout_item"]["w"]["tensor_shape"]
    bad_files = [json.dumps(bad).encode() for bad in (mixed, shapeless)]
    for bad in (*bad_files, json_bytes(plain=False, w=EXPERTS), json_bytes(stage=None, w=EXPERTS)):
        with pytest.raises(CoverageError, match="several ways"):
            read(tmp_path, bad)


def test_an_operator_tells_of_the_moments_too_when_they_are_cut_equally(tmp_path: Path) -> None:
    whole = json.loads(json_bytes(**{"w": EXPERTS, "moment1.w": EXPERTS}))
    del whole["parallel_strategy_item"]["MatMul_moment1.w"]
    (strategy,) = read(tmp_path, json.dumps(whole).encode())
    assert strategy.tensors["moment1.w"] == strategy.tensors["w"] == AS_IT_STANDS[0]
    whole["parallel_layout_item"]["moment1.w"]["tensor_map"] = [0, 1, -1]
    with pytest.raises(CoverageError, match=r"several ways for `moment1.w`"):
        read(tmp_path, json.dumps(whole).encode())


@pytest.mark.parametrize(("axes", "expected"), [(3, AS_IT_STANDS), (2, JOINED)])
def test_the_number_of_axes_decides(tmp_path: Path, axes: int, expected: tuple[TensorLayout, tuple[int, ...]]) -> None:
    (strategy,) = read(tmp_path, json_bytes(plain=False, w=EXPERTS), num_axes={"w": axes})
    assert (strategy.tensors["w"], strategy.shapes["w"]) == expected


@pytest.mark.parametrize(
    "item",
    [
        {"dev_matrix": [2, 2, 2], "tensor_map": [2, 1, 0], "tensor_shape": [2, 2, 4]},  # (4, 4) or (2, 8)
        {"dev_matrix": [2] * 12, "tensor_map": list(range(12)), "tensor_shape": [2] * 12},  # too many ways
    ],
)
def test_a_number_of_axes_that_leaves_two_ways_does_not_decide(tmp_path: Path, item: dict[str, Any]) -> None:
    with pytest.raises(CoverageError, match="several ways"):
        read(tmp_path, json_bytes(plain=False, w=item), num_axes={"w": 2})


def test_a_tensor_that_could_be_read_in_thousands_of_ways_is_refused_or_read_as_it_stands(tmp_path: Path) -> None:
    item = {"dev_matrix": [4], "tensor_map": [-1] * 16, "tensor_shape": [1] * 16}
    with pytest.raises(CoverageError, match="several ways"):
        read(tmp_path, json_bytes(plain=False, w=item), num_axes={"w": 1})
    (strategy,) = read(tmp_path, json_bytes(plain=False, w=item), num_axes={"w": 16})
    assert strategy.shapes["w"] == (1,) * 16


def test_a_device_axis_of_size_1_leaves_a_tensor_axis_of_size_1_in_json(tmp_path: Path) -> None:
    item = {"dev_matrix": [4], "tensor_map": [-1, 0], "tensor_shape": [1, 16]}
    with pytest.raises(CoverageError, match="several ways"):
        read(tmp_path, json_bytes(plain=False, w=item))
    (strategy,) = read(tmp_path, json_bytes(plain=False, w=item), num_axes={"w": 1})
    assert (strategy.tensors["w"], strategy.shapes["w"]) == (TensorLayout((4,), ((0,),)), (16,))


@pytest.mark.parametrize("size", [-1, 2])
def test_an_optimizer_shard_that_only_a_joined_axis_can_have_decides(tmp_path: Path, size: int) -> None:
    item = {"dev_matrix": [2, 2, 2], "tensor_map": [1, 0], "tensor_shape": [2, 8]}
    item |= {"opt_weight_shard_step": 4, "opt_weight_shard_size": size}
    (strategy,) = read(tmp_path, json_bytes(plain=False, w=item))
    assert strategy.tensors["w"] == TensorLayout((2, 2, 2), ((1, 0),), 4, size)


# ---- what is written is read again

NAMES = st.text("ab0-.\u5c42", min_size=1, max_size=8)


@st.composite
def layouts(draw: st.DrawFn, devices: int, several: bool = True) -> TensorLayout:
    """Any layout over `devices`, a power of two."""
    dev = [draw(st.sampled_from([1, devices]))]
    while prod(dev) < devices and len(dev) < 15:
        dev.append(draw(st.sampled_from([1, 2, devices // prod(dev)])))
    dev.append(devices // prod(dev))
    order = draw(st.permutations(range(len(dev))))
    num_axes = draw(st.integers(0, 4))
    maps: list[list[int]] = [[] for _ in range(num_axes)]
    for m in order:
        axis = draw(st.integers(-1, num_axes - 1)) if num_axes else -1
        if axis >= 0 and (several or not maps[axis]):
            maps[axis].append(m)
    used = {m for axis in maps for m in axis}
    free = prod(size for m, size in enumerate(reversed(dev)) if m not in used)
    size = draw(st.sampled_from([0, -1, 1, free]))
    return TensorLayout(tuple(dev), tuple(map(tuple, maps)), draw(st.integers(0, 300)), size)


@st.composite
def stages(draw: st.DrawFn, several: bool = True) -> list[Strategy]:
    devices = draw(st.sampled_from([1, 2, 8, 1024]))
    tensors = st.dictionaries(NAMES, layouts(devices, several), min_size=1, max_size=6)
    return [Strategy(stage, draw(tensors), {}) for stage in range(draw(st.integers(1, 3)))]


def tricky(strategy: Strategy) -> bool:
    return all(mindspore_layouts.stage_and_name(name) for name in strategy.tensors)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=stages())
def test_what_is_written_is_read_again(tmp_path: Path, parts: list[Strategy]) -> None:
    assert list(read(tmp_path, dump_merged(parts))) == parts
    if tricky(parts[0]):
        with pytest.raises(UsageError, match="takes such a file for a merged one"):
            dump_strategy(parts[0])
    else:
        assert read(tmp_path, dump_strategy(parts[0])) == (parts[0],)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=stages(several=False), data=st.data())
def test_what_is_written_as_json_is_read_again(tmp_path: Path, parts: list[Strategy], data: st.DataObject) -> None:
    first = parts[0]
    shapes = {
        name: tuple(prod(layout.dev_matrix) * data.draw(st.sampled_from([1, 2])) for _ in layout.tensor_map)
        for name, layout in first.tensors.items()
        if data.draw(st.booleans())
    }
    if not tricky(first):
        strategy = replace(first, shapes=shapes)
        assert read(tmp_path, dump_json(strategy)) == (strategy,)


def test_a_merged_file_may_have_names_with_dashes(tmp_path: Path) -> None:
    parts = [stage_of(0, **{"a-b": CUT, "0-0-c": CUT}), stage_of(1, **{"7-x": CUT})]
    assert list(read(tmp_path, dump_merged(parts))) == parts


def test_a_file_of_one_stage_may_have_names_with_dashes_if_not_all_begin_with_a_number(tmp_path: Path) -> None:
    strategy = stage_of(0, **{"0-x": CUT, "a-b-c": CUT})
    assert read(tmp_path, dump_strategy(strategy)) == (strategy,)


def test_a_stage_without_a_number_is_written_as_stage_0(tmp_path: Path) -> None:
    assert read(tmp_path, dump_strategy(stage_of(None))) == (stage_of(0),)


@pytest.mark.parametrize("numbers", [(1,), (0, 2), (0, 0)])
def test_stages_that_are_not_a_run_are_not_merged(numbers: tuple[int, ...]) -> None:
    with pytest.raises(CoverageError, match="not those of one run"):
        dump_merged([stage_of(number) for number in numbers])


@pytest.mark.parametrize("dump", [dump_strategy, dump_json, lambda strategy: dump_merged([strategy])])
@pytest.mark.parametrize("layout", [TensorLayout((2, 2), ((2,), ())), TensorLayout((1,) * 17, ((), ()))])
def test_an_impossible_layout_is_not_written(dump: Any, layout: TensorLayout) -> None:
    with pytest.raises(CoverageError, match="impossible layout for `(0-)?w`"):
        dump(stage_of(0, w=layout))

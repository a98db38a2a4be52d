"""Shards and strategy files that MindSpore made: our merge and our split are its own, byte for byte.

What each rank must hold is cut with numpy, by the formula in `rank_results.part_of`, from the JSON form of a strategy,
read here and not by ckptkit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.errors import CoverageError
from tests.rank_results import (
    Array,
    Tensors,
    odd_names,
    part_of,
    random_tensors,
    rank_bytes,
    read_file,
    read_ranks,
    read_whole,
    same_tensors,
    weight_files,
    write_whole,
)

pytestmark = pytest.mark.usefixtures("quick_disk")

GOLDEN = Path(__file__).parent.parent / "golden" / "mindspore"
SHARDED = ["dp2mp2", "dp2mp2_opt"]
STRATEGY_ONLY = ["dp2mp2_train", "dp4_opt", "ep4", "interleave", "layout", "mp4", "pp2dp2mp2"]
# The JSON form writes an axis that two device axes cut as two axes. What was meant, by the end of the name:
TRUE_LAYOUTS = {
    "layout": {
        "bias": ((16,), ((1, 0),)),
        "wo": ((16, 16), ((), (1, 0))),
        "wq": ((16, 16), ((1, 0), ())),
    }
}
Axes = Sequence[Sequence[int]]
Item = tuple[tuple[int, ...], Sequence[int], Axes, int, int]  # shape, device matrix, map, optimizer shard's step, size


def stages_of(sample: str) -> list[dict[str, Item]]:
    """Return each stage's layouts, as the JSON form of its strategy has them."""
    return [items_of(sample, json.loads(file.read_text())) for file in sorted((GOLDEN / sample).glob("*.json"))]


def items_of(sample: str, strategy: dict[str, Any]) -> dict[str, Item]:
    found = {}
    for name, item in strategy["parallel_layout_item"].items():
        shape, axes = tuple(item["tensor_shape"]), [() if m == -1 else (m,) for m in item["tensor_map"]]
        shape, axes = TRUE_LAYOUTS.get(sample, {}).get(name.rpartition(".")[2], (shape, axes))
        found[name] = (shape, item["dev_matrix"], axes, item["opt_weight_shard_step"], item["opt_weight_shard_size"])
    return found


def whole_model(stages: Sequence[dict[str, Item]]) -> Tensors:
    """Return random tensors for every name, and counters where the strategy is one of a training graph."""
    shapes: dict[str, Sequence[int]] = {name: item[0] for stage in stages for name, item in stage.items()}
    if any(name.startswith("moment1.") for name in shapes):
        shapes |= {"global_step": (1,), "beta1_power": (), "learning_rate": ()}
    return random_tensors(shapes)


def parts_by_formula(stages: Sequence[dict[str, Item]], whole: Tensors) -> dict[int, Tensors]:
    """Return what each rank holds; a tensor that no stage names is whole on every rank."""
    devices = int(np.prod(next(iter(stages[0].values()))[1]))
    named = {name for stage in stages for name in stage}
    everywhere = {name: array for name, array in whole.items() if name not in named}
    return {
        number * devices + device: everywhere
        | {name: part_of(whole[name], device, *item[1:]) for name, item in stage.items()}
        for number, stage in enumerate(stages)
        for device in range(devices)
    }


def strategy_of(sample: str, form: str, folder: Path) -> Path:
    """Return the strategy files of one form: a file, or a folder of the stages' files."""
    files = sorted((GOLDEN / sample).glob(f"strategy_stage*.{form}"))
    if len(files) == 1:
        return files[0]
    folder.mkdir()
    for file in files:
        shutil.copy(file, folder)
    return folder


def only_file(folder: Path) -> Path:
    (file,) = weight_files(folder)
    return file


# ---- shards that MindSpore cut --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["ckpt", "json"])
@pytest.mark.parametrize("sample", SHARDED)
def test_our_merge_is_the_file_that_mindspore_cut(tmp_path: Path, sample: str, form: str) -> None:
    strategy = strategy_of(sample, form, tmp_path / "strategy")
    reshard(GOLDEN / sample / "sharded", tmp_path / "m", Parallel(src_strategy=strategy))
    assert only_file(tmp_path / "m").read_bytes() == (GOLDEN / sample / "full.ckpt").read_bytes()
    reshard(GOLDEN / sample / "sharded", tmp_path / "s", Parallel(src_strategy=strategy), format="safetensors")
    assert same_tensors(read_whole(tmp_path / "s"), read_file(GOLDEN / sample / "full.ckpt"))


@pytest.mark.parametrize("form", ["ckpt", "json"])
@pytest.mark.parametrize("sample", SHARDED)
def test_our_split_is_mindspores(tmp_path: Path, sample: str, form: str) -> None:
    strategy = strategy_of(sample, form, tmp_path / "strategy")
    reshard(GOLDEN / sample / "full.ckpt", tmp_path / "c", Parallel(dst_strategy=strategy))
    reshard(GOLDEN / sample / "full.ckpt", tmp_path / "s", Parallel(dst_strategy=strategy), format="safetensors")
    theirs = read_ranks(GOLDEN / sample / "sharded")
    assert list(theirs) == list(read_ranks(tmp_path / "c")) == [0, 1, 2, 3]
    for rank, tensors in read_ranks(tmp_path / "s").items():
        ours = tmp_path / "c" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        assert ours.read_bytes() == (GOLDEN / sample / "sharded" / f"rank_{rank}" / f"net{rank}.ckpt").read_bytes()
        assert same_tensors(tensors, theirs[rank])


@pytest.mark.parametrize(("a", "b"), [SHARDED, SHARDED[::-1]])
def test_shards_of_one_layout_become_mindspores_shards_of_the_other(tmp_path: Path, a: str, b: str) -> None:
    strategies = {"src_strategy": GOLDEN / a / "strategy_stage0.ckpt", "dst_strategy": GOLDEN / b}
    reshard(GOLDEN / a / "sharded", tmp_path / "b", Parallel(**strategies))
    ours, theirs = read_ranks(tmp_path / "b"), read_ranks(GOLDEN / b / "sharded")
    assert ours.keys() == theirs.keys()
    assert all(same_tensors(ours[rank], theirs[rank]) for rank in theirs)


def test_shards_read_by_the_wrong_strategy_are_refused_or_not_the_original(tmp_path: Path) -> None:
    """The control: what the tests above compare depends on the strategy."""
    with pytest.raises(CoverageError, match="its strategy file says"):
        wrong = Parallel(src_strategy=GOLDEN / "dp2mp2" / "strategy_stage0.json")
        reshard(GOLDEN / "dp2mp2_opt" / "sharded", tmp_path / "m", wrong)
    turned = json.loads((GOLDEN / "dp2mp2" / "strategy_stage0.json").read_text())
    turned["parallel_layout_item"]["layers.0.wq"]["tensor_map"] = [-1, 0]
    (tmp_path / "turned.json").write_text(json.dumps(turned))
    with pytest.raises(CoverageError, match=r"`layers.0.wq`.*strategy file says"):
        reshard(GOLDEN / "dp2mp2" / "sharded", tmp_path / "m", Parallel(src_strategy=tmp_path / "turned.json"))
    reshard(GOLDEN / "dp2mp2" / "full.ckpt", tmp_path / "m", Parallel(dst_strategy=tmp_path / "turned.json"))
    theirs, ours = (read_ranks(folder)[1] for folder in (GOLDEN / "dp2mp2" / "sharded", tmp_path / "m"))
    assert odd_names(ours, theirs) == ["layers.0.wq"]


# ---- strategies without shards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
@pytest.mark.parametrize("form", ["ckpt", "json"])
@pytest.mark.parametrize("sample", STRATEGY_ONLY)
def test_a_strategy_splits_by_the_formula_and_merges_back(tmp_path: Path, sample: str, form: str, suffix: str) -> None:
    stages = stages_of(sample)
    whole = whole_model(stages)
    source = write_whole(tmp_path / f"full.{suffix}", whole)
    strategy = strategy_of(sample, form, tmp_path / "strategy")
    reshard(source, tmp_path / "split", Parallel(dst_strategy=strategy))
    ours, wanted = read_ranks(tmp_path / "split"), parts_by_formula(stages, whole)
    assert list(ours) == list(wanted)
    assert {rank: odd for rank in wanted if (odd := odd_names(ours[rank], wanted[rank]))} == {}
    for name, options in {"ours": {}, "theirs": {"src_strategy": strategy}}.items():
        reshard(tmp_path / "split", tmp_path / name, Parallel(**options))
        merged = only_file(tmp_path / name)
        assert same_tensors(read_file(merged), whole)
        if suffix == "ckpt" and len(stages) == 1:
            assert merged.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("sample", STRATEGY_ONLY)
def test_a_strategy_cuts_something(sample: str) -> None:
    """The control: with a strategy that left everything whole, the test above would say nothing."""
    stages = stages_of(sample)
    whole = whole_model(stages)
    parts = parts_by_formula(stages, whole)
    assert all(any(part.shape != whole[name].shape for name, part in held.items()) for held in parts.values())
    assert len({tuple(part.tobytes() for part in held.values()) for held in parts.values()}) > 1


@pytest.mark.parametrize(("a", "b"), [("mp4", "dp4_opt"), ("interleave", "mp4"), ("dp4_opt", "interleave")])
def test_one_network_goes_from_strategy_to_strategy(tmp_path: Path, a: str, b: str) -> None:
    assert {n: i[0] for n, i in stages_of(a)[0].items()} == {n: i[0] for n, i in stages_of(b)[0].items()}
    whole = whole_model(stages_of(a))
    source = write_whole(tmp_path / "full.ckpt", whole)
    reshard(source, tmp_path / "a", Parallel(dst_strategy=GOLDEN / a))
    reshard(tmp_path / "a", tmp_path / "ab", Parallel(dst_strategy=GOLDEN / b))
    reshard(source, tmp_path / "b", Parallel(dst_strategy=GOLDEN / b))
    assert rank_bytes(tmp_path / "ab") == rank_bytes(tmp_path / "b")


def test_the_training_state_of_every_stage_comes_along(tmp_path: Path) -> None:
    stages = stages_of("pp2dp2mp2")
    whole = whole_model(stages)
    source = write_whole(tmp_path / "full.ckpt", whole)
    reshard(source, tmp_path / "split", Parallel(dst_strategy=strategy_of("pp2dp2mp2", "ckpt", tmp_path / "s")))
    for rank, tensors in read_ranks(tmp_path / "split").items():
        assert {"global_step", "beta1_power", "learning_rate"} < tensors.keys()
        prefix = "layers.0" if rank < 4 else "layers.2"
        state = [f"{kind}.{prefix}.wq" for kind in ("moment1", "moment2", "accu_grads")]
        assert [tensors[name].shape for name in state] == [tensors[f"{prefix}.wq"].shape] * 3 == [(8, 16)] * 3
    reshard(tmp_path / "split", tmp_path / "bare", Parallel(), no_optimizer=True)
    weights = {name: array for name, array in whole.items() if name.startswith(("layers.", "emb.", "out."))}
    assert same_tensors(read_whole(tmp_path / "bare"), weights)


def test_a_damaged_part_shows(tmp_path: Path) -> None:
    """The control of the formula tests: one bit in one rank's part is seen."""
    stages = stages_of("mp4")
    whole = whole_model(stages)
    reshard(write_whole(tmp_path / "full.ckpt", whole), tmp_path / "split", Parallel(dst_strategy=GOLDEN / "mp4"))
    wanted = parts_by_formula(stages, whole)[3]
    found: dict[str, Array] = {name: array.copy() for name, array in read_ranks(tmp_path / "split")[3].items()}
    assert same_tensors(found, wanted)
    found["layers.1.wo"][0, 0] ^= 1
    assert odd_names(found, wanted) == ["layers.1.wo"]

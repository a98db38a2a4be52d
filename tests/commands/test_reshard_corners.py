"""Corners of cutting and joining: sources of several dtypes, gaps between ranks, copies of what is dropped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptkit.commands.convert import convert
from ckptkit.commands.inspect import inspect
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.errors import CoverageError
from ckptkit.execute import execute
from ckptkit.formats.mindspore_strategy import Strategy, dump_strategy, read_strategies
from ckptkit.mapping.expr import Leaf, node
from ckptkit.mapping.ops import Concat
from ckptkit.plan.plan import OutputTensor, Plan
from ckptkit.types import Extent, Region, TensorInfo, TensorLayout, TensorSpec
from tests.rank_results import odd_names, random_tensors, read_ranks, read_whole, weight_files, write_whole
from tests.test_execute import MemorySink
from tests.tiny_models import make_hf_plain
from tests.trained_models import make_llama, make_trained

pytestmark = pytest.mark.usefixtures("quick_disk")


def test_regions_of_a_tensor_that_is_fused_from_two_dtypes_are_each_moved_in_their_own(tmp_path: Path) -> None:
    """BF16 on the left, F32 on the right; three ranks hold the left, both, and the right, all as F32."""
    left = np.arange(1, 33, dtype=np.float32).reshape(4, 8)
    right = (left * 1.0001).astype(np.float32)
    file = tmp_path / "source"
    file.write_bytes((left.view(np.uint32) >> 16).astype(np.uint16).tobytes() + right.tobytes())
    infos = {
        "a": TensorInfo("a", (4, 8), "BF16", file, (Extent(0, 64),)),
        "b": TensorInfo("b", (4, 8), "F32", file, (Extent(64, 128),)),
    }
    expr = node(Concat(1), [Leaf("a", (4, 8)), Leaf("b", (4, 8))])
    boxes = {(0, 6): "a", (6, 12): "ab", (12, 16): "b"}
    outputs = tuple(
        OutputTensor(
            TensorSpec("w", (4, stop - start), "F32"), number, expr, {name: infos[name] for name in names},
            Region((0, start), (4, stop)),
        )
        for number, ((start, stop), names) in enumerate(boxes.items())
    )  # fmt: skip
    plan = Plan(outputs, (), {}, (), (), (), (), (), {})
    sink = MemorySink(plan)
    execute(plan, sink, workers=1)
    whole = np.concatenate([left, right], axis=1)
    for (start, stop), data in zip(boxes, sink.data, strict=True):
        assert bytes(data) == np.ascontiguousarray(whole[:, start:stop]).tobytes()


@pytest.mark.parametrize("ranks", ["0,1,6,7", "0,7", "2-5", "0-7"])
def test_ranks_with_a_gap_between_their_columns_are_written(tmp_path: Path, ranks: str) -> None:
    whole = write_whole(tmp_path / "whole.safetensors", tensors := random_tensors({"w": (8, 16)}))
    for devices in (4, 8):
        strategy = Strategy(0, {"w": TensorLayout((devices,), ((), (0,)))}, {})
        (tmp_path / f"{devices}.ckpt").write_bytes(dump_strategy(strategy))
    reshard(whole, tmp_path / "four", Parallel(dst_strategy=tmp_path / "4.ckpt"))
    reshard(tmp_path / "four", tmp_path / "some", Parallel(dst_strategy=tmp_path / "8.ckpt", ranks=ranks))
    for rank, held in read_ranks(tmp_path / "some").items():
        assert np.array_equal(held["w"], tensors["w"][:, 2 * rank : 2 * rank + 2])


def tied_ranks(folder: Path, *, odd: bool) -> Path:
    """Write two ranks that hold a tied model with both twins stored; with `odd` one copy of the head differs."""
    hf = make_hf_plain(folder / "hf", family="qwen2", tied=True, layers=2)
    convert(hf, folder / "ms", to_dialect="mindformers", parallel=Parallel(dp=2))
    ranks = read_ranks(folder / "ms")
    (embedding,) = (name for name in ranks[0] if "embedding" in name)
    (strategy,) = read_strategies(folder / "ms" / "strategy")
    layouts = {**strategy.tensors, "lm_head.weight": strategy.tensors[embedding]}
    source = folder / "source"
    (source / "strategy").mkdir(parents=True)
    (source / "strategy" / "ckpt_strategy_rank_0.ckpt").write_bytes(
        dump_strategy(replace(strategy, tensors=layouts, shapes={}))
    )
    (source / "config.json").write_bytes((hf / "config.json").read_bytes())
    for rank, held in ranks.items():
        head = held[embedding].copy()
        if odd and rank == 1:
            head[0, 0] ^= 5
        (source / f"rank_{rank}").mkdir()
        write_whole(source / f"rank_{rank}" / f"checkpoint_{rank}.ckpt", {**held, "lm_head.weight": head})
    return source


def test_copies_of_a_tied_twin_that_is_dropped_are_compared_too(tmp_path: Path) -> None:
    convert(tied_ranks(tmp_path / "equal", odd=False), tmp_path / "out", to_dialect="hf")
    assert odd_names(read_whole(tmp_path / "out"), read_whole(tmp_path / "equal" / "hf")) == []
    with pytest.raises(CoverageError, match="differ") as caught:
        convert(tied_ranks(tmp_path / "odd", odd=True), tmp_path / "never", to_dialect="hf")
    assert "lm_head.weight" in caught.value.items[0]


def test_a_rank_that_would_hold_nothing_is_refused(tmp_path: Path) -> None:
    whole = write_whole(tmp_path / "whole.safetensors", random_tensors({"a": (4, 4)}))
    one = TensorLayout((1,), ((), ()))
    (tmp_path / "strategy").mkdir()
    for stage, name in enumerate(("a", "adam_m.a")):
        (tmp_path / "strategy" / f"{stage}.ckpt").write_bytes(dump_strategy(Strategy(stage, {name: one}, {})))
    with pytest.raises(CoverageError, match="1 of 2 ranks would hold nothing") as caught:
        reshard(whole, tmp_path / "out", Parallel(dst_strategy=tmp_path / "strategy"))
    assert caught.value.items == ("rank_1",)


@pytest.mark.parametrize("name", ["state-old.safetensors", "state-00002-of-00003.safetensors"])
def test_training_state_is_one_numbered_set_and_nothing_else(tmp_path: Path, name: str) -> None:
    whole = make_trained(make_llama(tmp_path / "hf"), tmp_path / "whole")
    convert(whole, tmp_path / "back", to_dialect="hf")
    inspect(tmp_path / "back")
    (file,) = weight_files(tmp_path / "back" / "training_state")
    (file.parent / name).write_bytes(file.read_bytes())
    with pytest.raises(CoverageError, match="does not hold all files of one training state"):
        inspect(tmp_path / "back")

"""Folders of strategy files: a file a stage or a file a rank are the stages of one run, or are refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from strategy_bytes import (
    CUT,
    GOLDEN,
    json_bytes,
    stage_of,
)

from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats.mindspore_strategy import (
    Strategy,
    dump_merged,
    dump_strategy,
    read_strategies,
)
from ckptkit.types import TensorLayout


def folder_of(folder: Path, **contents: bytes) -> Path:
    for name, data in contents.items():
        (folder / f"{name}.ckpt").write_bytes(data)
    return folder


def of_stage(stage: int | None, **tensors: TensorLayout) -> bytes:
    """Return a file of one stage; without a number, one without strategy items."""
    if stage is not None:
        return dump_strategy(stage_of(stage, **tensors))
    data = dump_strategy(stage_of(0, **tensors))
    return data[:2] + data[data.index(b"\x1a") :]


def test_files_of_the_ranks_of_one_stage_are_that_stage_once(tmp_path: Path) -> None:
    first, second = stage_of(0, a=CUT), stage_of(1, b=CUT)
    for rank in range(8):
        data = dump_strategy(first if rank < 4 else second)
        (tmp_path / f"ckpt_strategy_rank_{rank}_rank_{rank}.ckpt").write_bytes(data)
    assert read_strategies(tmp_path) == (first, second)
    odd = stage_of(1, b=TensorLayout((2, 2), ((), (0,))))
    (tmp_path / "ckpt_strategy_rank_7_rank_7.ckpt").write_bytes(dump_strategy(odd))
    with pytest.raises(CoverageError, match=r"rank_4.* and .*rank_7.* contradict each other about stage 1\n  b\n"):
        read_strategies(tmp_path)


@pytest.mark.parametrize(
    "odd", [stage_of(0, a=CUT, b=CUT), stage_of(0, b=CUT), stage_of(0, a=replace(CUT, opt_step=2, opt_size=-1))]
)
def test_files_of_one_stage_that_differ_are_refused(tmp_path: Path, odd: Strategy) -> None:
    folder_of(tmp_path, one=of_stage(0, a=CUT), two=dump_strategy(odd))
    with pytest.raises(CoverageError, match="contradict each other about stage 0"):
        read_strategies(tmp_path)


def test_shapes_that_differ_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_bytes(json_bytes(w={}))
    (tmp_path / "two.json").write_bytes(json_bytes(w={"tensor_shape": [16, 4]}))
    with pytest.raises(CoverageError, match="contradict each other about stage 0"):
        read_strategies(tmp_path)


def test_device_axes_of_size_1_are_no_contradiction(tmp_path: Path) -> None:
    padded = TensorLayout((1, 2, 2, 1), ((1,), ()))
    folder_of(tmp_path, one=of_stage(0, w=CUT), two=of_stage(0, w=padded))
    assert read_strategies(tmp_path) == (stage_of(0, w=CUT),)


def test_a_stage_that_is_missing_is_named(tmp_path: Path) -> None:
    folder_of(tmp_path, a=of_stage(0), b=of_stage(3))
    with pytest.raises(CoverageError, match="lacks 2 of 4 stages\n  stage 1\n  stage 2"):
        read_strategies(tmp_path)


def test_a_merged_file_beside_its_parts_is_no_contradiction(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "pp2dp2mp2", tmp_path / "run")
    parts = read_strategies(tmp_path / "run")
    (tmp_path / "run" / "merged.ckpt").write_bytes(dump_merged(parts))
    assert read_strategies(tmp_path / "run") == parts


def test_files_without_a_stage_take_it_from_their_names(tmp_path: Path) -> None:
    two, one = of_stage(None, b=CUT), of_stage(None, a=CUT)
    folder_of(tmp_path, strategy_stage1=two, strategy_stage0=one)
    assert read_strategies(tmp_path) == (stage_of(0, a=CUT), stage_of(1, b=CUT))


def test_files_without_a_stage_take_it_from_their_ranks(tmp_path: Path) -> None:
    two, one = of_stage(None, b=CUT), of_stage(None, a=CUT)
    folder_of(tmp_path, strategy_rank_0=one, strategy_rank_3=one, strategy_rank_4=two, strategy_rank_7=two)
    assert read_strategies(tmp_path) == (stage_of(0, a=CUT), stage_of(1, b=CUT))
    folder_of(tmp_path, strategy_rank_5=one)
    with pytest.raises(CoverageError, match="contradict each other about stage 1"):
        read_strategies(tmp_path)


def test_a_sole_stage_needs_no_number(tmp_path: Path) -> None:
    folder_of(tmp_path, one=of_stage(None))
    assert read_strategies(tmp_path) == (stage_of(None),)
    folder_of(tmp_path, two=of_stage(None))
    assert read_strategies(tmp_path) == (stage_of(None),)


@pytest.mark.parametrize("second", [of_stage(None, b=CUT), of_stage(1, b=CUT)])
def test_files_without_a_stage_and_without_telling_names_are_refused(tmp_path: Path, second: bytes) -> None:
    folder_of(tmp_path, one=of_stage(None, a=CUT), two=second)
    with pytest.raises(CoverageError, match="state no stage, and their names do not tell it"):
        read_strategies(tmp_path)


@pytest.mark.parametrize("name", ["strategy_stage1.ckpt", "stage1.ckpt", "strategy_stage1.json"])
@pytest.mark.parametrize("data", [bytes(64), b"\x07" + of_stage(1)[1:]])
def test_a_damaged_file_in_a_folder_is_not_passed_over(tmp_path: Path, name: str, data: bytes) -> None:
    folder_of(tmp_path, strategy_stage0=of_stage(0))
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=f"no strategy files of MindSpore\n  {name}"):
        read_strategies(tmp_path)


def test_other_files_in_a_folder_are_passed_over(tmp_path: Path) -> None:
    folder_of(tmp_path, strategy_stage0=of_stage(0))
    shutil.copy(GOLDEN / "dp2mp2" / "full.ckpt", tmp_path / "weights.ckpt")
    (tmp_path / "ckptkit.json").write_text("{}")
    (tmp_path / ".strategy.ckpt").write_text("")
    (tmp_path / "rank_0").mkdir()
    assert read_strategies(tmp_path) == (stage_of(0),)


def test_a_folder_without_strategy_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no strategy file of MindSpore"):
        read_strategies(tmp_path)

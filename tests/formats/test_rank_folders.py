"""The contract: ranks by number, all of them, of one step of one run; what is chosen is said, nothing is guessed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats.rank_folders import LastSave, find_ranks, folders_with_ranks, open_ranks

CLIENT = Path(__file__).parents[1] / "clients" / "mindformers_saves.py"


def put(folder: Path, rank: int, *names: str) -> None:
    path = folder / f"rank_{rank}"
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        save_file({"w": np.full(2, rank, np.float32)}, path / name)


def put_meta(folder: Path, rank: int, epoch: object, step: object, file: object) -> None:
    content = {"last_epoch": epoch, "last_step": step, "last_ckpt_file": file}
    (folder / f"rank_{rank}" / "meta.json").write_text(json.dumps(content))


def chosen(folder: Path, **options: int) -> list[str]:
    return [checkpoint.path.name for checkpoint in open_ranks(folder, **options).ranks.values()]


# ---- which ranks there are ----------------------------------------------------------------------------------------


def test_ranks_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    for rank in range(128):
        put(tmp_path, rank, f"net{rank}.safetensors")
    (tmp_path / "rank_x").mkdir()
    assert list(find_ranks(tmp_path)) == list(range(128))
    ranks = open_ranks(tmp_path)
    assert list(ranks.ranks) == list(range(128))
    assert [c.path.name for c in ranks.ranks.values()] == [f"net{r}.safetensors" for r in range(128)]


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    for rank in (0, 1, 3, 6):
        put(tmp_path / "run", rank, "a.safetensors")
    with pytest.raises(CoverageError, match="lacks 3 of 7 ranks") as caught:
        open_ranks(tmp_path / "run")
    assert caught.value.items == ("rank_2", "rank_4", "rank_5")
    assert caught.value.hint == "copy the missing folders here"


def test_a_rank_that_is_in_the_folder_beside_is_found_for_the_hint(tmp_path: Path) -> None:
    """As when each process names its folder by its own clock."""
    for rank in (0, 2):
        put(tmp_path / "run-10-00-00", rank, "a.safetensors")
    put(tmp_path / "run-10-00-01", 1, "a.safetensors")
    (tmp_path / "run-10-00-00.log").mkdir()
    for rank in range(3):
        put(tmp_path / "another", rank, "a.safetensors")
    with pytest.raises(CoverageError, match="lacks 1 of 3 ranks") as caught:
        open_ranks(tmp_path / "run-10-00-00")
    assert "`run-10-00-01`, beside this folder, has some" in caught.value.hint


def test_one_rank_in_two_folders_is_refused(tmp_path: Path) -> None:
    put(tmp_path, 0, "a.safetensors")
    put(tmp_path, 1, "a.safetensors")
    (tmp_path / "rank_1").rename(tmp_path / "rank_01")
    put(tmp_path, 1, "a.safetensors")
    with pytest.raises(UsageError, match="holds rank 1 twice") as caught:
        find_ranks(tmp_path)
    assert set(caught.value.items) == {"rank_1", "rank_01"}


def test_an_empty_rank_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    with pytest.raises(CoverageError, match="holds no .ckpt"):
        open_ranks(tmp_path)


def test_the_folder_above_is_answered_with_those_that_hold_ranks(tmp_path: Path) -> None:
    put(tmp_path / "checkpoint_network", 0, "a.safetensors")
    put(tmp_path / "checkpoint", 0, "a.safetensors")
    (tmp_path / "strategy").mkdir()
    assert [path.name for path in folders_with_ranks(tmp_path)] == ["checkpoint", "checkpoint_network"]
    with pytest.raises(UsageError, match="holds no `rank_N` folders") as caught:
        open_ranks(tmp_path)
    assert caught.value.items == (str(tmp_path / "checkpoint"), str(tmp_path / "checkpoint_network"))
    assert caught.value.hint == "name one of these, which do"


def test_files_of_ranks_without_folders_are_answered_with_what_to_do(tmp_path: Path) -> None:
    for rank in range(2):
        save_file({"w": np.zeros(2, np.float32)}, tmp_path / f"net_rank_{rank}-1_2.safetensors")
    with pytest.raises(UsageError, match="holds no `rank_N` folders") as caught:
        open_ranks(tmp_path)
    assert caught.value.hint == "put the file of each rank N in a folder `rank_N`"
    assert len(caught.value.items) == 2


# ---- which file of a rank counts ----------------------------------------------------------------------------------


def test_the_newest_step_by_number_is_taken_and_said(tmp_path: Path) -> None:
    for rank in range(2):
        put(tmp_path, rank, "a-1_9.safetensors", "a-1_10.safetensors")
    ranks = open_ranks(tmp_path)
    assert {c.path.name for c in ranks.ranks.values()} == {"a-1_10.safetensors"}
    assert ranks.notes == ("each rank: epoch 1, step 10 is the newest; passed over: `a-1_9.safetensors`",)
    assert ranks.saved == (1, 10)
    assert chosen(tmp_path, step=9) == ["a-1_9.safetensors"] * 2
    assert open_ranks(tmp_path, step=9).saved == (1, 9)


def test_a_later_epoch_is_newer_whatever_its_step(tmp_path: Path) -> None:
    put(tmp_path, 0, "a-9_100.safetensors", "a-10_2.safetensors")
    assert chosen(tmp_path) == ["a-10_2.safetensors"]


def test_a_step_in_two_epochs_is_that_of_the_later_one(tmp_path: Path) -> None:
    put(tmp_path, 0, "a-1_5.safetensors", "a-2_5.safetensors", "a-3_1.safetensors")
    ranks = open_ranks(tmp_path, step=5)
    assert ranks.saved == (2, 5)
    assert ranks.notes == ("each rank: epoch 2, step 5 is the newest; passed over: `a-1_5.safetensors`",)


def test_ranks_of_different_steps_are_refused(tmp_path: Path) -> None:
    put(tmp_path, 0, "a-1_9.safetensors", "a-1_10.safetensors")
    put(tmp_path, 1, "a-1_9.safetensors")
    with pytest.raises(CoverageError, match="do not offer the same step") as caught:
        open_ranks(tmp_path)
    assert caught.value.items == ("rank_0: epoch 1, step 10", "rank_1: epoch 1, step 9")
    assert caught.value.hint == "epoch 1, step 9 is on every rank: take it with `--step 9`"
    assert chosen(tmp_path, step=9) == ["a-1_9.safetensors"] * 2
    with pytest.raises(CoverageError, match="`rank_1` has no file of step 10") as caught:
        open_ranks(tmp_path, step=10)
    assert caught.value.items == ("it has epoch 1, step 9",)


def test_ranks_without_a_common_step_are_refused(tmp_path: Path) -> None:
    put(tmp_path, 0, "a-1_9.safetensors")
    put(tmp_path, 1, "a.safetensors")
    with pytest.raises(CoverageError, match="do not offer the same step") as caught:
        open_ranks(tmp_path)
    assert caught.value.items == ("rank_0: epoch 1, step 9", "rank_1: no step")
    assert caught.value.hint == "no step is complete: copy the missing files"


def test_files_whose_names_say_no_step_are_not_guessed_between(tmp_path: Path) -> None:
    put(tmp_path, 0, "a.safetensors", "b-1_2.safetensors")
    with pytest.raises(UsageError, match="do not say which is the newest") as caught:
        open_ranks(tmp_path)
    assert caught.value.items == ("a.safetensors", "b-1_2.safetensors")
    assert chosen(tmp_path, step=2) == ["b-1_2.safetensors"]


def test_files_of_two_formats_are_not_chosen_between(tmp_path: Path) -> None:
    put(tmp_path, 0, "a-1_2.safetensors", "a-1_2.ckpt")
    with pytest.raises(UsageError, match="`rank_0` holds files of two formats") as caught:
        open_ranks(tmp_path)
    assert caught.value.items == ("a-1_2.ckpt", "a-1_2.safetensors")


def test_a_file_of_another_rank_is_refused(tmp_path: Path) -> None:
    put(tmp_path, 0, "net_rank_0-1_2.safetensors")
    put(tmp_path, 1, "net_rank_0-1_2.safetensors")
    with pytest.raises(CoverageError, match="`rank_1` holds `net_rank_0-1_2.safetensors`, a file of rank 0"):
        open_ranks(tmp_path)


@pytest.mark.parametrize("name", ["checkpoint_{}", "net{}", "net-{}", "a_0{}"])
def test_files_that_are_called_after_each_others_rank_are_refused(tmp_path: Path, name: str) -> None:
    for rank, number in enumerate((0, 2, 1)):
        put(tmp_path, rank, f"{name.format(number)}.safetensors")
    with pytest.raises(CoverageError, match="2 of 3 ranks hold a file that is called after another rank") as caught:
        open_ranks(tmp_path)
    file = name.format(2)
    assert caught.value.items[0] == f"rank_1 holds {file}.safetensors"


@pytest.mark.parametrize(
    "names",
    [
        ("net0", "net1", "net2"),
        ("net1", "net2", "net3"),  # counted from 1, or by something else
        ("net0-1_2", "net2-1_2", "net1-1_2"),  # runs are numbered like this too
        ("a0", "b2", "c1"),
        ("net2", "net2", "net2"),
    ],
)
def test_numbers_that_are_not_those_of_the_ranks_are_no_reason_to_refuse(tmp_path: Path, names: list[str]) -> None:
    for rank, name in enumerate(names):
        put(tmp_path, rank, f"{name}.safetensors")
    assert chosen(tmp_path) == [f"{name}.safetensors" for name in names]


def test_graphs_strategies_and_unfinished_files_are_no_weights(tmp_path: Path) -> None:
    put(tmp_path, 0, "a-1_2.safetensors")
    rank = tmp_path / "rank_0"
    (rank / "a-graph.meta").write_bytes(b"graph")
    (rank / "graph.pb").write_bytes(b"graph")
    (rank / "a-1_3.tmp").write_bytes(b"half")
    (rank / "strategy.ckpt").write_bytes(b"\x08\x02\x12\x00")
    (rank / "sub.safetensors").mkdir()
    assert chosen(tmp_path) == ["a-1_2.safetensors"]
    (rank / "strategy.ckpt").write_bytes(b"\x0a\x02\x0a\x00")  # the control: a record of a checkpoint
    with pytest.raises(UsageError, match="files of two formats"):
        open_ranks(tmp_path)


def test_the_ranks_note_in_groups_what_they_passed_over(tmp_path: Path) -> None:
    for rank in range(3):
        put(tmp_path, rank, f"a_rank_{rank}-1_2.safetensors", f"a_rank_{rank}-1_3.safetensors")
    put(tmp_path, 1, "a_rank_1-1_1.safetensors")
    passed = "epoch 1, step 3 is the newest; passed over: "
    assert open_ranks(tmp_path).notes == (
        passed.join(["`rank_0`, `rank_2`: ", "`a_rank_{rank}-1_2.safetensors`"]),
        passed.join(["`rank_1`: ", "`a_rank_{rank}-1_1.safetensors`, `a_rank_{rank}-1_2.safetensors`"]),
    )


# ---- runs, and what MindFormers' meta.json says -------------------------------------------------------------------


def test_of_several_runs_meta_json_names_the_last(tmp_path: Path) -> None:
    for rank in range(2):
        put(tmp_path, rank, *(f"CKP_rank_{rank}{run}.safetensors" for run in ("-1_9", "-1_10", "_1-1_3", "_1-1_2")))
    with pytest.raises(UsageError, match="`rank_0` holds files of several runs"):
        open_ranks(tmp_path)
    for rank in range(2):
        put_meta(tmp_path, rank, 1, 3, f"CKP_rank_{rank}_1-1_3.safetensors")
    ranks = open_ranks(tmp_path)
    assert [c.path.name for c in ranks.ranks.values()] == [f"CKP_rank_{r}_1-1_3.safetensors" for r in range(2)]
    assert "epoch 1, step 3 is the newest of the run that `meta.json` names; passed over:" in ranks.notes[0]
    assert ranks.resume[1] == LastSave(1, 3, "CKP_rank_1_1-1_3.safetensors")
    assert chosen(tmp_path, step=9) == ["CKP_rank_0-1_9.safetensors", "CKP_rank_1-1_9.safetensors"]


def test_a_newer_file_than_meta_json_names_is_taken_and_said(tmp_path: Path) -> None:
    for rank in range(2):
        put(tmp_path, rank, f"CKP_rank_{rank}-1_9.safetensors", f"CKP_rank_{rank}-1_10.safetensors")
        put_meta(tmp_path, rank, 1, 10 - rank, f"CKP_rank_{rank}-1_{10 - rank}.safetensors")
    ranks = open_ranks(tmp_path)
    assert ranks.saved == (1, 10)
    assert ranks.notes[1] == "epoch 1, step 10 is taken; `meta.json` names as the last save epoch 1, step 9"
    assert open_ranks(tmp_path, step=9).notes == ()


@pytest.mark.parametrize(
    "last", [(1, "9", "a-1_9.ckpt"), (1, 9, "a.ckpt"), (None, None, None), (True, 9, "a-1_9.ckpt")]
)
def test_a_meta_json_that_names_no_save_is_passed_over_and_said(tmp_path: Path, last: tuple[object, ...]) -> None:
    put(tmp_path, 0, "a-1_9.safetensors")
    put_meta(tmp_path, 0, *last)
    ranks = open_ranks(tmp_path)
    assert ranks.resume == {}
    assert ranks.notes == ("passed over, for they do not name a last save: `rank_0/meta.json`",)


def test_a_meta_json_that_is_no_json_is_passed_over_and_said(tmp_path: Path) -> None:
    put(tmp_path, 0, "a-1_9.safetensors")
    (tmp_path / "rank_0" / "meta.json").write_text('{"last_epoch": 1')
    assert open_ranks(tmp_path).notes == ("passed over, for they do not name a last save: `rank_0/meta.json`",)


# ---- names alike for a new set ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["CKP_rank_0_1-2_10.ckpt", "CKP_rank_1_1-2_10.ckpt"], "CKP_rank_{rank}_1-2_10.ckpt"),
        (["n_rank_0-network-2_10.ckpt", "n_rank_1-network-2_10.ckpt"], "n_rank_{rank}-network-2_10.ckpt"),
        (["net0.ckpt", "net1.ckpt"], "net{rank}.ckpt"),
        (["checkpoint_0.safetensors"], "checkpoint_{rank}.safetensors"),
        (["a-0_0.ckpt", "a-0_0.ckpt"], "a-0_0.ckpt"),
        (["a-1_1.ckpt", "a-1_1.ckpt"], "a-1_1.ckpt"),
        (["llama2.ckpt"] * 3, "llama2.ckpt"),
        (["net10.ckpt", "net10.ckpt"], "net10.ckpt"),
        (["a-1_1.ckpt", "b-1_1.ckpt"], ""),
    ],
)
def test_a_new_set_can_be_named_like_this_one(tmp_path: Path, names: list[str], pattern: str) -> None:
    for rank, name in enumerate(names):
        put(tmp_path, rank, name)
    ranks = open_ranks(tmp_path)
    assert ranks.pattern == pattern
    assert ranks.file_name(7) == (pattern.replace("{rank}", "7") or "checkpoint_7.ckpt")
    if pattern:
        assert [ranks.file_name(rank) for rank in ranks.ranks] == names
    said = "the names of the ranks' files differ in more than the rank: they may be of different runs"
    assert ranks.notes == (() if pattern else (said,))


# ---- as the frameworks write them ---------------------------------------------------------------------------------


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_what_mindformers_saves_is_read(tmp_path: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CLIENT), str(tmp_path / "out"), kind, "9", "10"],
        cwd=tmp_path, env={**os.environ, "GLOG_v": "4"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    with pytest.raises(UsageError, match="holds no `rank_N` folders") as caught:
        open_ranks(tmp_path / "out")
    assert [Path(item).name for item in caught.value.items] == ["checkpoint", "checkpoint_network"]
    ranks = open_ranks(tmp_path / "out" / "checkpoint")
    assert ranks.pattern == f"CKP_rank_{{rank}}_1-1_9.{kind}"
    assert ranks.resume == {rank: LastSave(1, 9, f"CKP_rank_{rank}_1-1_9.{kind}") for rank in range(2)}
    assert {"weight", "adam_m.weight", "global_step", "epoch_num", "step_num"} <= ranks.ranks[1].tensors.keys()
    assert not ranks.thinned
    assert open_ranks(tmp_path / "out" / "checkpoint", step=10).pattern == f"CKP_rank_{{rank}}-1_10.{kind}"
    network = open_ranks(tmp_path / "out" / "checkpoint_network", step=10)
    assert network.pattern == f"CKP_rank_{{rank}}-network-1_10.{kind}"
    assert network.ranks[0].tensors.keys() == {"weight", "bias"}


@pytest.mark.frameworks
@pytest.mark.parametrize(("removed", "thinned"), [(True, True), (False, False), (None, False)])
def test_redundancy_that_mindspore_removed_is_known(tmp_path: Path, removed: bool | None, thinned: bool) -> None:
    os.environ.setdefault("GLOG_v", "4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mindspore as ms

        for rank, name in enumerate("ab"):
            (tmp_path / f"rank_{rank}").mkdir()
            tensors = [{"name": name, "data": ms.Tensor(np.ones(2, np.float32))}]
            file = str(tmp_path / f"rank_{rank}" / "net-1_2.safetensors")
            ms.save_checkpoint(tensors, file, format="safetensors", remove_redundancy=removed)
    ranks = open_ranks(tmp_path)
    assert ranks.thinned is thinned
    assert [list(checkpoint.tensors) for checkpoint in ranks.ranks.values()] == [["a"], ["b"]]

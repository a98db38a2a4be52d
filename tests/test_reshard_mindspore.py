"""MindSpore's own tools on shards and strategy files that ckptkit wrote, and ckptkit on what they get wrong.

One child process runs MindSpore (`clients/mindspore_strategies.py`). Its `transform_checkpoints` merges and cuts our
.ckpt shards by our strategy files: both ways lead to the same tensors. Where MindSpore 2.9 is wrong, a test asserts
what it does, so that the claim stays true, and that ckptkit does it right or refuses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients.run import run_client

from ckptkit.commands.convert import convert
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.errors import CoverageError
from ckptkit.formats.mindspore_strategy import Strategy, dump_merged, dump_strategy
from ckptkit.types import TensorLayout
from tests.rank_results import Tensors, odd_names, random_tensors, read_ranks, read_whole, same_tensors, write_whole
from tests.trained_models import make_llama, make_qwen3_moe, make_trained

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]

CUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("llama", {"mp": 2}),
    "tp2 dp2 opt": ("llama", {"mp": 2, "dp": 2, "optimizer_shard": True}),
    "tp2 pp3": ("llama", {"mp": 2, "pp": 3}),
    "tp4 kv": ("few kv", {"mp": 4, "replicate_kv": True}),
    "tied pp2": ("tied", {"mp": 2, "pp": 2}),
    "moe ep4": ("moe", {"ep": 4}),
    "moe tp2 pp2 ep2": ("moe", {"mp": 2, "pp": 2, "ep": 2}),
}
FROM_TO = [("tp2", "tp2 dp2 opt"), ("tp2 dp2 opt", "tp2"), ("tp2 dp2 opt", "tp2 pp3"), ("tp2 pp3", "tp2")]
CUT, ALONG, WHOLE = (TensorLayout((2,), axes) for axes in (((0,), ()), ((), (0,)), ((), ())))


class Room:
    """A folder in which things are made, and what MindSpore is to do and has done with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[dict[str, Any]] = []
        self.answers: dict[str, Any] = {}

    def path(self, name: str) -> Path:
        return self.folder / name

    def add(self, name: str, **job: Any) -> None:
        self.jobs.append({"name": name, **job})

    def transform(self, source: Path, name: str, src: Path | None, dst: Path | None = None, **more: str) -> None:
        self.add(name, transform=source, to=self.path(f"theirs {name}"), src=src, dst=dst, **more)

    def theirs(self, name: str) -> dict[int, Tensors]:
        """Return what MindSpore made; its answer must not be an error."""
        assert self.answers[name] == {}
        return read_ranks(self.path(f"theirs {name}"))

    def put(self, name: str, ranks: Sequence[Tensors], layouts: Sequence[dict[str, TensorLayout]], file: str) -> None:
        """Write ranks under the file name `file`, with N for the rank, and a strategy file for each stage."""
        for rank, tensors in enumerate(ranks):
            write_whole(self.path(name) / f"rank_{rank}" / file.replace("N", str(rank)), tensors)
        for stage, layout in enumerate(layouts):
            path = self.path(f"{name} strategy/stage{stage}.ckpt")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(dump_strategy(Strategy(stage, layout, {})))

    def strategy(self, name: str) -> Path:
        return self.path(f"{name} strategy")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    room = Room(tmp_path_factory.mktemp("mindspore"))
    make_models(room)
    add_own_shards(room)
    add_wrong(room)
    jobs = room.path("jobs.json")
    jobs.write_text(json.dumps(room.jobs, default=str))
    room.answers = run_client("mindspore_strategies", "--jobs", str(jobs), timeout=240)
    return room


def make_models(room: Room) -> None:
    hf = {
        "llama": make_llama(room.path("hf llama")),
        "few kv": make_llama(room.path("hf kv"), kv_heads=2),
        "tied": make_llama(room.path("hf tied"), tied=True),
        "moe": make_qwen3_moe(room.path("hf moe")),
    }
    for name, folder in hf.items():
        make_trained(folder, room.path(name))
    bf16 = make_llama(room.path("hf bf16"), dtype="BF16")
    convert(bf16, room.path("bf16"), format="ckpt")
    convert(bf16, room.path("bf16 tp2"), format="ckpt", parallel=Parallel(mp=2))


def add_own_shards(room: Room) -> None:
    """Cut every model, and let MindSpore merge the shards and cut them in other ways."""
    for label, (model, degrees) in CUTS.items():
        reshard(room.path(model), room.path(label), Parallel(**degrees), variant="base", format="ckpt")
        room.add(f"strategies of {label}", merge=room.path(label) / "strategy", to=merged_strategy(room, label))
        room.transform(room.path(label), label, src=merged_strategy(room, label))
    room.transform(room.path("bf16 tp2"), "bf16", src=room.path("bf16 tp2/strategy/ckpt_strategy_rank_0.ckpt"))
    for a, b in FROM_TO:
        room.transform(room.path(a), f"{a} to {b}", src=merged_strategy(room, a), dst=merged_strategy(room, b))
    whole = random_tensors({"w": (4, 6), "adam_m.w": (4, 6), "global_step": (1,)})
    room.put("state", [whole], [{"w": TensorLayout((2,), ((), (0,)))}], "whole.ckpt")
    reshard(room.path("state/rank_0/whole.ckpt"), room.path("state cut"), Parallel(dst_strategy=room.strategy("state")))
    room.transform(room.path("state cut"), "state", src=room.path("state cut/strategy/ckpt_strategy_rank_0.ckpt"))


def merged_strategy(room: Room, label: str) -> Path:
    """Return the one file that MindSpore merges of our strategy files; it merges a single stage's too."""
    return room.path(f"merged {label}.ckpt")


# ---- both are right -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", CUTS)
def test_mindspore_merges_our_shards_by_our_strategy_files(room: Room, label: str) -> None:
    assert room.answers[f"strategies of {label}"] == {}
    original = read_whole(room.path(CUTS[label][0]))
    theirs = room.theirs(label)
    assert list(theirs) == [0]
    assert odd_names(theirs[0], original) == []
    assert any(name.startswith("adam_v.") for name in original)


def test_mindspore_merges_our_bf16_shards(room: Room) -> None:
    assert same_tensors(room.theirs("bf16")[0], read_whole(room.path("bf16")))


@pytest.mark.parametrize(("a", "b"), FROM_TO)
def test_mindspore_cuts_our_shards_as_we_do(room: Room, tmp_path: Path, a: str, b: str) -> None:
    reshard(room.path(a), tmp_path / "ours", Parallel(**CUTS[b][1]), format="ckpt")
    ours, theirs = read_ranks(tmp_path / "ours"), room.theirs(f"{a} to {b}")
    assert list(ours) == list(theirs)
    for rank, tensors in ours.items():
        assert odd_names(tensors, theirs[rank]) == [], f"rank {rank}"


def test_state_that_follows_its_weight_is_in_the_strategy_files_we_write(room: Room) -> None:
    shapes = {name: array.shape for name, array in read_ranks(room.path("state cut"))[1].items()}
    assert shapes == {"w": (4, 3), "adam_m.w": (4, 3), "global_step": (1,)}
    assert same_tensors(room.theirs("state")[0], read_whole(room.path("state/rank_0")))


# ---- MindSpore is wrong ---------------------------------------------------------------------------------------------


def add_wrong(room: Room) -> None:
    whole = random_tensors({"a": (8, 4), "b": (4, 8), "adam_m.a": (8, 4), "norm": (4,)})
    halves = [cut_in_two(whole, rank) for rank in range(2)]
    both = {"a": CUT, "b": ALONG, "adam_m.a": CUT, "norm": TensorLayout((2,), ((),))}
    write_whole(room.path("whole/whole.ckpt"), whole)

    room.put("axis", halves, [both], "net-N.safetensors")
    room.put("turned", [], [both | {"a": ALONG, "adam_m.a": ALONG, "b": CUT}], "")
    dst = room.strategy("turned") / "stage0.ckpt"
    room.transform(room.path("axis"), "axis", room.strategy("axis") / "stage0.ckpt", dst, format="safetensors")

    without = {name: layout for name, layout in both.items() if name != "adam_m.a"}
    room.put("moments", halves, [without], "net-N.ckpt")
    room.transform(room.path("moments"), "moments", room.strategy("moments") / "stage0.ckpt")

    stages = [{"layers.0.w": CUT}, {"layers.1.w": CUT}]
    parts = random_tensors({"layers.0.w": (8, 4), "layers.1.w": (8, 4)})
    of_rank = [{name: np.split(parts[name], 2)[rank]} for name in parts for rank in range(2)]
    room.put("stages", of_rank, stages, "net-N.ckpt")
    room.path("first stage.ckpt").write_bytes(dump_merged([Strategy(0, stages[0], {})]))
    room.transform(room.path("stages"), "stages", room.path("first stage.ckpt"))

    room.put("order", halves, [both], "net-10_10.ckpt")
    for rank in range(2):
        old = {name: array + np.uint32(1) for name, array in halves[rank].items()}
        write_whole(room.path(f"order/rank_{rank}/net-9_10.ckpt"), old)
    room.transform(room.path("order"), "order", room.strategy("order") / "stage0.ckpt")

    odd = [halves[0], halves[1] | {"norm": halves[1]["norm"] ^ np.uint32(1 << 22)}]
    room.put("replicas", odd, [both], "net-N.ckpt")
    room.transform(room.path("replicas"), "replicas", room.strategy("replicas") / "stage0.ckpt")

    lacking = [{name: array for name, array in half.items() if name != "b"} for half in halves]
    room.put("lacking", lacking, [both], "net-N.ckpt")
    room.transform(room.path("lacking"), "lacking", room.strategy("lacking") / "stage0.ckpt")

    room.put("wrong", halves, [both | {"a": WHOLE, "adam_m.a": WHOLE}], "net-N.ckpt")
    room.transform(room.path("wrong"), "wrong", room.strategy("wrong") / "stage0.ckpt")

    three = {name: TensorLayout((3,), ((0,), ())) for name in ("a", "b")}
    rows = random_tensors({"a": (12, 4), "b": (24, 2)})
    room.put("four", [{n: np.split(t, 4)[r] for n, t in rows.items()} for r in range(4)],
             [{name: TensorLayout((4,), ((0,), ())) for name in rows}], "net-N.ckpt")  # fmt: skip
    room.put("three", [], [three], "")
    dst = room.strategy("three") / "stage0.ckpt"
    room.transform(room.path("four"), "three", room.strategy("four") / "stage0.ckpt", dst)


def cut_in_two(whole: Tensors, rank: int) -> Tensors:
    axes = {"a": 0, "b": 1, "adam_m.a": 0}
    return {n: np.ascontiguousarray(np.split(t, 2, axes[n])[rank]) if n in axes else t for n, t in whole.items()}


def original(room: Room) -> Tensors:
    return read_whole(room.path("whole"))


def ours(room: Room, name: str, to: Path, **more: Any) -> Tensors:
    """Return what we merge of the ranks `name` by their strategy."""
    reshard(room.path(name), to / name, Parallel(src_strategy=room.strategy(name), **more))
    return read_whole(to / name)


def test_in_safetensors_mindspore_writes_wrong_bytes_for_what_it_cuts_on_axis_1(room: Room, tmp_path: Path) -> None:
    theirs = room.theirs("axis")
    wanted = [{n: np.split(original(room)[n], 2, 1)[rank] for n in ("a", "adam_m.a")} for rank in range(2)]
    for rank in range(2):
        assert [theirs[rank][name].shape for name in wanted[rank]] == [(8, 2), (8, 2)]
        assert odd_names({n: theirs[rank][n] for n in wanted[rank]}, wanted[rank]) == ["a", "adam_m.a"]
        assert np.array_equal(theirs[rank]["b"], np.split(original(room)["b"], 2)[rank])  # on axis 0 it is right
    strategies = {"src_strategy": room.strategy("axis"), "dst_strategy": room.strategy("turned")}
    reshard(room.path("axis"), tmp_path / "ours", Parallel(**strategies))
    for rank, tensors in read_ranks(tmp_path / "ours").items():
        assert odd_names({n: tensors[n] for n in wanted[rank]}, wanted[rank]) == []
    assert same_tensors(ours(room, "axis", tmp_path), original(room))


def test_moments_without_an_entry_stay_at_half_their_shape_in_mindspore(room: Room, tmp_path: Path) -> None:
    (theirs,) = room.theirs("moments").values()
    assert (theirs["a"].shape, theirs["adam_m.a"].shape) == ((8, 4), (4, 4))
    assert same_tensors(ours(room, "moments", tmp_path), original(room))


def test_a_missing_stage_passes_in_mindspore_and_its_weights_are_gone(room: Room, tmp_path: Path) -> None:
    (theirs,) = room.theirs("stages").values()
    assert theirs.keys() == {"layers.0.w"}
    assert ours(room, "stages", tmp_path).keys() == {"layers.0.w", "layers.1.w"}
    with pytest.raises(CoverageError, match="4 ranks lie here, and the layout is one of 2") as error:
        reshard(room.path("stages"), tmp_path / "m", Parallel(src_strategy=room.path("first stage.ckpt")))
    assert "rank_2 holds layers.1.w" in error.value.items


def test_mindspore_takes_the_last_file_by_text_order(room: Room, tmp_path: Path) -> None:
    (theirs,) = room.theirs("order").values()
    assert same_tensors(theirs, {name: array + np.uint32(1) for name, array in original(room).items()})  # net-9
    assert same_tensors(ours(room, "order", tmp_path), original(room))


def test_mindspore_does_not_notice_replicas_that_differ(room: Room, tmp_path: Path) -> None:
    (theirs,) = room.theirs("replicas").values()
    assert same_tensors(theirs, original(room))  # rank 0's; rank 1 has another norm
    with pytest.raises(CoverageError, match="differs? between ranks"):
        ours(room, "replicas", tmp_path)


def test_mindspore_leaves_out_what_no_rank_holds(room: Room, tmp_path: Path) -> None:
    (theirs,) = room.theirs("lacking").values()
    assert theirs.keys() == original(room).keys() - {"b"}
    with pytest.raises(CoverageError, match="1 tensor of the layout is on no rank"):
        ours(room, "lacking", tmp_path)


def test_mindspore_believes_a_wrong_strategy(room: Room, tmp_path: Path) -> None:
    (theirs,) = room.theirs("wrong").values()
    assert theirs["a"].shape == (4, 4)  # of (8, 4)
    with pytest.raises(CoverageError, match="differs? between ranks"):
        ours(room, "wrong", tmp_path)


def test_mindspore_does_not_go_from_four_devices_to_three(room: Room, tmp_path: Path) -> None:
    assert "error" in room.answers["three"]
    strategies = {"src_strategy": room.strategy("four"), "dst_strategy": room.strategy("three")}
    reshard(room.path("four"), tmp_path / "three", Parallel(**strategies))
    whole = ours(room, "four", tmp_path)
    for rank, tensors in read_ranks(tmp_path / "three").items():
        assert same_tensors(tensors, {name: np.split(array, 3)[rank] for name, array in whole.items()})

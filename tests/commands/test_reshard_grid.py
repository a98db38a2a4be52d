"""A grid of layouts: whatever the way from one to another, every rank's file has the same bytes in the end.

Each layout is made of each other one, from what an earlier step of the walk left, and is what the whole checkpoint
gives in one step: so A -> B -> C is A -> C, whatever A and B. Moments and counters travel along everywhere. What a
rank must hold is cut with numpy here, by rules written down once more.
"""

from __future__ import annotations

import re
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.commands.convert import convert
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from tests.rank_results import Array, Tensors, odd_names, rank_bytes, read_ranks, read_whole, same_tensors
from tests.trained_models import COUNTERS, make_llama, make_qwen3_moe, make_trained, weights_of

pytestmark = pytest.mark.usefixtures("quick_disk")

DENSE: dict[str, dict[str, Any]] = {
    "whole": {},
    "tp2": {"mp": 2},
    "tp3": {"mp": 3},
    "tp4 dp2": {"mp": 4, "dp": 2},
    "pp3": {"pp": 3},
    "dp2 opt": {"dp": 2, "optimizer_shard": True},
    "tp2 dp2 opt": {"mp": 2, "dp": 2, "optimizer_shard": True},
    "tp3 pp2": {"mp": 3, "pp": 2},
    "tp4 pp3 dp2 opt": {"mp": 4, "pp": 3, "dp": 2, "optimizer_shard": True},
}
MOE: dict[str, dict[str, Any]] = {
    "whole": {},
    "tp2": {"mp": 2},
    "ep4": {"ep": 4},
    "tp4 ep6": {"mp": 4, "ep": 6},
    "tp2 pp3 ep4": {"mp": 2, "pp": 3, "ep": 4},
    "dp4 ep2 opt": {"dp": 4, "ep": 2, "optimizer_shard": True},
    "tp2 pp2 ep12": {"mp": 2, "pp": 2, "ep": 12},
}
MODELS = {"llama": (make_llama, DENSE), "qwen3_moe": (make_qwen3_moe, MOE)}
BASE = {"variant": "base"}  # the names of a checkpoint without a manifest fit several layouts of fused tensors
TP_AXES = {
    "tok_embeddings": 0, "lm_head": 0, "wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "wo": 1, "w2": 1,
    "word_embeddings": 0, "output_layer": 0, "linear_qkv": 0, "linear_proj": 1,
}  # fmt: skip
FIRST, LAST = r"tok_embeddings|word_embeddings", r"lm_head|norm_out|output_layer|final_layernorm"
LAYERS = 3


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A model's name, its HuggingFace folder, and its whole MindSpore checkpoint with training state."""
    folder = tmp_path_factory.mktemp(request.param)
    hf = MODELS[request.param][0](folder / "hf")
    return request.param, hf, make_trained(hf, folder / "base")


def test_every_layout_becomes_every_other_and_the_original(model: tuple[str, Path, Path], tmp_path: Path) -> None:
    name, hf, base = model
    layouts = MODELS[name][1]
    original, latest, direct = read_whole(base), {}, {}
    for label, degrees in layouts.items():
        latest[label] = tmp_path / f"direct {label}"
        reshard(base, latest[label], Parallel(**degrees), **(BASE if degrees else {}))
        direct[label] = rank_bytes(latest[label])
    for a, b in permutations(layouts, 2):
        target = tmp_path / f"{b} of {a}"
        reshard(latest[a], target, Parallel(**layouts[b]), **(BASE if a == "whole" else {}))
        if b == "whole":  # its tensors come stage by stage, in the order in which they were stored
            assert same_tensors(read_whole(target), original), a
        else:
            found = rank_bytes(target)
            assert found.keys() == direct[b].keys(), f"{a} -> {b}"
            assert [file for file in found if found[file] != direct[b][file]] == [], f"{a} -> {b}"
        latest[b] = target
    assert len({str(sorted(files.items())) for files in direct.values()}) == len(layouts)  # the control: all differ
    for label, folder in latest.items():
        reshard(folder, tmp_path / f"merged {label}", Parallel())
        assert same_tensors(read_whole(tmp_path / f"merged {label}"), original), label
        convert(folder, tmp_path / f"hf {label}", to_dialect="hf", no_optimizer=True, **BASE)
        assert same_tensors(read_whole(tmp_path / f"hf {label}"), read_whole(hf)), label


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"], indirect=True)
def test_each_rank_holds_its_part_by_the_rules_written_here(model: tuple[str, Path, Path], tmp_path: Path) -> None:
    name, _, base = model
    original = read_whole(base)
    cut = 0
    for label, degrees in MODELS[name][1].items():
        if label == "whole" or (name == "qwen3_moe" and "opt" in label):
            continue
        reshard(base, tmp_path / label, Parallel(**degrees), **BASE)
        wanted = expected_ranks(original, **degrees)
        found = read_ranks(tmp_path / label)
        assert found.keys() == wanted.keys(), label
        for rank, tensors in wanted.items():
            assert odd_names(found[rank], tensors) == [], f"{label}, rank {rank}"
        cut += any(part.shape != original[n].shape for part_set in wanted.values() for n, part in part_set.items())
    assert cut >= 5  # the control: the rules do cut something


def test_straight_from_huggingface_is_the_same_as_by_way_of_a_whole_checkpoint(
    model: tuple[str, Path, Path], tmp_path: Path
) -> None:
    name, hf, _ = model
    convert(hf, tmp_path / "whole")
    for label, degrees in MODELS[name][1].items():
        convert(hf, tmp_path / label.replace("whole", "at once"), parallel=Parallel(**degrees))
        reshard(tmp_path / "whole", tmp_path / f"{label} again", Parallel(**degrees))
        assert rank_bytes(tmp_path / label.replace("whole", "at once")) == rank_bytes(tmp_path / f"{label} again")
        convert(tmp_path / label, tmp_path / f"{label} back", to_dialect="hf")
        assert same_tensors(read_whole(tmp_path / f"{label} back"), read_whole(hf))


def test_moments_reach_huggingface_names_from_any_layout(model: tuple[str, Path, Path], tmp_path: Path) -> None:
    name, hf, base = model
    convert(base, tmp_path / "hf", to_dialect="hf", **BASE)
    stated = read_whole(tmp_path / "hf")
    assert {n for n in stated if n.startswith("adam_m.")} == {f"adam_m.{n}" for n in read_whole(hf)}
    assert same_tensors(weights_of(stated), read_whole(hf))
    last = list(MODELS[name][1])[-1]
    reshard(base, tmp_path / "cut", Parallel(**MODELS[name][1][last]), **BASE)
    convert(tmp_path / "cut", tmp_path / "hf of cut", to_dialect="hf")
    assert same_tensors(read_whole(tmp_path / "hf of cut"), stated)
    convert(tmp_path / "hf of cut", tmp_path / "cut again", parallel=Parallel(**MODELS[name][1][last]))
    assert {rank: odd_names(a, b) for rank, (a, b) in both(tmp_path / "cut", tmp_path / "cut again").items()} == {
        rank: [] for rank in read_ranks(tmp_path / "cut")
    }


def both(a: Path, b: Path) -> dict[int, tuple[Tensors, Tensors]]:
    ranks, others = read_ranks(a), read_ranks(b)
    assert ranks.keys() == others.keys()
    return {rank: (ranks[rank], others[rank]) for rank in ranks}


# ---- the rules, written down once more ------------------------------------------------------------------------------


def expected_ranks(
    whole: Tensors, mp: int = 1, pp: int = 1, dp: int | None = None, ep: int = 1, optimizer_shard: bool = False
) -> dict[int, Tensors]:
    """Return what each rank holds: rank = (stage * dp + data) * mp + tensor."""
    dp = next(n for n in range(1, 100) if n * mp % ep == 0) if dp is None else dp
    ranks: dict[int, Tensors] = {rank: {} for rank in range(pp * dp * mp)}
    for rank, held in ranks.items():
        stage, data, tensor = np.unravel_index(rank, (pp, dp, mp))
        for name, array in whole.items():
            if name in COUNTERS:
                held[name] = array
            elif stage_of(name, pp) == stage:
                part = cut_experts(array, int(data * mp + tensor) % ep, ep) if ".experts." in name else array
                axis = tp_axis(name)
                part = part if axis is None else np.split(part, mp, axis)[tensor]
                excluded = array.ndim < 2 or "tok_embeddings" in name
                held[name] = np.split(part, dp)[data] if optimizer_shard and not excluded else part
    return ranks


def stage_of(name: str, pp: int) -> int:
    if re.search(FIRST, name):
        return 0
    if re.search(LAST, name):
        return pp - 1
    found = re.search(r"layers\.(\d+)\.", name)
    assert found
    return [0, 0, 1][int(found[1])] if pp == 2 else int(found[1]) * pp // LAYERS


def tp_axis(name: str) -> int | None:
    found = [axis for word, axis in TP_AXES.items() if f"{word}." in name]
    assert len(found) < 2
    return found[0] if found else None


def cut_experts(array: Array, index: int, ep: int) -> Array:
    """Return the rows of a device's experts; each of the 12 has equally many."""
    return np.concatenate(np.split(np.stack(np.split(array, 12)), ep)[index])

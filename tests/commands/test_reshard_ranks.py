"""The contract: what MindFormers left in the folders of ranks travels along, so that training goes on from the result.

Names say the epoch and the step, `meta.json` the file to resume from; of what `remove_redundancy` thinned out, the one
part that is left is enough.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.errors import CoverageError
from tests.rank_results import read_ranks, read_whole, same_tensors, write_whole
from tests.trained_models import make_llama, make_trained

CLIENT = Path(__file__).parents[1] / "clients" / "mindformers_resumes.py"
BASE = {"variant": "base"}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole MindSpore checkpoint with moments and counters."""
    folder = tmp_path_factory.mktemp("whole")
    return make_trained(make_llama(folder / "hf"), folder / "base")


def saved_by_a_run(whole: Path, folder: Path, pattern: str, *, meta: bool = True, kind: str = "safetensors") -> Path:
    """Cut `whole` over two ranks and name the files as a run does; no manifest, as a run leaves none."""
    reshard(whole, folder, Parallel(mp=2), format=kind, **BASE)
    (folder / "ckptkit.json").unlink()
    for rank in range(2):
        place, name = folder / f"rank_{rank}", pattern.format(rank=rank) + f".{kind}"
        (place / f"checkpoint_{rank}.{kind}").rename(place / name)
        if meta:
            content = {"last_epoch": 3, "last_step": 70, "last_ckpt_file": name}
            (place / "meta.json").write_text(json.dumps(content))
    return folder


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.glob("rank_*/*")}


def resumed_from(folder: Path, kind: str, ranks: int, room: Path) -> list[str]:
    """Return the file from which MindFormers itself would resume, by rank."""
    room.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CLIENT), str(folder), kind, str(ranks)],
        cwd=room, env={**os.environ, "GLOG_v": "4"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


# ---- resume files -------------------------------------------------------------------------------------------------


@pytest.mark.frameworks
def test_mindformers_resumes_from_the_result(whole: Path, tmp_path: Path) -> None:
    run = saved_by_a_run(whole, tmp_path / "run", "llama_rank_{rank}-3_70")
    reshard(run, tmp_path / "more", Parallel(mp=4), format="ckpt", **BASE)
    wanted = [f"llama_rank_{rank}-3_70.ckpt" for rank in range(4)]
    assert resumed_from(tmp_path / "more", "ckpt", 4, tmp_path / "room") == wanted
    (tmp_path / "more" / "rank_2" / "llama_rank_2-3_70.ckpt").unlink()  # the control: it does look
    with pytest.raises(AssertionError, match="No checkpoint could be resumed"):
        resumed_from(tmp_path / "more", "ckpt", 4, tmp_path / "other room")


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("pattern", ["CKP_rank_{rank}-3_70", "CKP_rank_{rank}_1-3_70"])
def test_files_are_named_like_those_of_the_source(whole: Path, tmp_path: Path, pattern: str, meta: bool) -> None:
    run = saved_by_a_run(whole, tmp_path / "run", pattern, meta=meta)
    report = reshard(run, tmp_path / "more", Parallel(mp=3), **BASE)
    files = [pattern.format(rank=rank) + ".safetensors" for rank in range(3)]
    assert names_in(tmp_path / "more") == {
        f"rank_{rank}/{name}" for rank, file in enumerate(files) for name in (file, "meta.json")
    }
    for rank, file in enumerate(files):
        content = json.loads((tmp_path / "more" / f"rank_{rank}" / "meta.json").read_text())
        assert content == {"last_epoch": 3, "last_step": 70, "last_ckpt_file": file}
    assert "rank_N/meta.json" in dict(report.rows)["beside"]
    assert not [text for label, text in report.rows if label == "note" and "SRC was saved at" in text]
    reshard(tmp_path / "more", tmp_path / "back", Parallel())
    assert same_tensors(read_whole(tmp_path / "back"), read_whole(whole))


def test_an_older_step_that_was_asked_for_is_the_one_to_resume_from(whole: Path, tmp_path: Path) -> None:
    run = saved_by_a_run(whole, tmp_path / "run", "CKP_rank_{rank}-3_70")
    for rank in range(2):
        newest = run / f"rank_{rank}" / f"CKP_rank_{rank}-3_70.safetensors"
        newest.with_name(f"CKP_rank_{rank}-2_40.safetensors").write_bytes(newest.read_bytes())
    reshard(run, tmp_path / "more", Parallel(mp=4, step=40), **BASE)
    content = json.loads((tmp_path / "more" / "rank_3" / "meta.json").read_text())
    assert content == {"last_epoch": 2, "last_step": 40, "last_ckpt_file": "CKP_rank_3-2_40.safetensors"}
    assert (tmp_path / "more" / "rank_3" / "CKP_rank_3-2_40.safetensors").is_file()


@pytest.mark.parametrize("pattern", ["checkpoint_{rank}", "net{rank}", "net-3_70"])
def test_names_that_mindformers_cannot_resume_from_are_not_kept(whole: Path, tmp_path: Path, pattern: str) -> None:
    run = saved_by_a_run(whole, tmp_path / "run", pattern, meta=False)
    report = reshard(run, tmp_path / "more", Parallel(mp=3), **BASE)
    assert names_in(tmp_path / "more") == {f"rank_{rank}/checkpoint_{rank}.safetensors" for rank in range(3)}
    said = [text for label, text in report.rows if label == "note" and text.startswith("SRC was saved at")]
    assert said == (["SRC was saved at epoch 3, step 70; no file of DST says so"] if "-" in pattern else [])


def test_files_of_weights_alone_keep_their_names_and_promise_no_resume(whole: Path, tmp_path: Path) -> None:
    run = saved_by_a_run(whole, tmp_path / "run", "CKP_rank_{rank}-network-3_70", meta=False)
    reshard(run, tmp_path / "more", Parallel(mp=3), **BASE)
    assert names_in(tmp_path / "more") == {f"rank_{r}/CKP_rank_{r}-network-3_70.safetensors" for r in range(3)}


@pytest.mark.parametrize("way", ["merge", "no optimizer"])
def test_a_step_that_is_not_carried_is_said(whole: Path, tmp_path: Path, way: str) -> None:
    run = saved_by_a_run(whole, tmp_path / "run", "CKP_rank_{rank}-3_70")
    layout = Parallel() if way == "merge" else Parallel(mp=4)
    told = {} if way == "merge" else {**BASE, "no_optimizer": True}
    report = reshard(run, tmp_path / "more", layout, **told)
    assert ("note", "SRC was saved at epoch 3, step 70; no file of DST says so") in report.rows
    assert not list((tmp_path / "more").rglob("meta.json"))


# ---- redundancy that was removed ----------------------------------------------------------------------------------


def thinned(whole: Path, folder: Path, kind: str, **degrees: int) -> Path:
    """Cut `whole` over ranks, and leave each tensor on the ranks where MindSpore's `remove_redundancy` leaves it."""
    from mindspore.train._utils import get_parameter_redundancy, remove_param_redundancy

    reshard(whole, folder, Parallel(**degrees), format=kind, **BASE)
    (folder / "ckptkit.json").unlink()
    ranks = read_ranks(folder)
    strategy = sorted((folder / "strategy").iterdir())[0]
    named = get_parameter_redundancy(str(strategy), initial_rank=0)
    of_all = {name: (tuple(ranks),) for name in ranks[0] if name not in named}  # as where a net has no layouts
    kept = remove_param_redundancy(named | of_all)
    for rank, tensors in ranks.items():
        file = next((folder / f"rank_{rank}").iterdir())
        file.unlink()  # it may be a link
        write_whole(file, {name: array for name, array in tensors.items() if name in kept.get(rank, ())})
    return folder


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
@pytest.mark.parametrize("degrees", [{"mp": 2, "dp": 2}, {"dp": 3}], ids=str)
def test_thinned_ranks_make_the_whole(whole: Path, tmp_path: Path, kind: str, degrees: dict[str, int]) -> None:
    run = thinned(whole, tmp_path / "run", kind, **degrees)
    held = [name for tensors in read_ranks(run).values() for name in tensors]
    parts = degrees.get("mp", 1)
    assert held.count("adam_m.model.layers.0.attention.wq.weight") == parts
    assert held.count("global_step") == 1
    assert held.count("model.layers.0.attention_norm.weight") == 1
    report = reshard(run, tmp_path / "merged", Parallel())
    assert same_tensors(read_whole(tmp_path / "merged"), read_whole(whole))
    assert any("as MindSpore's `remove_redundancy` leaves them" in text for _, text in report.rows)


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_a_rank_that_lost_a_tensor_is_not_taken_for_a_thinned_one(whole: Path, tmp_path: Path, kind: str) -> None:
    run = saved_by_a_run(whole, tmp_path / "run", "net{rank}", meta=False, kind=kind)
    reshard(run, tmp_path / "dp", Parallel(mp=2, dp=2), **BASE)
    (tmp_path / "dp" / "ckptkit.json").unlink()
    file = next((tmp_path / "dp" / "rank_3").iterdir())
    tensors = read_whole(file.parent)
    tensors.pop("model.layers.0.attention.wq.weight")
    file.unlink()
    write_whole(file, tensors)
    with pytest.raises(CoverageError, match="is not on the ranks that its layout names") as caught:
        reshard(tmp_path / "dp", tmp_path / "merged", Parallel())
    assert caught.value.items == ("rank_3 lacks it",)
    assert "what `remove_redundancy` leaves is on one rank only" in caught.value.why


def test_a_part_that_no_rank_kept_is_refused(whole: Path, tmp_path: Path) -> None:
    lost = "model.layers.0.attention.wq.weight"
    run = saved_by_a_run(whole, tmp_path / "run", "net{rank}", meta=False)
    zero, one = read_ranks(run).values()
    parts = {n: array for n, array in one.items() if not same_tensors({n: array}, {n: zero[n]})}
    assert lost in parts
    write_whole(next((run / "rank_1").iterdir()), {name: array for name, array in parts.items() if name != lost})
    with pytest.raises(CoverageError, match=f"`{lost}` is not on the ranks that its layout names") as caught:
        reshard(run, tmp_path / "merged", Parallel())
    assert caught.value.items == ("rank_1 lacks it",)

"""MindSpore's own tools take the strategy files that ckptkit writes, and ckptkit reads what they merge.

One child process runs all jobs (`clients/mindspore_strategies.py`). The shards come from MindSpore itself
(`tests/golden/mindspore`), so that what its `transform_checkpoints` makes by our files has a known answer.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clients.run import run_client
from strategy_bytes import GOLDEN

from ckptkit.formats import mindspore_ckpt
from ckptkit.formats.io import read_region
from ckptkit.formats.mindspore_strategy import Strategy, dump_json, dump_merged, dump_strategy, read_strategies
from ckptkit.types import TensorLayout

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]

SINGLE = ["dp2mp2", "dp2mp2_opt", "dp2mp2_train", "dp4_opt", "ep4", "interleave", "layout", "mp4"]
ODD_LAYOUTS = {
    "one device": TensorLayout((1,), ((), ())),
    "one axis, two device axes": TensorLayout((2, 2), ((0, 1),)),
    "three device axes": TensorLayout((2, 2, 2, 1), ((), (3, 1, 2), ())),
    "optimizer shard over two axes": TensorLayout((2, 3, 2), ((0,), ()), 2, 6),
    "1024 devices": TensorLayout((4, 256), ((0,), ()), 256, 2),
}


def as_mindspore_has_it(strategies: list[Strategy]) -> dict[str, list[Any]]:
    """Return what MindSpore makes of the layouts: device matrix, map, legacy, legacy, step, size, stages."""
    result: dict[str, list[Any]] = {}
    for strategy in strategies:
        for name, layout in strategy.tensors.items():
            maps: list[Any] = [list(axes) or [-1] for axes in layout.tensor_map]
            if all(len(axes) == 1 for axes in maps):
                maps = [axes[0] for axes in maps]
            stages = [strategy.stage or 0]
            result[name] = [list(layout.dev_matrix), maps, [], 0, layout.opt_step, layout.opt_size, stages]
    return result


class Jobs:
    """What MindSpore is to do, and its answers by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[dict[str, Any]] = []
        self.answers: dict[str, Any] = {}

    def file(self, name: str, data: bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return str(path)

    def add(self, name: str, **job: Any) -> None:
        self.jobs.append({"name": name, **job})

    def run(self) -> None:
        file = self.file("jobs.json", json.dumps(self.jobs, default=str).encode())
        self.answers = run_client("mindspore_strategies", "--jobs", file, timeout=240)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("strategies"))
    for name in SINGLE:
        (strategy,) = read_strategies(GOLDEN / name)
        jobs.add(f"parse theirs {name}", parse=GOLDEN / name / "strategy_stage0.ckpt")
        jobs.add(f"parse ours {name}", parse=jobs.file(f"{name}.ckpt", dump_strategy(strategy)))
        if name != "layout":
            jobs.add(f"parse json {name}", parse=jobs.file(f"{name}.json", dump_json(strategy)))
    for name, layout in ODD_LAYOUTS.items():
        data = dump_strategy(Strategy(0, {"w": layout}, {}))
        jobs.add(name, parse=jobs.file(f"{name}.ckpt", data))
    add_pipeline_jobs(jobs)
    add_transform_jobs(jobs)
    jobs.run()
    return jobs


def add_pipeline_jobs(jobs: Jobs) -> None:
    parts = read_strategies(GOLDEN / "pp2dp2mp2")
    for part in parts:
        jobs.file(f"ours/stage{part.stage}.ckpt", dump_strategy(part))
        jobs.file(f"ours-json/stage{part.stage}.json", dump_json(part))
        shutil.copy(GOLDEN / "pp2dp2mp2" / f"strategy_stage{part.stage}.ckpt", jobs.folder)
    theirs = jobs.folder / "theirs"
    theirs.mkdir()
    for file in jobs.folder.glob("strategy_stage*.ckpt"):
        file.rename(theirs / file.name)
    for name, suffix in (("theirs", "ckpt"), ("ours", "ckpt"), ("ours-json", "json")):
        jobs.add(f"merge {name}", merge=jobs.folder / name, to=jobs.folder / f"merged-{name}.{suffix}")
        jobs.add(f"parse merged {name}", parse=jobs.folder / f"merged-{name}.{suffix}")
        jobs.add(f"ranks {name}", ranks=1, src=jobs.folder / f"merged-{name}.{suffix}", dst=None)
    merged = jobs.file("merged.ckpt", dump_merged(parts))
    jobs.add("parse merged", parse=merged)
    jobs.add("ranks", ranks=1, src=merged, dst=None)


def add_transform_jobs(jobs: Jobs) -> None:
    (cut,) = read_strategies(GOLDEN / "dp2mp2")
    (opt,) = read_strategies(GOLDEN / "dp2mp2_opt")
    wrong = replace(opt, tensors={**opt.tensors, "layers.0.wq": opt.tensors["layers.0.wo"]})
    for name, strategy in {"cut": cut, "opt": opt, "wrong": wrong}.items():
        jobs.file(f"transform-{name}.ckpt", dump_strategy(strategy))
    for name, source, to in (
        ("to one", "opt", None),
        ("to wider", "opt", "cut"),
        ("to narrower", "cut", "opt"),
        ("wrong", "wrong", None),
    ):
        sharded = GOLDEN / ("dp2mp2" if source == "cut" else "dp2mp2_opt") / "sharded"
        dst = jobs.folder / f"transform-{to}.ckpt" if to else None
        job = {"src": jobs.folder / f"transform-{source}.ckpt", "dst": dst}
        jobs.add(name, transform=sharded, to=jobs.folder / name, **job)


FORMS = [(name, form) for name in SINGLE for form in ("theirs", "ours", "json")]
FORMS.remove(("layout", "json"))  # JSON cannot say it, and it is not written


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_mindspore_reads_the_same_layouts_in_our_files(done: Jobs, name: str, form: str) -> None:
    strategies = list(read_strategies(GOLDEN / name))
    assert done.answers[f"parse {form} {name}"]["layouts"] == as_mindspore_has_it(strategies)


@pytest.mark.parametrize("name", ODD_LAYOUTS)
def test_mindspore_reads_any_layout(done: Jobs, name: str) -> None:
    expected = as_mindspore_has_it([Strategy(0, {"w": ODD_LAYOUTS[name]}, {})])
    assert done.answers[name]["layouts"] == expected


@pytest.mark.parametrize("name", ["theirs", "ours", "ours-json"])
def test_what_mindspore_merges_is_read(done: Jobs, name: str) -> None:
    assert done.answers[f"merge {name}"] == {}
    (merged,) = done.folder.glob(f"merged-{name}.*")
    parts = read_strategies(GOLDEN / "pp2dp2mp2")
    found = read_strategies(merged)
    assert [part.stage for part in found] == [0, 1]
    assert [part.tensors for part in found] == [part.tensors for part in parts]
    assert done.answers[f"parse merged {name}"]["layouts"] == as_mindspore_has_it(list(parts))


def test_a_merged_file_is_written_as_mindspore_merges_ours(done: Jobs) -> None:
    parts = read_strategies(GOLDEN / "pp2dp2mp2")
    # MindSpore takes the files of a folder in no particular order
    either = [dump_merged(parts), dump_merged(parts[::-1])]
    assert (done.folder / "merged-ours.ckpt").read_bytes() in either
    assert done.answers["parse merged"]["layouts"] == as_mindspore_has_it(list(parts))


def test_mindspore_needs_the_same_ranks_by_our_files(done: Jobs) -> None:
    for name in ("ranks", "ranks theirs", "ranks ours"):
        (needed,) = done.answers[name]["ranks"]
        assert sorted(needed) == [0, 1, 4, 5]  # of eight: two stages, two ways of data parallel


def contents(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return the bytes of each tensor of each rank's one file."""
    return {file.parent.name: tensors_of(file) for file in folder.glob("rank_*/*.ckpt")}


def tensors_of(file: Path) -> dict[str, bytes]:
    return {tensor.name: read_region(tensor).tobytes() for tensor in mindspore_ckpt.read_index(file).tensors}


def test_mindspore_transforms_its_shards_by_our_files(done: Jobs) -> None:
    whole = tensors_of(GOLDEN / "dp2mp2_opt" / "full.ckpt")
    assert contents(done.folder / "to one") == {"rank_0": whole}
    assert contents(done.folder / "to wider") == contents(GOLDEN / "dp2mp2" / "sharded")
    assert contents(done.folder / "to narrower") == contents(GOLDEN / "dp2mp2_opt" / "sharded")


def test_a_wrong_layout_would_give_other_tensors(done: Jobs) -> None:
    whole = tensors_of(GOLDEN / "dp2mp2_opt" / "full.ckpt")
    found = contents(done.folder / "wrong")["rank_0"]
    assert [name for name in whole if found.get(name) != whole[name]] == ["layers.0.wq"]

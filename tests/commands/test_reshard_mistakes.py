"""The contract: an option about a layout is followed, or refused in the words in which it was given; never ignored.

What is taken for granted of a source is said. A default of `ckptkit.toml` that does nothing is passed over with a note.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptkit import CoverageError, Parallel, UsageError, check, convert, reshard
from ckptkit.cli import run
from ckptkit.formats.mindspore_strategy import Strategy, dump_strategy
from ckptkit.layout.layout import MAX_RANKS
from ckptkit.report import Report
from ckptkit.types import TensorLayout
from tests.rank_results import random_tensors, read_whole, same_tensors, write_whole
from tests.tiny_models import write_safetensors
from tests.trained_models import make_llama, make_qwen3_moe

pytestmark = pytest.mark.usefixtures("quick_disk")
ALONE: list[tuple[dict[str, Any], list[str]]] = [
    ({"pp_layers": "1,9"}, ["--pp-layers", "1,9"]),
    ({"replicate_kv": True}, ["--replicate-kv"]),
    ({"pp_interleave": 2}, ["--pp-interleave", "2"]),
    ({"optimizer_shard": True}, ["--optimizer-shard"]),
    ({"shard_embedding": False}, ["--no-shard-embedding"]),
    ({"shard_embedding": True}, ["--shard-embedding"]),
    ({"ranks": "0"}, ["--ranks", "0"]),
]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def ranks(hf: Path) -> Path:
    convert(hf, hf.parent / "ranks", parallel=Parallel(mp=2))
    return hf.parent / "ranks"


def rows(report: Report, label: str) -> list[str]:
    return [text for name, text in report.rows if name == label]


# Options that cut nothing.


@pytest.mark.parametrize(("said", "typed"), ALONE, ids=[typed[0] for _, typed in ALONE])
def test_an_option_that_cuts_nothing_is_refused(hf: Path, said: dict[str, Any], typed: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        convert(hf, hf.parent / "out", parallel=Parallel(**said), dry_run=True)
    assert caught.value.what == f"`{typed[0]}` does nothing where DST is whole"
    deep = make_llama(hf.parent / f"deep{typed[0]}", layers=10)  # the control: beside degrees it is followed
    assert rows(convert(deep, hf.parent / "out", parallel=Parallel(mp=2, pp=2, **said), dry_run=True), "layout")


@pytest.mark.parametrize(("said", "typed"), ALONE, ids=[typed[0] for _, typed in ALONE])
def test_such_an_option_is_passed_over_where_it_is_a_default(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    said: dict[str, Any], typed: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (name, value), *_ = said.items()
    Path("ckptkit.toml").write_text(f"[convert]\n{name} = {json.dumps(value)}\n")
    assert run(["convert", str(hf), "out", "--dry-run"]) == 0
    said_of_it = capsys.readouterr().out
    assert f"`{name.replace('_', '-')}` of ckptkit.toml passed over: `{typed[0]}` does nothing" in said_of_it
    assert run(["convert", str(hf), "out", "--dry-run", *typed]) == 2  # the control: typed, it is refused
    assert f"error: `{typed[0]}` does nothing" in capsys.readouterr().err


def test_what_cuts_nothing_beside_other_degrees_is_refused(hf: Path, tmp_path: Path) -> None:
    for said, what in (
        ({"dp": 2, "replicate_kv": True}, "`--replicate-kv` does nothing without tensor parallelism"),
        ({"mp": 2, "pp_interleave": 2}, "`--pp-interleave` does nothing without pipeline stages"),
        ({"dst_strategy": "s", "devices": 2}, "`--devices` does nothing beside `--dst-strategy`"),
        ({"dst_strategy": "s", "replicate_kv": True}, "`--replicate-kv` does nothing beside `--dst-strategy`"),
    ):
        with pytest.raises(UsageError) as caught:
            convert(hf, tmp_path / "out", parallel=Parallel(**said))
        assert caught.value.what == what


def test_a_number_of_devices_alone_is_data_parallelism(hf: Path, tmp_path: Path) -> None:
    assert rows(convert(hf, tmp_path / "out", parallel=Parallel(devices=8)), "layout") == ["8 ranks (dp 8)"]
    assert len(list((tmp_path / "out").glob("rank_*"))) == 8
    whole = convert(hf, tmp_path / "whole", parallel=Parallel(devices=1, mp=1, pp_interleave=1))
    assert not rows(whole, "layout")


@pytest.mark.parametrize("text", ["parallel_config: {data_parallel: 1}", "use_legacy: True"])
def test_a_run_file_that_cuts_nothing_is_said(hf: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    report = convert(hf, tmp_path / "out", parallel=Parallel(parallel_config=file))
    assert "no degree in `run.yaml` is above 1: DST is whole" in rows(report, "note")
    with pytest.raises(UsageError, match="`--ranks` does nothing where DST is whole"):
        convert(hf, tmp_path / "more", parallel=Parallel(parallel_config=file, ranks="0"))


@pytest.mark.parametrize("where", ["beside SRC", "beside a file", "--config"])
def test_a_run_file_needs_no_number_of_layers_where_config_json_has_it(hf: Path, tmp_path: Path, where: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "use_parallel: True\nparallel_config: {pipeline_stage: 2, micro_batch_num: 2}\n"
        "model: {model_config: {offset: [0, 1]}}\n"
    )
    source = hf if where == "beside SRC" else hf / "model.safetensors"
    options: dict[str, Any] = {}
    if where == "--config":
        source = tmp_path / "model.safetensors"
        shutil.copy(hf / "model.safetensors", source)
        options = {"config": hf}
    report = convert(source, tmp_path / "out", parallel=Parallel(parallel_config=file), dry_run=True, **options)
    assert "layers per stage: 1, 2; MindFormers needs `offset: [0, 1]` for it" in rows(report, "note")


# Counts.


@pytest.mark.parametrize("option", ["--mp", "--pp", "--dp", "--ep", "--devices", "--pp-interleave", "--pad-vocab-to"])
@pytest.mark.parametrize("count", ["0", "-5"])
def test_a_count_below_one_is_refused_by_the_name_of_its_option(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, count: str
) -> None:
    assert run(["convert", str(hf), str(tmp_path / "out"), option, count]) == 2
    assert f"error: `{option}` is {count}, and must be 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    "degrees", [{"dp": 10**6}, {"mp": 4, "devices": 10**9}, {"ep": 10**9, "dp": 10**9}, {"ep": 10**9}], ids=str
)
def test_more_ranks_than_any_run_has_are_refused_before_anything_is_built(
    hf: Path, tmp_path: Path, degrees: dict[str, int]
) -> None:
    with pytest.raises(UsageError, match=rf"the layout has 10+ ranks, and at most {MAX_RANKS} are allowed"):
        convert(hf, tmp_path / "out", parallel=Parallel(**degrees), dry_run=True)


@pytest.mark.parametrize("side", ["src", "dst"])
def test_strategy_files_of_too_many_devices_are_refused(ranks: Path, tmp_path: Path, side: str) -> None:
    layout = {name: TensorLayout((10**5,), ((),) * array.ndim) for name, array in read_whole(ranks / "rank_0").items()}
    (tmp_path / "strategy.ckpt").write_bytes(dump_strategy(Strategy(0, layout, {})))
    source = shutil.copytree(ranks, tmp_path / "ranks")
    (source / "ckptkit.json").unlink()
    with pytest.raises(UsageError, match=f"the layout has {10**5} ranks"):
        reshard(source, tmp_path / "out", Parallel(**{f"{side}_strategy": tmp_path / "strategy.ckpt"}))


def test_expert_parallelism_of_a_model_without_experts_is_refused(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        convert(hf, tmp_path / "out", parallel=Parallel(ep=3, mp=2), dry_run=True)
    assert caught.value.what == "ep 3 does nothing here, and does not divide the 2 devices of a stage"
    moe = make_qwen3_moe(tmp_path / "moe")  # the control
    assert "ep 3" in rows(convert(moe, tmp_path / "out", parallel=Parallel(ep=3, mp=2), dry_run=True), "layout")[0]


# Options of `reshard` that are about a family's table.


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (["--model", "nonsense"], "--model"),
        (["--variant", "x"], "--variant"),
        (["--table", "none.toml"], "--table"),
        (["--allow-unmapped"], "--allow-unmapped"),
        (["--tie-embeddings"], "--tie-embeddings"),
    ],
)
def test_a_merge_refuses_options_about_tables(
    ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    typed: list[str], name: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(["reshard", str(ranks), "out", *typed]) == 2
    assert f"error: `{name}` does nothing in a merge" in capsys.readouterr().err
    value = json.dumps([typed[1]] if name == "--table" else typed[1] if typed[1:] else True)
    Path("ckptkit.toml").write_text(f"[reshard]\n{name.removeprefix('--')} = {value}\n")
    assert run(["reshard", str(ranks), "out"]) == 0
    assert f"`{name.removeprefix('--')}` of ckptkit.toml passed over" in capsys.readouterr().out


def test_a_config_that_nothing_was_compared_with_is_said(ranks: Path, tmp_path: Path) -> None:
    other = make_qwen3_moe(tmp_path / "moe")
    report = reshard(ranks, tmp_path / "out", Parallel(), config=other)
    said = "from `--config`, and not compared with the tensors, as no table was needed: `config.json`"
    assert said in rows(report, "note")
    assert not rows(reshard(ranks, tmp_path / "own", Parallel()), "note")


def test_reshard_leaves_out_unmapped_tensors_and_ties_on_request(hf: Path, tmp_path: Path) -> None:
    """What the errors of a layout by degrees suggest, `reshard` has."""
    convert(hf, tmp_path / "whole")
    tensors = read_whole(tmp_path / "whole")
    (tmp_path / "whole" / "ckptkit.json").unlink()
    (tmp_path / "whole" / "param_name_map.json").unlink()
    file = next((tmp_path / "whole").glob("*.safetensors"))
    write_whole(file, tensors | random_tensors({"model.layers.0.adapter.weight": (2, 2)}))
    with pytest.raises(CoverageError) as caught:
        reshard(tmp_path / "whole", tmp_path / "out", Parallel(mp=2), variant="base")
    assert "`--allow-unmapped`" in caught.value.hint
    where = [str(tmp_path / "whole"), str(tmp_path / "out"), "--mp", "2", "--variant", "base"]
    assert run(["reshard", *where, "--allow-unmapped"]) == 0
    reshard(tmp_path / "out", tmp_path / "merged", Parallel())
    assert same_tensors(read_whole(tmp_path / "merged"), tensors)
    write_safetensors(file, {name: array for name, array in tensors.items() if name != "lm_head.weight"}, "F32")
    assert run(["reshard", *where, "--overwrite"]) == 3
    assert run(["reshard", *where, "--overwrite", "--tie-embeddings"]) == 0


# What lies in the folders of ranks.


def test_swapped_rank_files_are_refused(ranks: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(ranks, tmp_path / "ranks")
    (folder / "ckptkit.json").unlink()
    one, two = folder / "rank_0" / "checkpoint_0.safetensors", folder / "rank_1" / "checkpoint_1.safetensors"
    one.rename(folder / "rank_1" / one.name)
    two.rename(folder / "rank_0" / two.name)
    with pytest.raises(CoverageError, match="2 of 2 ranks hold a file that is called after another rank"):
        reshard(folder, tmp_path / "out", Parallel())


def test_a_lone_rank_without_a_strategy_is_taken_as_whole_and_that_is_said(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "whole")
    folder = tmp_path / "run"
    (folder / "rank_0").mkdir(parents=True)
    shutil.copy(tmp_path / "whole" / "part0.safetensors", folder / "rank_0" / "net.safetensors")
    shutil.copy(tmp_path / "whole" / "part0.safetensors", folder / "older.safetensors")
    report = reshard(folder, tmp_path / "out", Parallel())
    assert rows(report, "note")[-2:] == [
        "no strategy file says how `rank_0` was cut: its tensors are taken as whole",
        "passed over, as they lie beside the ranks: `older.safetensors`",
    ]


def test_weights_beside_ranks_are_noted_and_strategy_files_are_not(ranks: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(ranks, tmp_path / "ranks")
    for file in (folder / "strategy").iterdir():
        file.rename(folder / file.name)
    (folder / "strategy").rmdir()
    (folder / "ckptkit.json").unlink()
    assert rows(reshard(folder, tmp_path / "out", Parallel()), "note") == []


@pytest.mark.parametrize("name", ["other.safetensors", "checkpoint-1_10.ckpt"])
def test_a_weight_file_that_ckptkit_did_not_write_is_named(ranks: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(ranks, tmp_path / "ranks")
    shutil.copy(folder / "rank_0" / "checkpoint_0.safetensors", folder / "rank_0" / name)
    for command in (check, lambda path: reshard(path, tmp_path / "out", Parallel())):
        with pytest.raises(CoverageError, match="has 1 weight file that ckptkit did not write") as caught:
            command(folder)
        assert caught.value.items == (f"rank_0/{name}",)
        assert "--step" not in caught.value.hint


def test_one_part_that_differs_in_one_element_is_told_in_the_singular(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "ranks", parallel=Parallel(dp=2))
    (tmp_path / "ranks" / "ckptkit.json").unlink()
    place = tmp_path / "ranks" / "rank_1"
    tensors = read_whole(place)
    norm = tensors["model.norm_out.weight"].copy()
    norm[0] ^= 1
    shutil.rmtree(place)
    place.mkdir()
    write_whole(place / "checkpoint_1.safetensors", tensors | {"model.norm_out.weight": norm})
    with pytest.raises(CoverageError) as caught:
        reshard(tmp_path / "ranks", tmp_path / "out", Parallel())
    assert caught.value.what == "1 part of a tensor differs between ranks that hold the same part"
    assert caught.value.items[0].startswith("model.norm_out.weight: 1 element of rank_1 differs from rank_0, by up to")


LIMITED = """
import resource, sys
from ckptkit.cli import run
from ckptkit.formats import files
resource.setrlimit(resource.RLIMIT_NOFILE, (40, int(sys.argv[1])))
if sys.argv[2] == "broken":
    files.raise_open_files = lambda needed: needed
sys.exit(run(["check", sys.argv[3]]))
"""


@pytest.mark.parametrize(("hard", "how", "code"), [(4096, "right", 0), (4096, "broken", 4), (40, "right", 4)])
def test_many_ranks_are_read_where_few_files_may_be_open(
    hf: Path, tmp_path: Path, hard: int, how: str, code: int
) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 4096
    convert(hf, tmp_path / "ranks", parallel=Parallel(mp=12, dp=4))
    for rank in range(48):  # no links: every rank has a file of its own
        file = tmp_path / "ranks" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors"
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(hard), how, str(tmp_path / "ranks")],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("hint: raise the limit of open files (`ulimit -n`)" in done.stderr) == bool(code)

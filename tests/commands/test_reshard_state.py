"""The contract: training state goes wherever its weight goes, on any way, bit for bit; or it is left out and counted.

HuggingFace with its folder of state, whole MindSpore checkpoints, and ranks; fused weights, tied ones, strategy files
that do not name the moments, moments in another dtype than the weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.commands.convert import convert
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.errors import CoverageError
from ckptkit.formats.manifest import read_manifest
from ckptkit.formats.mindspore_strategy import dump_strategy, read_strategies
from ckptkit.report import Report
from tests.rank_results import Tensors, odd_names, random_tensors, read_file, read_ranks, read_whole, write_whole
from tests.tiny_models import make_hf_plain, write_safetensors
from tests.trained_models import COUNTERS, make_llama, state_of

pytestmark = pytest.mark.usefixtures("quick_disk")
KINDS = {
    "AdamWeightDecay": ("adam_m.", "adam_v."),
    "Adam": ("moment1.", "moment2."),
    "mint AdamW": ("exp_avg.", "exp_avg_sq."),
    "accumulated": ("accu_grads.",),
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "hf")


def trained(hf: Path, folder: Path, prefixes: tuple[str, ...] = ("adam_m.", "adam_v.")) -> Path:
    """Copy a HuggingFace folder and put training state beside its weights, as ckptkit does; return `folder`."""
    shutil.copytree(hf, folder)
    (folder / "training_state").mkdir()
    state = state_of(read_whole(hf), prefixes)
    write_safetensors(folder / "training_state" / "state-00001-of-00001.safetensors", state, "F32")
    return folder


def weights_in(folder: Path) -> Tensors:
    """Return the tensors among HuggingFace's weights, where state has no place."""
    return read_file(folder / "model.safetensors")


def rows(report: Report, label: str) -> list[str]:
    return [text for own, text in report.rows if own == label]


def without_manifest(folder: Path, *names: str) -> Path:
    """Take the manifest away, and these names out of the strategy files, as a run leaves a folder."""
    (folder / "ckptkit.json").unlink()
    axes = {name: array.ndim for tensors in read_ranks(folder).values() for name, array in tensors.items()}
    strategies = read_strategies(folder / "strategy", num_axes=axes)
    for file, strategy in zip(sorted((folder / "strategy").iterdir(), key=_number), strategies, strict=True):
        for name in [name for name in strategy.tensors if name.startswith(names)]:
            del strategy.tensors[name]  # type: ignore[attr-defined]
        file.write_bytes(dump_strategy(strategy))
    return folder


def _number(file: Path) -> int:
    return int(file.stem.rpartition("_")[2])


# ---- there and back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("variant", ["base", "qkv_concat"])
def test_state_goes_from_huggingface_to_ranks_and_back(hf: Path, tmp_path: Path, optimizer: str, variant: str) -> None:
    prefixes = KINDS[optimizer]
    source = trained(hf, tmp_path / "source", prefixes)
    report = convert(source, tmp_path / "ranks", variant=variant, parallel=Parallel(mp=3, pp=2))
    convert(source, tmp_path / "whole", variant=variant)
    reshard(tmp_path / "ranks", tmp_path / "merged", Parallel())
    assert odd_names(read_whole(tmp_path / "merged"), read_whole(tmp_path / "whole")) == []
    reshard(tmp_path / "whole", tmp_path / "four", Parallel(mp=4, dp=2, optimizer_shard=True))
    for number, folder in enumerate(("ranks", "whole", "four", "merged")):
        convert(tmp_path / folder, tmp_path / f"back{number}", to_dialect="hf")
        assert odd_names(read_whole(tmp_path / f"back{number}"), read_whole(source)) == [], folder
        assert odd_names(weights_in(tmp_path / f"back{number}"), read_whole(hf)) == []
    weights = len(read_whole(tmp_path / "whole")) - len(COUNTERS)
    count = weights // (1 + len(prefixes))
    assert report.data["state"] == {**dict.fromkeys(prefixes, count), "counters": len(COUNTERS)}
    assert rows(report, "state") == [", ".join([*(f"{p} x {count}" for p in prefixes), "counters x 4"])]
    assert (read_manifest(tmp_path / "four") or {})["state"] == report.data["state"]


def test_a_result_without_state_says_none(hf: Path, tmp_path: Path) -> None:
    report = convert(hf, tmp_path / "out")
    assert "state" not in report.data
    assert rows(report, "state") == []
    assert "state" not in (read_manifest(tmp_path / "out") or {})


def test_fused_moments_are_fused_as_their_weight_is(hf: Path, tmp_path: Path) -> None:
    """Where weight and moment hold the same numbers before, they hold the same after, on every rank."""
    source = tmp_path / "source"
    shutil.copytree(hf, source)
    (source / "training_state").mkdir()
    twins = {f"adam_m.{name}": array for name, array in read_whole(hf).items()}
    write_safetensors(source / "training_state" / "state-00001-of-00001.safetensors", twins, "F32")
    convert(source, tmp_path / "ranks", variant="qkv_concat", parallel=Parallel(mp=2, pp=3))
    fused = 0
    for tensors in read_ranks(tmp_path / "ranks").values():
        weights = {name: array for name, array in tensors.items() if not name.startswith("adam_m.")}
        assert len(tensors) == 2 * len(weights)
        for name, array in weights.items():
            np.testing.assert_array_equal(tensors[f"adam_m.{name}"], array, err_msg=name)
        fused += sum("w_qkv" in name for name in weights)
    assert fused == 2 * 3


def test_moments_that_no_strategy_names_follow_their_weight(hf: Path, tmp_path: Path) -> None:
    source = trained(hf, tmp_path / "source")
    convert(source, tmp_path / "ranks", parallel=Parallel(mp=2, pp=3, dp=2, optimizer_shard=True))
    without_manifest(tmp_path / "ranks", "adam_m.", "adam_v.")
    strategy = tmp_path / "ranks" / "strategy"
    assert b"adam_m" not in b"".join(file.read_bytes() for file in strategy.iterdir())
    reshard(tmp_path / "ranks", tmp_path / "merged", Parallel())
    convert(tmp_path / "merged", tmp_path / "back", to_dialect="hf")
    assert odd_names(read_whole(tmp_path / "back"), read_whole(source)) == []
    reshard(tmp_path / "merged", tmp_path / "again", Parallel(dst_strategy=strategy))
    for rank, tensors in read_ranks(tmp_path / "ranks").items():
        assert odd_names(read_ranks(tmp_path / "again")[rank], tensors) == [], rank


def test_the_unified_layout_is_cut_by_strategy_files(hf: Path, tmp_path: Path) -> None:
    """`part0.safetensors`, `param_name_map.json` and, for counters, `hyper_param.safetensors`: no map names these."""
    convert(trained(hf, tmp_path / "source"), tmp_path / "whole", max_shard_size="12KB")
    wanted = read_whole(tmp_path / "whole")
    convert(tmp_path / "source", tmp_path / "ranks", parallel=Parallel(mp=2))
    unified = tmp_path / "unified"
    unified.mkdir()
    names = [name for name in wanted if name not in COUNTERS]
    files = {f"part{n}.safetensors": names[n::3] for n in range(3)}
    for file, held in files.items():
        write_whole(unified / file, {name: wanted[name] for name in held})
    write_whole(unified / "hyper_param.safetensors", {name: wanted[name] for name in COUNTERS})
    weight_map = {name: file for file, held in files.items() for name in held}
    (unified / "param_name_map.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    report = reshard(unified, tmp_path / "cut", Parallel(dst_strategy=tmp_path / "ranks" / "strategy"))
    assert report.data["state"]["counters"] == len(COUNTERS)
    for rank, tensors in read_ranks(tmp_path / "ranks").items():
        assert odd_names(read_ranks(tmp_path / "cut")[rank], tensors) == [], rank


# ---- dtypes -------------------------------------------------------------------------------------------------------


def test_fp32_moments_beside_bf16_weights_are_never_cast(tmp_path: Path) -> None:
    model = make_hf_plain(tmp_path / "hf", dtype="BF16", hidden=24, heads=6, kv_heads=3, intermediate=24, vocab=48)
    source = trained(model, tmp_path / "source")
    wanted = read_whole(source)
    assert {array.itemsize for array in wanted.values()} == {2, 4}
    convert(source, tmp_path / "ranks", parallel=Parallel(mp=3))
    convert(tmp_path / "ranks", tmp_path / "back", to_dialect="hf")
    assert odd_names(read_whole(tmp_path / "back"), wanted) == []
    report = convert(source, tmp_path / "cast", dtype="fp16", parallel=Parallel(mp=3))
    convert(tmp_path / "cast", tmp_path / "cast back", to_dialect="hf")
    state = read_whole(tmp_path / "cast back").keys() - weights_in(tmp_path / "cast back").keys()
    kept = {name: array for name, array in wanted.items() if name in state}
    assert len(kept) == 2 * len(read_whole(model)) + len(COUNTERS)
    assert odd_names({name: read_whole(tmp_path / "cast back")[name] for name in kept}, kept) == []
    counted = [text for text in rows(report, "kept") if text.endswith(": training state is never cast")]
    assert sum(int(text.partition(" x ")[0]) if " x " in text else 1 for text in counted) == len(kept)


# ---- left out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["convert", "reshard", "merge"])
def test_state_that_is_left_out_is_counted(hf: Path, tmp_path: Path, way: str) -> None:
    source = trained(hf, tmp_path / "source")
    convert(source, tmp_path / "ranks", parallel=Parallel(mp=2))
    convert(hf, tmp_path / "bare")
    layout = Parallel(mp=3) if way == "reshard" else Parallel()
    if way == "convert":
        report = convert(source, tmp_path / "out", no_optimizer=True)
    else:
        report = reshard(tmp_path / "ranks", tmp_path / "out", layout, no_optimizer=True)
    if way == "reshard":
        reshard(tmp_path / "out", tmp_path / "merged", Parallel())
    result = tmp_path / ("merged" if way == "reshard" else "out")
    assert odd_names(read_whole(result), read_whole(tmp_path / "bare")) == []
    dropped = [text for text in rows(report, "dropped") if text.endswith("left out by `--no-optimizer`")]
    count = sum(int(text.partition(" x ")[0]) if " x " in text else 1 for text in dropped)
    assert count == 2 * len(read_whole(hf if way == "convert" else tmp_path / "bare")) + len(COUNTERS)
    assert "state" not in report.data


# ---- tied twins ---------------------------------------------------------------------------------------------------


def tied_model(folder: Path, *, head: bool, embedding: bool = True, state: tuple[str, ...], equal: bool = True) -> Path:
    """Write a tied model that stores its head and its embedding, or one of them, and moments of those in `state`."""
    make_llama(folder, tied=True)
    tensors = read_whole(folder)
    value = tensors.pop(EMBEDDING)
    tensors |= {EMBEDDING: value} if embedding else {}
    tensors |= {HEAD: value} if head else {}
    write_safetensors(folder / "model.safetensors", tensors, "F32")
    moments = {f"adam_m.{name}": random_tensors({"": value.shape}, seed=7)[""] for name in state}
    if not equal:
        moments[f"adam_m.{HEAD}"] = random_tensors({"": value.shape}, seed=8)[""]
    (folder / "training_state").mkdir()
    write_safetensors(folder / "training_state" / "state-00001-of-00001.safetensors", moments, "F32")
    return folder


def test_equal_state_of_tied_twins_is_one(tmp_path: Path) -> None:
    source = tied_model(tmp_path / "hf", head=True, state=(EMBEDDING, HEAD))
    report = convert(source, tmp_path / "out", parallel=Parallel(mp=2))
    assert rows(report, "dropped") == [
        f"{HEAD}: bit-equal to its tied twin `{EMBEDDING}`",
        f"adam_m.{HEAD}: bit-equal to its tied twin `adam_m.{EMBEDDING}`",
    ]
    assert report.data["state"] == {"adam_m.": 1}
    convert(tmp_path / "out", tmp_path / "back", to_dialect="hf")
    assert f"adam_m.{HEAD}" not in read_whole(tmp_path / "back")
    assert odd_names(read_whole(tmp_path / "back"), without(read_whole(source), HEAD, f"adam_m.{HEAD}")) == []


@pytest.mark.parametrize("state", [(EMBEDDING, HEAD), (HEAD,)], ids=["both", "head alone"])
def test_twins_with_different_state_are_both_kept(tmp_path: Path, state: tuple[str, ...]) -> None:
    source = tied_model(tmp_path / "hf", head=True, state=state, equal=False)
    report = convert(source, tmp_path / "out", parallel=Parallel(mp=2))
    said = f"they have different training state (`adam_m.{HEAD}`): both are kept"
    assert any(said in text for text in rows(report, "note"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    convert(tmp_path / "out", tmp_path / "back", to_dialect="hf")
    assert odd_names(read_whole(tmp_path / "back"), read_whole(source)) == []
    untied = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(untied))
    with pytest.raises(CoverageError, match="but both are stored and have different training state"):
        convert(source, tmp_path / "told", tie_embeddings=True)


def test_state_of_a_head_that_stands_in_for_the_embedding_goes_with_it(tmp_path: Path) -> None:
    source = tied_model(tmp_path / "hf", head=True, embedding=False, state=(HEAD,))
    convert(source, tmp_path / "out", parallel=Parallel(mp=2))
    convert(tmp_path / "out", tmp_path / "back", to_dialect="hf")
    stored, found = read_whole(source), read_whole(tmp_path / "back")
    wanted = without(stored, HEAD, f"adam_m.{HEAD}")
    wanted |= {EMBEDDING: stored[HEAD], f"adam_m.{EMBEDDING}": stored[f"adam_m.{HEAD}"]}
    assert odd_names(found, wanted) == []


def test_state_of_a_weight_that_is_not_there_is_refused(tmp_path: Path) -> None:
    source = tied_model(tmp_path / "hf", head=False, state=(EMBEDDING, HEAD))
    with pytest.raises(CoverageError, match="1 tensor of `hf` matches no row") as caught:
        convert(source, tmp_path / "out")
    assert f"adam_m.{HEAD}" in caught.value.items[0]
    assert "`--no-optimizer` leaves all of it out" in caught.value.hint
    report = convert(source, tmp_path / "out", allow_unmapped=True)
    assert rows(report, "unmapped") == [f"adam_m.{HEAD}: training state of `{HEAD}`, which is not stored"]


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: array for name, array in tensors.items() if name not in names}


# ---- what does not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [{}, {"mp": 2}], ids=["merge", "reshard"])
def test_a_moment_that_was_not_cut_like_its_weight_is_refused(hf: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Two ranks hold the whole moment of a weight that is cut, and no strategy says so."""
    convert(trained(hf, tmp_path / "source"), tmp_path / "ranks", parallel=Parallel(mp=2))
    whole = tmp_path / "whole"
    reshard(tmp_path / "ranks", whole, Parallel())
    name = "adam_m.model.layers.0.attention.wq.weight"
    for rank, tensors in read_ranks(without_manifest(tmp_path / "ranks", "adam_m.")).items():
        (file,) = (tmp_path / "ranks" / f"rank_{rank}").iterdir()
        write_whole(file, tensors | {name: read_whole(whole)[name]})
    with pytest.raises(CoverageError, match="1 tensor of state has another shape than the parameter") as caught:
        reshard(tmp_path / "ranks", tmp_path / "out", Parallel(**layout), variant="base" if layout else None)
    assert caught.value.items == (f"{name} (96, 24), {name[7:]} (48, 24)",)


def test_counters_that_differ_between_ranks_are_refused(hf: Path, tmp_path: Path) -> None:
    convert(trained(hf, tmp_path / "source"), tmp_path / "ranks", parallel=Parallel(mp=2, pp=2))
    without_manifest(tmp_path / "ranks")
    reshard(tmp_path / "ranks", tmp_path / "equal", Parallel())
    (file,) = (tmp_path / "ranks" / "rank_3").iterdir()
    write_whole(file, read_file(file) | {"global_step": np.array([8], np.uint32)})
    with pytest.raises(CoverageError, match="differs between ranks that hold the same part") as caught:
        reshard(tmp_path / "ranks", tmp_path / "out", Parallel())
    assert [item.split(",")[0] for item in caught.value.items] == [
        "global_step: 1 element of rank_3 differs from rank_0"
    ]

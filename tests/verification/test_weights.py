"""The contract: every element of both sides is accounted for, whole or cut over ranks; nothing else is called equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runner_jobs import wrong_table

from ckptkit import CoverageError, Parallel, convert, diff, reshard, verify
from ckptkit.commands.sides import Asked, open_sides
from ckptkit.report import Report
from ckptkit.verification.weights import compare, rounding
from tests.rank_results import Tensors, read_file, read_whole, write_whole
from tests.tiny_models import carry, make_hf_plain
from tests.trained_models import make_llama, make_qwen3_moe, make_trained, state_of

Change = Callable[[Tensors], None]
LAYER = "model.layers.{}.attention.{}.weight"
CUTS = {
    "whole": None,
    "tensor parallel": Parallel(mp=2),
    "all": Parallel(mp=2, pp=3, dp=2, optimizer_shard=True),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("hf") / "hf")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_moe(tmp_path_factory.mktemp("moe") / "hf")


def mindspore(hf: Path, folder: Path, cut: Parallel | None, *, change: Change | None = None) -> Path:
    """Convert `hf`, with `change` made to MindSpore's tensors; what is changed or cut then has no manifest."""
    convert(hf, folder / "whole", to_dialect="mindformers")
    if change is not None:
        tensors = copied(folder / "whole")
        change(tensors)
        config = (folder / "whole" / "config.json").read_bytes()
        shutil.rmtree(folder / "whole")
        write_whole(folder / "whole" / "part0.safetensors", tensors)
        (folder / "whole" / "config.json").write_bytes(config)
    if cut is None:
        return folder / "whole"
    reshard(folder / "whole", folder / "cut", cut)
    (folder / "cut" / "ckptkit.json").unlink()
    return folder / "cut"


def copied(path: Path) -> Tensors:
    """Return tensors that may be changed, of a folder or a file."""
    found = read_whole(path) if path.is_dir() else read_file(path)
    return {name: array.copy() for name, array in found.items()}


def status(report: Report, kind: str) -> set[str]:
    return {row["name"] for row in report.data["parameters"] if row["status"] == kind}


def weights(a: Path, b: Path, **options: object) -> Report:
    return verify(a, b, level="weights", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", CUTS)
def test_what_was_converted_is_loaded_whole(hf: Path, tmp_path: Path, cut: str) -> None:
    report = weights(hf, mindspore(hf, tmp_path, CUTS[cut]))
    assert report.exit_code == 0, report.to_text()
    names = {row["name"] for row in report.data["parameters"]}
    assert status(report, "loaded") == names == set(read_whole(tmp_path / "whole"))


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "whole"])
def test_both_sides_may_be_cut(hf: Path, tmp_path: Path, cut: str) -> None:
    a = mindspore(hf, tmp_path / "a", Parallel(mp=4))
    b = mindspore(hf, tmp_path / "b", CUTS[cut])
    assert weights(a, b).exit_code == 0
    assert diff(a, b).exit_code == 0
    assert weights(b, hf).exit_code == 0


def test_experts_over_ranks_are_compared_with_those_that_hold_them(moe: Path, tmp_path: Path) -> None:
    convert(moe, tmp_path / "ms", to_dialect="mindformers", parallel=Parallel(mp=2, ep=2, dp=2))
    assert weights(moe, tmp_path / "ms").exit_code == 0


def swap(one: str, two: str) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[one], tensors[two] = tensors[two], tensors[one]

    return change


def round_to_bf16(tensors: Tensors) -> None:
    name = LAYER.format(1, "wq")
    tensors[name] = carry(tensors[name].view(np.float32), "BF16").astype(np.uint32) << 16


def store_in_bf16(tensors: Tensors) -> None:
    name = LAYER.format(1, "wq")
    tensors[name] = carry(tensors[name].view(np.float32), "BF16")


def transpose(tensors: Tensors) -> None:
    name = LAYER.format(1, "wo")
    assert tensors[name].shape[0] == tensors[name].shape[1]
    tensors[name] = np.ascontiguousarray(tensors[name].T)


def of_another_checkpoint(tensors: Tensors) -> None:
    name = LAYER.format(1, "wq")
    tensors[name] = np.random.default_rng(7).standard_normal(tensors[name].shape, np.float32).view(np.uint32)


def without_a_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        del tensors[name]


def with_another(tensors: Tensors) -> None:
    tensors["model.layers.1.attention.wz.weight"] = tensors[LAYER.format(1, "wq")]


FAULTS: list[tuple[str, Change, str, set[str]]] = [
    ("a tensor of another checkpoint", of_another_checkpoint, "value", {LAYER.format(1, "wq")}),
    (
        "two layers swapped", swap(LAYER.format(0, "wq"), LAYER.format(1, "wq")), "value",
        {LAYER.format(0, "wq"), LAYER.format(1, "wq")},
    ),
    (
        "gate and up swapped",
        swap("model.layers.1.feed_forward.w1.weight", "model.layers.1.feed_forward.w3.weight"), "value",
        {"model.layers.1.feed_forward.w1.weight", "model.layers.1.feed_forward.w3.weight"},
    ),
    ("one tensor rounded to bf16", round_to_bf16, "value", {LAYER.format(1, "wq")}),
    ("one tensor stored in bf16", store_in_bf16, "dtype", {LAYER.format(1, "wq")}),
    ("an unknown tensor", with_another, "unexpected", {"model.layers.1.attention.wz.weight"}),
]  # fmt: skip


# a layout by degrees has no place for an unknown tensor, so there is no set of ranks with one
@pytest.mark.parametrize(
    ("fault", "cut"),
    [(f, cut) for f in FAULTS for cut in CUTS if f[2] != "unexpected" or cut == "whole"],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_fault_is_found_and_named(
    hf: Path, tmp_path: Path, fault: tuple[str, Change, str, set[str]], cut: str
) -> None:
    _, change, kind, names = fault
    report = weights(hf, mindspore(hf, tmp_path, CUTS[cut], change=change))
    assert report.exit_code == 1
    assert report.data["failed"] == ["weights"]
    assert status(report, kind) == names, report.to_text()
    others = status(report, "loaded")
    assert len(others) == len(report.data["parameters"]) - len(names)


def test_a_square_matrix_that_is_transposed_is_found(tmp_path: Path) -> None:
    hf = make_hf_plain(tmp_path / "hf", hidden=32, heads=4, kv_heads=4)
    report = weights(hf, mindspore(hf, tmp_path, None, change=transpose))
    assert (report.exit_code, status(report, "value")) == (1, {LAYER.format(1, "wo")})


def test_a_layer_that_is_not_there_is_missing(hf: Path, tmp_path: Path) -> None:
    report = weights(hf, mindspore(hf, tmp_path, None, change=without_a_layer))
    assert report.exit_code == 1
    assert len(status(report, "missing")) == 9
    assert "model.layers.2.self_attn.q_proj.weight" in status(report, "missing")
    assert "model.layers.2." in report.to_text()


def test_what_neither_side_has_is_missing_too(hf: Path, tmp_path: Path) -> None:
    """Two sides that lack the same tensor are equal, and neither is right."""
    ms = mindspore(hf, tmp_path, None, change=lambda tensors: tensors.pop("model.norm_out.weight"))
    shutil.copytree(ms, tmp_path / "twin")
    assert diff(ms, tmp_path / "twin").exit_code == 0
    report = weights(ms, tmp_path / "twin")
    assert (report.exit_code, status(report, "missing")) == (1, {"model.norm_out.weight"})


def test_plain_concat_read_as_grouped_qkv_is_found(hf: Path, tmp_path: Path) -> None:
    """Both layouts have the same names and shapes; only the rows tell."""
    convert(hf, tmp_path / "ms", to_dialect="mindformers", variant="qkv_concat-1.4")
    (tmp_path / "ms" / "ckptkit.json").unlink()
    assert weights(hf, tmp_path / "ms", variant_b="qkv_concat-1.4").exit_code == 0
    report = weights(hf, tmp_path / "ms", variant_b="qkv_concat")
    assert report.exit_code == 1
    assert {name.split(".")[-2] for name in status(report, "value")} == {"w_qkv", "w_gate_hidden"}


def test_one_shard_of_another_step_is_found_and_its_rank_named(hf: Path, tmp_path: Path) -> None:
    cut = mindspore(hf, tmp_path, Parallel(mp=2, pp=3))
    file = next((cut / "rank_3").iterdir())
    tensors = read_file(file)
    rng = np.random.default_rng(3)
    write_whole(file, {n: (t.view(np.float32) + rng.standard_normal(t.shape, np.float32)).view(np.uint32)
                       if "attention.wq" in n else t for n, t in tensors.items()})  # fmt: skip
    report = weights(hf, cut)
    assert report.exit_code == 1
    wrong = status(report, "value")
    assert wrong == {name for name in tensors if "attention.wq" in name} and len(wrong) == 1
    assert report.data["shards"] == [f"rank_3:{next(iter(wrong))}"]
    assert "rank_3:" in report.to_text()


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_replica_that_is_no_copy_is_found_on_either_side(hf: Path, tmp_path: Path, side: str) -> None:
    cut = mindspore(hf, tmp_path, Parallel(mp=2, dp=2))
    file = next((cut / "rank_3").iterdir())
    copy = file.read_bytes()
    file.unlink()
    file.write_bytes(copy)
    tensors = copied(file)
    tensors["model.norm_out.weight"][5] ^= 1 << 20
    write_whole(file, tensors)
    report = weights(*((cut, hf) if side == "a" else (hf, cut)))
    assert report.exit_code == 1
    assert status(report, "value") == {"model.norm_out.weight"}
    assert "rank_3" in report.to_text()
    assert diff(*((cut, hf) if side == "a" else (hf, cut))).exit_code == 1


def test_a_rank_that_is_missing_is_an_error_before_anything_is_compared(hf: Path, tmp_path: Path) -> None:
    cut = mindspore(hf, tmp_path, Parallel(mp=2))
    shutil.rmtree(cut / "rank_1")
    with pytest.raises(CoverageError):
        weights(hf, cut)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_cast_of_all_is_within_its_bound_and_is_told(hf: Path, tmp_path: Path, dtype: str) -> None:
    convert(hf, tmp_path / "ms", to_dialect="mindformers", dtype=dtype, parallel=Parallel(mp=2))
    for pair in ((hf, tmp_path / "ms"), (tmp_path / "ms", hf)):
        report = weights(*pair)
        assert report.exit_code == 0, report.to_text()
        assert len(status(report, "dtype")) == len(report.data["parameters"])
        assert "rounded to nearest" in report.to_text()
    assert diff(hf, tmp_path / "ms").exit_code == 1


@pytest.mark.parametrize("wider", ["a", "b"])
def test_it_is_the_wider_side_that_runs_rounded_at_level_forward(hf: Path, tmp_path: Path, wider: str) -> None:
    convert(hf, tmp_path / "ms", to_dialect="mindformers", dtype="bf16", variant="qkv_concat")
    pair = (hf, tmp_path / "ms") if wider == "a" else (tmp_path / "ms", hf)
    sides = open_sides(*pair, Asked())
    of_a, of_b = rounding(compare(sides.pair(), None, None, workers=1, progress=None))
    rounded, other = (of_a, of_b) if wider == "a" else (of_b, of_a)
    assert rounded == dict.fromkeys(read_whole(hf), "BF16") and not other
    sides = open_sides(hf, hf, Asked())
    assert rounding(compare(sides.pair(), None, None, workers=1, progress=None)) == ({}, {})


def test_a_cast_that_is_off_by_one_bit_is_no_cast(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "ms", to_dialect="mindformers", dtype="bf16")
    tensors = copied(tmp_path / "ms")
    tensors[LAYER.format(1, "wq")].reshape(-1)[5] ^= 1
    write_whole(tmp_path / "other" / "part0.safetensors", tensors)
    shutil.copy(hf / "config.json", tmp_path / "other")
    report = weights(hf, tmp_path / "other")
    assert (report.exit_code, status(report, "value")) == (1, {LAYER.format(1, "wq")})


def test_training_state_of_one_side_is_benign_and_that_of_both_is_compared(hf: Path, tmp_path: Path) -> None:
    trained = make_trained(hf, tmp_path / "trained", to_dialect="mindformers")
    report = weights(hf, trained)
    assert report.exit_code == 0, report.to_text()
    assert all("training state" in reason for _, reason in report.data["benign"])
    assert len(report.data["benign"]) == len(state_of(read_whole(trained), ())) + 2 * len(status(report, "loaded"))
    tensors = copied(trained)
    tensors["adam_m." + LAYER.format(1, "wq")].reshape(-1)[3] ^= 1
    write_whole(tmp_path / "other" / "model.safetensors", tensors)
    shutil.copy(hf / "config.json", tmp_path / "other")
    report = weights(trained, tmp_path / "other")
    assert (report.exit_code, status(report, "value")) == (1, {"adam_m." + LAYER.format(1, "wq")})


def test_training_state_is_compared_across_namings(hf: Path, tmp_path: Path) -> None:
    trained = make_trained(hf, tmp_path / "trained", to_dialect="mindformers")
    convert(trained, tmp_path / "back", to_dialect="hf")
    convert(tmp_path / "back", tmp_path / "qkv", to_dialect="mindformers", variant="qkv_concat")
    assert diff(trained, tmp_path / "qkv").exit_code == 0
    tensors = copied(trained)
    tensors["adam_v." + LAYER.format(2, "wk")].reshape(-1)[1] ^= 1
    write_whole(trained / "model.safetensors", tensors)
    report = weights(trained, tmp_path / "qkv")
    assert (report.exit_code, status(report, "value")) == (1, {"adam_v.model.layers.2.attention.w_qkv.weight"})


def test_a_padded_vocabulary_is_compared_row_by_row(tmp_path: Path) -> None:
    hf = make_llama(tmp_path / "hf", vocab=46)
    convert(hf, tmp_path / "ms", to_dialect="mindformers", parallel=Parallel(mp=4, pad_vocab_to=48))
    for pair in ((hf, tmp_path / "ms"), (tmp_path / "ms", hf)):
        assert weights(*pair).exit_code == 0


def test_a_wrong_but_invertible_table_passes_weights(hf: Path, tmp_path: Path) -> None:
    """Level weights proves that nothing was lost, and not that a row's names are right: that is level forward's."""
    table = wrong_table(tmp_path)
    convert(hf, tmp_path / "ms", to_dialect="mindformers", table=table)
    assert weights(hf, tmp_path / "ms", table=table).exit_code == 0
    (tmp_path / "ms" / "ckptkit.json").unlink()
    report = weights(hf, tmp_path / "ms")
    assert {name.split(".")[-2] for name in status(report, "value")} == {"wk", "wv"}


def test_the_load_status_folds_layers(hf: Path, tmp_path: Path) -> None:
    text = weights(hf, mindspore(hf, tmp_path, None)).to_text()
    assert "model.layers.{0..2}.attention.wq.weight x 3" in text


def test_json_has_a_row_for_each_parameter(hf: Path, tmp_path: Path) -> None:
    report = weights(hf, mindspore(hf, tmp_path, None, change=of_another_checkpoint))
    data = json.loads(report.to_json())
    assert (data["command"], data["ok"], data["level"]) == ("verify", False, "weights")
    row = next(row for row in data["parameters"] if row["status"] == "value")
    assert row["name"] == LAYER.format(1, "wq") and row["changed"] > 500 and row["max_abs"] > 1

"""The contract: MindFormers' newer checkpoint folders are read and written as any other checkpoint over ranks.

What MindFormers' own save code wrote (tests/golden/mindformers) has the values that were given to it, in every layout
and whether or not redundant slices were removed; it merges, and is cut again to the very files. Weights and moments go
to HuggingFace and back. Damaged folders are in `formats/test_mindformers_damage.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.commands.check import check
from ckptkit.commands.convert import convert
from ckptkit.commands.diff import diff
from ckptkit.commands.inspect import inspect
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.commands.verify import verify
from ckptkit.errors import UsageError
from ckptkit.formats.manifest import read_manifest
from ckptkit.formats.mindformers_metadata import read_metadata
from ckptkit.formats.mindspore_strategy import dump_strategy
from ckptkit.report import Report
from tests.rank_results import Array, Tensors, odd_names, read_file, read_ranks, read_whole, same_tensors, write_whole
from tests.tiny_models import write_safetensors
from tests.trained_models import make_llama, make_qwen3_moe, make_trained, weights_of

pytestmark = pytest.mark.usefixtures("quick_disk")

GOLDEN = Path(__file__).parent.parent / "golden" / "mindformers"
ITERATION = "iteration_00000008"
FOLDERS = ["single", "v21_single", "tp2", "dp2_zero", "pp2", "tp2dp2_rr"]
CUT = ["tp2", "dp2_zero", "pp2"]
LAYER = ("input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.experts")
SHAPES = {"embedding": (32, 8), "input_layernorm": (8,), "linear_qkv": (24, 8), "linear_proj": (8, 8),
          "experts": (4, 8, 16), "output_layer": (32, 8)}  # fmt: skip


def rows(report: Report, label: str) -> list[str]:
    return [text for own, text in report.rows if own == label]


def parameters() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters of the network that was saved, in its order."""
    yield "embedding.word_embeddings.weight", SHAPES["embedding"]
    for layer in range(2):
        for part in LAYER:
            suffix = "weight1" if part == "mlp.experts" else "weight"
            yield f"decoder.layers.{layer}.{part}.{suffix}", SHAPES[part.rpartition(".")[2]]
    yield "output_layer.weight", SHAPES["output_layer"]


def stated() -> Tensors:
    """Return the tensors that were saved, by the rule in the README beside them."""
    found: Tensors = {"global_step": np.array([8], np.uint32)}
    for index, (name, shape) in enumerate(parameters()):
        for more, prefix in ((0, ""), (1000, "adam_m."), (2000, "adam_v.")):
            values = (np.arange(np.prod(shape)) % 127 + index + more).reshape(shape).astype(np.float32)
            bits = values.view(np.uint32)
            is_bf16 = not prefix and "layernorm" not in name
            found[prefix + name] = (bits >> 16).astype(np.uint16) if is_bf16 else bits  # exact: below 256
    return found


def merged(source: Path, target: Path, **options: Any) -> Tensors:
    reshard(source, target, Parallel(**options), format="safetensors")
    return read_whole(target)


def files_in(folder: Path) -> dict[str, Tensors]:
    return {file.name: read_file(file) for file in sorted(folder.glob("*.safetensors"))}


# ---- what MindFormers wrote ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("inside", ["", ITERATION])
def test_a_folder_of_mindformers_has_the_values_that_were_saved(tmp_path: Path, name: str, inside: str) -> None:
    found = merged(GOLDEN / name / inside, tmp_path / "whole")
    rate = found.pop("learning_rate", None)  # no rule says its value; saves without redundancy leave it out
    assert (rate is None) == (name == "tp2dp2_rr")
    assert odd_names(found, stated()) == []


def test_a_value_that_was_not_saved_is_seen() -> None:
    assert same_tensors(stated(), stated())
    wrong = stated() | {"global_step": np.array([9], np.uint32)}
    assert odd_names(wrong, stated()) == ["global_step"]


@pytest.mark.parametrize("name", CUT)
def test_it_is_cut_again_to_the_very_tensors_and_metadata(tmp_path: Path, name: str) -> None:
    merged(GOLDEN / name, tmp_path / "whole")
    strategies = tmp_path / "strategies"
    strategies.mkdir()
    for stage, strategy in enumerate(read_metadata(GOLDEN / name / ITERATION).strategies()):
        (strategies / f"{stage}.ckpt").write_bytes(dump_strategy(strategy))
    options = Parallel(dst_strategy=strategies)
    reshard(tmp_path / "whole", tmp_path / "again", options, format="mindformers")
    again, theirs = tmp_path / "again" / ITERATION, GOLDEN / name / ITERATION
    ours = files_in(again)
    assert ours.keys() == files_in(theirs).keys()
    for file, tensors in files_in(theirs).items():
        assert odd_names(ours[file], tensors) == []
    written, saved = (json.loads((folder / "metadata.json").read_text()) for folder in (again, theirs))
    written["state_dict_metadata"].pop("learning_rate")
    written["storage_data"].pop("('learning_rate', (0,))")
    assert written == saved
    layouts = [list(entry["layout"]) for entry in written["state_dict_metadata"].values()]
    assert layouts == [list(entry["layout"]) for entry in saved["state_dict_metadata"].values()]
    assert (tmp_path / "again" / "latest_checkpointed_iteration.txt").read_text() == "8"


def test_the_moment_of_training_comes_along(tmp_path: Path) -> None:
    reshard(GOLDEN / "tp2", tmp_path / "one", Parallel())
    assert files_in(tmp_path / "one" / ITERATION).keys() == {
        "CKP-model-0000000-0000001.safetensors", "CKP-opt-0000000-0000001.safetensors",
    }  # fmt: skip
    assert not (tmp_path / "one" / ITERATION / "metadata.json").exists()
    common = json.loads((tmp_path / "one" / ITERATION / "common.json").read_text())
    assert common == json.loads((GOLDEN / "tp2" / ITERATION / "common.json").read_text())
    reshard(GOLDEN / "v21_single", tmp_path / "old", Parallel())
    assert "consumed_samples" not in (tmp_path / "old" / ITERATION / "common.json").read_text()


def test_inspect_says_what_a_folder_holds() -> None:
    report = inspect(GOLDEN / "tp2dp2_rr")
    assert rows(report, "iteration") == [f"{ITERATION}: epoch_num 1, step_num 8, global_step 8, global_batch_size 4"]
    assert "remove_redundancy" in rows(report, "saved")[0]
    assert rows(report, "layout") == ["1 stage(s) of 4 device(s), from `metadata.json`"]
    assert report.data["whole"]["decoder.layers.1.mlp.experts.weight1"] == {"shape": [4, 8, 16], "dtype": "BF16"}
    assert "CKP-model-0000000-0000004.safetensors, CKP-opt-0000000-0000004.safetensors" in rows(report, "ranks")[0]
    stages = inspect(GOLDEN / "pp2")
    assert rows(stages, "layout") == ["2 stage(s) of 1 device(s), from `metadata.json`"]
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= stages.data["whole"].keys()
    assert rows(inspect(GOLDEN / "single"), "layout") == ["whole: one rank saved it"]


@pytest.mark.parametrize("name", FOLDERS)
def test_check_reads_all_of_it_and_compares_the_ranks(name: str) -> None:
    report = check(GOLDEN / name)
    assert report.headline == f"`{GOLDEN / name}`: structure checked, bytes not"
    replicas = {"tp2": 8, "dp2_zero": 2, "pp2": 2}  # two norms with their moments, and two counters
    assert rows(report, "replicas") == (
        [f"{replicas[name]} slices that more than one rank holds are equal"] if name in replicas else []
    )


def test_diff_compares_it_with_any_other() -> None:
    assert diff(GOLDEN / "tp2", GOLDEN / "dp2_zero" / ITERATION).exit_code == 0
    assert diff(GOLDEN / "tp2", GOLDEN / "pp2").exit_code == 0
    report = diff(GOLDEN / "tp2", GOLDEN / "tp2dp2_rr")
    assert report.exit_code == 1
    assert rows(report, "only in A") == ["learning_rate"]


# ---- other releases --------------------------------------------------------------------------------------------------


def edited(folder: Path, name: str, change: Any) -> Path:
    shutil.copytree(GOLDEN / name, folder)
    file = folder / ITERATION / "metadata.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return folder


def drop_groups(content: dict[str, Any]) -> None:
    for found in content["storage_data"].values():
        for row in found:
            del row["rank_group"]


@pytest.mark.parametrize("name", ["tp2", "tp2dp2_rr"])
def test_a_save_of_1_8_without_rank_groups_is_read(tmp_path: Path, name: str) -> None:
    found = merged(edited(tmp_path / "1.8", name, drop_groups), tmp_path / "whole")
    found.pop("learning_rate", None)
    assert odd_names(found, stated()) == []


def nullify(content: dict[str, Any]) -> None:
    for entry in content["state_dict_metadata"].values():
        if set(entry["axis_fragmentations"]) == {1}:
            entry["layout"] = None


def test_null_layouts_are_read(tmp_path: Path) -> None:
    found = merged(edited(tmp_path / "2.1", "tp2", nullify), tmp_path / "whole")
    found.pop("learning_rate")
    assert odd_names(found, stated()) == []


def list_gradients(content: dict[str, Any]) -> None:
    for name in [name for name in content["state_dict_metadata"] if name.startswith("decoder")]:
        content["state_dict_metadata"][f"accu_grads.{name}"] = content["state_dict_metadata"][name]
        for key in [key for key in content["storage_data"] if key.startswith(f"('{name}'")]:
            content["storage_data"][key.replace(name, f"accu_grads.{name}")] = content["storage_data"][key]


def test_gradients_that_are_listed_and_in_no_file_are_passed_over_and_noted(tmp_path: Path) -> None:
    folder = edited(tmp_path / "listed", "tp2", list_gradients)
    assert "8 `accu_grads` tensors are listed" in " ".join(rows(check(folder), "note"))
    found = merged(folder, tmp_path / "whole")
    assert not any(name.startswith("accu_grads") for name in found)


def test_fragmentations_that_are_not_those_of_the_layout_are_noted_and_the_layout_counts(tmp_path: Path) -> None:
    def turn(content: dict[str, Any]) -> None:
        content["state_dict_metadata"]["output_layer.weight"]["axis_fragmentations"] = [1, 2]

    folder = edited(tmp_path / "turned", "tp2", turn)
    report = reshard(folder, tmp_path / "whole", Parallel(), format="safetensors")
    assert any("`axis_fragmentations` of `output_layer.weight` are not" in note for note in rows(report, "note"))
    assert same_tensors(weights_of(read_whole(tmp_path / "whole")), weights_of(stated()))


# ---- from HuggingFace and back ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A HuggingFace folder and its MindSpore checkpoint with training state."""
    folder = tmp_path_factory.mktemp("model")
    hf = make_llama(folder / "hf")
    return hf, make_trained(hf, folder / "ms")


DEGREES: list[dict[str, Any]] = [
    {}, {"mp": 2}, {"pp": 3}, {"dp": 2}, {"mp": 2, "dp": 2, "optimizer_shard": True},
    {"mp": 4, "pp": 3, "dp": 2, "optimizer_shard": True}, {"mp": 3, "pp": 2},
]  # fmt: skip


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_weights_and_moments_go_from_huggingface_and_back(
    model: tuple[Path, Path], tmp_path: Path, degrees: dict[str, Any]
) -> None:
    hf, ms = model
    options = {"variant": "base"} if degrees else {}
    reshard(ms, tmp_path / "newer", Parallel(**degrees), format="mindformers", **options)
    assert not list((tmp_path / "newer").glob("rank_*"))
    assert check(tmp_path / "newer").headline == f"`{tmp_path / 'newer'}` is sound"
    report = convert(tmp_path / "newer", tmp_path / "back", to_dialect="hf", variant=options.get("variant", "base"))
    assert odd_names(read_file(tmp_path / "back" / "model.safetensors"), read_whole(hf)) == []
    assert rows(report, "state") == ["adam_m. x 30, adam_v. x 30, counters x 4"]
    convert(tmp_path / "back", tmp_path / "again", variant="base")
    assert odd_names(read_whole(tmp_path / "again"), read_whole(ms)) == []


def test_moments_are_left_out_and_counted(model: tuple[Path, Path], tmp_path: Path) -> None:
    hf, ms = model
    reshard(ms, tmp_path / "newer", Parallel(mp=2), variant="base", format="mindformers")
    report = convert(tmp_path / "newer", tmp_path / "back", to_dialect="hf", no_optimizer=True)
    assert odd_names(read_whole(tmp_path / "back"), read_whole(hf)) == []
    assert sum(int(text.partition(" x ")[0]) if " x " in text else 1 for text in rows(report, "dropped")) == 64
    report = reshard(tmp_path / "newer", tmp_path / "bare", Parallel(pp=3), no_optimizer=True)
    assert not list((tmp_path / "bare").glob("*/CKP-opt*"))
    assert len(list((tmp_path / "bare").glob("*/CKP-model*"))) == 3


def test_convert_writes_it_straight_from_huggingface(model: tuple[Path, Path], tmp_path: Path) -> None:
    hf, ms = model
    report = convert(hf, tmp_path / "newer", format="mindformers", parallel=Parallel(mp=2))
    folder = tmp_path / "newer" / "iteration_00000000"
    assert sorted(path.name for path in folder.iterdir()) == [
        "CKP-model-0000000-0000002.safetensors", "CKP-model-0000001-0000002.safetensors", "common.json",
        "metadata.json",
    ]  # fmt: skip
    assert (tmp_path / "newer" / "config.json").read_bytes() == (hf / "config.json").read_bytes()
    assert 'load_checkpoint: "' in rows(report, "yaml")[0]
    assert rows(report, "yaml")[1] == "use_legacy_format: False"
    assert odd_names(merged(tmp_path / "newer", tmp_path / "whole"), weights_of(read_whole(ms))) == []


def test_ranks_become_a_newer_folder_and_ranks_again(model: tuple[Path, Path], tmp_path: Path) -> None:
    _, ms = model
    reshard(ms, tmp_path / "ranks", Parallel(mp=2, pp=3), variant="base")
    reshard(tmp_path / "ranks", tmp_path / "newer", Parallel(dp=2), format="mindformers")
    reshard(tmp_path / "newer", tmp_path / "again", Parallel(mp=2, pp=3), format="safetensors")
    ours, before = read_ranks(tmp_path / "again"), read_ranks(tmp_path / "ranks")
    assert ours.keys() == before.keys()
    assert all(odd_names(ours[rank], before[rank]) == [] for rank in before)


def test_the_step_is_that_of_the_optimizers_counter(tmp_path: Path) -> None:
    saved: dict[str, Array] = {"w": np.ones((4, 2), np.uint32)}
    for rank in range(2):
        write_whole(tmp_path / f"ranks/rank_{rank}/CKP_rank_{rank}-3_20.safetensors", saved)
    (tmp_path / "strategy").mkdir()
    whole = read_metadata(GOLDEN / "tp2" / ITERATION).strategies()[0]
    layout = {"w": whole.tensors["output_layer.weight"]}
    (tmp_path / "strategy" / "0.ckpt").write_bytes(dump_strategy(type(whole)(0, layout, {})))
    told = Parallel(src_strategy=tmp_path / "strategy")
    reshard(tmp_path / "ranks", tmp_path / "newer", told, format="mindformers")
    common = json.loads((tmp_path / "newer" / "iteration_00000020" / "common.json").read_text())
    assert (common["epoch_num"], common["step_num"], common["global_step"]) == (3, 20, 20)
    report = reshard(GOLDEN / "tp2", tmp_path / "whole", Parallel(), format="safetensors")
    assert any("saved at epoch 1, step 8" in note for note in rows(report, "note"))
    reshard(tmp_path / "whole", tmp_path / "counted", Parallel(), format="mindformers")
    assert (tmp_path / "counted" / ITERATION).is_dir()


# ---- the moment of training ------------------------------------------------------------------------------------------


def make_saved(folder: Path, counters: dict[str, int], loss_scale: float | None = None) -> Path:
    """Write weights with moments, and counters as MindFormers saves them; return `folder`."""
    folder.mkdir()
    names = ("w", "adam_m.w", "adam_v.w")
    tensors: Tensors = {name: np.full((4, 2), index, np.uint32) for index, name in enumerate(names)}
    if loss_scale is not None:
        tensors["loss_scale"] = np.array([loss_scale], np.float32).view(np.uint32)
    write_safetensors(folder / "a.safetensors", tensors, "F32")
    write_safetensors(folder / "b.safetensors", {n: np.array([v], np.uint32) for n, v in counters.items()}, "I32")
    return folder


def common_of(root: Path) -> dict[str, Any]:
    (file,) = root.glob("iteration_*/common.json")
    common: dict[str, Any] = json.loads(file.read_text())
    return common


COUNTERS = {"epoch_num": 3, "step_num": 8, "global_step": 7, "global_batch_size": 16}


def test_every_counter_that_is_stored_is_written(tmp_path: Path) -> None:
    saved = make_saved(tmp_path / "saved", COUNTERS, 1024.0)
    report = reshard(saved, tmp_path / "newer", Parallel(), format="mindformers")
    assert common_of(tmp_path / "newer") == {**COUNTERS, "loss_scale": 1024.0, "ckpt_status": None}
    assert (tmp_path / "newer" / ITERATION).is_dir()  # after the step, as MindFormers names it
    assert not any("before a run goes on" in note for note in rows(report, "note"))
    reshard(tmp_path / "newer", tmp_path / "again", Parallel(), format="mindformers")
    assert common_of(tmp_path / "again") == common_of(tmp_path / "newer")


@pytest.mark.parametrize(
    ("counters", "common", "words"),
    [
        ({"global_step": 7}, (1, 7, 7, None), ["epoch of step 7", "says no global_batch_size"]),
        ({"epoch_num": 2, "step_num": 9}, (2, 9, 9, None), ["says no global_batch_size"]),
        ({"global_batch_size": 4}, (0, 0, 0, 4), []),
        (COUNTERS | {"global_batch_size": 0}, (3, 8, 7, 0), ["says no global_batch_size"]),
    ],
)
def test_what_a_run_cannot_be_resumed_without_is_noted(
    tmp_path: Path, counters: dict[str, int], common: tuple[int | None, ...], words: list[str]
) -> None:
    saved = make_saved(tmp_path / "saved", counters)
    report = reshard(saved, tmp_path / "newer", Parallel(), format="mindformers")
    found = common_of(tmp_path / "newer")
    assert tuple(found[key] for key in ("epoch_num", "step_num", "global_step", "global_batch_size")) == common
    notes = [note for note in rows(report, "note") if "before a run goes on" in note]
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_weights_alone_resume_no_run_and_get_no_note(tmp_path: Path) -> None:
    saved = make_saved(tmp_path / "saved", {"global_step": 7})
    options: dict[str, Any] = {"format": "mindformers", "no_optimizer": True}
    report = reshard(saved, tmp_path / "bare", Parallel(), **options)
    assert not any("before a run goes on" in note for note in rows(report, "note"))


def test_an_iteration_without_common_json_gets_one_that_can_be_resumed_from(tmp_path: Path) -> None:
    root = shutil.copytree(GOLDEN / "tp2", tmp_path / "root")
    (root / ITERATION / "common.json").unlink()
    report = reshard(root, tmp_path / "newer", Parallel(), format="mindformers")
    found = common_of(tmp_path / "newer")
    assert [found[key] for key in ("epoch_num", "step_num", "global_step")] == [1, 8, 8]
    assert len([note for note in rows(report, "note") if "before a run goes on" in note]) == 2


def test_counters_of_common_json_and_of_tensors_that_disagree_are_noted(tmp_path: Path) -> None:
    root = shutil.copytree(GOLDEN / "tp2", tmp_path / "root")
    file = root / ITERATION / "common.json"
    for count, noted in ((8, False), (6, True)):
        file.write_text(file.read_text().replace('"global_step": 8', f'"global_step": {count}'))
        report = reshard(root, tmp_path / f"newer{count}", Parallel(), format="mindformers")
        assert common_of(tmp_path / f"newer{count}")["global_step"] == count
        found = any("disagree in `global_step: 6, and the tensor 8`" in note for note in rows(report, "note"))
        assert found == noted


def test_counters_are_not_taken_for_quantised_weights(tmp_path: Path) -> None:
    saved = make_saved(tmp_path / "saved", COUNTERS)
    write_safetensors(saved / "c.safetensors", {"adam_m.v": np.ones(3, np.uint32)}, "I32")

    def noted() -> list[str]:
        report = reshard(saved, tmp_path / "out", Parallel(), format="safetensors", dry_run=True)
        return [note for note in rows(report, "note") if "if they are quantised" in note]

    assert [note.partition(",")[0] for note in noted()] == ["1 tensor is I32"]  # of no parameter: the network's own
    write_safetensors(saved / "c.safetensors", {"v": np.ones(3, np.uint32)}, "F32")
    write_safetensors(saved / "d.safetensors", {"adam_m.v": np.ones(3, np.uint32)}, "I32")
    assert noted() == []
    write_safetensors(saved / "c.safetensors", {"v": np.ones(3, np.uint32)}, "I32")
    assert [note.partition(",")[0] for note in noted()] == ["1 tensor is I32"]


def test_experts_and_their_moments_go_there_and_back(tmp_path: Path) -> None:
    hf = make_qwen3_moe(tmp_path / "hf")
    ms = make_trained(hf, tmp_path / "ms")
    reshard(ms, tmp_path / "newer", Parallel(mp=2, pp=3, ep=4), variant="base", format="mindformers")
    assert odd_names(merged(tmp_path / "newer", tmp_path / "whole"), read_whole(ms)) == []


def test_a_finished_result_gets_its_name_by_a_rerun_that_reports_the_same_casts(tmp_path: Path) -> None:
    hf = make_llama(tmp_path / "hf")
    large = {name: np.full(a.shape, 0x47800000, np.uint32) for name, a in read_whole(hf).items()}  # 65536
    write_safetensors(hf / "model.safetensors", large, "F32")
    target = tmp_path / "newer"

    def run() -> list[str]:
        return rows(
            convert(hf, target, format="mindformers", parallel=Parallel(mp=2), dtype="fp16", clamp=True), "cast"
        )

    first, manifest = run(), read_manifest(target)
    assert manifest is not None
    assert {name.partition(":")[0] for name in manifest["tensors"]} == {"rank_0", "rank_1"}
    assert check(target).headline == f"`{target}` is sound"
    target.rename(f"{target}.partial-{manifest['plan']}")  # a crash just before the last step
    assert run() == first
    assert any("576 overflowed" in text for text in first)


def test_several_iterations_are_told_by_step(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "tp2", tmp_path / "root")
    shutil.copytree(GOLDEN / "pp2" / ITERATION, tmp_path / "root" / "iteration_00000004")
    assert rows(inspect(tmp_path / "root", step=4), "layout") == ["2 stage(s) of 1 device(s), from `metadata.json`"]
    assert rows(inspect(tmp_path / "root"), "layout") == ["1 stage(s) of 2 device(s), from `metadata.json`"]
    found = merged(tmp_path / "root", tmp_path / "whole", step=4)
    assert found["learning_rate"].shape == ()


def test_an_iteration_of_our_own_result_can_be_named_itself(model: tuple[Path, Path], tmp_path: Path) -> None:
    hf, ms = model
    reshard(ms, tmp_path / "newer", Parallel(mp=2), variant="base", format="mindformers")
    inside = tmp_path / "newer" / "iteration_00000000"
    assert rows(check(inside), "digests") == ["188 of 188 tensors have the bytes that ckptkit.json promises"]
    convert(inside, tmp_path / "back", to_dialect="hf", no_optimizer=True)
    assert odd_names(read_whole(tmp_path / "back"), read_whole(hf)) == []


def test_small_files_of_a_checkpoint_do_not_travel(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "tp2", tmp_path / "root")
    (tmp_path / "root" / "tokenizer.json").write_text("{}")
    merged(tmp_path / "root", tmp_path / "whole")
    assert not {"latest_checkpointed_iteration.txt", "metadata.json"} & {p.name for p in (tmp_path / "whole").iterdir()}
    assert (tmp_path / "whole" / "tokenizer.json").exists()
    merged(GOLDEN / "tp2" / ITERATION, tmp_path / "inside")
    assert not {"common.json", "metadata.json"} & {path.name for path in (tmp_path / "inside").iterdir()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to_dialect": "hf", "format": "mindformers"}, "not stored in folders of MindFormers"),
        ({"format": "mindformers", "parallel": Parallel(mp=2, ranks="0")}, "`--ranks` does nothing"),
        ({"format": "mindformers", "max_shard_size": "1MB"}, "`--max-shard-size` does nothing"),
        ({"format": "newer"}, "unknown format"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    model: tuple[Path, Path], tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        convert(model[0], tmp_path / "out", **options)


def test_strategy_files_are_not_for_these_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has its layout in `metadata.json`"):
        merged(GOLDEN / "tp2", tmp_path / "out", src_strategy=GOLDEN)


def test_verify_compares_it_too(model: tuple[Path, Path], tmp_path: Path) -> None:
    hf, _ = model
    convert(hf, tmp_path / "newer", format="mindformers", parallel=Parallel(mp=2, pp=3))
    assert verify(hf, tmp_path / "newer", level="weights").exit_code == 0
    (tmp_path / "newer" / "ckptkit.json").unlink()
    file = next((tmp_path / "newer").glob("*/CKP-model-0000001-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert verify(hf, tmp_path / "newer", level="weights", variant_b="base").exit_code == 1

"""The contract of a checkpoint of a run: an ordinary HuggingFace folder that every command takes.

How it gets its name: test_step_commit.py; what it shares with the one before: test_step_reuse.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckptkit.commands.check import check
from ckptkit.commands.convert import convert
from ckptkit.commands.diff import diff
from ckptkit.commands.resume_train import model_origin
from ckptkit.errors import CorruptError, InternalError, UsageError
from ckptkit.formats.registry import open_checkpoint
from ckptkit.train.config import ModelConfig
from ckptkit.train.state import read_state
from ckptkit.train.step_files import lay_out_step, side_files_in
from ckptkit.train.step_folders import LATEST, StepFolder, folder_of
from ckptkit.train.step_read import open_step, tensors_in
from ckptkit.train.step_write import Snapshot, write_step
from tests.rank_results import read_whole
from tests.train.tiny_steps import (
    EMBEDDING,
    assert_holds,
    make_model,
    make_snapshot,
    make_state,
    make_tensors,
    names_in,
    write,
)

pytestmark = pytest.mark.usefixtures("quick_disk")


def test_a_checkpoint_is_an_ordinary_folder_with_all_that_lies_beside_the_model(run: Path, model: Path) -> None:
    written = write(run, model, 8)
    assert written.folder == run / "step-00000008"
    assert names_in(written.folder) == [
        "ckptkit.json", "config.json", "generation_config.json", "model.safetensors", "state.json", "tokenizer.json",
        "training_state/state-00001-of-00001.safetensors",
    ]  # fmt: skip
    assert_holds(written.folder, 8)
    assert read_state(written.folder) == make_state(8)
    assert open_checkpoint(written.folder).metadata == {"format": "pt"}
    assert (run / LATEST).read_text() == "step-00000008\n"
    assert written.num_bytes == sum((written.folder / name).stat().st_size for name in names_in(written.folder))


def test_check_diff_and_convert_take_it_with_its_moments(run: Path, model: Path, tmp_path: Path) -> None:
    folder = write(run, model, 8, frozen=(EMBEDDING,)).folder
    report = check(folder)
    assert report.data["digests_compared"] == report.data["tensors"] == 34
    assert not [text for label, text in report.rows if label == "note"]
    convert(folder, tmp_path / "there", to_dialect="mindformers")
    assert "exp_avg.model.layers.0.attention.wq.weight" in read_whole(tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back", to_dialect="hf")
    assert diff(folder, tmp_path / "back").exit_code == 0
    assert diff(folder, tmp_path / "there").exit_code == 0
    other = write(run, model, 9).folder
    assert diff(folder, other).exit_code == 1  # the control


def test_the_config_says_float32_and_nothing_else_is_changed(run: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "narrow", dtype="BF16")
    folder = write_first(run, model, 1)
    was, now = (json.loads((path / "config.json").read_text()) for path in (model, folder))
    assert was["torch_dtype"] == "bfloat16"
    assert now == was | {"torch_dtype": "float32"}
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    (model / "config.json").write_text(json.dumps(was | {"torch_dtype": "float32"}))  # in its own form
    folder = write_first(run, model, 2)
    assert (folder / "config.json").read_bytes() == (model / "config.json").read_bytes()


def write_first(run: Path, model: Path, step: int) -> Path:
    """Write a checkpoint of a run that began with `model`; return its folder."""
    origin = model_origin(ModelConfig(path=model), None)
    return write_step(run, make_snapshot(step), side_files=origin.side_files, facts=origin.facts).folder


def test_side_files_are_written_again_when_the_folder_that_they_came_from_is_gone(run: Path, model: Path) -> None:
    """As when pruning removes the checkpoint that a run went on from."""
    was = (model / "tokenizer.json").read_bytes()
    sides = side_files_in(model)
    shutil.rmtree(model)
    folder = write_step(run, make_snapshot(1), side_files=sides, facts={}).folder
    assert (folder / "tokenizer.json").read_bytes() == was
    with pytest.raises(UsageError, match="no such file"):  # the control
        side_files_in(model)


def test_a_run_that_begins_with_a_checkpoint_does_not_take_its_state_for_a_side_file(run: Path, model: Path) -> None:
    folder = write(run, model, 8, frozen=(EMBEDDING,)).folder
    assert sorted(side_files_in(folder)) == ["config.json", "generation_config.json", "tokenizer.json"]


def test_a_tied_model_stores_the_embedding_only(run: Path, tmp_path: Path) -> None:
    tied = make_model(tmp_path / "tied", tied=True)
    folder = write(run, tied, 1, shape={"tied": True}).folder
    assert "lm_head.weight" not in open_checkpoint(folder).tensors
    convert(folder, tmp_path / "there", to_dialect="mindformers")
    assert "exp_avg.model.tok_embeddings.embedding_weight" in read_whole(tmp_path / "there")


def test_large_weights_become_shards_with_an_index(run: Path, model: Path) -> None:
    folder = write(run, model, 3, max_shard_bytes=4000).folder
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len([n for n in names_in(folder) if n.startswith("model-")]) > 2
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in make_tensors(3)[0].values())
    assert_holds(folder, 3)
    assert check(folder).data["digests_compared"] == 36


def test_tensors_that_do_not_go_together_are_refused() -> None:
    weights, moments = make_tensors(1)
    norm = "model.norm.weight"
    odd = [
        (weights, {n: a for n, a in moments.items() if n != f"exp_avg.{norm}"}, (), f"exp_avg.{norm} is missing"),
        (weights, {**moments, "exp_avg.x": weights[norm]}, (), "exp_avg.x is of no trained weight"),
        (weights, moments, (norm,), f"exp_avg.{norm} is of no trained weight"),
        (weights, {**moments, f"exp_avg.{norm}": weights[EMBEDDING]}, (), "its weight (16,)"),
        ({**weights, norm: weights[norm].astype(np.float64)}, moments, (), "is float64"),
        (weights, moments, ("x",), "x is frozen and no weight"),
    ]
    for some, others, frozen, words in odd:
        with pytest.raises(InternalError) as caught:
            lay_out_step(some, others, frozen)
        assert words in str(caught.value)
    lay_out_step(weights, moments, ())  # the control


def test_a_tensor_that_changes_after_it_was_checked_is_seen_when_it_is_read(run: Path, model: Path) -> None:
    folder = write(run, model, 1).folder
    content = open_step(StepFolder(1, folder))
    assert len(dict(tensors_in(content, moments=False))) == 12
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4] + b"\0\0\0\0")
    with pytest.raises(CorruptError, match=r"`lm_head.weight` has not the bytes"):
        dict(tensors_in(content))


def test_what_is_not_in_c_order_is_written_as_it_reads(run: Path) -> None:
    snapshot = make_snapshot(1)
    turned = {name: np.asfortranarray(array) for name, array in snapshot.weights.items()}
    write_step(run, Snapshot(snapshot.state, turned, snapshot.moments), side_files={}, facts={})
    assert_holds(folder_of(run, 1), 1)

"""The contract of `ckptkit runs`: what is there, whether it is whole, and what may go."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from ckptkit.commands.runs import list_runs, prune_runs
from ckptkit.errors import ResourceError, UsageError
from ckptkit.report import Report
from ckptkit.train.step_folders import LATEST, folder_of, scan
from tests.train.tiny_steps import EMBEDDING, flip_last_bit, make_model, write


@pytest.fixture
def run(tmp_path: Path, quick_disk: None) -> Path:
    """A run with checkpoints of the steps 4, 8 and 12, of which 4 is the best; the embedding is frozen."""
    model = make_model(tmp_path / "model")
    best = {"step": 4, "loss": 1.25, "held_out": "a" * 32}
    for step in (4, 8, 12):
        before = folder_of(tmp_path / "run", step - 4)
        write(tmp_path / "run", model, step, best=best, frozen=(EMBEDDING,), previous=before, loss=step / 4)
    return tmp_path / "run"


def rows(report: Report) -> dict[str, str]:
    return dict(report.rows)


def test_checkpoints_are_listed_newest_first_with_losses_and_marks(run: Path) -> None:
    report = list_runs(run)
    assert report.exit_code == 0
    assert report.headline == f"`{run}`: 3 checkpoints, 3 whole"
    assert [label for label, _ in report.rows] == ["step 12", "step 8", "step 4", "note"]
    text = rows(report)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  whole  \d+\.\d kB \(1.3 kB shared", text["step 12"])
    assert text["step 12"].endswith("loss 3.0000  newest")
    assert text["step 4"].endswith("loss 1.0000  best (evaluation loss 1.2500)")
    data = json.loads(report.to_json())
    assert [(row["step"], row["whole"], row["loss"], row["best"]) for row in data["checkpoints"]] == [
        (12, True, 3.0, False),
        (8, True, 2.0, False),
        (4, True, 1.0, True),
    ]
    folder = folder_of(run, 12)
    assert data["checkpoints"][0]["bytes"] == sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    assert data["checkpoints"][0]["epoch"] == 4


def test_folders_of_one_step_are_told_apart(run: Path) -> None:
    shutil.copytree(folder_of(run, 8), run / "step-8")
    texts = [text for label, text in list_runs(run).rows if label == "step 8"]
    assert [text.startswith("`step-8`  ") for text in texts] == [False, True]


def test_what_is_not_whole_says_why_and_is_a_difference(run: Path) -> None:
    os.truncate(folder_of(run, 12) / "model-00001-of-00002.safetensors", 7)
    (folder_of(run, 8) / "ckptkit.json").unlink()
    report = list_runs(run)
    assert report.exit_code == 1
    assert re.search(r"NOT WHOLE: .*`model-00001-of-00002.safetensors` has 7 bytes", rows(report)["step 12"])
    assert "there is no ckptkit.json" in rows(report)["step 8"]
    assert "newest" in rows(report)["step 4"]
    assert rows(report)["note"].startswith("sizes and headers") or LATEST in rows(report)["note"]


def test_a_changed_byte_is_seen_with_digests_alone(run: Path) -> None:
    flip_last_bit(folder_of(run, 8) / "training_state" / "state-00001-of-00001.safetensors")
    assert list_runs(run).exit_code == 0
    report = list_runs(run, digests=True)
    assert report.exit_code == 1
    assert "has not the bytes that were written" in rows(report)["step 8"]


def test_a_pointer_to_another_checkpoint_is_noted(run: Path) -> None:
    (run / LATEST).write_text("step-00000008\n")
    notes = [text for label, text in list_runs(run).rows if label == "note"]
    assert notes[0] == "LATEST names `step-00000008`; nothing relies on it"


def test_pruning_keeps_the_newest_and_the_best(run: Path) -> None:
    told = prune_runs(run, keep_last=1, keep_best=True, dry_run=True)
    assert [folder.step for folder in scan(run)] == [12, 8, 4]
    assert told.headline == f"`{run}`: 1 checkpoint would be removed, 2 kept"
    report = prune_runs(run, keep_last=1, keep_best=True)
    assert [folder.step for folder in scan(run)] == [12, 4]
    assert report.data["removed"] == told.data["removed"] == ["step-00000008"]
    assert report.data["kept"] == ["step-00000012", "step-00000004"]
    assert report.data["freed_bytes"] == told.data["freed_bytes"] > 0
    assert prune_runs(run, keep_last=1).data["removed"] == [
        "step-00000004"
    ]  # the control: the best one is no more kept
    assert [folder.step for folder in scan(run)] == [12]
    assert prune_runs(run, keep_last=1).data["removed"] == []


def test_pruning_leaves_alone_what_is_not_whole(run: Path) -> None:
    os.truncate(folder_of(run, 12) / "state.json", 7)
    report = prune_runs(run, keep_last=1)
    assert [folder.step for folder in scan(run)] == [12, 8]
    assert "`step-00000012` is not whole" in report.data["left"][0]
    assert report.to_text().count("left alone") == 1


def test_pruning_never_removes_all(run: Path) -> None:
    with pytest.raises(UsageError, match="0 checkpoints cannot be kept"):
        prune_runs(run, keep_last=0)
    assert len(scan(run)) == 3


def test_what_cannot_be_removed_is_an_error_in_words(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self == folder_of(run, 4):
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ResourceError, match="1 checkpoint in") as caught:
        prune_runs(run, keep_last=1)
    assert caught.value.items == ("`step-00000004` could not be removed: permission denied",)
    assert [folder.step for folder in scan(run)] == [12, 4]


def test_a_folder_that_is_no_run_is_refused_and_runs_below_it_are_named(run: Path) -> None:
    for command in (list_runs, prune_runs):
        with pytest.raises(UsageError, match="holds no checkpoints of a run") as caught:
            command(run.parent)
        assert caught.value.items == ("run",)
        with pytest.raises(UsageError, match="no such folder"):
            command(run / "nothing")

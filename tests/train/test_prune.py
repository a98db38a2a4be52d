"""The contract of pruning: what stays is a set, the newest whole checkpoint is always in it, and strangers stay too."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckptkit.errors import UsageError
from ckptkit.train import prune as module
from ckptkit.train.prune import Keep, kept_steps, prune
from ckptkit.train.step_folders import folder_of, scan
from tests.train.tiny_steps import EMBEDDING, flip_last_bit, write

pytestmark = pytest.mark.usefixtures("quick_disk")


def steps_in(run: Path) -> list[int]:
    return [folder.step for folder in scan(run)]


def test_the_oldest_by_number_goes_and_not_the_first_by_text(tmp_path: Path, model: Path) -> None:
    """F15: with a limit of 10, step 10000 was deleted and 9000 stayed."""
    run = tmp_path / "run"
    for step in range(9000, 10001, 100):
        write(run, model, step).folder.rename(run / f"checkpoint-{step}")
    assert min(path.name for path in run.glob("checkpoint-*")) == "checkpoint-10000"  # the control: by text
    pruned = prune(run, Keep(10))
    assert pruned.removed == ("checkpoint-9000",)
    assert steps_in(run) == list(range(10000, 9000, -100))


def test_folders_without_a_manifest_of_ours_are_not_touched(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3, 4):
        write(run, model, step)
    for name in ("step-00000000", "checkpoint-9000"):
        (run / name).mkdir()
        (run / name / "model.safetensors").write_bytes(b"x")
    os.truncate(folder_of(run, 2) / "model.safetensors", 10)
    (folder_of(run, 1)).rename(tmp_path / "elsewhere")
    folder_of(run, 1).symlink_to(tmp_path / "elsewhere")
    pruned = prune(run, Keep(1))
    assert pruned.removed == ("step-00000003",)
    assert pruned.kept == ("step-00000004", "step-00000001")
    assert [text.split("`")[1] for text in pruned.left] == ["step-00000002", "step-00000000"]
    assert steps_in(run) == [4, 2, 1, 0]
    assert (run / "checkpoint-9000").exists()


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(2, best=100), [500, 400, 100]),
        (Keep(1, best=100), [500, 100]),
        (Keep(1), [500]),
        (Keep(9), [500, 400, 300, 200, 100]),
        (Keep(2, best=500), [500, 400]),
        (Keep(2, best=150), [500, 400]),
        (Keep(2, best=100, protect=frozenset({300})), [500, 400, 300, 100]),
    ],
    ids=str,
)
def test_what_stays_is_the_newest_the_best_and_the_protected(keep: Keep, kept: list[int]) -> None:
    """F16: with a best one to protect, the last one went; with a limit of 1, all did."""
    assert kept_steps([500, 400, 300, 200, 100], keep) == set(kept)
    assert kept_steps([], keep) == set()


def test_nobody_may_ask_for_none_to_be_kept() -> None:
    with pytest.raises(UsageError, match="0 checkpoints cannot be kept"):
        Keep(0)


def test_a_save_prunes_and_never_itself(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        write(run, model, step, keep=Keep(2))
    assert steps_in(run) == [3, 2]
    written = write(run, model, 4, keep=Keep(2, best=2))
    assert steps_in(run) == [4, 3, 2]
    assert written.removed == ()
    assert write(run, model, 1, keep=Keep(2)).removed == ("step-00000002",)
    assert steps_in(run) == [4, 3, 1]


def test_a_damaged_newest_does_not_count_for_a_whole_one(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        write(run, model, step)
    flip_last_bit(folder_of(run, 3) / "model.safetensors")
    copy = shutil.copytree(run, tmp_path / "copy")
    pruned = prune(run, Keep(1), verify_newest=True)
    assert (pruned.kept, pruned.removed) == (("step-00000002",), ("step-00000001",))
    assert "`step-00000003` is not whole" in pruned.left[0]
    assert prune(copy, Keep(1)).kept == ("step-00000003",)  # the control: by its sizes it is whole


def test_a_dry_run_says_the_same_and_removes_nothing(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        write(run, model, step, frozen=(EMBEDDING,), previous=folder_of(run, step - 1))
    before = sorted(run.rglob("*"))
    told = prune(run, Keep(2), dry_run=True)
    assert sorted(run.rglob("*")) == before
    size = sum(path.stat().st_size for path in folder_of(run, 1).rglob("*") if path.is_file())
    linked = (folder_of(run, 1) / "model-00002-of-00002.safetensors").stat().st_size
    assert told.freed_bytes == size - linked
    assert prune(run, Keep(2)) == told


def test_what_goes_has_a_hidden_name_before_its_first_file_is_removed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill during the removal leaves what nobody takes for a checkpoint, and what the next save removes."""
    run = tmp_path / "run"
    for step in (1, 2, 3):
        write(run, model, step)
    seen: list[str] = []
    monkeypatch.setattr(module, "remove", lambda path: seen.append(path.name))
    assert prune(run, Keep(2)).removed == ("step-00000001",)
    assert len(seen) == 1
    assert seen[0].startswith(".del-step-00000001-")
    assert steps_in(run) == [3, 2]
    assert len(list(run.glob(".del-*"))) == 1
    monkeypatch.undo()
    write(run, model, 4)
    assert not list(run.glob(".del-*"))


def test_what_cannot_be_removed_is_told_and_does_no_harm_to_a_save(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        write(run, model, step)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self == folder_of(run, 1):
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    written = write(run, model, 3, keep=Keep(2))
    assert written.removed == ()
    assert written.notes == ("`step-00000001` could not be removed: permission denied",)
    assert steps_in(run) == [3, 2, 1]

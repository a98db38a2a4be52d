"""The contract: which folder is a newer one of MindFormers, and which of its iterations counts.

The tracker decides, as it does for MindFormers; what it passes over, and what it names and is not there, is said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import CkptkitError, CorruptError, CoverageError, UsageError
from ckptkit.formats.mindformers_folder import TRACKER, is_checkpoint, locate, read_common


def make_root(folder: Path, *numbers: int, tracker: str | None = None) -> Path:
    for number in numbers:
        path = folder / f"iteration_{number:08d}"
        path.mkdir(parents=True)
        (path / "CKP-model-0000000-0000001.safetensors").touch()
    folder.mkdir(exist_ok=True)
    if tracker is not None:
        (folder / TRACKER).write_text(tracker)
    return folder


def test_the_tracker_decides(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", 4, 8, 12, tracker="8")
    place = locate(root)
    assert (place.number, place.folder.name, place.root, place.prefix) == (
        8, "iteration_00000008", root, "iteration_00000008/",
    )  # fmt: skip
    newer, older = place.notes
    assert "`iteration_00000012` is newer" in newer
    assert "did not end" in newer
    assert "passed over: `iteration_00000004`" in older


def test_a_step_chooses_and_one_that_the_tracker_does_not_name_yet_is_noted(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", 4, 8, 12, tracker="8")
    assert (locate(root, 4).number, locate(root, 4).notes) == (4, ())
    assert "may not have ended" in locate(root, 12).notes[0]
    assert "may not have ended" in locate(root / "iteration_00000012").notes[0]
    assert locate(root / "iteration_00000004").notes == ()


def test_an_iteration_can_be_named_itself(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", 8, tracker="8")
    place = locate(root / "iteration_00000008")
    assert (place.number, place.root, place.prefix) == (8, root / "iteration_00000008", "")
    (root / "iteration_00000008").rename(tmp_path / "saved")
    assert locate(tmp_path / "saved").number is None


def test_the_only_iteration_needs_no_tracker(tmp_path: Path) -> None:
    place = locate(make_root(tmp_path / "root", 8))
    assert place.number == 8
    assert place.notes == (f"no `{TRACKER}` says that iteration 8 is complete",)


@pytest.mark.parametrize(
    ("numbers", "tracker", "step", "error", "words"),
    [
        ((4, 8), "12", None, CoverageError, "names iteration 12, which is not in"),
        ((), "12", None, CoverageError, "names iteration 12, which is not in"),
        ((4, 8), "8", 12, CoverageError, "has no iteration 12"),
        ((4, 8), None, None, UsageError, "holds 2 iterations and no"),
        ((4, 8), "release", None, CorruptError, "should be the number of an iteration"),
        ((4, 8), "", None, CorruptError, "should be the number of an iteration"),
    ],
)
def test_what_is_not_clear_is_refused(
    tmp_path: Path, numbers: tuple[int, ...], tracker: str | None, step: int | None, error: type[CkptkitError],
    words: str,
) -> None:  # fmt: skip
    with pytest.raises(error, match=words) as caught:
        locate(make_root(tmp_path / "root", *numbers, tracker=tracker), step)
    assert type(caught.value) is error


def test_two_folders_of_one_iteration_are_refused(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", 8)
    (root / "iteration_8").mkdir()
    with pytest.raises(UsageError, match="iteration 8 twice"):
        locate(root)


def test_other_folders_are_none(tmp_path: Path) -> None:
    assert is_checkpoint(make_root(tmp_path / "root", 8, tracker="8"))
    assert is_checkpoint(tmp_path / "root" / "iteration_00000008")
    assert is_checkpoint(make_root(tmp_path / "lost", tracker="8"))
    megatron = make_root(tmp_path / "megatron", tracker="8")
    (megatron / "iter_0000008").mkdir()
    assert not is_checkpoint(megatron)
    hub = make_root(tmp_path / "hub", 8)
    (hub / "model.safetensors").touch()
    assert not is_checkpoint(hub)
    assert not is_checkpoint(tmp_path)


def put_common(folder: Path, **changes: Any) -> Path:
    common = {"epoch_num": 1, "step_num": 8, "global_step": 8, "loss_scale": None, "global_batch_size": 4}
    (folder / "common.json").write_text(json.dumps(common | {"ckpt_status": None} | changes))
    return folder


def test_common_json_is_read_and_keys_that_old_releases_refuse_are_noted(tmp_path: Path) -> None:
    common, notes = read_common(tmp_path)
    assert common is None
    assert "cannot resume" in notes[0]
    common, notes = read_common(put_common(tmp_path))
    assert common is not None
    assert (common["global_step"], notes) == (8, [])
    _, notes = read_common(put_common(tmp_path, consumed_samples=32))
    assert "1.8 to 2.0 refuse: `consumed_samples`" in notes[0]


@pytest.mark.parametrize(
    "changes", [{"global_step": "8"}, {"epoch_num": [1]}, {"loss_scale": True}, {"epoch_num": float("nan")}]
)
def test_values_that_are_no_numbers_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match="no numbers"):
        read_common(put_common(tmp_path, **changes))

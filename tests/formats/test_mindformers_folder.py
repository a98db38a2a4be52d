"""The contract: which folder is a newer one of MindFormers, and which of its iterations counts.

The tracker decides, as it does for MindFormers; what it passes over, and what it names and is not there, is said.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import CkptkitError, CorruptError, CoverageError, UsageError
from ckptkit.formats.mindformers_folder import TRACKER, Place, is_checkpoint, locate, read_common, unlike_number


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


def test_an_iteration_that_is_named_itself_needs_no_sound_tracker(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", 8, tracker="last")
    place = locate(root / "iteration_00000008")
    assert place.number == 8
    assert "cannot be told" in place.notes[0]


def test_a_link_says_the_number_by_its_own_name(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", 8, tracker="8")
    (root / "iteration_00000008").rename(tmp_path / "disk")
    (root / "iteration_00000008").symlink_to(tmp_path / "disk")
    assert (locate(root).number, locate(root / "iteration_00000008").number) == (8, 8)
    assert locate(tmp_path / "disk").number is None
    (tmp_path / "latest").symlink_to(root / "iteration_00000008")
    assert locate(tmp_path / "latest").number is None  # of the link's name and the last folder's, neither says it


def test_the_folder_that_a_link_leads_to_says_the_number_where_the_tracker_lies_there(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", 8, 12, tracker="8")
    (tmp_path / "latest").symlink_to(root / "iteration_00000012")
    (tmp_path / "iteration_00000007").symlink_to(root / "iteration_00000012")
    for name in ("latest", "iteration_00000007"):
        place = locate(tmp_path / name)
        assert place.number == 12
        assert "may not have ended" in place.notes[0]


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


def test_files_of_an_iteration_beside_iterations_are_refused(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", 4, 8, tracker="8")
    locate(root)
    (root / "CKP-model-0000000-0000001.safetensors").touch()
    with pytest.raises(UsageError, match="holds two checkpoints") as caught:
        locate(root)
    assert caught.value.items == (
        "`CKP-model-0000000-0000001.safetensors`", "`iteration_00000004`, `iteration_00000008`",
    )  # fmt: skip


def put_folder(file: Path) -> None:
    file.mkdir()


def put_dead_link(file: Path) -> None:
    file.symlink_to(file.parent / "gone")


@pytest.mark.parametrize("put", [put_folder, put_dead_link])
def test_a_small_file_that_is_none_is_refused(tmp_path: Path, put: Callable[[Path], None]) -> None:
    root = make_root(tmp_path / "root", 8)
    put(root / TRACKER)
    with pytest.raises(CorruptError, match="not a regular file"):
        locate(root)
    inside = root / "iteration_00000008"
    assert locate(inside).number == 8  # named itself, it needs no tracker
    put(inside / "common.json")
    with pytest.raises(CorruptError, match="not a regular file"):
        read_common(inside)


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
    ("common", "words"),
    [
        ({"step_num": 8, "global_step": 8}, ""),
        ({"step_num": 8, "global_step": 6}, ""),  # updates that overflowed are skipped
        ({"step_num": None, "global_step": None}, ""),
        ({}, ""),
        ({"step_num": 99, "global_step": 99}, "says step_num 99 and global_step 99"),
        ({"step_num": 99, "global_step": 8}, "says step_num 99:"),
        ({"step_num": 8, "global_step": 99}, "says global_step 99:"),
    ],
)
def test_a_step_that_is_not_of_the_folder_is_noted(tmp_path: Path, common: dict[str, Any], words: str) -> None:
    notes = unlike_number(Place(tmp_path, tmp_path, 8, ()), common)
    assert (len(notes), all(words in note for note in notes)) == (int(words != ""), True)
    assert unlike_number(Place(tmp_path, tmp_path, None, ()), common) == []


@pytest.mark.parametrize(
    "changes", [{"global_step": "8"}, {"epoch_num": [1]}, {"loss_scale": True}, {"epoch_num": float("nan")}]
)
def test_values_that_are_no_numbers_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match="no numbers"):
        read_common(put_common(tmp_path, **changes))

"""The contract of names: steps are numbers, whatever their zeros; what killed writers left goes, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ckptkit.errors import UsageError
from ckptkit.train.prune import remove_leftovers
from ckptkit.train.step_folders import folder_of, hold, leftovers, name_being_removed, name_being_written, remove, scan
from tests.train.tiny_steps import make_model, write

DEAD = 2**22 + 1  # more than any pid of Linux


def test_a_folder_has_eight_digits_and_more_where_needed() -> None:
    assert folder_of(Path("run"), 8) == Path("run/step-00000008")
    assert folder_of(Path("run"), 1234567890).name == "step-1234567890"


def test_steps_are_sorted_as_numbers_whatever_their_zeros(tmp_path: Path) -> None:
    """F19: by text, 0900000 sorts below 100000, and a run would go on 800000 steps back."""
    names = ["step-100000", "step-0900000", "step-00000020", "step-3"]
    for name in [*names, "handpicked", "step-x", "step-", "step-5-old", ".tmp-step-9-1-00000000", "mystep-7"]:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").write_text("a file")
    assert [folder.path.name for folder in scan(tmp_path)] == [names[1], names[0], names[2], names[3]]
    assert [folder.step for folder in scan(tmp_path)] == [900000, 100000, 20, 3]
    by_text = sorted(names, reverse=True)
    assert by_text[0] != "step-0900000"  # the control: the order that is wrong


def test_a_folder_that_was_renamed_is_found_when_it_is_ours(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    run = tmp_path / "run"
    for step, name in ((4, "checkpoint-4"), (6, "6")):
        write(run, model, step).folder.rename(run / name)
    (run / "checkpoint-8").mkdir()
    (run / "2024").mkdir()
    assert [folder.path.name for folder in scan(run)] == ["6", "checkpoint-4"]


def test_no_run_has_no_steps_and_a_file_is_no_run(tmp_path: Path) -> None:
    assert scan(tmp_path / "nothing") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError):
        scan(tmp_path / "file")


def test_names_of_two_writers_differ() -> None:
    """F23: a fixed temporary name collides."""
    names = {name_being_written("step-00000001") for _ in range(100)}
    assert len(names) == 100
    assert all(re.fullmatch(rf"\.tmp-step-00000001-{os.getpid()}-[0-9a-f]{{8}}", name) for name in names)


def test_what_a_killed_writer_left_goes_and_what_is_being_written_stays(tmp_path: Path) -> None:
    dead = tmp_path / f".tmp-step-00000001-{DEAD}-0123abcd"
    recycled = tmp_path / ".tmp-step-00000001-1-0123abcd"  # its number is that of a process again
    mine = tmp_path / name_being_written("step-00000002")
    removed = tmp_path / name_being_removed("step-00000003")
    hint = tmp_path / f".tmp-LATEST-{DEAD}-0123abcd"
    for folder in (dead, recycled, mine, removed):
        (folder / "training_state").mkdir(parents=True)
        (folder / "training_state" / "state").write_text("x")
    hint.write_text("step-00000001\n")
    others = [tmp_path / name for name in (".tmp-notes", ".del-me", "step-00000001", f".tmp-step-1-{DEAD}")]
    for folder in others:
        folder.mkdir()
    fd = hold(mine)
    try:
        assert set(leftovers(tmp_path)) == {dead, recycled, removed, hint}
        remove_leftovers(tmp_path)
        assert set(tmp_path.iterdir()) == {mine, *others}
    finally:
        os.close(fd)
    remove_leftovers(tmp_path)  # the control: without its lock it is a leftover
    assert set(tmp_path.iterdir()) == {*others}


def test_removing_what_somebody_else_removes_is_no_error(tmp_path: Path) -> None:
    remove(tmp_path / "gone")
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    remove(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


READ_ONLY = """
import os, shutil, sys
from pathlib import Path
from ckptkit.train.step_folders import remove
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
folder = Path(sys.argv[1]) / "step-1"
(folder / "training_state").mkdir(parents=True)
for file in (folder / "a", folder / "training_state" / "b"):
    file.write_text("x")
    file.chmod(0o400)
(folder / "training_state").chmod(0o500)
folder.chmod(0o500)
try:
    shutil.rmtree(folder)
except PermissionError:
    print("plain removal fails")
remove(folder)
print(os.listdir(sys.argv[1]))
"""


def test_read_only_files_and_folders_are_removed_by_a_plain_user() -> None:
    """F29: what was saved with mode 0400 cannot be rotated away."""
    where = Path(tempfile.mkdtemp())  # pytest's own lies in a folder that nobody else may enter
    where.chmod(0o777)
    try:
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(where)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "plain removal fails\n[]\n"
    finally:
        remove(where)

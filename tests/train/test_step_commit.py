"""The contract of a checkpoint's name: it stands for a whole one, whoever else writes, and whatever the disk does.

The order in which it reaches the disk is checked in test_commit_trace.py, kills in test_step_kills.py.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.errors import ResourceError
from ckptkit.train import step_write
from ckptkit.train.state import read_state
from ckptkit.train.step_folders import LATEST, folder_of, scan
from ckptkit.train.step_scan import load_newest
from tests.train.tiny_steps import (
    assert_holds,
    names_in,
    write,
)

ROOT = Path(__file__).parent.parent.parent


pytestmark = pytest.mark.usefixtures("quick_disk")


def test_a_partial_folder_of_that_step_is_replaced(run: Path, model: Path) -> None:
    """F03: a folder with weights, without optimizer and manifest, is no reason to stop."""
    shutil.copytree(write(run, model, 8).folder, run / "copy")
    shutil.rmtree(run / "step-00000008" / "training_state")
    (run / "step-00000008" / "ckptkit.json").unlink()
    (run / "step-00000008" / "junk").write_text("x")
    written = write(run, model, 8)
    assert names_in(written.folder) == names_in(run / "copy")
    assert_holds(written.folder, 8)
    assert sorted(p.name for p in run.iterdir()) == [LATEST, "copy", "step-00000008"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_whole_folder_of_that_step_is_replaced_by_the_newer_one(
    run: Path, model: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    write(run, model, 8, loss=1.0)
    if not can_exchange:
        monkeypatch.setattr(step_write, "exchange", lambda one, two: False)
    write(run, model, 8, loss=2.0)
    assert read_state(folder_of(run, 8)).loss == 2.0
    assert sorted(p.name for p in run.iterdir()) == [LATEST, "step-00000008"]


def test_a_pointer_that_cannot_be_written_is_a_note(run: Path, model: Path) -> None:
    """F02: the data is whole, so the run goes on."""
    write(run, model, 1)
    (run / LATEST).unlink()
    (run / LATEST / "in the way").mkdir(parents=True)
    written = write(run, model, 2)
    assert "`LATEST` could not be written" in written.notes[0]
    found = load_newest(run)
    assert found is not None
    assert found.state.step == 2
    assert not list(run.glob(".tmp-*"))


@pytest.mark.parametrize("words", ["names `step-00000001`", "names `step-00000099`", "is empty", "is missing"])
def test_the_newest_whole_checkpoint_counts_whatever_the_pointer_says(run: Path, model: Path, words: str) -> None:
    """F02: a pointer to an older one, to one that is gone, an empty one, none."""
    for step in (1, 2):
        write(run, model, step)
    found = load_newest(run)
    assert found is not None
    assert found.notes == ()  # the control: a pointer that is right needs no word
    (run / LATEST).unlink()
    if words != "is missing":
        (run / LATEST).write_text(words.partition("`")[2].rstrip("`"))
    found = load_newest(run)
    assert found is not None
    assert found.state.step == 2
    assert words in found.notes[0]


FULL_DISK = """
import resource, sys
from pathlib import Path
from tests.train.tiny_steps import write
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), -1))
write(Path(sys.argv[1]), Path(sys.argv[2]), 2)
"""


@pytest.mark.parametrize("limit", [10, 3000, 15000])
def test_a_disk_that_is_full_leaves_nothing_of_the_new_one_and_the_old_one_whole(
    run: Path, model: Path, limit: int
) -> None:
    write(run, model, 1)
    before = sorted(run.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(run), str(model), str(limit)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "ResourceError: cannot write" in done.stderr
    assert sorted(run.rglob("*")) == before
    assert_holds(run / "step-00000001", 1)


def test_files_have_the_mode_of_the_umask(run: Path, model: Path) -> None:
    """F29: nothing is read-only for its owner."""
    mask = os.umask(0o027)
    try:
        folder = write(run, model, 1).folder
    finally:
        os.umask(mask)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*") if p.is_file()}
    assert modes == {0o640}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_eight_processes_save_into_a_run_that_is_not_there_yet(run: Path, model: Path) -> None:
    """F21, F23: every writer makes its folder, and no two use one name; four of them save the same step."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.train.tiny_steps import write\n"
        "print('ready', flush=True)\nsys.stdin.readline()\n"
        "write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))"
    )
    steps = [1, 2, 3, 4, 5, 5, 5, 5]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(run), str(model), str(step)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for step in steps
    ]  # fmt: skip
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    ended = [child.communicate("go\n", timeout=120) for child in children]
    assert [child.returncode for child in children] == [0] * 8, ended
    assert [folder.step for folder in scan(run)] == [5, 4, 3, 2, 1]
    for folder in scan(run):
        assert_holds(folder.path, folder.step)
    assert sorted(p.name for p in run.iterdir() if not p.name.startswith("step-")) == [LATEST]


def test_a_failing_disk_is_an_error_in_words(run: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(step_write, "fsync_tree", fail)
    with pytest.raises(ResourceError, match="the disk reports an input/output error"):
        write(run, model, 1)
    assert list(run.iterdir()) == []

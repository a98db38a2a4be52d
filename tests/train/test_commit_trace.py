"""The contract with the disk, as the kernel sees it: files before their folder's name, LATEST after it, removal last.

A kill cannot show a missing fsync, for what a dead process wrote is still there; a power cut would. Each fault that is
planted is one that the check must catch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.train.step_folders import scan
from ckptkit.train.step_read import open_step
from tests.train.commit_trace import CALLS, Call, calls_in, commit_faults
from tests.train.tiny_steps import make_model

ROOT = Path(__file__).parent.parent.parent
CHILD = """
import os, shutil, sys
from pathlib import Path
from ckptkit.train import step_reuse, step_write
from ckptkit.train.prune import Keep
from ckptkit.train.saver import Saver
from ckptkit.train.step_files import side_files_in
from tests.train.tiny_steps import EMBEDDING, make_snapshot

run, model, plant = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
fsync, commit, point_at, write_file = os.fsync, step_write._commit, step_write._point_at, step_write.write_file
late = []

def commit_then_sync(temp, target):
    commit(temp, target)
    for fd in late:
        fsync(fd)

def point_then_commit(temp, target):
    point_at(target)
    commit(temp, target)

def remove_then_commit(temp, target):
    shutil.rmtree(run / "step-00000001", ignore_errors=True)
    commit(temp, target)

def write_more(path, data):
    write_file(path, data)
    if path.name == "ckptkit.json":
        write_file(path.with_name("late.json"), data)

def write_hint_unsynced(target):
    temp = target.with_name(".tmp-LATEST")
    temp.write_text(target.name)
    temp.rename(target.with_name("LATEST"))
    return ()

def write_again(path, data):
    write_file(path, data)
    if path.name == "state.json":
        with open(path, "ab") as stream:
            stream.write(b"x")

if plant == "write after fsync":
    step_write.write_file = write_again
if plant == "no fsync":
    os.fsync = lambda fd: None
if plant == "rename before fsync":
    os.fsync = lambda fd: late.append(os.dup(fd))
    step_write._commit = commit_then_sync
if plant == "no fsync of folders":
    step_write.fsync_tree = lambda folder: None
if plant == "no fsync of the run":
    step_write.fsync_folder = lambda folder: None
if plant == "no fsync of links":
    step_reuse.fsync_file = lambda path: None
if plant == "LATEST first":
    step_write._commit = point_then_commit
if plant == "LATEST unsynced":
    step_write._point_at = write_hint_unsynced
if plant == "prune first":
    step_write._commit = remove_then_commit
if plant == "manifest first":
    step_write.write_file = write_more
if plant == "removal before its name":
    from ckptkit.train import prune
    prune.fsync_folder = lambda folder: None

previous = None
def write(snapshot):
    global previous
    written = step_write.write_step(
        run, snapshot, side_files=side_files_in(model), facts={}, previous=previous, keep=Keep(1)
    )
    previous = written.folder
with Saver(write) as saver:
    for step in (1, 2):
        saver.save(make_snapshot(step, frozen=(EMBEDDING,)))
"""


def traced(tmp_path: Path, plant: str) -> tuple[list[Call], Path]:
    """Save two checkpoints, of which the first goes then, and return the system calls; skip without strace."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    model = make_model(tmp_path / "model")
    run, log = tmp_path / "run", tmp_path / "log"
    command = [strace, "-f", "-y", "-s", "4096", "-o", str(log), "-e", f"trace={CALLS}"]
    command += [sys.executable, "-c", CHILD, str(run), str(model), plant]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    text = log.read_text(errors="replace") if log.exists() else ""
    if "step-00000001" not in text and "ptrace" in done.stderr:
        pytest.skip("strace may not attach here")
    assert done.returncode == 0, done.stderr
    return calls_in(text), run


def test_every_file_is_on_the_disk_before_its_folder_has_its_name_and_all_else_comes_after(tmp_path: Path) -> None:
    calls, run = traced(tmp_path, "nothing")
    assert commit_faults(calls, str(run)) == []
    assert [folder.path.name for folder in scan(run)] == ["step-00000002"]
    open_step(scan(run)[0])
    names = [call.name for call in calls if call.paths and str(run) in call.paths[-1]]
    for name in ("openat", "write", "fsync", "rename", "mkdir", "unlinkat"):
        assert name in names, "the trace does not show what it is checked for"
    assert {"link", "linkat"} & {*names}


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        ("no fsync", "model-00001-of-00002.safetensors was not synced between its last write and the rename"),
        ("no fsync", "state.json was not synced between"),
        ("no fsync", "training_state/state-00001-of-00001.safetensors was not synced between"),
        ("write after fsync", "state.json was not synced between its last write and the rename"),
        ("rename before fsync", "ckptkit.json was not synced between its last write and the rename"),
        ("no fsync of folders", "the folder training_state was not synced before the rename"),
        ("no fsync of the run", "the run's folder was not synced between the rename and LATEST"),
        ("no fsync of links", "step-00000002: model-00002-of-00002.safetensors was not synced"),
        ("LATEST first", "LATEST was written before the rename"),
        ("LATEST unsynced", "LATEST was not synced before its rename"),
        ("prune first", "was removed before the rename"),
        ("manifest first", "late.json came after the manifest"),
        ("removal before its name", "step-00000001 was removed before its hidden name was on the disk"),
    ],
)
def test_the_check_catches_a_writer_that_does_not_wait_or_has_another_order(
    tmp_path: Path, plant: str, words: str
) -> None:
    calls, run = traced(tmp_path, plant)
    assert any(words in fault for fault in commit_faults(calls, str(run))), commit_faults(calls, str(run))


def test_a_call_that_another_thread_interrupts_is_read_as_one() -> None:
    log = "\n".join(
        (
            "7 fsync(5</run/.tmp-1/a> <unfinished ...>",
            '8 write(1</dev/pts/0>, "x", 1)  = 1',
            "7 <... fsync resumed>)             = 0",
            '7 rename("/run/.tmp-1", "/run/step-1") = 0',
            '7 unlinkat(6</run/.del-1/b>, "c", 0) = 0',
            '7 rename("/run/x", "/run/y") = -1 ENOENT (No such file or directory)',
        )
    )
    found = [(call.name, call.begin, call.end, call.paths) for call in calls_in(log)]
    assert found == [
        ("fsync", 0, 2, ("/run/.tmp-1/a",)),
        ("write", 1, 1, ("/dev/pts/0",)),
        ("rename", 3, 3, ("/run/.tmp-1", "/run/step-1")),
        ("unlinkat", 4, 4, ("/run/.del-1/b/c",)),
    ]

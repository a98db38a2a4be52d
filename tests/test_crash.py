"""The contract: whenever a run is killed, DST holds the old result, the new one or nothing; run again, it ends right.

Three ways to look: SIGKILL at 50 random moments; SIGKILL before every single system call that changes the disk, in
each variant of the protocol; and the order in which files reach the disk, which is what a power cut would test. Each
checker is also shown a writer that is wrong.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_checks import Runner, Snapshot, beside, order_faults, snapshot, state_fault, steps_in
from kill_runs import KILLED, kill_once, make_models
from tiny_models import make_hf_plain

SOURCE = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "intermediate": 24, "vocab": 19}
ARGS = ("--workers", "1", "--no-progress", "--max-shard-size", "6KB")  # one worker: the same steps in every run


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder for results; in memory where that can be, for a SIGKILL does not ask whether a sync took long."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path))
    yield folder / "room"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Path:
    """A folder with two models, `src` and `other`, and what becomes of each without any crash: `new` and `old`."""
    folder = tmp_path_factory.mktemp("sources")
    make_hf_plain(folder / "src", shards=2, **SOURCE)
    make_hf_plain(folder / "other", seed=1, **SOURCE)
    assert runner.run("convert", folder / "src", folder / "new", *ARGS) == 0
    assert runner.run("convert", folder / "other", folder / "old", *ARGS) == 0
    return folder


def whole(folder: Path) -> Snapshot:
    found = snapshot(folder)
    assert found
    return found


def prepare(sources: Path, room: Path, *, overwrite: bool) -> Path:
    """Make `room` empty but for an old result, and return the target inside it."""
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir()
    if overwrite:
        shutil.copytree(sources / "old", room / "out")
    return room / "out"


def finish(runner: Runner, command: tuple[object, ...], target: Path, new: Snapshot, *, exchange: bool = True) -> None:
    """Run the command again: it must end with the whole new result and nothing beside it."""
    code = runner.run(*command, exchange=exchange)
    if code == 2 and "--overwrite" not in command:  # killed after the rename: the result was there already
        assert "is not empty" in runner.said()
    else:
        assert code == 0, runner.said()
    assert state_fault(target, [new]) == ""
    assert beside(target) == []


def test_a_run_killed_at_any_moment_leaves_nothing_half_done_and_is_continued(
    tmp_path: Path, room: Path, runner: Runner
) -> None:
    models = make_models(runner, tmp_path)
    chance = random.Random(20)
    num_kept = 0
    for number in range(50):
        moment = chance.uniform(0, 1.1 * models.seconds)
        fault, kept = kill_once(runner, models, room, moment, overwrite=number % 2 == 1)
        assert fault == "", moment
        num_kept += kept
    assert num_kept > 10, "the kills did not fall into the copying"


VARIANTS = {
    "fresh": (False, True),
    "overwrite by exchange": (True, True),
    "overwrite by two renames": (True, False),
}


@pytest.mark.parametrize(("variant", "tear"), [*((variant, False) for variant in VARIANTS), ("fresh", True)], ids=str)
def test_a_run_killed_at_any_step_leaves_nothing_half_done_and_is_continued(
    tmp_path: Path, room: Path, runner: Runner, sources: Path, variant: str, tear: bool
) -> None:
    """`tear`: a write is cut in the middle; else the kill comes just before the step."""
    overwrite, exchange = VARIANTS[variant]
    old, new = whole(sources / "old"), whole(sources / "new")
    command = ("convert", sources / "src", room / "out", *ARGS, *(["--overwrite"] if overwrite else []))
    target = prepare(sources, room, overwrite=overwrite)
    assert runner.run(*command, exchange=exchange, trace=str(tmp_path / "trace")) == 0, runner.said()
    steps = steps_in(tmp_path / "trace")
    gap = [] if exchange else [n for n, step in enumerate(steps, 1) if step[0] == "rename" and step[2] == str(target)]
    for number, step in enumerate(steps, 1):
        if tear and step[0] not in ("write", "pwrite"):
            continue
        if overwrite and step[0] in ("pwrite", "posix_fallocate"):  # the same as without
            continue
        target = prepare(sources, room, overwrite=overwrite)
        assert runner.run(*command, exchange=exchange, die_at=number, tear=tear) == KILLED
        allowed = [new, old if overwrite else None, *([None] if number in gap else [])]
        assert state_fault(target, allowed) == "", (number, step)
        finish(runner, command, target, new, exchange=exchange)


@pytest.mark.parametrize("plant", ["direct_writes", "early_rename"])
def test_the_kill_test_catches_a_writer_that_shows_its_result_too_early(
    tmp_path: Path, room: Path, runner: Runner, sources: Path, plant: str
) -> None:
    new = whole(sources / "new")
    for number in range(1, 80):
        target = prepare(sources, room, overwrite=False)
        assert runner.run("convert", sources / "src", target, *ARGS, die_at=number, plant=plant) == KILLED
        if state_fault(target, [new, None]):
            return
    pytest.fail("the fault that was planted was not seen")


def test_a_second_crash_while_another_plan_clears_up_does_not_finish_a_half_removed_result(
    tmp_path: Path, room: Path, runner: Runner, sources: Path
) -> None:
    """Plan A, killed before its rename, is whole in its partial folder; plan B is killed while removing that."""
    new = whole(sources / "new")
    command = ("convert", sources / "src", room / "out", *ARGS)
    other = ("convert", sources / "other", room / "out", *ARGS, "--overwrite")
    prepare(sources, room, overwrite=False)
    assert runner.run(*command, trace=str(tmp_path / "trace")) == 0
    rename = next(n for n, step in enumerate(steps_in(tmp_path / "trace"), 1) if step[0] == "rename")
    for number in range(2, len(new) + 3):
        prepare(sources, room, overwrite=False)
        assert runner.run(*command, die_at=rename) == KILLED
        assert runner.run(*other, die_at=number) == KILLED
        finish(runner, (*command, "--overwrite"), room / "out", new)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_file_is_on_disk_before_the_rename_and_every_name_after_it(
    tmp_path: Path, room: Path, runner: Runner, sources: Path, variant: str
) -> None:
    overwrite, exchange = VARIANTS[variant]
    target = prepare(sources, room, overwrite=overwrite)
    command = ("convert", sources / "src", target, *ARGS, *(["--overwrite"] if overwrite else []))
    assert runner.run(*command, exchange=exchange, trace=str(tmp_path / "trace")) == 0, runner.said()
    steps = steps_in(tmp_path / "trace")
    assert order_faults(steps, target) == []


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        ("no_sync", "was not synced before the rename"),
        ("no_folder_sync", "the folder was not synced"),
        ("no_folder_sync", "the parent folder was not synced"),
        ("sync_after_rename", "was not synced before the rename"),
    ],
)
def test_the_order_check_catches_a_writer_that_does_not_wait_for_the_disk(
    tmp_path: Path, room: Path, runner: Runner, sources: Path, plant: str, fault: str
) -> None:
    target = prepare(sources, room, overwrite=False)
    trace = tmp_path / "trace"
    assert runner.run("convert", sources / "src", target, *ARGS, plant=plant, trace=str(trace)) == 0, runner.said()
    steps = steps_in(trace)
    assert any(fault in found for found in order_faults(steps, target))


STRACE_NAMES = {"renameat2": "rename", "renameat": "rename", "pwrite64": "pwrite", "fallocate": "posix_fallocate"}


def strace_steps(text: str) -> list[list[str]]:
    """Return the successful calls of an `strace -y` log as steps: [call, path, second path]."""
    steps = []
    for line in text.splitlines():
        call = re.match(r"(?:\d+ +)?(\w+)\((.*)\) += (\d+)", line)
        if call is None:
            continue
        name = {"renameat2": "rename", "renameat": "rename", "pwrite64": "pwrite", "fallocate": "posix_fallocate"}.get(
            call[1], call[1]
        )
        name = {"unlinkat": "rmdir" if "AT_REMOVEDIR" in line else "unlink"}.get(name, name)
        if name == "rename":
            paths = re.findall(r'"([^"]*)"', call[2])
        elif name in ("unlink", "rmdir"):
            folder, path = re.search(r"<([^>]*)>", call[2]), re.findall(r'"([^"]*)"', call[2])[0]
            paths = [path if path.startswith("/") or folder is None else f"{folder[1]}/{path}"]
        else:
            paths = re.findall(r"<([^>]*)>", call[2])[:1]
        steps.append([name, *paths])
    return steps


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_kernel_sees_the_same_order(tmp_path: Path, room: Path, sources: Path, overwrite: bool) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    target = prepare(sources, room, overwrite=overwrite)
    calls = "write,pwrite64,fsync,rename,renameat,renameat2,unlink,unlinkat,rmdir,fallocate"
    command = [strace, "-f", "-y", "-o", str(tmp_path / "log"), "-e", f"trace={calls}", sys.executable, "-m", "ckptkit"]
    command += ["convert", str(sources / "src"), str(target), *ARGS, *(["--overwrite"] if overwrite else [])]
    traced = subprocess.run(command, capture_output=True, text=True, timeout=120)
    log = (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""
    if "rename" not in log and "ptrace" in traced.stderr:
        pytest.skip("strace may not trace here")
    assert traced.returncode == 0, traced.stderr
    assert order_faults(strace_steps(log), target) == []

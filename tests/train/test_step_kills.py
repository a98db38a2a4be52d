"""The contract of SIGKILL: whenever it comes, each step folder is whole, and none that was announced is lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptkit.errors import CkptkitError
from ckptkit.train.prune import Keep
from ckptkit.train.step_folders import scan
from ckptkit.train.step_read import open_step
from ckptkit.train.step_scan import load_newest
from tests.train.tiny_steps import make_model, write

ROOT = Path(__file__).parent.parent.parent
SAVES = """
{plant}
from tests.train.tiny_steps import main
print("ready", flush=True)
main()
"""
IN_PLACE = """
from ckptkit.train import step_write
step_write.name_being_written = lambda name: name
step_write._commit = lambda temp, target: None
"""


def run_and_kill(run: Path, model: Path, first: int, seconds: float, plant: str = "") -> list[int]:
    """Save steps from `first` on until SIGKILL, `seconds` after the process is ready; return those announced."""
    child = subprocess.Popen(
        [sys.executable, "-c", SAVES.format(plant=plant), str(run), str(model), str(first), str(first + 10_000)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    return [int(line.split()[1]) for line in said.splitlines(keepends=True) if line.endswith("\n")]


def faults_in(run: Path) -> list[str]:
    """Return what is wrong with the step folders: a name is given to whole ones only."""
    faults = []
    for folder in scan(run):
        try:
            open_step(folder)
        except CkptkitError as error:
            faults.append(error.what)
    return faults


def test_a_run_killed_at_any_moment_has_a_whole_checkpoint_no_older_than_the_last_announced(tmp_path: Path) -> None:
    model, run = make_model(tmp_path / "model"), tmp_path / "run"
    chance = random.Random(30)
    last = in_flight = 0
    for _ in range(30):
        announced = run_and_kill(run, model, last + 1, chance.uniform(0, 0.25))
        assert faults_in(run) == []
        found = load_newest(run)
        if found is None:
            assert not announced
            assert last == 0
            continue
        assert found.state.step >= max(announced, default=last)
        assert found.state.step <= max([last, *announced]) + 1
        in_flight += bool(list(run.glob(".tmp-*")))
        last = found.state.step
    assert last > 30, "the kills left no time for saves"
    assert in_flight >= 5, "the kills did not fall into saves"
    assert len(list(run.glob(".tmp-*"))) <= 1  # each start removes what the one before left
    write(run, model, last + 1, keep=Keep(2))
    assert sorted(path.name for path in run.iterdir()) == ["LATEST", *sorted(f.path.name for f in scan(run))]
    assert [folder.step for folder in scan(run)] == [last + 1, last]


def test_the_kill_test_catches_a_writer_that_shows_its_folder_too_early(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    chance = random.Random(31)
    for number in range(30):
        run = tmp_path / f"run{number}"
        run_and_kill(run, model, 1, chance.uniform(0, 0.25), IN_PLACE)
        if faults_in(run):
            return
    pytest.fail("the fault that was planted was not seen")

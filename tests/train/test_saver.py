"""The contract of saving in the background: one at a time, of one moment, errors are heard, an exit waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ckptkit.train.saver import Saver
from ckptkit.train.step_folders import StepFolder, folder_of, scan
from ckptkit.train.step_read import open_step, tensors_in
from ckptkit.train.step_write import Snapshot, write_step
from tests.train.tiny_steps import make_model, make_snapshot, make_state, make_tensors

ROOT = Path(__file__).parent.parent.parent


class Slow:
    """A writer that waits until it is let go; it counts how many are inside."""

    def __init__(self, run: Path | None = None) -> None:
        self.run = run
        self.go = threading.Event()
        self.begun = threading.Event()
        self.steps: list[int] = []
        self.inside = self.most = 0

    def __call__(self, snapshot: Snapshot) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.begun.set()
        assert self.go.wait(60)
        if self.run is not None:
            write_step(self.run, snapshot, side_files={}, facts={})
        self.steps.append(snapshot.state.step)
        self.inside -= 1


def test_a_save_returns_before_it_is_written_and_the_next_one_waits() -> None:
    slow = Slow()
    with Saver(slow) as saver:
        started = time.perf_counter()
        saver.save(make_snapshot(1))
        assert time.perf_counter() - started < 10  # seconds; the writer would have waited for 60
        assert slow.begun.wait(60)
        assert slow.inside == 1
        assert slow.steps == []
        started = time.perf_counter()
        threading.Timer(0.2, slow.go.set).start()
        saver.save(make_snapshot(2))
        assert slow.steps[0] == 1
        assert time.perf_counter() - started > 0.1
    assert slow.steps == [1, 2]
    assert slow.most == 1
    assert slow.inside == 0


def test_in_the_foreground_a_save_is_done_when_it_returns() -> None:
    slow = Slow()
    slow.go.set()
    saver = Saver(slow, background=False)
    saver.save(make_snapshot(1))
    assert slow.steps == [1]
    assert slow.inside == 0


@pytest.mark.parametrize("background", [True, False])
def test_an_error_is_heard_once_and_nothing_is_begun_over_it(background: bool) -> None:
    written = []

    def fail_first(snapshot: Snapshot) -> None:
        written.append(snapshot.state.step)
        if len(written) == 1:
            raise OSError(28, "No space left on device")

    saver = Saver(fail_first, background=background)
    if background:
        saver.save(make_snapshot(1))
        with pytest.raises(OSError, match="No space left"):
            saver.save(make_snapshot(2))
    else:
        with pytest.raises(OSError, match="No space left"):
            saver.save(make_snapshot(1))
    assert written == [1]
    saver.save(make_snapshot(3))
    saver.finish()
    assert written == [1, 3]


def test_an_error_of_the_last_save_surfaces_at_the_end() -> None:
    def fail(snapshot: Snapshot) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), Saver(fail) as saver:
        saver.save(make_snapshot(1))


def test_an_error_of_training_is_not_hidden_by_one_of_the_save() -> None:
    def fail(snapshot: Snapshot) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="training") as caught, Saver(fail) as saver:
        saver.save(make_snapshot(1))
        raise ValueError("training")
    assert "No space left" in caught.value.__notes__[0]


@pytest.mark.parametrize("copied", [True, False])
def test_a_checkpoint_is_of_one_moment_when_the_caller_copies(tmp_path: Path, copied: bool) -> None:
    """T16: weights of one step with the moments of another. Live arrays are the control: they must be seen to mix."""
    slow = Slow(tmp_path)
    weights, moments = make_tensors(1)
    live = Snapshot(make_state(1), weights, moments)
    copy = Snapshot(live.state, {n: a.copy() for n, a in weights.items()}, {n: a.copy() for n, a in moments.items()})
    with Saver(slow) as saver:
        saver.save(copy if copied else live)
        for array in weights.values():
            array += 1  # the next update, right after save has returned
        slow.go.set()
    found = dict(tensors_in(open_step(StepFolder(1, folder_of(tmp_path, 1)))))
    expected = {**make_tensors(1)[0], **make_tensors(1)[1]}
    same = all(np.array_equal(found[name], array) for name, array in expected.items())
    assert same == copied


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    array = np.ones((4 << 20,), np.float32)  # 16 MiB
    snapshot = Snapshot(make_state(1), {"a": array}, {"exp_avg.a": array, "exp_avg_sq.a": array})
    write_step(tmp_path, snapshot, side_files={}, facts={})  # imports and caches
    tracemalloc.start()
    try:
        write_step(tmp_path, snapshot, side_files={}, facts={})
        peak = tracemalloc.get_traced_memory()[1]
        copy = array.copy()  # the control: a copy would show
        assert tracemalloc.get_traced_memory()[1] > copy.nbytes
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


CHILD = """
import signal, sys, threading, time
from pathlib import Path
from ckptkit.train import step_write
from ckptkit.train.saver import Saver
from tests.train.tiny_steps import make_snapshot, write

run, model, ending = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda number, frame: stop.set())

def put(snapshot):
    print("writing", flush=True)
    time.sleep(0.5)
    write(run, model, snapshot.state.step)

saver = Saver(put)
saver.save(make_snapshot(1))
if ending == "exception":
    raise SystemExit(3)
stop.wait(60)
saver.save(make_snapshot(2))
saver.finish()
"""


@pytest.mark.parametrize(("ending", "code", "steps"), [("sigterm", 0, [2, 1]), ("exception", 3, [1])])
def test_a_process_that_is_told_to_end_finishes_its_saves(
    tmp_path: Path, ending: str, code: int, steps: list[int]
) -> None:
    model, run = make_model(tmp_path / "model"), tmp_path / "run"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(run), str(model), ending], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    if ending == "sigterm":
        time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == code
    assert [folder.step for folder in scan(run)] == steps
    for folder in scan(run):
        open_step(folder)
    assert not list(run.glob(".tmp-*"))

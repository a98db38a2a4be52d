"""The contract: a disk, a source or a user that stops a run leaves no part of a result, and says so in words.

Whatever happens, DST holds the old result or nothing; the exit code and three lines tell what, why and how to go on;
and the same command, run again, keeps the files that were finished (the same inodes) and ends as if nothing had been.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_checks import Runner, Snapshot, snapshot, state_fault, steps_in
from tiny_models import make_hf_plain

from ckptkit.formats.journal import JOURNAL
from ckptkit.formats.manifest import MANIFEST

ARGS = ("--workers", "1", "--no-progress", "--max-shard-size", "12KB")
MIB = 1 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = make_hf_plain(tmp_path / "src", layers=2, shards=4)
    (folder / "tokenizer.json").write_bytes(b'{"filler": "' + b"x" * MIB + b'"}')
    return folder


@pytest.fixture
def new(tmp_path: Path, source: Path, runner: Runner) -> Snapshot:
    """What becomes of `source` when nothing is in the way; the steps of that run are in `trace`."""
    target = tmp_path / "whole"
    assert runner.run("convert", source, target, *ARGS, trace=str(tmp_path / "trace")) == 0, runner.said()
    found = snapshot(target)
    assert found
    return found


def finished(room: Path) -> dict[str, tuple[int, int]]:
    """Return the inode and time of the files that the journal in `room` says are finished."""
    found = {}
    for journal in room.glob(f"*.partial-*/{JOURNAL}"):
        for line in journal.read_text().splitlines()[1:]:
            name = line.split('"')[3]
            stat = (journal.parent / name).stat()
            found[name] = (stat.st_ino, stat.st_mtime_ns)
    return found


def said_in_words(text: str, *words: str) -> None:
    """A message says what (`error:`), why and how, names what it is about, and shows no traceback."""
    assert "Traceback" not in text
    assert text.startswith("error: "), text
    assert "\nhint: " in text, text
    for word in words:
        assert word in text


def continues(runner: Runner, command: tuple[object, ...], target: Path, new: Snapshot) -> None:
    """Run the command again: the whole result, nothing beside it, finished files kept."""
    kept = finished(target.parent)
    assert kept, "no file was finished before the run was stopped"
    assert runner.run(*command) == 0, runner.said()
    assert state_fault(target, [new]) == ""
    assert {name: ((target / name).stat().st_ino, (target / name).stat().st_mtime_ns) for name in kept} == kept
    assert [path for path in target.parent.iterdir() if path.name.startswith(f"{target.name}.")] == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_limit_on_file_size_ends_as_a_full_disk_does(
    tmp_path: Path, source: Path, new: Snapshot, runner: Runner, overwrite: bool
) -> None:
    files = sorted((tmp_path / "whole").glob("part*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    limit = next(size - 1 for number, size in enumerate(sizes) if number and size > max(sizes[:number]))
    target = tmp_path / "room" / "out"
    old = None
    if overwrite:
        make_hf_plain(tmp_path / "other", seed=1)
        assert runner.run("convert", tmp_path / "other", target) == 0
        old = snapshot(target)
    command = ("convert", source, target, *ARGS, *(["--overwrite"] if overwrite else []))
    assert runner.run(*command, fsize=limit) == 4
    said_in_words(runner.said(), "part", "ulimit -f", "finished files are kept")
    assert state_fault(target, [old]) == ""
    continues(runner, command, target, new)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB; only root may mount one."""
    folder = tmp_path / "small_disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    ("leave_bytes", "file"), [(40_000, "part"), (200_000, "tokenizer.json")], ids=["weights", "side files"]
)
def test_a_disk_that_fills_up_in_the_middle(
    small_disk: Path, source: Path, new: Snapshot, runner: Runner, leave_bytes: int, file: str
) -> None:
    target, ballast = small_disk / "out", small_disk / "ballast"
    command = ("convert", source, target, *ARGS)
    assert runner.run(*command, ballast=[str(ballast), leave_bytes]) == 4
    said_in_words(runner.said(), f"cannot write `{file}", "no space is left", "finished files are kept")
    assert not target.exists()
    ballast.unlink()
    continues(runner, command, target, new)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    small_disk: Path, source: Path, new: Snapshot, runner: Runner
) -> None:
    with (small_disk / "ballast").open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, 8 * MIB)
    assert runner.run("convert", source, small_disk / "out", *ARGS) == 4
    said_in_words(runner.said(), "needs", "free")
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


def test_another_file_system_takes_a_result_inside_it_and_not_in_its_place(
    small_disk: Path, source: Path, new: Snapshot, runner: Runner
) -> None:
    assert runner.run("convert", source, small_disk, *ARGS) == 2
    said_in_words(runner.said(), "mounted", "name a folder inside it")
    (small_disk.parent / "link").symlink_to(small_disk / "below")
    assert runner.run("convert", source, small_disk.parent / "link" / "out", *ARGS) == 0, runner.said()
    assert state_fault(small_disk / "below" / "out", [new]) == ""


def test_a_folder_that_may_not_be_written_is_refused_before_the_work(
    tmp_path: Path, source: Path, new: Snapshot, runner: Runner
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    for target in (locked / "out", locked / "deep" / "out"):
        assert runner.run("convert", source, target, *ARGS, powerless=True) == 4
        said_in_words(runner.said(), "cannot be written", "read-only")
    assert list(locked.iterdir()) == []


def test_a_read_only_file_system_is_refused_before_the_work(
    small_disk: Path, source: Path, new: Snapshot, runner: Runner
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert runner.run("convert", source, small_disk / "out", *ARGS) == 4
    said_in_words(runner.said(), "cannot be written", "read-only")


def test_an_old_result_that_may_not_be_removed_stays_beside_the_new_one(
    tmp_path: Path, source: Path, new: Snapshot, runner: Runner
) -> None:
    target = tmp_path / "room" / "out"
    make_hf_plain(tmp_path / "other", seed=1)
    assert runner.run("convert", tmp_path / "other", target) == 0
    target.chmod(0o555)
    command = ("convert", source, target, *ARGS, "--overwrite")
    for _ in range(2):
        assert runner.run(*command, powerless=True) == 4
        said_in_words(runner.said(), "new result is in place", "remove it by hand")
        assert state_fault(target, [new]) == ""


def test_a_source_file_that_may_not_be_read(tmp_path: Path, source: Path, runner: Runner) -> None:
    (source / "model-00002-of-00004.safetensors").chmod(0)
    assert runner.run("convert", source, tmp_path / "out", *ARGS, powerless=True) == 4
    said_in_words(runner.said(), "model-00002-of-00004.safetensors", "Permission denied")


def middle(trace: Path) -> int:
    """Return the number of the first write into the third weight file."""
    return next(n for n, step in enumerate(steps_in(trace), 1) if step[0] == "pwrite" and "part2" in step[1])


def starts_over(runner: Runner, command: tuple[object, ...], target: Path, new: Snapshot) -> None:
    """A source file was replaced: its equal copy is another file, so nothing made of the first one is kept for it."""
    assert runner.run(*command) == 2
    said_in_words(runner.said(), "another plan", "--overwrite")
    assert runner.run(*command, "--overwrite") == 0, runner.said()
    made = snapshot(target)
    assert made is not None
    assert made.keys() == new.keys()
    assert [name for name in made if made[name] != new[name]] == [MANIFEST], "the plan's digest is another"
    assert [path for path in target.parent.iterdir() if path.name.startswith(f"{target.name}.")] == []


def test_a_source_file_that_shrinks_during_the_run(tmp_path: Path, source: Path, new: Snapshot, runner: Runner) -> None:
    last = source / "model-00004-of-00004.safetensors"
    shutil.copy2(last, tmp_path / "sound")
    target = tmp_path / "room" / "out"
    command = ("convert", source, target, *ARGS)
    size = last.stat().st_size
    assert runner.run(*command, at=[middle(tmp_path / "trace"), "truncate", str(last), size - 8]) == 5
    said_in_words(runner.said(), last.name, "shrank")
    assert not target.exists()
    shutil.copy2(tmp_path / "sound", last)
    starts_over(runner, command, target, new)


@pytest.mark.parametrize("name", ["model-00004-of-00004.safetensors", "tokenizer.json"])
def test_a_source_file_that_vanishes_during_the_run(
    tmp_path: Path, source: Path, new: Snapshot, runner: Runner, name: str
) -> None:
    shutil.copy2(source / name, tmp_path / "sound")
    target = tmp_path / "room" / "out"
    command = ("convert", source, target, *ARGS)
    code = runner.run(*command, at=[middle(tmp_path / "trace"), "remove", str(source / name)])
    assert code == 4 if name == "tokenizer.json" else code in (2, 4)
    assert "Traceback" not in runner.said()
    assert name in runner.said()
    assert not target.exists()
    shutil.copy2(tmp_path / "sound", source / name)
    (continues if name == "tokenizer.json" else starts_over)(runner, command, target, new)


@pytest.mark.parametrize(
    ("number", "code", "word", "overwrite"),
    [(signal.SIGINT, 130, "interrupted", True), (signal.SIGTERM, 143, "terminated", False)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_in_the_middle(
    tmp_path: Path, runner: Runner, number: signal.Signals, code: int, word: str, overwrite: bool
) -> None:
    source = make_hf_plain(tmp_path / "src", layers=8, hidden=256, intermediate=512, vocab=500, shards=3)
    options = ("--no-progress", "--max-shard-size", "200KB")
    target = tmp_path / "room" / "out"
    assert runner.run("convert", source, tmp_path / "whole", *options) == 0
    new, old = snapshot(tmp_path / "whole"), None
    assert new
    if overwrite:
        make_hf_plain(tmp_path / "other", seed=1)
        assert runner.run("convert", tmp_path / "other", target) == 0
        old = snapshot(target)
    command = ("convert", source, target, *options, *(["--overwrite"] if overwrite else []))
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptkit", *map(str, command)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    while len(finished(target.parent)) < 3 and process.poll() is None:
        time.sleep(0.002)
    assert process.poll() is None, "the run was over too soon"
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code, said
    assert said.strip().startswith(f"{word}: ") and said.count("\n") <= 2, said
    assert "run the same command again" in said
    assert state_fault(target, [old]) == ""
    continues(runner, command, target, new)


def test_a_source_file_that_is_written_during_the_run_is_not_passed_over(
    tmp_path: Path, source: Path, new: Snapshot, runner: Runner
) -> None:
    """Its size is the same, so nothing else can tell that the result may be half old and half new."""
    first = source / "model-00001-of-00004.safetensors"
    target = tmp_path / "room" / "out"
    assert runner.run("convert", source, target, *ARGS, at=[middle(tmp_path / "trace"), "utime", str(first)]) == 5
    said_in_words(runner.said(), first.name)
    assert not target.exists()

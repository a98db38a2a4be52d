"""The contract: whenever a run for some ranks is killed, DST is what its manifest says; run again, the part is there.

A part is killed before every system call that changes the disk: as the first one, as the one that completes the result,
and as one that is written again. Another part's run finishes a join that was stopped. The checker is also shown a join
that is wrong.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_checks import Runner, Snapshot, beside, snapshot, steps_in
from kill_runs import KILLED
from tiny_models import make_hf_plain

from ckptkit.formats.manifest import MANIFEST, read_manifest
from ckptkit.formats.part_manifests import missing_ranks, ranks_in

SOURCE = {"layers": 1, "hidden": 24, "heads": 6, "kv_heads": 3, "intermediate": 24, "vocab": 18}
LAYOUT = ("--mp", "3", "--workers", "1", "--no-progress")


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder for results; in memory where that can be, for a SIGKILL does not ask whether a sync took long."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path))
    yield folder / "room"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Path:
    """A model, `src`; the result of one run, `one`; and what ranks 0 and 2 of it are, `some`."""
    folder = tmp_path_factory.mktemp("sources")
    make_hf_plain(folder / "src", **SOURCE)
    assert runner.run("convert", folder / "src", folder / "one", *LAYOUT) == 0, runner.said()
    assert runner.run(*part(folder, folder / "some", "0,2")) == 0, runner.said()
    return folder


def part(sources: Path, target: Path, ranks: str | None, *more: str) -> tuple[object, ...]:
    return ("convert", sources / "src", target, *LAYOUT, *(["--ranks", ranks] if ranks else []), *more)


def whole(folder: Path) -> Snapshot:
    """Return all files but for the manifest, which is not in the order of another run's."""
    found = snapshot(folder)
    assert found
    return {name: digest for name, digest in found.items() if name != MANIFEST}


def prepare(sources: Path, room: Path, there: str | None) -> Path:
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir()
    if there is not None:
        shutil.copytree(sources / there, room / "out")
    return room / "out"


def fault(target: Path, one: Snapshot, least: set[int]) -> str:
    """Say what is wrong with `target`: its manifest must name `least` ranks at least, and none that is not whole."""
    if not target.exists():
        return "" if not least else "it is gone"
    manifest = read_manifest(target)
    if manifest is None:
        return "it has no manifest"
    ranks = ranks_in(manifest)
    if not ranks >= least:
        return f"it names ranks {ranks} and lost some of {least}"
    if set(missing_ranks(manifest)) != {0, 1, 2} - ranks:
        return "it does not say which ranks are missing"
    found = whole(target)
    named = {name for name in one if not name.startswith("rank_") or int(name.split("/")[0][5:]) in ranks}
    odd = sorted(name for name in named if found.get(name) != one[name])
    return f"its manifest names what is not there, or not whole: {odd}" if odd else ""


def killed_at_every_step(
    runner: Runner, sources: Path, room: Path, there: str | None, command: tuple[object, ...], least: set[int]
) -> Iterator[tuple[int, str]]:
    """Kill `command` before each of its steps, look, and run it again; yield what is wrong with its number."""
    one = whole(sources / "one")
    target = prepare(sources, room, there)
    trace = sources / "trace"
    assert runner.run(*command, trace=str(trace)) == 0, runner.said()
    wanted = read_manifest(target)
    for number, step in enumerate(steps_in(trace), 1):
        if step[0] in ("pwrite", "posix_fallocate"):  # inside the partial folder, as in any run
            continue
        target = prepare(sources, room, there)
        assert runner.run(*command, die_at=number) == KILLED
        yield number, fault(target, one, least)
        code = runner.run(*command)
        if code:
            assert code == 2
            assert re.search("of this result already|is not empty", runner.said()), (number, step)
        yield number, fault(target, one, ranks_in(wanted or {}))
        yield number, "" if same_manifest(read_manifest(target), wanted) else "its manifest is another one"
        yield number, ", ".join(beside(target))


def same_manifest(one: dict[str, Any] | None, two: dict[str, Any] | None) -> bool:
    assert one is not None
    assert two is not None
    return json.dumps(one | {"seal": ""}, sort_keys=True) == json.dumps(two | {"seal": ""}, sort_keys=True)


CASES: dict[str, tuple[str | None, str | None, tuple[str, ...], set[int]]] = {
    "all ranks": (None, None, (), set()),
    "the first part": (None, "0,2", (), set()),
    "the last part": ("some", "1", (), {0, 2}),
    "a part again": ("some", "1-2", ("--overwrite",), {0}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_part_killed_at_any_step_leaves_what_the_manifest_says_and_is_continued(
    room: Path, runner: Runner, sources: Path, case: str
) -> None:
    there, ranks, more, least = CASES[case]
    command = part(sources, room / "out", ranks, *more)
    faults = [found for found in killed_at_every_step(runner, sources, room, there, command, least) if found[1]]
    assert faults == []


def test_the_kill_test_catches_a_join_that_is_named_before_it_is_done(
    room: Path, runner: Runner, sources: Path
) -> None:
    command = part(sources, room / "out", "1")
    target = prepare(sources, room, "some")
    assert runner.run(*command, trace=str(sources / "trace"), plant="early_manifest") == 0, runner.said()
    found = []
    for number in range(1, len(steps_in(sources / "trace")) + 1):
        target = prepare(sources, room, "some")
        assert runner.run(*command, die_at=number, plant="early_manifest") == KILLED
        found.append(fault(target, whole(sources / "one"), {0, 2}))
    assert any("names what is not there" in text for text in found)


def order_faults(steps: list[list[str]], target: Path) -> list[str]:
    """Return what a power cut could lose of a join: names and bytes must be on disk before what relies on them."""
    where = {
        "rank": next(n for n, step in enumerate(steps) if step[0] == "rename" and step[2] == f"{target}/rank_1"),
        "manifest": next(
            n for n, step in enumerate(steps) if step[0] == "rename" and step[2] == f"{target}/{MANIFEST}"
        ),
    }
    partial = steps[where["rank"]][1].rpartition("/")[0]

    def synced(path: str, after: int, before: int) -> bool:
        return ["fsync", path] in [step[:2] for step in steps[after:before]]

    needed = {
        "the file of the rank": synced(f"{partial}/rank_1/checkpoint_1.safetensors", 0, where["rank"]),
        "the folder of the rank": synced(f"{partial}/rank_1", 0, where["rank"]),
        "the name of the rank": synced(str(target), where["rank"], where["manifest"]),
        "the manifest": synced(steps[where["manifest"]][1], where["rank"], where["manifest"]),
        "the name of the manifest": synced(str(target), where["manifest"], where["manifest"] + 2),
    }
    return [name for name, done in needed.items() if not done]


@pytest.mark.parametrize(
    ("plant", "faults"),
    [
        (None, []),
        ("no_folder_sync", ["the folder of the rank", "the name of the rank", "the name of the manifest"]),
    ],
)
def test_what_a_manifest_names_is_on_disk_before_it(
    room: Path, runner: Runner, sources: Path, plant: str | None, faults: list[str]
) -> None:
    target = prepare(sources, room, "some")
    assert runner.run(*part(sources, target, "1"), trace=str(sources / "trace"), plant=plant) == 0, runner.said()
    assert order_faults(steps_in(sources / "trace"), target) == faults


def test_a_join_that_was_stopped_is_finished_by_another_part(room: Path, runner: Runner, sources: Path) -> None:
    """Part 1 is killed in its join; part 2, which finds it, joins both."""
    command = part(sources, room / "out", "1")
    target = prepare(sources, room, None)
    assert runner.run(*part(sources, target, "0")) == 0
    assert runner.run(*command, trace=str(sources / "trace")) == 0
    renames = [n for n, step in enumerate(steps_in(sources / "trace"), 1) if step[0] == "rename"]
    assert len(renames) == 3  # the folder of the rank, the manifest, what is left
    for number in (*renames, renames[-1] + 1):
        prepare(sources, room, None)
        assert runner.run(*part(sources, target, "0")) == 0
        assert runner.run(*command, die_at=number) == KILLED
        assert len(beside(target)) == 1
        assert runner.run(*part(sources, target, "2")) == 0, runner.said()
        assert beside(target) == []
        assert whole(target) == whole(sources / "one")
        assert missing_ranks(read_manifest(target) or {}) == []
        assert runner.run("check", target) == 0, runner.said()


def test_an_unfinished_part_is_left_to_its_own_command(room: Path, runner: Runner, sources: Path) -> None:
    command = part(sources, room / "out", "1")
    target = prepare(sources, room, "some")
    assert runner.run(*command, trace=str(sources / "trace")) == 0
    writes = [n for n, step in enumerate(steps_in(sources / "trace"), 1) if step[0] == "pwrite"]
    prepare(sources, room, None)
    assert runner.run(*command, die_at=writes[-1]) == KILLED
    unfinished = beside(target)
    assert len(unfinished) == 1
    assert runner.run(*part(sources, target, "0,2")) == 0, runner.said()
    assert beside(target) == unfinished
    assert runner.run(*command) == 0
    assert beside(target) == []
    assert whole(target) == whole(sources / "one")
    assert runner.run(*part(sources, room / "other", "1"), die_at=writes[-1]) == KILLED
    assert runner.run("convert", sources / "src", room / "other", *LAYOUT) == 2
    assert "an unfinished result of another plan lies beside" in runner.said()
    assert runner.run("convert", sources / "src", room / "other", *LAYOUT, "--overwrite") == 0
    assert whole(room / "other") == whole(sources / "one")
    assert sorted(path.name for path in room.iterdir()) == ["other", "out"]

"""The contract: an input is never changed, two runs never spoil one output, and what is made belongs to its maker."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_checks import Runner, Snapshot, snapshot, state_fault
from tiny_models import make_hf_plain

from ckptkit.cli import run
from ckptkit.commands.write import already_written
from ckptkit.formats.result_folder import ResultFolder

ARGS = ("--no-progress", "--max-shard-size", "40KB")


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runner, Runner]]:
    pair = (Runner(tmp_path_factory.mktemp("runner")), Runner(tmp_path_factory.mktemp("runner")))
    yield pair
    for runner in pair:
        runner.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_hf_plain(tmp_path / "src", shards=2)


def listing(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return the inode, mode, size and time of everything in a folder, itself included."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        stat = path.lstat()
        found[str(path)] = (stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns)
    return found


def lay_traps(room: Path, source: Path) -> None:
    """Make other ways to name the input and what is around it."""
    (room / "link").symlink_to(source)
    (room / "link_to_link").symlink_to(room / "link")
    (room / "parent").symlink_to(room)
    (source / "below").mkdir()
    (source / "below" / "filled").write_bytes(b"")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "target",
    ["src", "src/", "./src/../src", "link", "link_to_link", "src/new", "src/below", "link/new/deep", ".", "parent",
     "parent/src", "src/model-00001-of-00002.safetensors", "src/config.json"],
)  # fmt: skip
def test_an_output_that_touches_the_input_is_refused(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    overwrite: bool,
) -> None:
    lay_traps(tmp_path, source)
    monkeypatch.chdir(tmp_path)
    before = listing(tmp_path)
    for origin in ("src", "link", "src/model-00001-of-00002.safetensors"):
        if origin == "src/model-00001-of-00002.safetensors" and target in (
            "src/new",
            "src/below",
            "link/new/deep",
            "src/config.json",
        ):
            continue  # beside a file that is the whole input there is room
        assert run(["convert", origin, target, *(["--overwrite"] if overwrite else [])]) == 2
        said = capsys.readouterr().err
        assert "input" in said or "is a file" in said
        assert "hint: " in said
    assert listing(tmp_path) == before


def test_an_output_inside_the_folder_that_links_of_the_input_point_to_is_refused(tmp_path: Path, source: Path) -> None:
    """As in the cache of huggingface_hub: `snapshots/<revision>/` holds links to `blobs/`."""
    shutil.move(source, tmp_path / "blobs")
    source.mkdir()
    for blob in (tmp_path / "blobs").iterdir():
        (source / blob.name).symlink_to(blob)
    before = listing(tmp_path)
    assert run(["convert", str(source), str(tmp_path / "blobs"), "--overwrite"]) == 2
    assert listing(tmp_path) == before
    assert run(["convert", str(source), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_input_is_never_written_nor_left_anything(
    tmp_path: Path, source: Path, runners: tuple[Runner, Runner], overwrite: bool
) -> None:
    for path in source.iterdir():
        path.chmod(0o444)
    source.chmod(0o555)
    before = listing(source)
    target = tmp_path / "out"
    commands = [
        ("inspect", source), ("convert", source, target, "--dry-run"), ("convert", source, target, *ARGS),
        ("check", target), ("convert", target, tmp_path / "back"),
    ]  # fmt: skip
    if overwrite:
        commands += [("convert", source, target, "--format", "ckpt", "--overwrite")]
    for command in commands:
        assert runners[0].run(*command, powerless=True) == 0, runners[0].said()
        if command[:2] == ("check", target):
            made = listing(target)
        if command[0] == "convert" and command[1] == target:
            assert listing(target) == made
    assert listing(source) == before


def test_files_that_share_their_bytes_with_the_input_can_be_replaced(tmp_path: Path, source: Path) -> None:
    """The old result is a folder of hard links to the input: its names are removed, the input's bytes stay."""
    made = tmp_path / "made"
    assert run(["convert", str(source), str(made), "--to", "hf"]) == 0
    bytes_before = snapshot(made)
    shutil.copytree(made, tmp_path / "out", copy_function=os.link)
    os.link(made / "config.json", made / "again.json")
    assert run(["convert", str(made), str(tmp_path / "out"), "--overwrite"]) == 0
    (made / "again.json").unlink()
    assert snapshot(made) == bytes_before
    assert not any(path.stat().st_nlink > 1 for path in (tmp_path / "out").iterdir())
    assert run(["check", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o002])
def test_the_umask_decides_who_may_read_the_result(
    tmp_path: Path, source: Path, runners: tuple[Runner, Runner], mask: int
) -> None:
    target = tmp_path / "new" / "out"
    assert runners[0].run("convert", source, target, umask=oct(mask)[2:]) == 0, runners[0].said()
    assert {path.stat().st_mode & 0o777 for path in (target, target.parent)} == {0o777 & ~mask}
    assert {path.stat().st_mode & 0o777 for path in target.iterdir()} == {0o666 & ~mask}


def test_a_result_through_a_link_goes_where_the_link_points(tmp_path: Path, source: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "result")
    assert run(["convert", str(source), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").is_symlink()
    assert not (tmp_path / "disk" / "result").is_symlink()
    assert run(["check", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["result"]


def both(runners: tuple[Runner, Runner], commands: list[tuple[object, ...]], delays: list[float | None]) -> list[int]:
    """Run two commands at once, each killed after its delay if there is one; return how they ended."""
    codes = [0, 0]

    def one(number: int) -> None:
        codes[number] = runners[number].run(*commands[number], kill_after=delays[number])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return codes


def whole(folder: Path) -> Snapshot:
    found = snapshot(folder)
    assert found
    return found


def test_the_same_conversion_twice_at_once_gives_one_whole_result(
    tmp_path: Path, source: Path, runners: tuple[Runner, Runner]
) -> None:
    assert runners[0].run("convert", source, tmp_path / "whole", *ARGS) == 0
    new = whole(tmp_path / "whole")
    for number in range(10):
        target = tmp_path / f"room{number}" / "out"
        command = ("convert", source, target, *ARGS, *(["--overwrite"] if number % 2 else []))
        codes = both(runners, [command, command], [None, None])
        assert 0 in codes
        assert set(codes) <= {0, 2}
        for code, runner in zip(codes, runners, strict=True):
            assert code == 0 or "another process" in runner.said() or "not empty" in runner.said(), runner.said()
        assert state_fault(target, [new]) == ""
        assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_any_two_runs_at_once_killed_at_any_time_leave_one_whole_result_or_none(
    tmp_path: Path, source: Path, runners: tuple[Runner, Runner]
) -> None:
    """Different conversions to one output, with and without `--overwrite`: whatever is there is whole."""
    other = make_hf_plain(tmp_path / "other", seed=1)
    for name, origin in (("whole_a", source), ("whole_b", other)):
        assert runners[0].run("convert", origin, tmp_path / name, *ARGS) == 0
    results = [whole(tmp_path / "whole_a"), whole(tmp_path / "whole_b")]
    target = tmp_path / "room" / "out"
    chance = random.Random(7)
    seen = set()
    for number in range(40):
        commands = [
            ("convert", chance.choice((source, other)), target, *ARGS, *chance.choice(((), ("--overwrite",))))
            for _ in range(2)
        ]
        delays = [chance.choice((None, chance.uniform(0, 0.25))) for _ in range(2)]
        codes = both(runners, commands, delays)
        assert set(codes) <= {0, 2, -9}, (number, codes, runners[0].said(), runners[1].said())
        assert state_fault(target, [*results, *([None] if not any(seen) else [])]) == "", (number, commands, codes)
        seen.add(target.exists())
    assert runners[0].run("convert", source, target, *ARGS, "--overwrite") == 0, runners[0].said()
    assert state_fault(target, [results[0]]) == ""
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_an_output_that_replaces_the_folder_given_as_config_is_refused(tmp_path: Path, source: Path) -> None:
    assert run(["convert", str(source), str(tmp_path / "ms")]) == 0
    for name in ("config.json", "generation_config.json", "ckptkit.json"):
        (tmp_path / "ms" / name).unlink()
    before = listing(source)
    assert run(["convert", str(tmp_path / "ms"), str(source), "--config", str(source), "--overwrite"]) == 2
    assert listing(source) == before


def test_a_plan_file_that_is_an_input_is_refused(tmp_path: Path, source: Path) -> None:
    before = listing(source)
    assert run(["convert", str(source), str(tmp_path / "out"), "--plan", str(source / "config.json")]) == 2
    assert listing(source) == before


def test_an_unfinished_result_that_vanishes_while_it_is_measured_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run of the same conversion may give it its name at that moment."""
    folder = ResultFolder(tmp_path / "out", "a" * 32)
    folder.partial.mkdir()
    (folder.partial / "part0.safetensors").write_bytes(b"x" * 5000)
    assert already_written(folder) >= 5000

    def vanish(self: Path, pattern: str) -> Iterator[Path]:
        yield self / "part0.safetensors"
        raise FileNotFoundError(2, "No such file or directory", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rglob", vanish)
        assert already_written(folder) == 0

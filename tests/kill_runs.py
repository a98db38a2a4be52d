"""Kill conversions at random moments and run them again, many times.

Every kill must leave the old result, the new one or nothing under the final name, and the same command must end with
the same bytes as a run that nobody killed. `scripts/killtest` is this program; the tests run 50 kills of it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from crash_checks import Runner, Snapshot, beside, snapshot, state_fault  # noqa: E402
from tiny_models import make_hf_plain  # noqa: E402

from ckptkit.formats.journal import JOURNAL  # noqa: E402

OPTIONS = ("--no-progress", "--max-shard-size", "200KB")
KILLED = -9


@dataclass(frozen=True, slots=True)
class Models:
    """A folder with `src` and `other`, what becomes of them (`whole`, `old`), and how long `src` takes."""

    folder: Path
    new: Snapshot
    old: Snapshot
    seconds: float


def make_models(runner: Runner, folder: Path) -> Models:
    make_hf_plain(folder / "src", layers=8, hidden=256, intermediate=512, vocab=500, dtype="BF16", shards=3)
    make_hf_plain(folder / "other", seed=1)
    started = time.perf_counter()
    for name, result in (("other", "old"), ("src", "whole")):
        started = time.perf_counter()
        if runner.run("convert", folder / name, folder / result, *OPTIONS):
            raise RuntimeError(runner.said())
    seconds = time.perf_counter() - started
    new, old = snapshot(folder / "whole"), snapshot(folder / "old")
    assert new
    assert old
    return Models(folder, new, old, seconds)


def kill_once(runner: Runner, models: Models, room: Path, moment: float, *, overwrite: bool) -> tuple[str, int]:
    """Kill one run after `moment` seconds and run it again; return what was wrong, and how many files were kept."""
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir()
    target = room / "out"
    if overwrite:
        shutil.copytree(models.folder / "old", target)
    command = ("convert", models.folder / "src", target, *OPTIONS, *(["--overwrite"] if overwrite else []))
    status = runner.run(*command, kill_after=moment)
    fault = state_fault(target, [models.new, models.old if overwrite else None])
    kept = sum(journal.read_text().count('"file"') for journal in room.glob(f"*.partial-*/{JOURNAL}"))
    if status not in (KILLED, 0) or fault:
        return fault or runner.said(), kept
    code = runner.run(*command)
    if code and not (code == 2 and not overwrite and "is not empty" in runner.said()):  # killed after the rename
        return runner.said(), kept
    rest = beside(target)
    return state_fault(target, [models.new]) or (f"left beside it: {rest}" if rest else ""), kept


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill conversions at random moments and run them again.")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work: the disk to be tested; default: the system's")
    options = parser.parse_args()
    failures = kept = 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        runner = Runner(Path(name))
        models = make_models(runner, Path(name))
        chance = random.Random(options.seed)
        for number in range(options.count):
            moment = chance.uniform(0, 1.1 * models.seconds)
            fault, files = kill_once(runner, models, Path(name) / "room", moment, overwrite=number % 2 == 1)
            kept += files
            if fault:
                failures += 1
                print(f"kill {number}, after {moment:.3f} s: {fault}", flush=True)
        runner.close()
    print(f"{options.count} kills in runs of {models.seconds:.2f} s: {failures} failures; {kept} finished files kept")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

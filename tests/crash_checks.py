"""What must hold after a crash, and in which order a result must reach the disk; and the runs that are checked.

The checkers return what is wrong as text, and nothing when all is well.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from ckptkit.formats.journal import JOURNAL

RUNNER = Path(__file__).with_name("crash_runner.py")
Snapshot = dict[str, str]
Step = list[str]


def snapshot(folder: Path) -> Snapshot | None:
    """Return the digest of every file of a folder by its relative path; None when there is no such folder."""
    if not folder.is_dir():
        return None
    return {
        str(path.relative_to(folder)): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def steps_in(trace: Path) -> list[Step]:
    """Return the steps that a run wrote to its `trace`."""
    return [json.loads(line) for line in trace.read_text().splitlines()]


def beside(target: Path) -> list[str]:
    """Return the names of all that lies beside `target`."""
    return sorted(path.name for path in target.parent.iterdir() if path != target)


def state_fault(target: Path, allowed: Sequence[Snapshot | None]) -> str:
    """Say what is wrong with what lies under the final name: it must be one of `allowed`, whole."""
    found = snapshot(target)
    if found in allowed or (found == {} and None in allowed):
        return ""
    best = min((a for a in allowed if a is not None), key=lambda a: len(a.items() ^ (found or {}).items()), default={})
    differing = sorted({name for name, _ in best.items() ^ (found or {}).items()})
    return f"`{target.name}` is {'missing' if found is None else f'no whole result: {differing}'}"


def order_faults(steps: Sequence[Step], target: Path) -> list[str]:
    """Return what a power cut could lose: every write must be synced before the rename, and the names after it.

    `steps` are [call, path, second path] in the order of the calls; paths are absolute.
    """
    renames = [n for n, step in enumerate(steps) if step[0] in ("rename", "exchange") and str(target) in step[1:3]]
    if not renames:
        return [f"nothing was renamed to `{target.name}`"]
    before, after = steps[: renames[-1]], steps[renames[-1] + 1 :]
    partial = next(path for path in steps[renames[-1]][1:3] if path != str(target))
    faults = []
    for file in sorted(path.relative_to(target) for path in target.rglob("*") if path.is_file()):
        synced = _last(before, "fsync", f"{partial}/{file}")
        if synced < 0:
            faults.append(f"{file} was not synced before the rename")
        elif any(step[0] in _WRITES and step[1] == f"{partial}/{file}" for step in steps[synced:]):
            faults.append(f"{file} was written after it was synced")
    if _last(before, "fsync", partial) <= _last(before, "unlink", f"{partial}/{JOURNAL}"):
        faults.append("the folder was not synced before the rename")
    durable = _last(after, "fsync", str(target.parent))
    if durable < 0:
        faults.append("the parent folder was not synced after the rename")
    if any(step[0] in ("unlink", "rmdir") for step in after[: max(durable, 0)]):
        faults.append("the old result was removed before the new name was on disk")
    return faults


_WRITES = ("open", "write", "pwrite", "posix_fallocate", "ftruncate")


def _last(steps: Sequence[Step], call: str, path: str) -> int:
    """Return the number of the last such step, or -1."""
    return max((number for number, step in enumerate(steps) if step[:2] == [call, path]), default=-1)


class Runner:
    """A process that forks a child for each run of ckptkit: see crash_runner.py."""

    def __init__(self, folder: Path) -> None:
        self.stderr = folder / "stderr.txt"
        self.process = subprocess.Popen(
            [sys.executable, str(RUNNER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self, *args: object, **request: Any) -> int:
        """Run ckptkit with `args` and return its exit code, or minus the signal that ended it.

        `request` has the other keys of crash_runner.py.
        """
        line = {"args": [str(arg) for arg in args], "stderr": str(self.stderr)} | request
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        return int(json.loads(self.process.stdout.readline())["status"])

    def said(self) -> str:
        return self.stderr.read_text()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

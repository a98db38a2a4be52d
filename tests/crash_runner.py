"""A process that runs ckptkit on request, each run in a forked child that can be made to die at a chosen step.

A *step* is a system call that changes what is on disk: making, renaming and removing names, allocating, writing,
syncing. Started as `python tests/crash_runner.py`; a request is one line of JSON on stdin:

    args        the command line of ckptkit
    stderr      the file that takes the child's stderr
    die_at      kill the child by SIGKILL just before step number `die_at` (from 1); null: run to the end
    kill_after  kill the child's process group after so many seconds
    tear        with `die_at`, when that step is a write: write the first half of it, then die
    exchange    false: the kernel cannot exchange two folders (RENAME_EXCHANGE)
    trace       write the steps as JSON lines [name, path, path or number] to this file
    plant       a fault to plant, by its name in PLANTS or SYNC_PLANTS: the checkers must catch it

    fsize       no file may become longer than so many bytes (RLIMIT_FSIZE)
    umask       the file mode creation mask, in octal
    powerless   give up the rights of root, so that permissions bind
    ballast     [file, bytes]: once there was found to be space, fill the disk but for so many bytes
    at          [step, call, path, argument]: just before that step, call os.<call>(path, argument)

The answer to each is a line {"status"}: the exit code, or the negative number of the signal that ended the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptkit import cli
from ckptkit.commands import convert as _convert  # imported here, once, for all children  # noqa: F401
from ckptkit.formats import parts, result_folder
from ckptkit.formats.result_folder import ResultFolder

STEPS = ("mkdir", "rename", "unlink", "rmdir", "posix_fallocate", "ftruncate", "write", "pwrite", "fsync")


class Steps:
    """Count and note the steps of this process; die at the chosen one."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.count = 0
        self.die_at = request.get("die_at")
        self.tear = bool(request.get("tear"))
        self.at, self.call, *self.args = request.get("at") or [0, ""]
        self.trace: list[list[Any]] = []

    def install(self) -> None:
        for name in STEPS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        os.open = self._wrapped("open", os.open)  # type: ignore[assignment]
        original = result_folder.exchange
        result_folder.exchange = self._wrapped("exchange", original)

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return original(*args, **options)
            self.count += 1
            self.trace.append([name, *(_path_of(arg, options) for arg in args[: 2 if name in _TWO_PATHS else 1])])
            if self.count == self.at:
                getattr(os, self.call)(*self.args)
            if self.count == self.die_at:
                if self.tear and name in ("write", "pwrite"):
                    original(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        return step


_TWO_PATHS = ("rename", "exchange")


def _path_of(value: Any, options: dict[str, Any]) -> str:
    if isinstance(value, int):
        return str(Path(f"/proc/self/fd/{value}").readlink())
    folder = options.get("dir_fd")
    if folder is not None:
        return str(Path(f"/proc/self/fd/{folder}").readlink() / value)
    return str(Path.cwd() / value)


def plant_direct_writes() -> None:
    """A writer that builds its result under the final name."""
    ResultFolder.partial = property(lambda self: self.target)  # type: ignore[assignment]
    ResultFolder._rename = lambda self: None  # type: ignore[method-assign]


def plant_early_rename() -> None:
    """A writer that gives the folder its name before the small files are in it."""
    add = ResultFolder.add
    partial = ResultFolder.partial

    def early(self: ResultFolder, name: str, data: bytes) -> None:
        here = partial.fget(self)  # type: ignore[attr-defined]
        if here.exists():
            here.rename(self.target)
        add(self, name, data)

    ResultFolder.add = early  # type: ignore[method-assign]
    ResultFolder.copy = lambda self, source, name: None  # type: ignore[method-assign]
    ResultFolder.partial = property(  # type: ignore[assignment]
        lambda self: self.target if self.target.exists() else partial.fget(self)  # type: ignore[attr-defined]
    )
    ResultFolder._rename = lambda self: None  # type: ignore[method-assign]


def plant_no_sync() -> None:
    """A writer that never waits for the disk."""
    os.fsync = lambda fd: None


def plant_no_folder_sync() -> None:
    """A writer that syncs files and not the folders that name them."""
    original = os.fsync
    os.fsync = lambda fd: None if Path(f"/proc/self/fd/{fd}").is_dir() else original(fd)  # type: ignore[arg-type]


def plant_sync_after_rename() -> None:
    """A writer that renames first and syncs afterwards."""
    original, late, rename = os.fsync, [], os.rename
    os.fsync = lambda fd: late.append(os.dup(fd))  # type: ignore[arg-type]

    def renamed(*args: Any, **options: Any) -> None:
        rename(*args, **options)
        for fd in late:
            original(fd)

    os.rename = renamed


def plant_early_manifest() -> None:
    """A writer that joins a part to a result and names it before it is there."""
    move, put = parts._move, parts._put_manifest

    def early(partial: Path, target: Path, name: str) -> None:
        mine, theirs = parts.read_manifest(partial), parts.read_manifest(target)
        put(partial, target, parts.joined(theirs or {}, mine or {}))
        move(partial, target, name)

    parts._move = early


PLANTS = {
    "direct_writes": plant_direct_writes,
    "early_rename": plant_early_rename,
    "early_manifest": plant_early_manifest,
}
# these go over the noting of steps: a call that they swallow is not noted
SYNC_PLANTS = {
    "no_sync": plant_no_sync,
    "no_folder_sync": plant_no_folder_sync,
    "sync_after_rename": plant_sync_after_rename,
}


def give_up_rights() -> None:
    """Drop all capabilities: root keeps its name and is bound by permissions like anybody."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset")


def fill_disk_later(file: str, leave_bytes: int) -> None:
    """Let somebody else fill the disk between the check for space and the writing."""
    begin = ResultFolder.open

    def filled(self: ResultFolder) -> None:
        stat = os.statvfs(Path(file).parent)
        with open(file, "wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, stat.f_bavail * stat.f_frsize - leave_bytes)
        begin(self)

    ResultFolder.open = filled  # type: ignore[method-assign]


def child(request: dict[str, Any]) -> int:
    """Run ckptkit in this process, with what the request asks for; return its exit code."""
    os.setpgid(0, 0)
    out = os.open(os.devnull, os.O_WRONLY)
    err = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(out, 1)
    os.dup2(err, 2)
    steps = Steps(request)
    PLANTS.get(request.get("plant"), lambda: None)()
    if request.get("exchange") is False:
        result_folder.exchange = lambda one, two: False
    if request.get("die_at") or request.get("trace") or request.get("at"):
        steps.install()
    SYNC_PLANTS.get(request.get("plant"), lambda: None)()
    if request.get("fsize"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["fsize"], resource.RLIM_INFINITY))
    if request.get("umask"):
        os.umask(int(request["umask"], 8))
    if request.get("powerless"):
        give_up_rights()
    if request.get("ballast"):
        fill_disk_later(*request["ballast"])
    code = cli.run(request["args"])
    sys.stderr.flush()
    if request.get("trace"):
        Path(request["trace"]).write_text("".join(json.dumps(step) + "\n" for step in steps.trace))
    return code


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 71
            try:
                code = child(request)
            finally:
                os._exit(code)
        if request.get("kill_after") is not None:
            with contextlib.suppress(OSError):  # the child has done it already
                os.setpgid(pid, pid)
            time.sleep(request["kill_after"])
            os.killpg(pid, signal.SIGKILL)  # at worst to a child that has ended and is not waited for yet
        print(json.dumps({"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)


if __name__ == "__main__":
    main()

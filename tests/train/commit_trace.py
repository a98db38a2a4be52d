"""In which order a save reached the disk: system calls from an `strace -f -y` log, and what is wrong with their order.

A power cut keeps what was fsynced, in names and in bytes, and anything or nothing of the rest. `commit_faults` returns
what it could lose, as sentences, and nothing when all is well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

CALLS = (
    "openat,open,creat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,link,linkat,unlink,unlinkat,rmdir,"
    "close,mkdir,mkdirat"
)
_WRITES = ("write", "pwrite64")
_SYNCS = ("fsync", "fdatasync")
_RENAMES = ("rename", "renameat", "renameat2")
_LINKS = ("link", "linkat")
_MAKES = ("mkdir", "mkdirat")
_OF_DESCRIPTORS = (*_WRITES, *_SYNCS, "close")
_REMOVES = ("unlink", "unlinkat", "rmdir")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that succeeded: the lines of the log where it began and ended, and its paths, absolute ones."""

    name: str
    begin: int
    end: int
    paths: tuple[str, ...]
    creates: bool = False


def calls_in(log: str) -> list[Call]:
    """Return the calls of a log, by their begin; those that another thread interrupted are put together."""
    waiting: dict[str, tuple[int, str]] = {}
    found = []
    for number, line in enumerate(log.splitlines()):
        pid, _, text = line.partition(" ")
        text = text.strip()
        if text.endswith("<unfinished ...>"):
            waiting[pid] = number, text.removesuffix("<unfinished ...>")
            continue
        begin = number
        if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", text):
            if pid not in waiting:
                continue
            begin, head = waiting.pop(pid)
            text = head + resumed[1]
        if whole := re.fullmatch(r"(\w+)\((.*)\)\s+= (\d+).*", text):
            found.append(Call(whole[1], begin, number, tuple(_paths(whole[1], whole[2])), "O_CREAT" in whole[2]))
    return sorted(found, key=lambda call: call.begin)


def _paths(name: str, arguments: str) -> Iterator[str]:
    """Yield the paths among a call's arguments: of its descriptor, or names below the folder given before them."""
    if name in _OF_DESCRIPTORS:
        yield from re.findall(r"^\d+<([^>]*)>", arguments)
        return
    folder = ""
    for fd, path in re.findall(r'(?:\d+|AT_FDCWD)<([^>]*)>|"((?:[^"\\]|\\.)*)"', arguments):
        if fd:
            folder = fd
        else:
            yield path if path.startswith("/") or not folder else f"{folder}/{path}"


def commit_faults(calls: Sequence[Call], run: str) -> list[str]:
    """Return what is wrong with the commits of all checkpoints in the folder of a run."""
    commits = [c for c in calls if c.name in _RENAMES and _is_step(c.paths[-1], run)]
    if not commits:
        return ["no checkpoint got its name"]
    faults = []
    for number, commit in enumerate(commits):
        after = commits[number + 1].begin if number + 1 < len(commits) else len(calls) + 10**9
        faults += _faults_before(calls, commit)
        faults += _faults_after([c for c in calls if commit.end < c.begin < after], commit, run)
        before = commits[number - 1].end if number else -1
        faults += _early(calls, commit, run, before)
    return faults


def _is_step(path: str, run: str) -> bool:
    return PurePath(path).parent == PurePath(run) and PurePath(path).name.startswith("step-")


def _faults_before(calls: Sequence[Call], commit: Call) -> Iterator[str]:
    """Yield what of the folder was not on the disk when it got its name."""
    temp, step = commit.paths[0], PurePath(commit.paths[-1]).name
    inside = [c for c in calls if c.paths and c.paths[-1].startswith(f"{temp}/")]
    made = [c for c in inside if c.creates or c.name in (*_LINKS, *_MAKES)]
    files = {c.paths[-1]: c for c in made if c.name not in _MAKES}
    for path, create in files.items():
        name = path.removeprefix(f"{temp}/")
        written = max((c.end for c in inside if c.name in _WRITES and c.paths[-1] == path), default=create.end)
        if not _synced(calls, path, written, commit.begin):
            yield f"{step}: {name} was not synced between its last write and the rename"
    for folder in {temp, *(c.paths[-1] for c in made if c.name in _MAKES)}:
        names = max((c.end for c in made if str(PurePath(c.paths[-1]).parent) == folder), default=-1)
        if not _synced(calls, folder, names, commit.begin):
            yield f"{step}: the folder {PurePath(folder).name} was not synced before the rename"
    manifest = files.get(f"{temp}/ckptkit.json")
    if manifest is None:
        yield f"{step}: there is no manifest"
    else:
        yield from (
            f"{step}: {PurePath(path).name} came after the manifest"
            for path, c in files.items()
            if c.begin > manifest.end
        )


def _synced(calls: Sequence[Call], path: str, after: int, before: int) -> bool:
    return any(c.name in _SYNCS and c.paths == (path,) and after < c.begin and c.end < before for c in calls)


def _faults_after(later: Sequence[Call], commit: Call, run: str) -> Iterator[str]:
    """Yield what came too early after a checkpoint got its name; `later` are the calls up to the next commit."""
    step = PurePath(commit.paths[-1]).name
    durable = next((c for c in later if c.name in _SYNCS and c.paths == (run,)), None)
    hint = next((c for c in later if c.name in _RENAMES and c.paths[-1] == f"{run}/LATEST"), None)
    if durable is None or (hint is not None and durable.end > hint.begin):
        yield f"{step}: the run's folder was not synced between the rename and LATEST"
    if hint is None:
        yield f"{step}: LATEST was not written after the rename"
        return
    if not _synced(later, hint.paths[0], commit.end, hint.begin):
        yield f"{step}: LATEST was not synced before its rename"
    for call in later:
        if call.name in (*_RENAMES, *_REMOVES) and _is_step(call.paths[0], run) and call.begin < hint.end:
            yield f"{step}: {PurePath(call.paths[0]).name} went before LATEST was written"
    for hide in (c for c in later if c.name in _RENAMES and PurePath(c.paths[-1]).name.startswith(".del-")):
        first = min((c.begin for c in later if c.name in _REMOVES and hide.paths[-1] in c.paths[-1]), default=None)
        if first is not None and not _synced(later, run, hide.end, first):
            yield f"{step}: {PurePath(hide.paths[0]).name} was removed before its hidden name was on the disk"


def _early(calls: Sequence[Call], commit: Call, run: str, after: int) -> Iterator[str]:
    """Yield what was done before a checkpoint got its name and belongs after it: to the hint, to other checkpoints."""
    step = PurePath(commit.paths[-1]).name
    begun = min((c.begin for c in calls if c.paths and c.paths[-1] == commit.paths[0] and c.name in _MAKES), default=0)
    for call in calls:
        if not max(after, begun) < call.begin < commit.begin:
            continue
        if call.name in _RENAMES and call.paths[-1] == f"{run}/LATEST":
            yield f"{step}: LATEST was written before the rename"
        if call.name in _REMOVES and any(_is_step(part, run) for part in _ancestors(call.paths[-1])):
            yield f"{step}: {call.paths[-1].removeprefix(run)} was removed before the rename"


def _ancestors(path: str) -> list[str]:
    return [path, *(str(parent) for parent in PurePath(path).parents)]

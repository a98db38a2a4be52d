"""Parts of one result: runs with `--ranks` that fill one folder together, each with the folders of its ranks.

A part is built like a whole result, in a partial folder of its own. The first one becomes `DST` by a rename; its
manifest says which ranks are there, and how many there are to be. A later one joins:

1. what is in the partial folder is on disk, its manifest too           -> a rerun goes on here
2. with `overwrite`: the manifest of `DST` without the ranks that are   -> an incomplete result, which a rerun fills
   to be made again; their folders go into the partial folder
3. each `rank_N` folder is renamed from the partial folder into `DST`   -> as before: no manifest names it yet
4. the manifest of both takes the place of that of `DST`, by a rename   -> the part is there
5. the rest of the partial folder is removed                            -> the next start removes it

So at any moment the manifest of `DST` says what is there, and every reader refuses a result that lacks ranks. What a
crash left between 1 and 5 is finished by the next run of any part. Joins come one after another: a process holds a
lock on the manifest, which machines that share a disk see, too. Parts know one another by the digest of the whole plan.
What does not live here: what manifests say of ranks (`part_manifests.py`), which part of a plan ranks are
(`plan/part.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ckptkit.errors import UsageError
from ckptkit.formats.disk import fsync_folder, fsync_tree, lock, write_file
from ckptkit.formats.journal import JOURNAL, Journal
from ckptkit.formats.manifest import MANIFEST, dump_manifest, plan_of, read_manifest
from ckptkit.formats.part_manifests import joined, missing_ranks, ranks_in, without
from ckptkit.formats.target import remove_replaced, siblings
from ckptkit.quantities import numbers_text

_PLAN_DIGITS = 24  # of the 32 in a partial folder's name; the rest tell the parts of one plan apart
_JOINED = "joined.json"


def part_name(digest: str, ranks: Sequence[int] | None) -> str:
    """Return the 32 digits in the names of partial folders: of a part, 24 of its plan's digest and 8 of its own."""
    if ranks is None:
        return digest
    return digest[:_PLAN_DIGITS] + xxhash.xxh3_64_hexdigest(repr(tuple(ranks)).encode())[: 32 - _PLAN_DIGITS]


def same_plan(one: str | None, two: str) -> bool:
    """Say whether two digests are of one plan, or of parts of one."""
    return one is not None and one[:_PLAN_DIGITS] == two[:_PLAN_DIGITS]


def check_part(target: Path, digest: str | None, ranks: Sequence[int], *, overwrite: bool) -> None:
    """Raise UsageError when no part with these `ranks`, of the plan of this `digest`, may be joined to `target`.

    Without a digest only what is known before there is a plan is looked at.
    """
    if not is_filled(target):
        return
    manifest = read_manifest(target)
    if manifest is None or "ranks" not in manifest.get("layout", {}):
        raise UsageError(
            f"the output folder `{target}` is not empty, and holds no parts of a result",
            why="files of two results would be mixed",
            hint="choose another folder",
        )
    if digest is None:
        return
    _refuse_other_plan(target, manifest, digest)
    again = set(ranks) & ranks_in(manifest)
    foreign = [rank for rank in ranks if rank not in again and (target / f"rank_{rank}").exists()]
    if again and not overwrite:
        missing = numbers_text(missing_ranks(manifest))
        raise UsageError(
            f"`{target}` holds ranks {numbers_text(again)} of this result already",
            hint=(f"`--ranks {missing}` are missing; " if missing else "") + "`--overwrite` writes these again",
        )
    if foreign and not overwrite:
        raise _foreign(target, foreign)


def is_filled(folder: Path) -> bool:
    """Say whether there is a folder of that name with something in it."""
    return folder.is_dir() and any(folder.iterdir())


def stands(partial: Path, target: Path, digest: str) -> bool:
    """Say whether a part is whole: each of its files in `partial`, or moved to `target` by a join that was stopped."""
    if plan_of(partial) != digest:
        return False
    manifest = read_manifest(partial) or {}
    for row in manifest["files"]:
        places = [folder / row["name"] for folder in (partial, target)]
        file = next((path for path in places if path.is_file()), None)
        if file is None or file.stat().st_size != row["bytes"]:
            return False
    return True


def mates(target: Path, digest: str, own: Path) -> list[Path]:
    """Return the partial folders of other parts of a plan, not `own` nor that of a run that writes all ranks."""
    others = (own, target.with_name(f"{target.name}.partial-{digest}"))
    found = [path for path in siblings(target, "partial") if path not in others]
    return [path for path in found if same_plan(digest, path.name[-32:])]


def finish_mate(mate: Path, target: Path, digest: str) -> None:
    """Join another part that is whole and that nobody is at work on: its run was stopped while it did that."""
    if not stands(mate, target, digest):
        return
    with contextlib.suppress(UsageError):  # somebody is at work on it, or its own command must settle it
        journal = Journal.take(mate)
        try:
            join_part(mate, target, overwrite=False)
            set_aside(mate)
        finally:
            journal.close()


def set_aside(partial: Path) -> None:
    """Remove what is left of a joined part, under a name that the next start clears away."""
    if partial.exists():
        old = partial.with_name(partial.name.replace(".partial-", ".old-"))
        partial.rename(old)
        fsync_folder(partial.parent)
        remove_replaced(old)


def join_part(partial: Path, target: Path, *, overwrite: bool) -> None:
    """Bring the ranks of a whole part to `target`; see the protocol above. Raises UsageError and OSError."""
    fsync_tree(partial)
    mine = read_manifest(partial)
    assert mine is not None, "a part has its manifest before it is joined"
    if _become(partial, target):
        return
    with _locked_manifest(target):
        theirs = read_manifest(target)
        assert theirs is not None, "it is locked"
        _refuse_other_plan(target, theirs, mine["plan"])
        moves = [rank for rank in sorted(ranks_in(mine)) if (partial / f"rank_{rank}").exists()]
        if again := set(moves) & ranks_in(theirs):
            if overwrite:
                theirs = without(theirs, again)
                _put_manifest(partial, target, theirs)
            moves = [rank for rank in moves if overwrite or rank not in again]
        if foreign := [rank for rank in moves if not overwrite and (target / f"rank_{rank}").exists()]:
            raise _foreign(target, foreign)
        for rank in moves:
            _move(partial, target, f"rank_{rank}")
        fsync_folder(target)
        if not ranks_in(mine) <= ranks_in(theirs):
            _put_manifest(partial, target, joined(theirs, mine))


def _become(partial: Path, target: Path) -> bool:
    """Rename a first part to `target`; False when something is there already."""
    if is_filled(target):
        return False
    (partial / JOURNAL).unlink(missing_ok=True)
    fsync_folder(partial)
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False  # another machine was first
    fsync_folder(target.parent)
    return True


@contextlib.contextmanager
def _locked_manifest(target: Path) -> Iterator[None]:
    """Hold the manifest of `target`, the one that has this name once it is locked."""
    path = target / MANIFEST
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            lock(fd, wait=True)
            if os.path.samestat(os.fstat(fd), path.stat()):
                yield
                return
        finally:
            os.close(fd)


def _move(partial: Path, target: Path, name: str) -> None:
    if (target / name).exists():
        (target / name).rename(partial / f"replaced-{name}")
    (partial / name).rename(target / name)


def _put_manifest(partial: Path, target: Path, manifest: Mapping[str, Any]) -> None:
    write_file(partial / _JOINED, dump_manifest(manifest))
    (partial / _JOINED).rename(target / MANIFEST)
    fsync_folder(target)


def _refuse_other_plan(target: Path, manifest: Mapping[str, Any], digest: str) -> None:
    if manifest["plan"] != digest:
        raise UsageError(
            f"`{target}` holds parts of another result than this one would be",
            why="the source (its files and their times), the options, the tables or the layout differ",
            hint="give every part the same source and options, but for `--ranks`; or choose another folder",
        )


def _foreign(target: Path, ranks: Sequence[int]) -> UsageError:
    return UsageError(
        f"`{target}` holds folders of ranks that its {MANIFEST} does not name",
        items=[f"rank_{rank}" for rank in ranks],
        why="what is in them is not known: they were copied there, or a run was stopped while it joined them",
        hint="move them away, or pass `--overwrite` to replace them",
    )

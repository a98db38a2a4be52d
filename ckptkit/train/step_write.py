"""Write a checkpoint of a run so that it is there whole or not at all, whatever happens meanwhile.

The protocol, and what a crash at each point leaves:

1. `.tmp-step-N-P-R/` is made and locked                          -> the next save removes it
2. each file is written and fsynced; the manifest comes last      -> the same
3. the folders are fsynced                                        -> the same
4. one rename to `step-N`, then the run's folder is fsynced       -> the checkpoint is there, or it is not
5. LATEST, by a rename of its own; failing is no error            -> LATEST names an older one: it is a hint
6. what is not to be kept is renamed to `.del-*`, then removed    -> the next save removes it

A folder of that step that is there already, a broken one or that of an earlier try, is exchanged with the new one in 4.
Where folders cannot be exchanged it is set aside first. What does not live here: the files' content (`step_files.py`),
their bytes (`step_bytes.py`), what is taken over from the checkpoint before (`step_reuse.py`), the thread (`saver.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from ckptkit.errors import ResourceError
from ckptkit.formats.disk import Turn, disk_error, exchange, fsync_folder, fsync_tree, make_folder, write_file
from ckptkit.formats.manifest import MANIFEST
from ckptkit.train.prune import Keep, Pruned, prune, remove_leftovers
from ckptkit.train.state import STATE_FILE, RunState, dump_state
from ckptkit.train.step_bytes import digest_of, write_tensors
from ckptkit.train.step_files import SHARD_BYTES, SideFiles, StepFile, Tensors, dump_step_manifest, lay_out_step
from ckptkit.train.step_folders import LATEST, folder_of, hold, name_being_removed, name_being_written, remove
from ckptkit.train.step_reuse import Before


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint is made of, all of one moment: nobody may change the arrays while it is written.

    `weights` are float32 under HuggingFace's names, of tied ones the embedding alone; `moments` are `exp_avg.NAME` and
    `exp_avg_sq.NAME` of each weight that is not among the `frozen`.
    """

    state: RunState
    weights: Tensors
    moments: Tensors
    frozen: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that is on the disk.

    `num_bytes` were written, `linked_bytes` were there already. `removed` are the names of folders that went, `notes`
    say what failed without harm to the checkpoint.
    """

    step: int
    folder: Path
    num_bytes: int
    linked_bytes: int
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def write_step(
    run: Path,
    snapshot: Snapshot,
    *,
    side_files: SideFiles,
    facts: Mapping[str, Any],
    previous: Path | None = None,
    keep: Keep | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Write a checkpoint into the folder of a run and give it its name; then prune, if `keep` says what stays.

    `previous` is the checkpoint before: frozen tensors that it has are linked. `facts` are for the manifest: see
    `facts_in`. Raises ResourceError when the disk fails; nothing is left of the new checkpoint then, and the
    others are untouched.
    """
    target = folder_of(run, snapshot.state.step)
    temp, lock_fd = _make_temp(run, target)
    try:
        written, linked = _fill(temp, snapshot, side_files, facts, Before.of(previous), max_shard_bytes)
        fsync_tree(temp)
        _commit(temp, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove(temp)  # gives its space back
        if isinstance(error, OSError):
            raise disk_error(error, target) from error
        raise
    finally:
        os.close(lock_fd)
    notes = _point_at(target)
    pruned = Pruned() if keep is None else _prune(target, snapshot.state.step, keep)
    return Written(snapshot.state.step, target, written, linked, pruned.removed, (*notes, *pruned.failures))


def _make_temp(run: Path, target: Path) -> tuple[Path, int]:
    """Make the folder that a checkpoint is written in; return it and the descriptor that keeps it locked.

    What killed processes left is removed in the same turn, when nobody else is between making a folder and locking it.
    """
    turn = Turn()
    temp = run / name_being_written(target.name)
    try:
        make_folder(run)
        turn.take(run)
        remove_leftovers(run)
        temp.mkdir()
        return temp, hold(temp)
    except OSError as error:
        raise disk_error(error, temp) from error
    finally:
        turn.end()


def _fill(
    temp: Path, snapshot: Snapshot, side_files: SideFiles, facts: Mapping[str, Any], before: Before, max_bytes: int
) -> tuple[int, int]:
    """Write all files of a checkpoint, the manifest last; return the bytes that were written, and those linked."""
    files, index = lay_out_step(snapshot.weights, snapshot.moments, snapshot.frozen, max_shard_bytes=max_bytes)
    small = {**side_files, **index, STATE_FILE: dump_state(snapshot.state)}
    digests, linked = _write_tensor_files(temp, files, snapshot, before)
    side: dict[str, tuple[str, int]] = {}
    for name, content in small.items():
        write_file(temp / name, content)
        side[name] = xxhash.xxh3_128_hexdigest(content), len(content)
    manifest = dump_step_manifest(snapshot.state.step, files, digests, side, facts)
    write_file(temp / MANIFEST, manifest)
    total = sum(file.layout.size for file in files) + sum(size for _, size in side.values()) + len(manifest)
    return total - linked, linked


def _write_tensor_files(
    temp: Path, files: Sequence[StepFile], snapshot: Snapshot, before: Before
) -> tuple[dict[str, str], int]:
    """Write or link each file of tensors; return the tensors' digests, and the bytes of linked files."""
    digests: dict[str, str] = {}
    linked = 0
    for file in files:
        path = temp / file.layout.name
        path.parent.mkdir(exist_ok=True)
        arrays = {
            spec.name: snapshot.weights[spec.name] if spec.name in snapshot.weights else snapshot.moments[spec.name]
            for spec in file.specs
        }
        if file.frozen:
            found = {name: digest_of(array) for name, array in arrays.items()}
            if before.link(file, found, path):
                digests |= found
                linked += file.layout.size
                continue
        digests |= write_tensors(path, file.layout, arrays)
    return digests, linked


def _commit(temp: Path, target: Path) -> None:
    """Give a finished checkpoint its name, and wait until that is on disk; what had the name is removed after it."""
    turn = Turn()
    aside = target.with_name(name_being_removed(target.name))
    try:
        turn.take(target.parent)
        if not os.path.lexists(target):
            temp.rename(target)
        elif exchange(temp, target):
            temp.rename(aside)
        else:
            target.rename(aside)
            temp.rename(target)
        fsync_folder(target.parent)
    finally:
        turn.end()
    with contextlib.suppress(OSError):  # the next save tries again
        remove(aside)


def _prune(target: Path, step: int, keep: Keep) -> Pruned:
    """Prune, and never what was written just now; a disk that fails here has done the checkpoint no harm."""
    try:
        return prune(target.parent, replace(keep, protect=keep.protect | {step}))
    except ResourceError as error:
        return Pruned(failures=(f"older checkpoints could not be removed: {error.what}",))


def _point_at(target: Path) -> tuple[str, ...]:
    """Let LATEST name a checkpoint; return a note when that fails, for nothing relies on it."""
    hint = target.with_name(LATEST)
    temp = target.with_name(name_being_written(LATEST))
    try:
        write_file(temp, f"{target.name}\n".encode())
        temp.rename(hint)
        fsync_folder(target.parent)
    except (OSError, ResourceError) as error:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)
        why = error.what if isinstance(error, ResourceError) else error.strerror
        return (f"`{LATEST}` could not be written ({why}); `{target.name}` is complete and will be found without it",)
    return ()

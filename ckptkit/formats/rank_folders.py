"""`rank_N/` sets: which ranks there are, and which file of each counts.

A distributed run of MindSpore saves one folder a process: `rank_0/`, `rank_1/`, ..., each with one file a saved step,
named `<prefix>-<epoch>_<step>.ckpt` or `.safetensors`. Ranks are ordered by number, not by text; the set must be
0..n-1; all ranks must offer the same step. What does not live here: joining the ranks' tensors, which takes a layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.folder import rank_folders
from ckptkit.formats.registry import open_checkpoint

_STEP = re.compile(r"-(\d+)_(\d+)$")
_SUFFIXES = (".ckpt", ".safetensors")


@dataclass(frozen=True, slots=True)
class RankSet:
    """One checkpoint a rank, in the order of ranks; `notes` says which files were passed over."""

    folder: Path
    ranks: Mapping[int, Checkpoint]
    notes: tuple[str, ...]


def find_ranks(folder: Path) -> dict[int, Path]:
    """Return the `rank_N` folders in `folder` by number; {} when there are none."""
    return {int(name.removeprefix("rank_")): folder / name for name in rank_folders(folder)}


def open_ranks(folder: Path, *, step: int | None = None) -> RankSet:
    """Open one file of every rank: the one of `step`, else the newest step; raise when ranks do not agree."""
    folders = find_ranks(folder)
    missing = sorted(set(range(max(folders) + 1)) - set(folders))
    if missing:
        raise CoverageError(
            f"`{folder.name}` lacks {len(missing)} of {max(folders) + 1} ranks",
            items=[f"rank_{rank}" for rank in missing],
            why="each rank holds its own part of the model",
            hint="copy the missing folders here",
        )
    chosen = {rank: _choose(path, step) for rank, path in folders.items()}
    steps = {rank: found for rank, (_, found, _) in chosen.items()}
    if len(set(steps.values())) > 1:
        raise CoverageError(
            f"the ranks of `{folder.name}` do not offer the same step",
            items=[f"rank_{rank}: {f'epoch {s[0]}, step {s[1]}' if s else 'no step'}" for rank, s in steps.items()],
            why="parts of two moments of training do not make one model",
            hint="name a step that every rank has with `--step`",
        )
    notes = [note for _, _, passed in chosen.values() for note in passed]
    return RankSet(folder, {rank: open_checkpoint(file) for rank, (file, _, _) in chosen.items()}, tuple(notes))


def _choose(folder: Path, step: int | None) -> tuple[Path, tuple[int, int] | None, list[str]]:
    """Return a rank's file, its (epoch, step) where the name says it, and a note on the files passed over."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    if not files:
        raise CoverageError(f"`{folder.name}` holds no .ckpt and no .safetensors file", hint="copy it again")
    numbered = {path: (int(m[1]), int(m[2])) for path in files if (m := _STEP.search(path.stem))}
    if step is not None:
        files = [path for path in files if path in numbered and numbered[path][1] == step]
        if not files:
            raise CoverageError(f"`{folder.name}` has no file of step {step}")
    if len(files) == 1:
        return files[0], numbered.get(files[0]), []
    if any(path not in numbered for path in files) or len(set(numbered.values())) < len(files):
        raise UsageError(
            f"`{folder.name}` holds {len(files)} files, and their names do not say which is the newest",
            items=[path.name for path in files],
            hint="leave one in each rank's folder",
        )
    newest = max(files, key=lambda path: numbered[path])
    others = ", ".join(path.name for path in files if path != newest)
    return newest, numbered[newest], [f"{folder.name}: `{newest.name}` is the newest; passed over: {others}"]

"""Sets of ranks: which ranks there are, and which file of each counts.

A distributed run of MindSpore saves one folder a process: `rank_0/`, `rank_1/`, ..., each with one file a saved step.
Beside these MindFormers writes `meta.json`, which names the last one that is complete. Ranks are ordered by number, not
by text; the set must be 0..n-1; all ranks must offer the same step. Graphs (`.meta`), strategy files and what is not
finished (`.tmp`) are not taken for weights. MindFormers' newer folders, with all ranks in one `iteration_N`, make the
same set (`mindformers_ranks.py`). What does not live here: joining the ranks' tensors, which takes a layout, and how
many ranks there must be, which the layout says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CorruptError, CoverageError, UsageError
from ckptkit.formats import files
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.folder import file_names, is_weight, natural, rank_folders
from ckptkit.formats.mindformers_folder import is_checkpoint, refuse_beside_files, refuse_beside_iterations
from ckptkit.formats.mindformers_ranks import Iteration, open_iteration
from ckptkit.formats.rank_names import HOLE, RankFile, common_pattern, parse, refuse_exchanged, run_of, says_step
from ckptkit.formats.registry import open_checkpoint

META = "meta.json"
SUFFIXES = (".ckpt", ".safetensors")


@dataclass(frozen=True, slots=True)
class LastSave:
    """What a rank's `meta.json` says of the last file that MindFormers finished: where a run is resumed."""

    epoch: int
    step: int
    file: str


@dataclass(frozen=True, slots=True)
class RankSet:
    """One checkpoint a rank, in the order of ranks; `notes` says which files were passed over.

    `saved` is the (epoch, step) that the file names say, or None. `pattern` is the file name, with `{rank}` where the
    rank's number goes (`CKP_rank_{rank}-1_10.ckpt`), or empty when the ranks' names differ in more. `resume` has the
    `meta.json` of the ranks that have one. `thinned`: the files say that MindSpore saved them with `remove_redundancy`,
    so that of the ranks with equal parts of a tensor only one, any one, holds it. A .ckpt file does not say so.
    `iteration` is what a newer folder of MindFormers says, its layout included; None for `rank_N` folders.
    """

    folder: Path
    ranks: Mapping[int, Checkpoint]
    notes: tuple[str, ...]
    saved: tuple[int, int] | None
    pattern: str
    resume: Mapping[int, LastSave]
    thinned: bool
    iteration: Iteration | None = None

    @property
    def keeps_step(self) -> bool:
        """Say whether files named like these tell MindFormers the epoch and step: by `_rank_N`, or `meta.json`."""
        return self.saved is not None and (HOLE in self.pattern or (self.pattern != "" and bool(self.resume)))

    def file_name(self, rank: int) -> str:
        """Return what a rank's file is called in a set like this one, whatever its number of ranks."""
        return (self.pattern or f"checkpoint_{HOLE}{self.ranks[0].path.suffix}").replace(HOLE, str(rank))

    def result_name(self, rank: int, suffix: str) -> str:
        """Return what a rank's file is called in a result: as here when that says a step, else after the rank alone."""
        return Path(self.file_name(rank)).stem + suffix if self.keeps_step else f"checkpoint_{rank}{suffix}"

    def last_save(self, rank: int, suffix: str) -> bytes | None:
        """Return the `meta.json` with which MindFormers resumes from a rank's file; None where it cannot."""
        if self.saved is None or not self.keeps_step or f"{HOLE}-" in self.pattern.rpartition("-")[0]:
            return None  # `_rank_N-network` are weights alone
        epoch, step = self.saved
        content = {"last_epoch": epoch, "last_step": step, "last_ckpt_file": self.result_name(rank, suffix)}
        return json.dumps(content).encode()


@dataclass(frozen=True, slots=True)
class _Choice:
    file: RankFile
    passed: tuple[RankFile, ...] = ()


def find_ranks(folder: Path) -> dict[int, Path]:
    """Return the folders of ranks in `folder` by number; {} when there are none.

    In a newer folder of MindFormers all ranks share one, and `folder` itself stands for them.
    """
    found = _rank_folders(folder)
    return {0: folder} if not found and is_checkpoint(folder) else found


def _rank_folders(folder: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for name in rank_folders(folder):
        rank = int(name.removeprefix("rank_"))
        if rank in found:
            raise UsageError(
                f"`{folder}` holds rank {rank} twice",
                items=[found[rank].name, name],
                hint="move one of the two away",
            )
        found[rank] = folder / name
    names = [path.name for path in found.values()]
    refuse_beside_iterations(folder, names)
    refuse_beside_files(folder, names)
    return found


def folders_with_ranks(folder: Path) -> list[Path]:
    """Return the folders in `folder` that hold `rank_N` folders: MindFormers' `checkpoint/`, `checkpoint_network/`."""
    found = [path for path in folder.iterdir() if _ranks_in(path)]
    return sorted(found, key=lambda path: natural(path.name))


def open_ranks(folder: Path, *, step: int | None = None) -> RankSet:
    """Open one file of every rank: the one of `step`, else the newest.

    Where a folder has files of several runs, `meta.json` says which run was the last. Raises CoverageError when ranks
    are missing or do not agree, UsageError when it is not clear which file counts.
    """
    folders = _rank_folders(folder)
    if not folders and is_checkpoint(folder):
        return _open_iteration(folder, step)
    if not folders:
        raise _no_ranks(folder)
    missing = sorted(set(range(max(folders) + 1)) - set(folders))
    if missing:
        raise _missing(folder, missing, folders)
    resume, notes = _read_meta(folders)
    files_of = {rank: _candidates(path, rank) for rank, path in folders.items()}
    chosen = {rank: _choose(path, rank, files_of[rank], step, resume) for rank, path in folders.items()}
    saved = {rank: choice.file.saved for rank, choice in chosen.items()}
    if len(set(saved.values())) > 1:
        raise _different_steps(folder, saved, files_of)
    notes += _passed_over(chosen)
    if step is None:
        notes += _older_than_chosen(resume, saved[0])
    names = {rank: choice.file.path.name for rank, choice in chosen.items()}
    refuse_exchanged(names)
    pattern = common_pattern(names)
    if not pattern:
        notes.append("the names of the ranks' files differ in more than the rank: they may be of different runs")
    notes += _beside_ranks(folder)
    ranks = {rank: open_checkpoint(choice.file.path) for rank, choice in chosen.items()}
    thinned = any(checkpoint.metadata.get("remove_redundancy") == "True" for checkpoint in ranks.values())
    return RankSet(folder, ranks, tuple(notes), saved[0], pattern, resume, thinned)


def _open_iteration(folder: Path, step: int | None) -> RankSet:
    """Open an iteration of a newer folder of MindFormers; `RankSet.folder` is where a manifest of it lies."""
    iteration, ranks, notes, thinned = open_iteration(folder, step)
    epoch = (iteration.common or {}).get("epoch_num")
    saved = None if iteration.number is None else (epoch if isinstance(epoch, int) else 0, iteration.number)
    return RankSet(iteration.place.root, ranks, tuple(notes), saved, "", {}, thinned, iteration)


def _no_ranks(folder: Path) -> UsageError:
    below = [str(path) for path in folders_with_ranks(folder)]
    flat = [name for name in file_names(folder) if name.endswith(SUFFIXES) and "_rank_" in name]
    hint = "put the file of each rank N in a folder `rank_N`" if flat else "name the folder that holds `rank_0`"
    if below:
        hint = "name one of these, which do"
    return UsageError(f"`{folder}` holds no `rank_N` folders", items=below or flat, hint=hint)


def _missing(folder: Path, missing: Sequence[int], there: Mapping[int, Path]) -> CoverageError:
    hint = "copy the missing folders here"
    beside = _rest_beside(folder, missing, there)
    if beside is not None:
        hint += f": `{beside.name}`, beside this folder, has some; see whether it is of the same run"
    return CoverageError(
        f"`{folder.name}` lacks {len(missing)} of {max(there) + 1} ranks",
        items=[f"rank_{rank}" for rank in missing],
        why="each rank holds its own part of the model",
        hint=hint,
    )


def _rest_beside(folder: Path, missing: Sequence[int], there: Mapping[int, Path]) -> Path | None:
    """Return a folder beside `folder` that holds missing ranks and none that are there, as far as can be seen."""
    try:
        others = sorted(folder.resolve().parent.iterdir())
    except OSError:
        return None  # it is for a hint only
    for path in others:
        ranks = _ranks_in(path)
        if ranks & set(missing) and not ranks & set(there):
            return path
    return None


def _ranks_in(path: Path) -> set[int]:
    """Return the ranks that have a folder in `path`; none where that cannot be seen, for it is to give a hint."""
    try:
        return {int(name.removeprefix("rank_")) for name in rank_folders(path)} if path.is_dir() else set()
    except OSError:
        return set()


def _read_meta(folders: Mapping[int, Path]) -> tuple[dict[int, LastSave], list[str]]:
    """Return what each rank's `meta.json` says, and a note for those that say nothing."""
    found: dict[int, LastSave] = {}
    odd = []
    for rank, path in folders.items():
        if not files.has_small(path / META):
            continue
        try:
            content = files.read_json_object(path / META)
        except CorruptError:
            content = {}
        epoch, step, name = (content.get(f"last_{key}") for key in ("epoch", "step", "ckpt_file"))
        if type(epoch) is int and type(step) is int and isinstance(name, str) and says_step(name):
            found[rank] = LastSave(epoch, step, name)
        else:
            odd.append(f"{path.name}/{META}")
    return found, [f"passed over, for they do not name a last save: {files.listed(odd)}"] if odd else []


def _candidates(folder: Path, rank: int) -> list[RankFile]:
    """Return the weight files of a rank's folder; raise when there is none, or none that can be of this rank."""
    names = [name for name in file_names(folder) if name.endswith(SUFFIXES)]
    found = [parse(folder / name, rank) for name in names if not _is_strategy(folder / name)]
    if not found:
        raise CoverageError(f"`{folder.name}` holds no .ckpt and no .safetensors file", hint="copy it again")
    kinds = sorted({file.path.suffix for file in found})
    if len(kinds) > 1:
        raise UsageError(
            f"`{folder.name}` holds files of two formats",
            items=[file.path.name for file in found],
            why="they may be of different runs",
            hint=f"move the {' or the '.join(kinds)} files of all ranks away",
        )
    return found


def _is_strategy(file: Path) -> bool:
    """Tell a strategy file, which shares the suffix `.ckpt`, by its first byte."""
    if file.suffix != ".ckpt":
        return False
    with files.opened(file) as descriptor:
        return files.pread(file, descriptor, 1, 0) == b"\x08"


def _choose(
    folder: Path, rank: int, found: Sequence[RankFile], step: int | None, resume: Mapping[int, LastSave]
) -> _Choice:
    """Return a rank's file, and those that were passed over for it."""
    if step is not None:
        of_step = [file for file in found if file.saved is not None and file.saved[1] == step]
        if not of_step:
            steps = sorted({file.saved for file in found if file.saved is not None})
            raise CoverageError(
                f"`{folder.name}` has no file of step {step}",
                items=[f"it has {_words(saved)}" for saved in steps] or [file.path.name for file in found],
            )
        found = of_step
    if len(found) == 1:
        return _Choice(found[0])
    if any(file.saved is None for file in found):
        raise UsageError(
            f"`{folder.name}` holds {len(found)} files, and their names do not say which is the newest",
            items=[file.path.name for file in found],
            hint="leave one in each rank's folder"
            + (", or name a step with `--step`" if any(file.saved for file in found) else ""),
        )
    run = _last_run(folder, found, run_of(resume[rank].file, rank) if rank in resume else None)
    newest = max((file for file in found if file.run == run), key=lambda file: file.saved or (0, 0))
    return _Choice(newest, tuple(file for file in found if file is not newest))


def _last_run(folder: Path, found: Sequence[RankFile], last: str | None) -> str:
    """Return the run that counts: the only one, or `last`, which `meta.json` names."""
    runs = {file.run for file in found}
    if len(runs) > 1 and last is not None:
        runs &= {last}
    if len(runs) != 1:
        raise UsageError(
            f"`{folder.name}` holds files of several runs",
            items=[file.path.name for file in found],
            why="steps of different runs cannot be told by number which is the newer",
            hint="move the files of the other runs away",
        )
    return runs.pop()


def _different_steps(
    folder: Path, saved: Mapping[int, tuple[int, int] | None], files_of: Mapping[int, Sequence[RankFile]]
) -> CoverageError:
    common = set.intersection(*({file.saved for file in found} for found in files_of.values())) - {None}
    newest = max((both for both in common if both), default=None)
    hint = "no step is complete: copy the missing files"
    if newest is not None:
        hint = f"{_words(newest)} is on every rank: take it with `--step {newest[1]}`"
    return CoverageError(
        f"the ranks of `{folder.name}` do not offer the same step",
        items=[f"rank_{rank}: {_words(both)}" for rank, both in saved.items()],
        why="parts of two moments of training do not make one model",
        hint=hint,
    )


def _words(saved: tuple[int, int] | None) -> str:
    return "no step" if saved is None else f"epoch {saved[0]}, step {saved[1]}"


def _beside_ranks(folder: Path) -> list[str]:
    """Return a note on the weight files that lie beside the ranks' folders, and do not count."""
    found = [name for name in file_names(folder) if is_weight(name) and not _is_strategy(folder / name)]
    return [f"passed over, as they lie beside the ranks: {files.listed(found)}"] if found else []


def _passed_over(chosen: Mapping[int, _Choice]) -> list[str]:
    """Return a note on each list of files that ranks passed over, most often one for all ranks."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, choice in chosen.items():
        groups.setdefault(tuple(file.pattern for file in choice.passed), []).append(rank)
    notes = []
    for names, ranks in groups.items():
        file, passed = chosen[ranks[0]].file, chosen[ranks[0]].passed
        where = "each rank" if len(ranks) == len(chosen) else files.listed([f"rank_{rank}" for rank in ranks])
        of = "" if all(other.run == file.run for other in passed) else f" of the run that `{META}` names"
        if names:
            notes.append(f"{where}: {_words(file.saved)} is the newest{of}; passed over: {files.listed(names)}")
    return notes


def _older_than_chosen(resume: Mapping[int, LastSave], saved: tuple[int, int] | None) -> list[str]:
    """Return a note when `meta.json` records another step than the one that is taken."""
    other = {(last.epoch, last.step) for last in resume.values()} - {saved}
    if not other or saved is None:
        return []
    return [f"{_words(saved)} is taken; `{META}` names as the last save {_words(min(other))}"]

"""What the name of a rank's file says: the rank, the run, the epoch and step at which it was saved.

MindSpore calls a file `PREFIX-EPOCH_STEP.ckpt` or `.safetensors`; a run that finds files of an earlier one puts `_1`
after its prefix. MindFormers' prefix has `_rank_N` at its end. MindSpore's tools write `net3.ckpt`. What does not live
here: which of several files counts (`rank_folders.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CoverageError

HOLE = "{rank}"  # in a pattern, where the rank's number goes
_NAME = re.compile(r"(?P<prefix>.+)-(?P<epoch>\d+)_(?P<step>\d+)")
_RANK = re.compile(r"(?<=_rank_)\d+(?=(_\d+)?(-network|-trainable_params)?$)")
_LAST_NUMBER = re.compile(r"\d+$")


@dataclass(frozen=True, slots=True)
class RankFile:
    """A rank's file: `run` is its prefix with `{rank}` for the rank; `saved` is (epoch, step), if its name says it."""

    path: Path
    run: str
    saved: tuple[int, int] | None

    @property
    def pattern(self) -> str:
        """The file's name, with `{rank}` for the rank."""
        step = "" if self.saved is None else "-{}_{}".format(*self.saved)
        return f"{self.run}{step}{self.path.suffix}"


def parse(path: Path, rank: int) -> RankFile:
    """Return what the name of a file in `rank`'s folder says; CoverageError when it says another rank."""
    prefix, saved = _split(path.stem)
    found = _RANK.search(prefix)
    if found and int(found[0]) != rank:
        raise CoverageError(
            f"`{path.parent.name}` holds `{path.name}`, a file of rank {int(found[0])}",
            why="the parts of two ranks would be exchanged, or one be taken twice",
            hint="put each file in the folder of its rank",
        )
    return RankFile(path, _with_hole(prefix, found) if found else prefix, saved)


def run_of(name: str, rank: int) -> str:
    """Return the run of a file of `rank`, as `RankFile.run` has it."""
    prefix, _ = _split(Path(name).stem)
    found = _RANK.search(prefix)
    return _with_hole(prefix, found) if found and int(found[0]) == rank else prefix


def says_step(name: str) -> bool:
    """Tell whether a file's name says at which epoch and step it was saved."""
    return _split(Path(name).stem)[1] is not None


def common_pattern(names: Mapping[int, str]) -> str:
    """Return what the ranks' file names have in common, with `{rank}` for the rank; empty when they differ in more."""
    found = [_patterns(name, rank) for rank, name in names.items()]
    return next((pattern for pattern in found[0] if all(pattern in others for others in found)), "")


def refuse_exchanged(names: Mapping[int, str]) -> None:
    """Raise CoverageError when the ranks' file names end in the numbers of all ranks, and some in another's."""
    told: dict[int, int] = {}
    rest = set()
    for rank, name in names.items():
        prefix, saved = _split(Path(name).stem)
        found = _LAST_NUMBER.search(prefix)
        if found and saved is None:
            told[rank] = int(found[0])
            rest.add(prefix[: found.start()])
    wrong = [f"rank_{rank} holds {names[rank]}" for rank, number in told.items() if number != rank]
    if wrong and len(rest) == 1 and sorted(told.values()) == sorted(names):
        raise CoverageError(
            f"{len(wrong)} of {len(names)} ranks hold a file that is called after another rank",
            items=wrong,
            why="the parts of ranks would be exchanged, and the tensors be made of them in the wrong order",
            hint="put each file in the folder of its rank; if the folders are right, call the files by one name",
        )


def _patterns(name: str, rank: int) -> list[str]:
    """Return the patterns that a rank's file name may be of, the likeliest first."""
    prefix, saved = _split(Path(name).stem)
    places = [_RANK.search(prefix), _LAST_NUMBER.search(prefix) if saved is None else None]
    holes = [found for found in places if found and found[0] == str(rank)]
    return [_with_hole(prefix, found) + name[len(prefix) :] for found in holes] + [name]


def _split(stem: str) -> tuple[str, tuple[int, int] | None]:
    found = _NAME.fullmatch(stem)
    return (found["prefix"], (int(found["epoch"]), int(found["step"]))) if found else (stem, None)


def _with_hole(prefix: str, number: re.Match[str]) -> str:
    return f"{prefix[: number.start()]}{HOLE}{prefix[number.end() :]}"

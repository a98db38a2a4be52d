"""Strategy files of MindSpore: which files are the stages of one run.

A run saves a file a pipeline stage, or a file a rank, equal within a stage (`ckpt_strategy_rank_N...`); MindSpore's
`merge_pipeline_strategys` makes one of them. Each file is in protobuf or in JSON form. What does not live here: the
forms (`mindspore_strategy_protobuf.py`, `mindspore_strategy_json.py`), how a layout cuts (`layout/slices.py`).
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats import files
from ckptkit.formats.mindspore_layouts import Strategy, without_unit_axes
from ckptkit.formats.mindspore_strategy_json import dump_json, looks_like_json, read_json
from ckptkit.formats.mindspore_strategy_protobuf import (
    dump_merged,
    dump_strategy,
    looks_like_protobuf,
    read_protobuf,
)

__all__ = [
    "STRATEGY",
    "Strategy",
    "dump_json",
    "dump_merged",
    "dump_strategy",
    "find_strategy",
    "is_strategy_file",
    "read_strategies",
]

STRATEGY = "strategy"  # the folder of strategy files beside `rank_N` folders

PROTOBUF, JSON = "protobuf", "JSON"
Found = tuple[Path, Strategy]


def is_strategy_file(path: Path) -> bool:
    """Tell by its first bytes whether `path` is a strategy file; False for a folder, and for nothing."""
    return _form(path) is not None


def find_strategy(folder: Path) -> Path | None:
    """Return the strategy files of a folder of ranks: its folder `strategy`, or itself when they lie in it."""
    if (folder / STRATEGY).is_dir():
        return folder / STRATEGY
    return folder if any(is_strategy_file(file) for file in sorted(folder.iterdir()) if file.is_file()) else None


def read_strategies(path: Path, *, num_axes: Mapping[str, int] | None = None) -> tuple[Strategy, ...]:
    """Return the stages of `path`, in order: one file, a folder of a file a stage or a file a rank, or a merged file.

    `num_axes` has the number of axes of each tensor that the caller knows; a JSON file may need it to be read in one
    way. Only a sole stage can have no number. Raises UsageError for what is no strategy file, CorruptError for
    damaged bytes, and CoverageError when stages are missing or contradict one another.
    """
    found = files.look(path)
    if found is not None and stat.S_ISDIR(found.st_mode):
        parts = _read_folder(path, num_axes or {})
    else:
        parts = [(path, strategy) for strategy in _read_file(path, num_axes or {})]
    return _complete(path, _one_a_stage(_numbered(path, parts)))


def _form(path: Path) -> str | None:
    found = files.look(path)
    if found is None or not stat.S_ISREG(found.st_mode):
        return None
    with files.opened(path) as descriptor:
        head = files.pread(path, descriptor, files.HEAD_BYTES, 0)
    if looks_like_protobuf(head):
        return PROTOBUF
    return JSON if looks_like_json(head) else None


def _read_file(file: Path, num_axes: Mapping[str, int]) -> list[Strategy]:
    form = _form(file)
    if form == PROTOBUF:
        return read_protobuf(file)
    if form == JSON:
        return read_json(file, num_axes)
    head, _ = files.read_head(file)
    looks = files.describe(head)
    raise UsageError(
        f"`{file}` is not a strategy file of MindSpore",
        why=f"it looks like {looks}" if looks else "",
        hint="give the file that MindSpore saved as `strategy_ckpt_save_file`, or the folder of them",
    )


def _read_folder(folder: Path, num_axes: Mapping[str, int]) -> list[Found]:
    """Return the stages in the files of a folder, with their files; the JSON files last, read as the others say."""
    forms = {file: _form(file) for file in _files_in(folder)}
    odd = [file.name for file, form in forms.items() if not form and _should_be_one(file)]
    if odd:
        raise UsageError(
            f"`{folder}` holds files that are no strategy files of MindSpore",
            items=odd,
            why="a damaged strategy file would be a stage that is missing",
            hint="put the strategy files in a folder of their own, or copy the damaged ones again",
        )
    if not any(forms.values()):
        raise UsageError(f"`{folder}` holds no strategy file of MindSpore", hint="give the folder or the file of a run")
    known = dict(num_axes)
    parts: list[Found] = []
    seen: dict[bytes, list[Strategy]] = {}
    for file in sorted(forms, key=lambda file: (forms[file] == JSON, file.name)):
        if forms[file] is None:
            continue
        digest = _digest(file)
        if digest not in seen:
            seen[digest] = _read_file(file, known)
            for strategy in seen[digest]:
                known.update({name: len(layout.tensor_map) for name, layout in strategy.tensors.items()})
        parts += [(file, strategy) for strategy in seen[digest]]
    return parts


def _should_be_one(file: Path) -> bool:
    """Tell whether a file that is no strategy file has the name of one, and does not look like weights."""
    if "strategy" in file.name:
        return file.suffix in (".ckpt", ".json")
    return file.suffix == ".ckpt" and files.kind_of(*files.read_head(file)) is None


def _files_in(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise files.open_error(folder, error) from error
    for path in names:
        if not path.is_dir():
            yield path


def _digest(file: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    with files.opened(file) as descriptor:
        size = files.size_of(descriptor)
        for position in range(0, size, files.COMPARE_BYTES):
            digest.update(files.pread(file, descriptor, files.COMPARE_BYTES, position))
    return digest.digest()


def _one_a_stage(parts: Sequence[Found]) -> list[Strategy]:
    """Return each stage once; raises CoverageError when files of one stage differ."""
    stages: dict[int | None, Found] = {}
    seen: set[int] = set()
    for file, strategy in parts:
        first, kept = stages.setdefault(strategy.stage, (file, strategy))
        if id(strategy) not in seen:
            seen.add(id(strategy))
            odd = _differences(kept, strategy)
            if odd:
                raise CoverageError(
                    f"`{first.name}` and `{file.name}` contradict each other about stage {strategy.stage or 0}",
                    items=odd,
                    why="all files of one stage are equal",
                    hint="leave the files of one run",
                )
            stages[strategy.stage] = first, replace(kept, shapes={**strategy.shapes, **kept.shapes})
    return [strategy for _, strategy in stages.values()]


def _differences(a: Strategy, b: Strategy) -> list[str]:
    """Return the tensors about which two files of one stage differ; device axes of size 1 change nothing."""
    odd = sorted(a.tensors.keys() ^ b.tensors.keys())
    for name, layout in a.tensors.items():
        other = b.tensors.get(name, layout)
        same = other == layout or without_unit_axes(other) == without_unit_axes(layout)
        if not same or a.shapes.get(name, b.shapes.get(name)) != b.shapes.get(name, a.shapes.get(name)):
            odd.append(name)
    return odd


def _numbered(path: Path, parts: Sequence[Found]) -> list[Found]:
    """Return the parts with the stages that their files' names say, if several state none themselves.

    Raises CoverageError unless all names end with `stageN` or have `rank_N`, or all parts are equal.
    """
    bare = [file.name for file, strategy in parts if strategy.stage is None]
    if not bare or len(parts) == 1:
        return list(parts)
    by_stage = [_number(file, "stage") for file, _ in parts]
    by_rank = [_number(file, "rank") for file, _ in parts]
    numbers: Sequence[int | None] = by_stage
    if None in by_stage and None not in by_rank:
        numbers = [(rank or 0) // _devices(strategy) for rank, (_, strategy) in zip(by_rank, parts, strict=True)]
    if len(bare) == len(parts) and None not in numbers:
        return [(file, replace(part, stage=n)) for n, (file, part) in zip(numbers, parts, strict=True)]
    if len(bare) == len(parts) and not any(_differences(parts[0][1], strategy) for _, strategy in parts[1:]):
        return list(parts)
    raise CoverageError(
        f"files of `{path}` state no stage, and their names do not tell it",
        items=bare,
        why="each pipeline stage has tensors of its own",
        hint="name them `strategy_stage0.ckpt`, `strategy_stage1.ckpt`, ...",
    )


def _number(file: Path, word: str) -> int | None:
    """Return the number that follows `word` in a file's name, or None when there is none or several."""
    found = {int(digits) for digits in re.findall(rf"{word}_?([0-9]{{1,6}})(?![0-9])", file.stem)}
    return found.pop() if len(found) == 1 else None


def _devices(strategy: Strategy) -> int:
    return prod(next(iter(strategy.tensors.values())).dev_matrix)


def _complete(path: Path, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Return the stages in order; raises CoverageError when one before the last is missing, or devices differ."""
    ordered = sorted(strategies, key=lambda strategy: strategy.stage or 0)
    present = {strategy.stage or 0 for strategy in ordered}
    missing = sorted(set(range(max(present) + 1)) - present)
    if missing:
        raise CoverageError(
            f"`{path}` lacks {len(missing)} of {max(present) + 1} stages",
            items=[f"stage {stage}" for stage in missing],
            why="each pipeline stage has tensors of its own, and the ranks count stage by stage",
            hint="give the folder with the strategy files of all stages",
        )
    devices = {strategy.stage or 0: _devices(strategy) for strategy in ordered}
    if len(set(devices.values())) > 1:
        raise CoverageError(
            f"the stages of `{path}` have different numbers of devices",
            items=[f"stage {stage}: {count}" for stage, count in devices.items()],
            why="the ranks count stage by stage, equally many in each",
            hint="leave the files of one run",
        )
    return tuple(ordered)

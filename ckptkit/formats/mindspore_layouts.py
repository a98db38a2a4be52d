"""What both forms of a MindSpore strategy file say, and the checks that they share.

What does not live here: the forms (`mindspore_strategy_protobuf.py`, `mindspore_strategy_json.py`), which files are
the stages of one run (`mindspore_strategy.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ckptkit.errors import CorruptError, CoverageError, UsageError
from ckptkit.types import Shape, TensorLayout

MOST_BYTES = 128 * 1024 * 1024  # of a strategy file; a tensor takes some 80 bytes, in JSON some 250
MOST_AXES = 16  # of a tensor, and of a device matrix
MOST_DEVICES = 2**20
MOST_STAGES = 2**16
SAVED, MERGED = 2, 1  # the counter `current_stage`, as MindSpore saves a stage and as it merges stages
SAVE_AGAIN = "save the strategy again in MindSpore"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One stage's strategy file.

    `stage` is None when no strategy item says it; `shapes` holds the whole shape of each tensor where the file says
    it (JSON only).
    """

    stage: int | None
    tensors: Mapping[str, TensorLayout]
    shapes: Mapping[str, Shape]


def stage_and_name(name: str) -> tuple[int, str] | None:
    """Return what a name of a merged file says, or None for a name without a stage's number and `-` before it."""
    found = re.fullmatch(r"(0|[1-9][0-9]{0,4})-(.+)", name, re.DOTALL)
    return (int(found[1]), found[2]) if found else None


def split_stages(
    file: Path, stages: Sequence[int], tensors: Mapping[str, TensorLayout], shapes: Mapping[str, Shape]
) -> list[Strategy]:
    """Return the stages of a file whose strategy items name `stages`: several for one that was merged.

    As MindSpore reads them, a file is a merged one when each name has a stage's number and `-` before it. Raises
    CoverageError when names and strategy items contradict each other, or when tensors of one stage are cut over
    different numbers of devices.
    """
    if not tensors:
        raise CoverageError(f"`{file}` states the layout of no tensor", hint=SAVE_AGAIN)
    named = {name: stage_and_name(name) for name in tensors}
    bare = [name for name, found in named.items() if found is None]
    if bare:
        if len(set(stages)) > 1:
            raise _contradiction(file, stages, f"{len(bare)} of its tensors name none", bare)
        result = [Strategy(stages[0] if stages else None, tensors, shapes)]
    else:
        result = _merged_stages(named, tensors, shapes)
        absent = sorted(set(stages) - {strategy.stage for strategy in result})
        if absent:
            raise _contradiction(file, stages, "its tensors lack some", [f"stage {stage}" for stage in absent])
    for strategy in result:
        _check_devices(file, strategy)
    return result


def _merged_stages(
    named: Mapping[str, tuple[int, str] | None], tensors: Mapping[str, TensorLayout], shapes: Mapping[str, Shape]
) -> list[Strategy]:
    layouts: dict[int, dict[str, TensorLayout]] = {}
    sizes: dict[int, dict[str, Shape]] = {}
    for whole, found in named.items():
        if found is not None:
            stage, name = found
            layouts.setdefault(stage, {})[name] = tensors[whole]
            if whole in shapes:
                sizes.setdefault(stage, {})[name] = shapes[whole]
    return [Strategy(stage, layouts[stage], sizes.get(stage, {})) for stage in layouts]


def _contradiction(file: Path, stages: Iterable[int], what: str, items: Sequence[str]) -> CoverageError:
    shown = ", ".join(str(stage) for stage in sorted(set(stages))[:5])
    return CoverageError(
        f"the strategy items of `{file}` name the stages {shown}; {what}",
        items=items,
        why="in a merged file each tensor's name begins with its stage, as in `0-w`; any other file is of one stage",
        hint="save or merge the strategy again in MindSpore",
    )


def _check_devices(file: Path, strategy: Strategy) -> None:
    """Raise CoverageError unless all tensors of a stage are cut over the same number of devices."""
    first: dict[int, str] = {}
    for name, layout in strategy.tensors.items():
        first.setdefault(prod(layout.dev_matrix), name)
    if len(first) > 1:
        raise CoverageError(
            f"`{file}` states different numbers of devices for stage {strategy.stage or 0}",
            items=[f"{count}: `{name}` and perhaps others" for count, name in sorted(first.items())],
            why="all tensors of a stage lie on the same devices",
            hint=SAVE_AGAIN,
        )


def checked(where: str, name: str, layout: TensorLayout) -> TensorLayout:
    """Return the layout of the tensor `name` if it can be one; else raise CoverageError. `where` begins the error."""
    dev, axes = layout.dev_matrix, [m for axis in layout.tensor_map for m in axis]
    wrong = ""
    if any(size < 1 for size in dev) or len(dev) > MOST_AXES or prod(dev) > MOST_DEVICES:
        wrong = f"it has the device matrix {list(dev)}"
    elif not dev and not layout.tensor_map:
        wrong = "it is empty"
    elif any(not 0 <= m < len(dev) for m in axes):
        wrong = f"it maps axes to the device axes {axes}, and the device matrix {list(dev)} has {len(dev)}"
    elif len(set(axes)) < len(axes):
        wrong = f"it uses a device axis twice: {axes}"
    elif layout.opt_step < 0 or layout.opt_size < -1:
        wrong = f"it has an optimizer shard of size {layout.opt_size}, step {layout.opt_step}"
    elif layout.opt_step and layout.opt_size > 0 and not _opt_shard_fits(layout):
        wrong = f"its optimizer shard has {layout.opt_size} parts, which the devices with equal parts cannot hold"
    if wrong:
        raise CoverageError(f"{where} has an impossible layout for `{name}`: {wrong}", hint=SAVE_AGAIN)
    return layout


def _opt_shard_fits(layout: TensorLayout) -> bool:
    """Tell whether the devices that hold equal parts, from the last device axis on, come in `opt_size` groups."""
    used = {m for axis in layout.tensor_map for m in axis}
    rest = layout.opt_size
    for m, size in enumerate(reversed(layout.dev_matrix)):
        if m not in used:
            taken = min(rest, size)
            if size % taken or rest % taken:
                return False
            rest //= taken
    return rest == 1


def parts_of(layout: TensorLayout) -> Shape:
    """Return in how many parts the device axes cut each axis of the tensor, optimizer shards aside."""
    dev = layout.dev_matrix
    return tuple(prod(dev[len(dev) - 1 - m] for m in axes) for axes in layout.tensor_map)


def without_unit_axes(layout: TensorLayout) -> TensorLayout:
    """Return the layout without device axes of size 1, which change nothing; equal layouts are equal then."""
    dev = layout.dev_matrix
    kept = [m for m in range(len(dev)) if dev[len(dev) - 1 - m] > 1]
    number = {m: i for i, m in enumerate(kept)}
    return TensorLayout(
        tuple(size for size in dev if size > 1),
        tuple(tuple(number[m] for m in axes if m in number) for axes in layout.tensor_map),
        layout.opt_step,
        layout.opt_size,
    )


def refuse_legacy(file: Path, name: str, field: str) -> CorruptError:
    """Return the error for a tensor whose legacy `field` is not empty."""
    return CorruptError(
        f"`{file}` states `{field}` for `{name}`, which is not supported",
        why="old releases sliced embedding tables in unequal parts with it",
        hint="save the strategy with a release of MindSpore that no longer does, or without manual slicing",
    )


def check_names(strategy: Strategy) -> None:
    """Raise UsageError when a stage's names would read as those of a merged file."""
    if strategy.tensors and all(stage_and_name(name) for name in strategy.tensors):
        raise UsageError(
            "a strategy file of one stage cannot hold these names: each begins with a number and `-`",
            items=list(strategy.tensors),
            why="MindSpore takes such a file for a merged one",
            hint="rename the tensors, or write a merged strategy file",
        )

"""Strategy files of MindSpore in JSON form, read and written.

    {"current_stage": 2,
     "parallel_layout_item": {name: {"dev_matrix", "tensor_map", "tensor_shape", "field", "opt_weight_shard_step",
                                     "opt_weight_shard_size"}},
     "parallel_strategy_item": {operator: {"stage", "parallel_strategy"}}}

An axis that several device axes cut is written as several axes, all but the last as long as its device axis: map
`[1, 0, -1]` and shape `[2, 8, 16]` stand for a tensor (16, 16) whose rows two device axes of size 2 cut, and also for
a tensor (2, 8, 16). Device axes of size 1 have gone from the matrix, and stand in the map as -1. What tells the
readings apart: an operator called `MatMul_NAME` whose `parallel_strategy` is not empty was not given such a layout,
so its tensor is read as it stands; or the caller knows how many axes a tensor has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

from ckptkit.errors import CorruptError, CoverageError, UsageError
from ckptkit.formats import files
from ckptkit.formats.mindspore_layouts import (
    MOST_AXES,
    MOST_BYTES,
    MOST_STAGES,
    SAVE_AGAIN,
    SAVED,
    Strategy,
    check_names,
    checked,
    parts_of,
    refuse_legacy,
    split_stages,
    stage_and_name,
)
from ckptkit.types import Shape, TensorLayout

COUNTER, LAYOUTS, OPERATORS = "current_stage", "parallel_layout_item", "parallel_strategy_item"
KEYS = {COUNTER, LAYOUTS, OPERATORS}
DEV_MATRIX, TENSOR_MAP, SHAPE = "dev_matrix", "tensor_map", "tensor_shape"
OPT_STEP, OPT_SIZE = "opt_weight_shard_step", "opt_weight_shard_size"
LEGACY = ("field", "param_split_shape", "indices_offset")
KNOWN = {DEV_MATRIX, TENSOR_MAP, SHAPE, OPT_STEP, OPT_SIZE, *LEGACY}
MOST_JOINTS = 8  # of one tensor's axes that may be parts of one axis

Reading = tuple[TensorLayout, Shape | None]


def looks_like_json(head: bytes) -> bool:
    """Tell whether a file that begins with `head` is a strategy file: an object with one of its keys first."""
    return re.match(rb'(\xef\xbb\xbf)?\s*\{\s*"(current_stage|parallel_(layout|strategy)_item)"', head) is not None


def read_json(file: Path, num_axes: Mapping[str, int]) -> list[Strategy]:
    """Return the stages that a file holds; `num_axes` has the number of axes of tensors that the caller knows.

    Raises CorruptError, and CoverageError for contradictions and for a layout that can be read in several ways.
    """
    with files.opened(file) as descriptor:
        size = files.size_of(descriptor)
    if size > MOST_BYTES:
        raise CorruptError(f"`{file}` has {size} bytes, more than a strategy file can need", hint=SAVE_AGAIN)
    with files.paused_gc():
        return _strategies(file, files.read_json_object(file), num_axes)


def _strategies(file: Path, whole: Mapping[str, Any], num_axes: Mapping[str, int]) -> list[Strategy]:
    _refuse_unknown(file, "it", whole, KEYS)
    _int(file, COUNTER, whole.get(COUNTER))
    stages, plain = _operators(file, _object(file, OPERATORS, whole.get(OPERATORS, {})))
    items = _object(file, LAYOUTS, whole.get(LAYOUTS, {}))
    stated = {name: _stated(file, name, _object(file, name, item)) for name, item in items.items()}
    tensors: dict[str, TensorLayout] = {}
    shapes: dict[str, Shape] = {}
    for name in stated:
        tensors[name], shape = _read(file, name, stated, plain, num_axes)
        if shape is not None:
            shapes[name] = shape
    return split_stages(file, stages, tensors, shapes)


def _operators(file: Path, items: Mapping[str, Any]) -> tuple[tuple[int, ...], set[str]]:
    """Return the stages that operators name, and the tensors whose operators were all given a plain strategy."""
    stages: dict[int, None] = {}  # an ordered set
    plain: set[str] = set()
    other: set[str] = set()
    for operator, item in items.items():
        item = _object(file, operator, item)
        stage, cuts = _int(file, f"stage of {operator}", item.get("stage")), item.get("parallel_strategy")
        if not 0 <= stage < MOST_STAGES or not isinstance(cuts, list):
            raise _damaged(file, f"`{operator}` has the stage {stage} and a strategy that is none")
        stages[stage] = None
        (plain if cuts else other).add(operator.partition("_")[2])
    return tuple(stages), plain - other


def _stated(file: Path, name: str, item: Mapping[str, Any]) -> Reading:
    """Return the layout and the shape of the tensor `name` as they stand in the file."""
    _refuse_unknown(file, f"`{name}`", item, KNOWN)
    for field in LEGACY:
        if item.get(field) not in (None, 0, []):
            raise refuse_legacy(file, name, field)
    dev, axes = _ints(file, name, DEV_MATRIX, item), _ints(file, name, TENSOR_MAP, item)
    shape = _ints(file, name, SHAPE, item) if SHAPE in item else None
    step, size = (_int(file, f"{key} of {name}", item.get(key)) for key in (OPT_STEP, OPT_SIZE))
    if shape is not None and (len(shape) != len(axes) or any(length < 0 for length in shape)):
        raise CoverageError(
            f"`{file}` states the shape {list(shape)} for `{name}`, and a map of {len(axes)} axes", hint=SAVE_AGAIN
        )
    layout = TensorLayout(dev, tuple(() if m == -1 else (m,) for m in axes), step, size)
    return checked(f"`{file}`", name, layout), shape


def _read(
    file: Path, name: str, stated: Mapping[str, Reading], plain: set[str], num_axes: Mapping[str, int]
) -> Reading:
    """Return the one layout and shape that a tensor's entry can mean; raises CoverageError unless there is one."""
    found = stage_and_name(name)
    bare = found[1] if found else name
    weight = bare.partition(".")[2]  # of a moment or a gradient, such as `moment1.WEIGHT`
    same = stated.get(name.removesuffix(bare) + weight) == stated[name]
    layout, shape = stated[name]
    wanted = num_axes.get(name, num_axes.get(bare))
    if name in plain or bare in plain or (same and weight in plain) or wanted == len(layout.tensor_map):
        readings: Iterator[Reading] = iter([stated[name]])
    elif sum(_joints(layout, shape)) > MOST_JOINTS:
        raise _several_ways(file, name, ["too many to try them all"])
    else:
        readings = _readings(layout, shape)
    fitting = (r for r in readings if wanted in (None, len(r[0].tensor_map)) and _fits(*r))
    several = list(islice(fitting, 2))
    if len(several) == 1:
        return several[0]
    if several:
        ways = [f"{len(r[0].tensor_map)} axes{f', shape {list(r[1])}' if r[1] else ''}" for r in several]
        raise _several_ways(file, name, ways)
    raise CoverageError(
        f"`{file}` states a layout for `{name}` that does not fit its shape",
        items=[
            f"device matrix {list(layout.dev_matrix)}, map {[list(m) or -1 for m in layout.tensor_map]}",
            f"shape {list(shape or ())}" if wanted is None else f"shape {list(shape or ())}, {wanted} axes elsewhere",
        ],
        hint=SAVE_AGAIN,
    )


def _several_ways(file: Path, name: str, ways: list[str]) -> CoverageError:
    return CoverageError(
        f"`{file}` can be read in several ways for `{name}`",
        items=ways,
        why="MindSpore's JSON form writes an axis that several device axes cut as several axes",
        hint="give the protobuf form of this strategy (`.ckpt`), which tells them apart",
    )


def _joints(layout: TensorLayout, shape: Shape | None) -> list[bool]:
    """Tell for each axis but the last whether it and the next may be one: where it is all cut."""
    parts = parts_of(layout)
    return [shape is None or shape[i] == parts[i] for i in range(len(parts) - 1)]


def _readings(layout: TensorLayout, shape: Shape | None) -> Iterator[Reading]:
    """Yield what an entry can mean: as it stands, or with neighbouring axes joined."""
    joints = _joints(layout, shape)
    for joined in product(*((False, True) if joint else (False,) for joint in joints)):
        maps: list[Shape] = []
        sizes: list[int] = []
        for i, axes in enumerate(layout.tensor_map):
            size = shape[i] if shape else 1
            if i and joined[i - 1]:
                maps[-1], sizes[-1] = maps[-1] + axes, sizes[-1] * size
            else:
                maps.append(axes)
                sizes.append(size)
        joint_layout = TensorLayout(layout.dev_matrix, tuple(maps), layout.opt_step, layout.opt_size)
        yield joint_layout, None if shape is None else tuple(sizes)


def _fits(layout: TensorLayout, shape: Shape | None) -> bool:
    """Tell whether a tensor of that shape comes apart in equal parts."""
    parts = list(parts_of(layout))
    if shape is None or not parts:
        return True
    if layout.opt_step and layout.opt_size:
        all_parts = prod(layout.dev_matrix) // prod(parts)
        parts[0] *= layout.opt_size if layout.opt_size > 0 else all_parts
    return all(size % count == 0 for size, count in zip(shape, parts, strict=True))


def _object(file: Path, what: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _damaged(file, f"`{what}` is no object")
    return value


def _int(file: Path, what: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise _damaged(file, f"`{what}` is no whole number")
    return value


def _ints(file: Path, name: str, key: str, item: Mapping[str, Any]) -> Shape:
    values = item.get(key)
    if not isinstance(values, list) or len(values) > MOST_AXES:
        raise _damaged(file, f"`{key}` of `{name}` is no list of up to {MOST_AXES} numbers")
    return tuple(_int(file, f"{key} of {name}", value) for value in values)


def _refuse_unknown(file: Path, what: str, item: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(item.keys() - known)
    if unknown:
        raise CorruptError(
            f"`{file}` is not a strategy file as known here: {what} has the unknown keys {files.listed(unknown)}",
            why="they may change what the others mean",
            hint="give the protobuf form of the strategy (`.ckpt`)",
        )


def _damaged(file: Path, what: str) -> CorruptError:
    return CorruptError(f"`{file}` is damaged or no strategy file of MindSpore: {what}", hint=SAVE_AGAIN)


def dump_json(strategy: Strategy) -> bytes:
    """Return the JSON strategy file of one stage (stage 0 if it says none), with its keys in MindSpore's order.

    An operator for each tensor says that it is to be read as it stands. Raises CoverageError for an impossible layout,
    UsageError for one that JSON cannot say, and when every name begins with a number and `-`, as in a merged file.
    """
    check_names(strategy)
    stage = strategy.stage or 0
    joined = [name for name, layout in strategy.tensors.items() if any(len(m) > 1 for m in layout.tensor_map)]
    if joined:
        raise UsageError(
            "a strategy file in JSON form cannot say that several device axes cut one tensor axis",
            items=joined,
            hint="write its protobuf form",
        )
    operators = {
        f"Shard_{name}": {"parallel_strategy": [parts_of(layout)], "stage": stage}
        for name, layout in strategy.tensors.items()
    }
    layouts = {
        name: _item(layout, strategy.shapes.get(name))
        for name, layout in strategy.tensors.items()
        if checked("a strategy file", name, layout)
    }
    whole = {COUNTER: SAVED, LAYOUTS: layouts, OPERATORS: operators or {"Stage": {"stage": stage}}}
    return json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _item(layout: TensorLayout, shape: Shape | None) -> dict[str, object]:
    return {
        DEV_MATRIX: layout.dev_matrix,
        "field": 0,
        OPT_SIZE: layout.opt_size,
        OPT_STEP: layout.opt_step,
        TENSOR_MAP: [m for axes in layout.tensor_map for m in axes or (-1,)],
        **({} if shape is None else {SHAPE: shape}),
    }

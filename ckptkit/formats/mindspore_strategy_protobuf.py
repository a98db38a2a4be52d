"""Strategy files of MindSpore in protobuf form, read and written (proto2, `node_strategy.proto` in MindSpore's source).

    08 int   current_stage: a counter of saves (2 as saved, 1 as merged), no stage
    12 size  parallel_strategy_item, one for each operator
      0A size  node_name
      12 size  parallel_strategys: 08 stage, 12 parallel_strategy (how the operator's inputs are cut; not needed here)
    1A size  parallel_layout_item, one for each tensor
      0A size  param_name
      12 size  parallel_layouts
        0A size  dev_matrix: 08 int, once for each device axis
        12 size  tensor_map: 08 int, once for each tensor axis, -1 for a whole one; or, when several device axes cut
                 one tensor axis, a tensor_map for each tensor axis (a tensor of one axis then has an empty second one)
        1A size  param_split_shape, 22 size  indices_offset: 08 int; legacy, empty
        28 int   field: legacy, 0
        30 int   opt_weight_shard_step    38 int   opt_weight_shard_size

Unknown fields and repeated single ones are refused: they might change what the others mean.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ckptkit.errors import CoverageError
from ckptkit.formats import files
from ckptkit.formats.mindspore_layouts import (
    MERGED,
    MOST_AXES,
    MOST_BYTES,
    MOST_STAGES,
    SAVED,
    Strategy,
    check_names,
    checked,
    refuse_legacy,
    split_stages,
)
from ckptkit.formats.protobuf import Window, sized, varint
from ckptkit.types import TensorLayout

WHAT = "MindSpore strategy file"
CURRENT_STAGE, STRATEGY_ITEM, LAYOUT_ITEM = 0x08, 0x12, 0x1A  # of the file
NAME, CONTENT = 0x0A, 0x12  # of an item
STAGE, PARALLEL_STRATEGY = 0x08, 0x12  # of parallel_strategys
DEV_MATRIX, TENSOR_MAP = 0x0A, 0x12  # of parallel_layouts
LEGACY_LISTS = {0x1A: "param_split_shape", 0x22: "indices_offset"}
FIELD, OPT_STEP, OPT_SIZE = 0x28, 0x30, 0x38
DIM, PACKED_DIMS = 0x08, 0x0A


def looks_like_protobuf(head: bytes) -> bool:
    """Tell whether a file that begins with `head` is a strategy file: its counter, then an item that has a name."""
    return re.match(rb"\x08[\x80-\xff]*[\x00-\x7f]([\x12\x1a][\x80-\xff]*([\x00-\x7f](\n|\Z)|\Z)|\Z)", head) is not None


def read_protobuf(file: Path) -> list[Strategy]:
    """Return the stages in a file that `looks_like_protobuf`; raises CorruptError and CoverageError."""
    with files.opened(file) as descriptor, files.paused_gc():
        size = files.size_of(descriptor)
        window = Window(file, descriptor, size, WHAT)
        if size > MOST_BYTES:
            raise window.error(0, f"it has {size} bytes")
        return _Reader(window).read(size)


class _Reader:
    """Reads one file; remembers the layouts it has read, since most tensors share a few."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.file = window.file
        self.known: dict[bytes, TensorLayout] = {}

    def read(self, size: int) -> list[Strategy]:
        window = self.window
        stages: dict[int, None] = {}  # an ordered set
        tensors: dict[str, TensorLayout] = {}
        counted = False
        for at, key, value, after in window.fields(0, size):
            if key == CURRENT_STAGE and not counted:
                counted = True
            elif key == STRATEGY_ITEM:
                stages[self._stage(*self._item(at, after, after + value)[1])] = None
            elif key == LAYOUT_ITEM:
                name, content = self._item(at, after, after + value)
                if name in tensors:
                    raise CoverageError(
                        f"`{self.file}` states two layouts for `{name}`", hint="save the strategy again"
                    )
                tensors[name] = self._layout(name, *content)
            else:
                raise window.error(at, f"an unknown or repeated field, key {key}")
        return split_stages(self.file, tuple(stages), tensors, {})

    def _item(self, start: int, first: int, end: int) -> tuple[str, tuple[int, int]]:
        """Return the name of an item, and where its content lies."""
        name: str | None = None
        content: tuple[int, int] | None = None
        for at, key, value, after in self.window.fields(first, end):
            if key == NAME and name is None:
                name = self.window.text(after, value)
            elif key == CONTENT and content is None:
                content = after, after + value
            else:
                raise self.window.error(at, f"an unknown or repeated field, key {key}, in an item")
        if not name or content is None:
            raise self.window.error(start, "an item without name or without content")
        return name, content

    def _stage(self, start: int, end: int) -> int:
        """Return the stage of a strategy item."""
        stage: int | None = None
        for at, key, value, _ in self.window.fields(start, end):
            if key == STAGE and stage is None:
                stage = value
            elif key != PARALLEL_STRATEGY:
                raise self.window.error(at, f"an unknown or repeated field, key {key}, in a strategy item")
        if stage is None or stage >= MOST_STAGES:
            raise self.window.error(start, "a strategy item without stage, or with an impossible one")
        return stage

    def _layout(self, name: str, start: int, end: int) -> TensorLayout:
        """Return the layout of the tensor `name` that lies from `start` to `end`."""
        stated = self.window.bytes_at(start, end - start)
        layout = self.known.get(stated)
        if layout is None:
            layout = self.known[stated] = checked(f"`{self.file}`", name, self._parse_layout(name, start, end))
        return layout

    def _parse_layout(self, name: str, start: int, end: int) -> TensorLayout:
        window = self.window
        lists: dict[int, list[list[int]]] = {}
        numbers: dict[int, int] = {}
        for at, key, value, after in window.fields(start, end):
            if key in (DEV_MATRIX, TENSOR_MAP) or key in LEGACY_LISTS:
                known = lists.setdefault(key, [])
                known.append(self._dims(after, after + value))
                if len(known) > MOST_AXES:
                    raise window.error(at, f"more than {MOST_AXES} lists of key {key} for `{name}`")
            elif key in (FIELD, OPT_STEP, OPT_SIZE) and key not in numbers:
                numbers[key] = self._signed(at, value)
            else:
                raise window.error(at, f"an unknown or repeated field, key {key}, in the layout of `{name}`")
        if len(numbers) < 3 or len(lists.get(DEV_MATRIX, ())) != 1:
            raise window.error(start, f"fields are missing or repeated in the layout of `{name}`")
        for key, field in LEGACY_LISTS.items():
            if any(lists.get(key, ())):
                raise refuse_legacy(self.file, name, field)
        if numbers[FIELD]:
            raise refuse_legacy(self.file, name, "field")
        maps = self._maps(name, start, lists.get(TENSOR_MAP, []))
        return TensorLayout(tuple(lists[DEV_MATRIX][0]), maps, numbers[OPT_STEP], numbers[OPT_SIZE])

    def _maps(self, name: str, start: int, maps: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        """Return for each tensor axis the device axes that cut it."""
        if len(maps) == 1:
            return tuple(() if m == -1 else (m,) for m in maps[0])
        if len(maps) == 2 and not maps[1]:
            maps = maps[:1]
        if not maps or not all(maps):
            raise self.window.error(start, f"an empty list in the tensor map of `{name}`")
        return tuple(tuple(m for m in axes if m != -1) for axes in maps)

    def _dims(self, start: int, end: int) -> list[int]:
        """Return the ints of a list, one field each or packed."""
        dims: list[int] = []
        for at, key, value, after in self.window.fields(start, end):
            if key == DIM:
                dims.append(self._signed(at, value))
            elif key == PACKED_DIMS:
                dims += [self._signed(at, number) for number in self.window.packed(after, value)]
            else:
                raise self.window.error(at, f"an unknown field, key {key}, in a list")
            if len(dims) > MOST_AXES:
                raise self.window.error(at, f"a list of more than {MOST_AXES} axes")
        return dims

    def _signed(self, at: int, value: int) -> int:
        """Return an int as protobuf means it: 64 bits, two's complement."""
        if value >= 2**64:
            raise self.window.error(at, "a number of more than 64 bits")
        return value - 2**64 if value >= 2**63 else value


def dump_strategy(strategy: Strategy) -> bytes:
    """Return the strategy file of one stage (stage 0 if it says none), as MindSpore saves it.

    It has one strategy item, for the stage that it states. Raises CoverageError for an impossible layout, UsageError
    when every name begins with a number and `-`, as in a merged file.
    """
    check_names(strategy)
    stage = strategy.stage or 0
    return _file(SAVED, [_stage_item(stage)], [_layout_item(n, layout) for n, layout in strategy.tensors.items()])


def dump_merged(strategies: Sequence[Strategy]) -> bytes:
    """Return one file for all stages, in the given order, as MindSpore's `merge_pipeline_strategys` writes it."""
    stages = [strategy.stage or 0 for strategy in strategies]
    if sorted(stages) != list(range(len(stages))):
        raise CoverageError(
            f"the stages {stages} are not those of one run", hint="give every stage once, beginning with 0"
        )
    layouts = [
        _layout_item(f"{stage}-{name}", layout)
        for stage, strategy in zip(stages, strategies, strict=True)
        for name, layout in strategy.tensors.items()
    ]
    return _file(MERGED, [_stage_item(stage) for stage in stages], layouts)


def _file(counter: int, strategy_items: list[bytes], layout_items: list[bytes]) -> bytes:
    parts = [bytes((CURRENT_STAGE, counter))]
    parts += [bytes((STRATEGY_ITEM,)) + sized(item) for item in strategy_items]
    parts += [bytes((LAYOUT_ITEM,)) + sized(item) for item in layout_items]
    return b"".join(parts)


def _item(name: str, content: bytes) -> bytes:
    return bytes((NAME,)) + sized(name.encode()) + bytes((CONTENT,)) + sized(content)


def _stage_item(stage: int) -> bytes:
    return _item(f"Stage_{stage}", bytes((STAGE,)) + varint(stage))


def _layout_item(name: str, layout: TensorLayout) -> bytes:
    checked("a strategy file", name, layout)
    axes = [list(cut) or [-1] for cut in layout.tensor_map]
    if all(len(cut) == 1 for cut in axes):
        maps = [[m for cut in axes for m in cut]]
    else:
        maps = [*axes, []] if len(axes) == 1 else axes
    content = bytes((DEV_MATRIX,)) + _dims(layout.dev_matrix)
    content += b"".join(bytes((TENSOR_MAP,)) + _dims(cut) for cut in maps)
    content += b"".join(bytes((key, 0)) for key in (*LEGACY_LISTS, FIELD))
    content += bytes((OPT_STEP,)) + _number(layout.opt_step) + bytes((OPT_SIZE,)) + _number(layout.opt_size)
    return _item(name, content)


def _dims(values: Sequence[int]) -> bytes:
    return sized(b"".join(bytes((DIM,)) + _number(value) for value in values))


def _number(value: int) -> bytes:
    return varint(value % 2**64)

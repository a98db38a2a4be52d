"""The records of a MindSpore `.ckpt` file: a parser for the six protobuf fields that the format has.

It seeks over content and reads a few bytes of each record. Unknown fields are refused, though protobuf would skip
them: the format has had these six since its first release, and a seventh might change what the bytes mean. For the
same reason a field that occurs twice in a message is refused. What does not live here: protobuf's encoding
(`protobuf.py`), what the records mean (`mindspore_ckpt.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckptkit.errors import CorruptError
from ckptkit.formats.protobuf import LENGTH, Window
from ckptkit.types import Extent

WHAT = "MindSpore .ckpt file"
VALUE = TAG = 1 << 3 | LENGTH
TENSOR = 2 << 3 | LENGTH
MAP_TENSOR = 3 << 3 | LENGTH
DIM, PACKED_DIMS = 1 << 3, 1 << 3 | LENGTH
TENSOR_TYPE = 2 << 3 | LENGTH
TENSOR_CONTENT = 3 << 3 | LENGTH


class Record(NamedTuple):
    """One record: a tensor or a piece of one, as the file states it; `kind` is its `tensor_type`."""

    name: str
    dims: tuple[int, ...]
    kind: str
    extent: Extent


def scan(file: Path, descriptor: int, end: int) -> Iterator[Record]:
    """Yield the records of an open file, which end at byte `end`; raises CorruptError."""
    window = Window(file, descriptor, end, WHAT)
    position = 0
    while position < end:
        key, size, start = window.field(position, end)
        if key != VALUE:
            raise window.error(position, f"key {key} where a record should begin")
        position = start + size
        yield _record(window, start, position)


def _record(window: Window, start: int, end: int) -> Record:
    """Return the record whose value lies from `start` to `end`."""
    name: str | None = None
    tensor: tuple[int, int] | None = None
    position = start
    while position < end:
        key, size, after = window.field(position, end)
        if key == TAG and name is None:
            name = window.text(after, size)
        elif key == TENSOR and tensor is None:
            tensor = (after, after + size)
        elif key == MAP_TENSOR:
            raise _map_parameter(window, name)
        else:
            raise window.error(position, f"an unknown or repeated field, key {key}, in a record")
        position = after + size
    if name is None or tensor is None:
        raise window.error(start, "a record without name or without tensor")
    return _tensor(window, name, *tensor)


def _map_parameter(window: Window, name: str | None) -> CorruptError:
    return CorruptError(
        f"`{window.file}` holds the map parameter `{name or 'without a name'}`, which is not supported",
        why="a map parameter is a hash table and not a tensor",
        hint="export its keys and values in MindSpore and save these as tensors",
    )


def _tensor(window: Window, name: str, start: int, end: int) -> Record:
    """Return the record called `name` whose tensor message lies from `start` to `end`."""
    dims: list[int] = []
    kind: str | None = None
    extent: Extent | None = None
    position = start
    while position < end:
        key, value, after = window.field(position, end)
        if key == DIM:
            dims.append(value)
            position = after
            continue
        if key == TENSOR_TYPE and kind is None:
            kind = window.text(after, value)
        elif key == TENSOR_CONTENT and extent is None:
            extent = Extent(after, value)
        elif key == PACKED_DIMS:  # not MindSpore's way, but equal in meaning
            dims += window.packed(after, value)
        else:
            raise window.error(position, f"an unknown or repeated field, key {key}, in tensor `{name}`")
        position = after + value
    if kind is None or extent is None:
        raise window.error(start, f"tensor `{name}` without type or without content")
    return Record(name, tuple(dims), kind, extent)

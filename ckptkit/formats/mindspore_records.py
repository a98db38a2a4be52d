"""The records of a MindSpore `.ckpt` file: a parser for the six protobuf fields that the format has.

It seeks over content and reads a few bytes of each record. Unknown fields are refused, though protobuf would skip
them: the format has had these six since its first release, and a seventh might change what the bytes mean. For the
same reason a field that occurs twice in a message is refused. What does not live here: what the records mean
(`mindspore_ckpt.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckptkit.errors import CorruptError
from ckptkit.formats import files
from ckptkit.types import Extent

WINDOW_BYTES = 4096
LONGEST_INT = 10  # bytes of a varint
LONGEST_FIELD = 2 * LONGEST_INT
LONGEST_NAME = 1024 * 1024  # bytes; MindSpore's own limit is 1024 characters
LENGTH = 2  # the wire type of a field with a size
AGAIN = "copy or save the file again"

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
    window = _Window(file, descriptor, end)
    position = 0
    while position < end:
        key, size, start = window.field(position, end)
        if key != VALUE:
            raise window.error(position, f"key {key} where a record should begin")
        position = start + size
        yield _record(window, start, position)


def _record(window: _Window, start: int, end: int) -> Record:
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


def _map_parameter(window: _Window, name: str | None) -> CorruptError:
    return CorruptError(
        f"`{window.file}` holds the map parameter `{name or 'without a name'}`, which is not supported",
        why="a map parameter is a hash table and not a tensor",
        hint="export its keys and values in MindSpore and save these as tensors",
    )


def _tensor(window: _Window, name: str, start: int, end: int) -> Record:
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
            dims += _packed(window, after, value)
        else:
            raise window.error(position, f"an unknown or repeated field, key {key}, in tensor `{name}`")
        position = after + value
    if kind is None or extent is None:
        raise window.error(start, f"tensor `{name}` without type or without content")
    return Record(name, tuple(dims), kind, extent)


def _packed(window: _Window, position: int, size: int) -> list[int]:
    """Return the ints that fill `size` bytes."""
    values = []
    data = window.bytes_at(position, size)
    value = shift = 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(value)
            value = shift = 0
    if shift:
        raise window.error(position, "a number that does not end")
    return values


class _Window:
    """A small buffer that moves over a file; `end` is the offset at which the records end."""

    __slots__ = ("base", "buffer", "descriptor", "end", "file")

    def __init__(self, file: Path, descriptor: int, end: int) -> None:
        self.file, self.descriptor, self.end = file, descriptor, end
        self.base, self.buffer = 0, b""

    def field(self, position: int, end: int) -> tuple[int, int, int]:
        """Return (key, value or size, offset after it) of the field at `position`.

        A key is a field number times 8 plus the wire type: 0 an int, 2 a size with content after it. A key of two
        bytes is an unknown field, and its first byte is returned. The content must end at or before `end`.
        """
        i = position - self.base
        if i < 0 or i + LONGEST_FIELD > len(self.buffer):
            self._move(position)
            i = 0
        buffer = self.buffer
        if len(buffer) < i + 2:
            raise self.error(position, "a field that does not end")
        key, value = buffer[i], buffer[i + 1]
        if value > 127:
            value, after = self.varint(position + 1)
        else:
            after = position + 2
        if after + (value if key & 7 == LENGTH else 0) > end:
            raise self._too_long(position, after + value, end)
        return key, value, after

    def varint(self, position: int) -> tuple[int, int]:
        """Return the int at `position`, which the buffer holds, and the offset after it."""
        i = position - self.base
        buffer = self.buffer
        value = shift = 0
        while i < len(buffer) and shift < 64:
            byte = buffer[i]
            value |= (byte & 127) << shift
            i += 1
            if byte < 128:
                return value, self.base + i
            shift += 7
        raise self.error(position, "a number that does not end")

    def text(self, position: int, size: int) -> str:
        """Return `size` bytes as text."""
        try:
            return self.bytes_at(position, size).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(position, "a name is not valid UTF-8") from error

    def bytes_at(self, position: int, size: int) -> bytes:
        """Return `size` bytes of a name or a list of dims."""
        i = position - self.base
        data = self.buffer[i : i + size]
        if len(data) == size:
            return data
        if size > LONGEST_NAME:
            raise self.error(position, f"a name of {size} bytes")
        return files.pread(self.file, self.descriptor, size, position)

    def error(self, position: int, what: str) -> CorruptError:
        return CorruptError(
            f"`{self.file}` is damaged or no MindSpore .ckpt file: {what}, at byte {position}", hint=AGAIN
        )

    def _too_long(self, position: int, needed: int, end: int) -> CorruptError:
        if needed <= self.end:
            return self.error(position, f"a field ends at byte {needed}, what holds it at byte {end}")
        return CorruptError(
            f"`{self.file}` is cut: the record near byte {position} needs {needed} bytes; the file has {self.end}",
            hint=AGAIN,
        )

    def _move(self, position: int) -> None:
        size = max(0, min(WINDOW_BYTES, self.end - position))
        self.buffer = files.pread(self.file, self.descriptor, size, position)
        self.base = position

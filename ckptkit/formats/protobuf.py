"""Protobuf's encoding: a reader that moves over a file field by field, and the bytes of ints and sized fields.

A message is a row of fields; each is a key (its number times 8, plus the wire type), then an int, or a size and so
many bytes. An int is in base 128, least significant group first. The other wire types occur in none of MindSpore's
files: their keys are unknown to every caller, and refused. What does not live here: which fields a message has
(`mindspore_records.py`, `mindspore_strategy_protobuf.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptkit.errors import CorruptError
from ckptkit.formats import files

WINDOW_BYTES = 4096
LONGEST_INT = 10  # bytes of a varint
LONGEST_FIELD = 2 * LONGEST_INT
LONGEST_NAME = 1024 * 1024  # bytes; MindSpore's own limit is 1024 characters
LENGTH = 2  # the wire type of a field with a size
AGAIN = "copy or save the file again"


def varint(value: int) -> bytes:
    """Return a non-negative int in protobuf's base 128, least significant group first."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def sized(data: bytes) -> bytes:
    """Return `data` with its size before it."""
    return varint(len(data)) + data


class Window:
    """A small buffer that moves over a file; `end` is the offset at which its messages end.

    `what` says in errors what the file should be.
    """

    __slots__ = ("base", "buffer", "descriptor", "end", "file", "what")

    def __init__(self, file: Path, descriptor: int, end: int, what: str) -> None:
        self.file, self.descriptor, self.end, self.what = file, descriptor, end, what
        self.base, self.buffer = 0, b""

    def fields(self, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (offset, key, value or size, offset after it) of each field of a message that ends at `end`."""
        while position < end:
            key, value, after = self.field(position, end)
            yield position, key, value, after
            position = after + (value if key & 7 == LENGTH else 0)

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

    def packed(self, position: int, size: int) -> list[int]:
        """Return the ints that fill `size` bytes."""
        values = []
        value = shift = 0
        for byte in self.bytes_at(position, size):
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                values.append(value)
                value = shift = 0
            elif shift == 7 * LONGEST_INT:
                break
        if shift:
            raise self.error(position, "a number that does not end")
        return values

    def text(self, position: int, size: int) -> str:
        """Return `size` bytes as text."""
        try:
            return self.bytes_at(position, size).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(position, "a name is not valid UTF-8") from error

    def bytes_at(self, position: int, size: int) -> bytes:
        """Return `size` bytes of a name or a list of dims."""
        i = position - self.base
        data = self.buffer[i : i + size] if i >= 0 else b""
        if len(data) == size:
            return data
        if size > LONGEST_NAME:
            raise self.error(position, f"a name of {size} bytes")
        return files.pread(self.file, self.descriptor, size, position)

    def error(self, position: int, what: str) -> CorruptError:
        return CorruptError(f"`{self.file}` is damaged or no {self.what}: {what}, at byte {position}", hint=AGAIN)

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

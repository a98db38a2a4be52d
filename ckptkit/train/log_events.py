"""TensorBoard's event files, scalars only: written here, in seventy lines, instead of by a package.

TensorBoard's own writer comes with a web server and a gRPC library, and tensorboardX imports torch where it is
installed: four seconds and a second framework in a process that trains. An event file is a row of records (TFRecord):

    uint64 length, uint32 crc of it, the bytes, uint32 crc of them        little-endian; crc32c, rotated and shifted

each a protobuf `Event`: 1 wall_time (double), 2 step, 3 file_version, 5 summary, 7 session_log (tensorflow/core/util/
event.proto). A summary is a row of values: 1 tag, 2 simple_value (float). A session log of status 1 (START) makes
TensorBoard forget the steps from its own on: what a killed run had written, and a resumed one writes again.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptkit.formats.disk import disk_error, write_all
from ckptkit.formats.protobuf import sized, varint

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed
_MASK_DELTA = 0xA282EAD8
_THEN = "or leave `log.tensorboard` out"
_VERSION = b"brain.Event:2"


@dataclass(frozen=True, slots=True)
class Events:
    """An open event file."""

    path: Path
    fd: int
    table: tuple[int, ...]

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the scalars of a step; what is not finite is shown by TensorBoard as such."""
        summary = b"".join(b"\x0a" + sized(_value(tag, value)) for tag, value in values.items())
        self._write(b"\x10" + varint(step) + b"\x2a" + sized(summary))

    def begin(self, step: int) -> None:
        """Write the head of the file, and that the steps from `step` on begin here."""
        self._write(b"\x1a" + sized(_VERSION))
        self._write(b"\x10" + varint(step) + b"\x3a" + sized(b"\x08\x01"))

    def close(self) -> None:
        os.close(self.fd)

    def _write(self, fields: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        record = length + self._crc(length) + event + self._crc(event)
        try:
            write_all(self.fd, record)
        except OSError as error:
            raise disk_error(error, self.path, why="", then=_THEN) from error

    def _crc(self, data: bytes) -> bytes:
        return struct.pack("<I", masked(crc32c(data, self.table)))


def open_events(folder: Path, step: int) -> Events:
    """Make a new event file in `folder` whose first step is `step`; ResourceError where it cannot be written."""
    now = time.time_ns()
    # TensorBoard reads files in the order of their names
    path = folder / f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise disk_error(error, path, why="", then=_THEN) from error
    events = Events(path, fd, crc_table())
    events.begin(step)
    return events


def crc_table() -> tuple[int, ...]:
    """Return the remainders of all bytes."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


def crc32c(data: bytes, table: tuple[int, ...]) -> int:
    """Return the CRC-32C (RFC 3720, B.4) of some bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """Return a crc as TFRecord stores it, so that a crc over data with crcs in it is none of these."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _value(tag: str, value: float) -> bytes:
    return b"\x0a" + sized(tag.encode()) + b"\x15" + struct.pack("<f", _fitting(value))


def _fitting(value: float) -> float:
    """Return a number that a float32 holds: struct refuses larger ones."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value

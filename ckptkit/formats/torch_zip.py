"""The zip container of a PyTorch file: which records it holds, and where their bytes lie.

torch.save stores its records uncompressed, so that a storage is a byte range of the file. The standard `zipfile`
is not used because it opens what this reader must refuse (compressed, encrypted, repeated or contradictory
records) and raises a dozen kinds of error on damage. What does not live here: what the records mean
(`torch_pickle.py`). Format: APPNOTE.TXT 6.3.9 of PKWARE, zip64 included.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckptkit.errors import CorruptError, UnsafeError
from ckptkit.formats import files
from ckptkit.types import Extent

MAX_DIRECTORY_BYTES = 1 << 28
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 0x0001 | 0x0040 | 0x2000
_DIRECTORY = 0x10  # of the external attributes; PyTorch's reader gives no bytes for such a record
_STORED = 0
CUT_SHORT = "the file was probably cut short while it was copied or downloaded; fetch it again"


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file: reads are positioned, and never leave the file."""

    path: Path
    descriptor: int
    size: int

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset` on; CorruptError when the file does not hold them."""
        if offset + size <= self.size:
            data = files.pread(self.path, self.descriptor, size, offset)
            if len(data) == size:
                return data
        raise self.error("ends inside a record", hint=CUT_SHORT)

    def error(self, what: str, *, why: str = "", hint: str = "") -> CorruptError:
        """Return the error that says `what` about this file."""
        return CorruptError(f"`{self.path}` {what}", why=why, hint=hint)


class Record(NamedTuple):
    """A record as the directory at the file's end describes it; `header` is its local header's offset."""

    name: bytes
    header: int
    size: int
    method: int
    flags: int

    @property
    def label(self) -> str:
        return self.name.decode("ascii", "backslashreplace")


def read_records(file: OpenFile) -> dict[str, Record]:
    """Return the records of a zip by name, in directory order; CorruptError or UnsafeError."""
    offset, size, count = _find_directory(file)
    if size > MAX_DIRECTORY_BYTES or count * _CENTRAL.size > size:
        raise file.error(f"has a zip directory of {size} bytes that cannot hold {count} records")
    data = file.read(offset, size)
    records: dict[str, Record] = {}
    at = 0
    for _ in range(count):
        record, at = _central_entry(file, data, at)
        if record.flags & _ENCRYPTED:
            raise UnsafeError(
                f"record `{record.label}` of `{file.path}` is encrypted",
                hint="decrypt the archive first; PyTorch itself never encrypts",
            )
        if record.label in records:
            raise file.error(f"holds two records named `{record.label}`", why="which of the two counts is ambiguous")
        records[record.label] = record
    return records


def locate(file: OpenFile, record: Record) -> Extent:
    """Return where the bytes of `record` lie; its local header must agree with the directory."""
    if record.method != _STORED:
        raise file.error(
            f"holds record `{record.label}` compressed (zip method {record.method})",
            why="tensors are read as byte ranges, which a compressed record does not have",
            hint="PyTorch never compresses; unpack the archive and pack it again with `zip -0`",
        )
    head = file.read(record.header, _LOCAL.size + len(record.name))
    signature, _, flags, method, *_, name_size, extra_size = _LOCAL.unpack_from(head)
    if signature != b"PK\x03\x04":
        raise file.error(f"has no record `{record.label}` where its zip directory says")
    if flags & _ENCRYPTED or method != record.method or name_size != len(record.name):
        raise file.error(f"describes record `{record.label}` in two ways that contradict each other")
    if head[_LOCAL.size :] != record.name:
        raise file.error(f"describes record `{record.label}` in two ways that contradict each other")
    start = record.header + len(head) + extra_size
    if start + record.size > file.size:
        raise file.error(f"ends inside record `{record.label}`", hint=CUT_SHORT)
    return Extent(start, record.size)


def _find_directory(file: OpenFile) -> tuple[int, int, int]:
    """Return offset, bytes and number of records of the directory, from the end record (zip64 or not)."""
    tail = file.read(max(0, file.size - _END.size - _FULL16), min(file.size, _END.size + _FULL16))
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        raise file.error("starts as a zip archive but has no end record", hint=CUT_SHORT)
    _, disk, first_disk, here, count, size, offset, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail):
        raise file.error("has bytes after its zip end record")
    end = file.size - len(tail) + at
    if at >= _LOCATOR64.size and tail[at - _LOCATOR64.size :].startswith(b"PK\x06\x07"):
        end = _LOCATOR64.unpack_from(tail, at - _LOCATOR64.size)[2]
        values = _END64.unpack(file.read(end, _END64.size))
        if values[0] != b"PK\x06\x06":
            raise file.error("has no zip64 end record where its locator says")
        here = _wider(file, here, _FULL16, values[6])
        count = _wider(file, count, _FULL16, values[7])
        size = _wider(file, size, _FULL32, values[8])
        offset = _wider(file, offset, _FULL32, values[9])
    if here != count or disk not in (0, _FULL16) or first_disk not in (0, _FULL16):
        raise file.error("is one part of a zip archive that spans several files")
    if offset + size > end:
        raise file.error("has a zip directory that reaches past its end record")
    return offset, size, count


def _wider(file: OpenFile, narrow: int, full: int, wide: int) -> int:
    """Return a zip64 value; the narrow field must be saturated or say the same."""
    if narrow not in (full, wide):
        raise file.error("has two zip end records that contradict each other")
    return wide


def _central_entry(file: OpenFile, data: bytes, at: int) -> tuple[Record, int]:
    """Return the record whose directory entry starts at `at`, and where the next entry starts."""
    if at + _CENTRAL.size > len(data):
        raise file.error("has a zip directory that ends too early")
    fields = _CENTRAL.unpack_from(data, at)
    signature, _, _, flags, method, _, _, _, packed, size, name_size, extra_size, comment_size = fields[:13]
    disk, attributes, header = fields[13], fields[15], fields[16]
    names_at = at + _CENTRAL.size
    extra_at = names_at + name_size
    stop = extra_at + extra_size + comment_size
    if signature != b"PK\x01\x02" or stop > len(data):
        raise file.error("has a damaged zip directory")
    if _FULL32 in (size, packed, header):
        size, packed, header = _widen(file, data[extra_at : extra_at + extra_size], size, packed, header)
    name = data[names_at:extra_at]
    if method == _STORED and size != packed:
        raise file.error("has a damaged zip directory", why="an uncompressed record has two different sizes")
    if disk not in (0, _FULL16) or (attributes & _DIRECTORY and size):
        raise file.error("has a damaged zip directory", why="a record lies in another file, or is a folder with bytes")
    return Record(name, header, size, method, flags), stop


def _widen(file: OpenFile, extra: bytes, *narrow: int) -> tuple[int, ...]:
    """Return the sizes and the offset of a record with each saturated one taken from its zip64 field."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + size]
            saturated = narrow.count(_FULL32)
            if len(wide) < 8 * saturated:
                break
            values = iter(struct.unpack_from(f"<{saturated}Q", wide))
            return tuple(next(values) if value == _FULL32 else value for value in narrow)
        at += 4 + size
    raise file.error("has a damaged zip directory", why="a zip64 size is missing")

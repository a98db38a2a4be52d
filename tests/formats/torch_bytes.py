"""PyTorch files written byte by byte, or damaged, so that tests have what PyTorch never writes; no PyTorch needed."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from fuzz import mutations

GOLDEN = Path(__file__).parent.parent / "golden" / "torch"
MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
VERSION = b"\x80\x02M\xe9\x03."


def text(value: str) -> bytes:
    """Return the opcode that pushes a text."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    """Return the opcode that pushes an int, of any size up to 255 bytes."""
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def named(module: str, name: str) -> bytes:
    """Return the opcode that pushes a global."""
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def ints(values: tuple[int, ...]) -> bytes:
    return tuple_of(*map(integer, values))


def call(function: bytes, *args: bytes) -> bytes:
    """Return opcodes that call `function` (REDUCE)."""
    return function + tuple_of(*args) + b"R"


HOOKS = call(named("collections", "OrderedDict"))


def storage(key: str = "0", count: int = 6, kind: str = "FloatStorage", *view: bytes) -> bytes:
    """Return opcodes that push a storage."""
    return tuple_of(text("storage"), named("torch", kind), text(key), text("cpu"), integer(count), *view) + b"Q"


def tensor(
    source: bytes | None = None,
    offset: int = 0,
    shape: tuple[int, ...] = (2, 3),
    strides: tuple[int, ...] = (3, 1),
    *extra: bytes,
) -> bytes:
    """Return opcodes that push a tensor; by default 2 x 3 of float32, the whole of storage `0`."""
    place = (source or storage(), integer(offset), ints(shape), ints(strides))
    return call(named("torch._utils", "_rebuild_tensor_v2"), *place, b"\x89", HOOKS, *extra)


def dict_of(entries: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in entries.items()) + b"u"


def whole(value: bytes, protocol: int = 2) -> bytes:
    """Return a complete pickle."""
    return b"\x80" + bytes([protocol]) + value + b"."


def write_zip(
    file: Path, pickled: bytes, storages: Mapping[str, bytes], others: Mapping[str, bytes] | None = None
) -> Path:
    """Write a zip file as torch.save would: `data.pkl`, the storages, and other records by name."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, value in (others or {}).items():
            archive.writestr(f"archive/{name}", value)
        for key, value in storages.items():
            archive.writestr(f"archive/data/{key}", value)
    return file


def legacy(pickled: bytes, storages: Mapping[str, tuple[int, bytes]], *, little_endian: bool = True) -> bytes:
    """Return a legacy file; a storage is its count of elements and its bytes."""
    system = whole(dict_of({"little_endian": b"\x88" if little_endian else b"\x89"}))
    keys = whole(b"](" + b"".join(map(text, storages)) + b"e")
    parts = [MAGIC, VERSION, system, pickled, keys]
    return b"".join(parts) + b"".join(struct.pack("<q", count) + raw for count, raw in storages.values())


def damaged_files(kind: str, count: int, seed: int) -> Iterator[bytes]:
    """Yield damaged copies of a golden file; `pickle` damages the pickle alone, in a sound zip."""
    data = (GOLDEN / ("legacy.bin" if kind == "legacy" else "zip.bin")).read_bytes()
    if kind != "pickle":
        yield from mutations(data, seed, count)
        return
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    for pickled in mutations(records["zip/data.pkl"], seed, count):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, value in (records | {"zip/data.pkl": pickled}).items():
                archive.writestr(name, value)
        yield out.getvalue()

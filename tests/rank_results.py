"""Read and cut checkpoints over ranks without ckptkit: small parsers of both file formats, and MindSpore's formula.

A tensor is an `Array` of unsigned integers of its elements' width, so that equal means equal bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
SPELLED = {2: ("BF16", b"BFloat16"), 4: ("F32", b"Float32")}  # what is written, by width
CARRIERS = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I64": 8, "U8": 1, "BOOL": 1, "F64": 8}
CKPT_WIDTHS = {"Float32": 4, "BFloat16": 2, "Float16": 2, "Int32": 4, "Int64": 8, "UInt8": 1, "Bool": 1, "Float64": 8}


def read_file(file: Path) -> Tensors:
    """Return every tensor of a .safetensors or .ckpt file."""
    return _read_ckpt(file.read_bytes()) if file.suffix == ".ckpt" else _read_safetensors(file.read_bytes())


def read_whole(folder: Path) -> Tensors:
    """Return every tensor of a folder's weight files, and of the training state beside HuggingFace's."""
    files = [*weight_files(folder), *(folder / "training_state").glob("*.safetensors")]
    return {name: array for file in files for name, array in read_file(file).items()}


def read_ranks(folder: Path) -> dict[int, Tensors]:
    """Return what each `rank_N` of a folder holds."""
    ranks = {int(path.name.removeprefix("rank_")): path for path in folder.glob("rank_*")}
    return {rank: read_whole(ranks[rank]) for rank in sorted(ranks)}


def weight_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in (".ckpt", ".safetensors"))


def rank_bytes(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file of weights, below the `rank_N` folders or not, and of the strategy files."""
    files = [*folder.glob("rank_*/*"), *folder.glob("strategy/*"), *weight_files(folder)]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def same_tensors(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    """Tell whether two sets of tensors have the same names, shapes, widths and bytes."""
    return a.keys() == b.keys() and all(
        (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape) and np.array_equal(a[name], b[name])
        for name in a
    )


def odd_names(a: Mapping[str, Array], b: Mapping[str, Array]) -> list[str]:
    """Return the names in which two sets of tensors differ."""
    one_sided = a.keys() ^ b.keys()
    return sorted(one_sided) + [n for n in a if n not in one_sided and not same_tensors({n: a[n]}, {n: b[n]})]


def random_tensors(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> Tensors:
    """Return a tensor of random 32-bit words for each shape: every bit pattern may come, NaN included."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 1 << 32, tuple(shape), np.uint32) for name, shape in shapes.items()}


def write_whole(file: Path, tensors: Mapping[str, Array], dtypes: Mapping[str, str] | None = None) -> Path:
    """Write F32 and BF16 tensors as MindSpore does, to a .ckpt or .safetensors file.

    In the latter, `dtypes` are those of tensors that are neither.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".ckpt":
        assert not dtypes
        file.write_bytes(b"".join(_record(name, array) for name, array in tensors.items()))
        return file
    header: dict[str, Any] = {"__metadata__": {"format": "ms"}}
    offset = 0
    for name, array in tensors.items():
        dtype = (dtypes or {}).get(name) or SPELLED[array.itemsize][0]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *(a.tobytes() for a in tensors.values())]))
    return file


def part_of(
    array: Array, device: int, dev: Sequence[int], axes: Sequence[Sequence[int]], step: int = 0, size: int = 0
) -> Array:
    """Return what `device` of a stage holds; `axes` are the map's entries for each tensor axis, () for a whole one.

    MindSpore's formula, step by step: cut by the device axes, then cut the rows that are left by the optimizer shard.
    """
    at = [int(c) for c in np.unravel_index(device, dev)]
    used = set()
    for axis, entries in enumerate(axes):
        index, parts = 0, 1
        for m in entries:
            a = len(dev) - 1 - m
            used.add(a)
            index, parts = index * dev[a] + at[a], parts * dev[a]
        array = np.split(array, parts, axis)[index]
    if step and size:
        spare = [a for a, length in enumerate(dev) if length > 1 and a not in used]
        count = prod(dev[a] for a in spare) if size == -1 else size
        index, mul, rest = 0, 1, count
        for a in reversed(spare):
            taken = min(rest, dev[a])
            index, mul, rest = index + at[a] % taken * mul, mul * taken, rest // taken
        array = np.split(array, count, 0)[index]
    return array


def _read_safetensors(data: bytes) -> Tensors:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, row in header.items():
        start, stop = (8 + length + offset for offset in row["data_offsets"])
        found[name] = np.frombuffer(data[start:stop], CARRIERS[WIDTHS[row["dtype"]]]).reshape(row["shape"])
    return found


def _read_ckpt(data: bytes) -> Tensors:
    found = {}
    for key, value in _fields(data):
        assert key == 1
        (_, name), (_, tensor) = _fields(value)
        fields = list(_fields(tensor))
        shape = [number for key, number in fields if key == 1]
        kind, content = (next(v for key, v in fields if key == wanted) for wanted in (2, 3))
        found[name.decode()] = np.frombuffer(content, CARRIERS[CKPT_WIDTHS[kind.decode()]]).reshape(shape)
    return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each protobuf field: an int, or bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, position = _varint(data, position)
        if key & 7 == 2:
            yield key >> 3, data[position : position + number]
            position += number
        else:
            assert key & 7 == 0
            yield key >> 3, number


def _varint(data: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[position]
        number |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return number, position


def _record(name: str, array: Array) -> bytes:
    dims = b"".join(b"\x08" + _as_varint(n) for n in array.shape)
    tensor = dims + _sized(0x12, SPELLED[array.itemsize][1]) + _sized(0x1A, array.tobytes())
    return _sized(0x0A, _sized(0x0A, name.encode()) + _sized(0x12, tensor))


def _sized(key: int, content: bytes) -> bytes:
    return bytes([key]) + _as_varint(len(content)) + content


def _as_varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])

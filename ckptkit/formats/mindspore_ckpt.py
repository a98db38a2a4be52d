"""MindSpore's `.ckpt` format, read and written without protobuf or MindSpore.

A file is a row of records; each is one protobuf message `Checkpoint` with one value (proto2, in MindSpore's
source `checkpoint.proto`):

    0A size  Checkpoint.value
      0A size  tag: the tensor's name
      12 size  tensor                          (1A: a map parameter, refused)
        08 int   dims, one for each axis; none for a scalar
        12 size  tensor_type: `Float32`, `BFloat16`, ..., `str`
        1A size  tensor_content: the elements, C order, little endian

A tensor over 512 MiB is cut in pieces, each a record with the same tag and the full dims. A text value has dims
`[0]` and holds UTF-32 code points; here it is a tensor of dtype STR and shape `(num_code_points,)`. An empty text
has one code point, 0: that is how MindSpore writes it. A trailer `crc_num` + 10 bytes, big endian, may follow: the
crc32 of all before it.

What does not live here: parsing records (`mindspore_records.py`), reading tensors (`io.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

from ckptkit.errors import CkptkitError, CorruptError, InternalError, UnsafeError, UsageError
from ckptkit.formats import files
from ckptkit.formats.base import FileIndex, OutputFile
from ckptkit.formats.mindspore_records import Record, scan
from ckptkit.formats.protobuf import AGAIN, sized, varint
from ckptkit.types import DTYPES, Extent, Shape, TensorInfo, TensorSpec, item_bytes

PIECE_BYTES = 512 * 1024 * 1024
NAME_LIMIT = 1024  # characters; MindSpore saves longer names and cannot load them
CRC_MARK = b"crc_num"
CRC_BYTES = len(CRC_MARK) + 10

_DTYPES = {dtype.mindspore: name for name, dtype in DTYPES.items() if dtype.mindspore}


def read_index(file: Path) -> FileIndex:
    """Return the tensors of a `.ckpt` file, in file order; seeks over their bytes.

    Only records that occur twice have their bytes read, to compare them. Raises CorruptError for a file that is
    damaged or of another format, UnsafeError for an encrypted one. The crc, if there is one, is not checked: see
    `verify_crc`.
    """
    with files.opened(file) as descriptor:
        size = files.size_of(descriptor)
        _check_head(file, files.pread(file, descriptor, min(files.HEAD_BYTES, size), 0))
        crc = _stated_crc(file, descriptor, size)
        end = size if crc is None else size - CRC_BYTES
        with files.paused_gc():
            tensors = [_join(file, run) for run in _runs(scan(file, descriptor, end))]
    kept, notes = _drop_duplicates(file, tensors)
    if crc is not None:
        notes.append(f"`{file.name}` ends with a crc32, {crc}, which was not checked")
    return FileIndex(file, tuple(kept), {}, tuple(notes))


def verify_crc(file: Path) -> None:
    """Read the whole file and raise CorruptError unless its trailing crc32 fits; without one, do nothing."""
    with files.opened(file) as descriptor:
        size = files.size_of(descriptor)
        stated = _stated_crc(file, descriptor, size)
        if stated is None:
            return
        found = 0
        for position in range(0, size - CRC_BYTES, files.COMPARE_BYTES):
            count = min(files.COMPARE_BYTES, size - CRC_BYTES - position)
            found = zlib.crc32(files.pread(file, descriptor, count, position), found)
    if found != stated:
        raise CorruptError(
            f"`{file}` has crc32 {found}; its trailer states {stated}",
            why="bytes have changed since it was saved",
            hint=AGAIN,
        )


def lay_out(name: str, specs: Sequence[TensorSpec]) -> OutputFile:
    """Return the layout of a new `.ckpt` file called `name`: byte for byte as MindSpore's `save_checkpoint` writes.

    Records are in the given order. Raises UsageError for a tensor that the format cannot hold, or that MindSpore
    would drop in silence (zero elements).
    """
    fixed = []
    extents: dict[str, tuple[Extent, ...]] = {}
    heads: dict[tuple[str, Shape, int, int], tuple[bytes, bytes]] = {}  # what many records have in common
    position = 0
    for spec in specs:
        key, num_bytes, text = spec.name, spec.num_bytes, spec.name.encode()
        if not num_bytes or key in extents or len(key) > NAME_LIMIT or DTYPES[spec.dtype].mindspore is None:
            raise _unwritable(name, spec)
        pieces = []
        for start in range(0, num_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, num_bytes - start)
            kind = (spec.dtype, spec.shape, size, len(text))
            around = heads.get(kind)
            if around is None:
                around = heads[kind] = _around_name(spec, size, len(text))
            head = text.join(around)
            fixed.append((position, head))
            position += len(head)
            pieces.append(Extent(position, size))
            position += size
        extents[key] = tuple(pieces)
    return OutputFile(name, position, tuple(fixed), extents)


def _unwritable(name: str, spec: TensorSpec) -> CkptkitError:
    """Return the error for a tensor that cannot go in a `.ckpt` file."""
    if DTYPES[spec.dtype].mindspore is None:
        return UsageError(
            f"`{name}` cannot hold `{spec.name}`: MindSpore's .ckpt format has no `{spec.dtype}`",
            hint="write safetensors (`--format safetensors`), or convert the dtype",
        )
    if not prod(spec.shape):
        return UsageError(
            f"`{name}` cannot hold `{spec.name}`: its shape {list(spec.shape)} has no elements",
            why="MindSpore drops such tensors from .ckpt files in silence",
            hint="write safetensors (`--format safetensors`)",
        )
    if len(spec.name) > NAME_LIMIT:
        return UsageError(
            f"a name for `{name}` has {len(spec.name)} characters: `{spec.name[:40]}...`",
            why=f"MindSpore cannot load names over {NAME_LIMIT} characters from a .ckpt file",
            hint="write safetensors (`--format safetensors`)",
        )
    return InternalError(f"two tensors named `{spec.name}` for `{name}`")


def _around_name(spec: TensorSpec, size: int, name_bytes: int) -> tuple[bytes, bytes]:
    """Return what comes before and after the name, of `name_bytes`, in a record with `size` bytes of content."""
    shape = (0,) if spec.dtype == "STR" else spec.shape
    kind = DTYPES[spec.dtype].mindspore or ""
    dims = b"".join(b"\x08" + varint(length) for length in shape)
    tensor = dims + b"\x12" + sized(kind.encode()) + b"\x1a" + varint(size)
    before, after = b"\x0a" + varint(name_bytes), b"\x12" + varint(len(tensor) + size) + tensor
    value_bytes = len(before) + name_bytes + len(after) + size
    return b"\x0a" + varint(value_bytes) + before, after


def _check_head(file: Path, head: bytes) -> None:
    """Raise unless a file that begins with `head` can be a `.ckpt` file."""
    files.refuse_empty_or_pointer(file, head)
    if files.is_encrypted(head):
        raise UnsafeError(
            f"`{file}` is encrypted by MindSpore",
            why="nothing in it can be read or checked without the key",
            hint="load it in MindSpore with `dec_key` and save it again without `enc_key`",
        )
    if head[:1] != b"\x0a":
        looks = files.describe(head)
        raise CorruptError(
            f"`{file}` is not a MindSpore .ckpt file",
            why=f"it looks like {looks}" if looks else "its first byte is not that of a record",
            hint=AGAIN,
        )


def _stated_crc(file: Path, descriptor: int, size: int) -> int | None:
    """Return the crc32 that the file's trailer states, or None without one."""
    trailer = files.pread(file, descriptor, CRC_BYTES, max(0, size - CRC_BYTES))
    if len(trailer) < CRC_BYTES or not trailer.startswith(CRC_MARK):
        return None
    return int.from_bytes(trailer[len(CRC_MARK) :], "big")


def _runs(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Yield the records of each tensor: those that follow one another with the same name, until it is complete."""
    run: list[Record] = []
    missing = 0
    for record in records:
        if run and (missing <= 0 or record.name != run[0].name):
            yield run
            run = []
        if not run:
            missing = prod(record.dims) * _width(record.kind)
        run.append(record)
        missing -= record.extent.size
    if run:
        yield run


def _width(kind: str) -> int:
    """Return the bytes of one element; 0 for a type that is not known, which `_join` will refuse."""
    return item_bytes(_DTYPES[kind]) if kind in _DTYPES else 0


def _join(file: Path, run: Sequence[Record]) -> TensorInfo:
    """Return the tensor that the pieces of `run` make; raises CorruptError if they do not fit together."""
    name, shape, kind, _ = run[0]
    if kind not in _DTYPES:
        hint = "dequantise the checkpoint first" if kind == "Int4" else "save it in MindSpore with another dtype"
        raise CorruptError(f"tensor `{name}` of `{file}` has type `{kind}`, which is not supported", hint=hint)
    if any((piece.dims, piece.kind) != (shape, kind) for piece in run[1:]):
        raise CorruptError(f"the pieces of tensor `{name}` of `{file}` differ in shape or type", hint=AGAIN)
    dtype = _DTYPES[kind]
    size = sum([piece.extent.size for piece in run])
    width = item_bytes(dtype)
    if shape == (0,):
        shape = (size // width,) if dtype == "STR" or not size else ()
    if size != prod(shape) * width:
        raise CorruptError(
            f"tensor `{name}` of `{file}` has {size} bytes; {dtype} {list(shape)} needs {prod(shape) * width}",
            why="the file was cut between the pieces of a tensor, or is damaged",
            hint=AGAIN,
        )
    return TensorInfo(name, shape, dtype, file, tuple([piece.extent for piece in run]))


def _drop_duplicates(file: Path, tensors: Sequence[TensorInfo]) -> tuple[list[TensorInfo], list[str]]:
    """Return the tensors without repeated equal ones, and notes on these; raises CorruptError if any differ."""
    kept: dict[str, TensorInfo] = {}
    equal = []
    for tensor in tensors:
        if kept.setdefault(tensor.name, tensor) is tensor:
            continue
        if not files.same_bytes(kept[tensor.name], tensor):
            raise CorruptError(
                f"duplicate tensor `{tensor.name}` in `{file}`, with different content",
                why="MindSpore would take the last one in silence",
                hint="save the checkpoint again with unique names",
            )
        equal.append(tensor.name)
    notes = [f"`{file.name}`: duplicate records with equal bytes: {files.listed(equal)}"] if equal else []
    return list(kept.values()), notes

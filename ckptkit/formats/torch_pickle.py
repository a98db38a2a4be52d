"""Read the index of a PyTorch file (`.bin`, `.pt`, `.pth`), zip or legacy, without PyTorch and without running it.

A zip file (PyTorch 1.6 and later) holds the pickle `data.pkl` and one uncompressed record `data/KEY` a storage. A
legacy file is five pickles (magic number, version, system, object, storage keys), then for each key an int64 count
and the storage's bytes. Either way a tensor is a strided view of a byte range. Bytes of tensors are never read
here. What does not live here: the zip container (`torch_zip.py`), the pickle (`torch_unpickler.py`), which entries
are tensors (`torch_names.py`). Format: `torch/serialization.py` of PyTorch.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path

from ckptkit.formats import files
from ckptkit.formats.base import FileIndex
from ckptkit.formats.torch_machine import TruncatedPickle
from ckptkit.formats.torch_names import DTYPE_OF_TORCH, named_tensors
from ckptkit.formats.torch_objects import MAX_COUNT, TensorView, shown
from ckptkit.formats.torch_unpickler import Unpickled, unpickle
from ckptkit.formats.torch_zip import CUT_SHORT, OpenFile, Record, locate, read_records
from ckptkit.types import Extent, Shape, TensorInfo, item_bytes

MAX_PICKLE_BYTES = 1 << 28
MAX_MARKER_BYTES = 64
_FIRST_WINDOW = 1 << 20
_ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")  # the second is an archive without records
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_MAGIC_BYTES = b"\x8a\x0a" + _LEGACY_MAGIC.to_bytes(10, "little")
_LEGACY_VERSION = 1001


def read_index(file: Path) -> FileIndex:
    """Return where each tensor of a PyTorch file lies.

    Tensors come in the order of their bytes. Raises UnsafeError when loading the file would run code, CorruptError
    when it is damaged or holds what cannot be converted (sparse, quantized or big-endian tensors, TorchScript), and
    the errors of `files.opened` when it cannot be opened.
    """
    with files.opened(file) as descriptor, files.paused_gc():
        return _index(OpenFile(file, descriptor, files.size_of(descriptor)))


def _index(file: OpenFile) -> FileIndex:
    head = file.read(0, min(files.HEAD_BYTES, file.size))
    files.refuse_empty_or_pointer(file.path, head)
    if head.startswith(_ZIP_MAGICS):
        return _zip_index(file)
    if head[:1] == b"\x80":
        return _legacy_index(file)
    looks = files.describe(head)
    raise file.error(
        "is not a PyTorch file: it starts as neither a zip archive nor a pickle",
        why=f"it looks like {looks}" if looks else "",
    )


def _zip_index(file: OpenFile) -> FileIndex:
    records = read_records(file)
    root = _root_of(file, records)
    _refuse_kinds(file, records, root)
    unpickled = unpickle(_content(file, records[f"{root}data.pkl"], MAX_PICKLE_BYTES), str(file.path))
    named = named_tensors(unpickled.value, unpickled.builder.aside, str(file.path))
    places = {}
    for key, storage in unpickled.builder.storages.items():
        record = records.get(f"{root}data/{key}")
        if record is None:
            raise file.error(f"lacks the record of storage {shown(key)}")
        if record.size != storage.num_bytes:
            raise file.error(
                f"gives storage {shown(key)} {storage.num_bytes} bytes in the pickle, {record.size} in the archive"
            )
        places[key] = locate(file, record)
    unused = sum(name.startswith(f"{root}data/") for name in records) - len(places)
    notes = [f"{unused} storages belong to no tensor and are passed over"] if unused else []
    return _file_index(file, named.tensors, places, [*named.notes, *notes])


def _root_of(file: OpenFile, records: dict[str, Record]) -> str:
    """Return the folder of the archive that holds `data.pkl`, with its slash."""
    pickles = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise file.error(
            f"is a zip archive with {len(pickles)} records `data.pkl`, where torch.save writes one",
            hint="a checkpoint inside a zip archive has to be unpacked first",
        )
    return pickles[0].removesuffix("data.pkl")


def _refuse_kinds(file: OpenFile, records: dict[str, Record], root: str) -> None:
    """Refuse archives that are not a plain little-endian checkpoint."""
    if f"{root}constants.pkl" in records or any(name.startswith(f"{root}code/") for name in records):
        raise file.error(
            "is a TorchScript archive, a program and not a checkpoint",
            hint="load it with PyTorch in a sandbox and save its state dict as safetensors",
        )
    order = records.get(f"{root}byteorder")
    if order is not None and (value := _content(file, order, MAX_MARKER_BYTES)) != b"little":
        named = "big-endian" if value == b"big" else f"of byte order {shown(value.decode('ascii', 'replace'))}"
        raise file.error(f"is {named}", hint="load it with PyTorch on any machine and save it again")


def _content(file: OpenFile, record: Record, limit: int) -> bytes:
    """Return the bytes of a small record."""
    if record.size > limit:
        raise file.error(f"holds record `{record.label}` of {record.size} bytes, and {limit} are the most that is read")
    return file.read(*locate(file, record))


def _legacy_index(file: OpenFile) -> FileIndex:
    head, unpickled, keys = _legacy_pickles(file)
    named = named_tensors(unpickled.value, unpickled.builder.aside, str(file.path))
    storages = unpickled.builder.storages
    if not isinstance(keys, list) or len(keys) != len(storages) or not all(type(key) is str for key in keys):
        raise file.error(f"does not list the {len(storages)} storages of its tensors")
    places: dict[str, Extent] = {}
    at = head
    for key in keys:
        storage = storages.get(key)
        if storage is None or key in places:
            raise file.error(f"lists storage {shown(key)} twice, or without a tensor")
        (count,) = struct.unpack("<q", file.read(at, 8))
        if count != storage.count:
            raise file.error(
                f"gives storage {shown(key)} {storage.count} elements in the pickle, {count} before its bytes"
            )
        places[key] = Extent(at + 8, storage.num_bytes)
        at += 8 + storage.num_bytes
    if at > file.size:
        raise file.error(f"ends {at - file.size} bytes before the end of its storages", hint=CUT_SHORT)
    if at < file.size:
        raise file.error(f"has {file.size - at} bytes after its last storage")
    return _file_index(file, named.tensors, places, list(named.notes))


def _legacy_pickles(file: OpenFile) -> tuple[int, Unpickled, object]:
    """Return where the storages start, the object, and the storage keys.

    Nothing says how long the pickles are, so they are read from a window that grows until it holds them.
    """
    window = _FIRST_WINDOW
    while True:
        data = file.read(0, min(window, file.size, MAX_PICKLE_BYTES))
        try:
            return _parse_legacy(file, data)
        except TruncatedPickle as error:
            if error.needed > file.size or len(data) == file.size:
                raise
            if error.needed > MAX_PICKLE_BYTES:
                raise file.error(f"holds a pickle of over {MAX_PICKLE_BYTES} bytes") from None
            window = max(8 * window, error.needed)


def _parse_legacy(file: OpenFile, data: bytes) -> tuple[int, Unpickled, object]:
    magic = unpickle(data, str(file.path))
    if magic.value != _LEGACY_MAGIC:
        raise file.error(
            "is a pickle that torch.save did not write",
            why="it does not start with PyTorch's magic number",
            hint="only checkpoints written by torch.save are read",
        )
    version = unpickle(data, str(file.path), start=magic.end)
    system = unpickle(data, str(file.path), start=version.end)
    if version.value != _LEGACY_VERSION or not isinstance(system.value, dict):
        raise file.error("is of a legacy version that is not known")
    if system.value.get("little_endian") is not True:
        raise file.error("is big-endian", hint="load it with PyTorch and save it again")
    content = unpickle(data, str(file.path), start=system.end)
    keys = unpickle(data, str(file.path), start=content.end)
    return keys.end, content, keys.value


def _file_index(
    file: OpenFile, tensors: dict[str, TensorView], places: dict[str, Extent], notes: list[str]
) -> FileIndex:
    """Return the index of `tensors`, whose storages lie at `places`."""
    infos = [_tensor_info(file, name, tensor, places) for name, tensor in tensors.items()]
    notes += _notes_on_views(infos, tensors, places)
    infos.sort(key=lambda info: info.extents[0].offset)
    return FileIndex(file.path, tuple(infos), {}, tuple(notes))


def _tensor_info(file: OpenFile, name: str, tensor: TensorView, places: dict[str, Extent]) -> TensorInfo:
    """Return where a tensor lies; CorruptError when its view leaves its storage."""
    dtype = DTYPE_OF_TORCH[tensor.dtype]
    item, storage, shape, strides = item_bytes(dtype), tensor.storage, tensor.shape, tensor.strides
    place = places[storage.key]
    count = prod(shape)
    if not count:
        return TensorInfo(name, shape, dtype, file.path, (Extent(place.offset, 0),))
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    start = storage.start * storage.item_bytes + tensor.offset * item
    if start + span * item > storage.stop * storage.item_bytes or count * item > MAX_COUNT:
        raise file.error(f"holds tensor {shown(name)} of shape {shape}, which reaches past the end of its storage")
    kept = None if _is_contiguous(shape, strides) else strides
    return TensorInfo(name, shape, dtype, file.path, (Extent(place.offset + start, span * item),), kept)


def _is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Say whether the elements lie in C order without gaps; the stride of an axis of size 1 is never used."""
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1:
            if stride != expected:
                return False
            expected *= n
    return True


def _notes_on_views(infos: list[TensorInfo], tensors: dict[str, TensorView], places: dict[str, Extent]) -> list[str]:
    """Tell of storages that hold more than their tensors, and of tensors that hold more than their storage."""
    used: dict[str, set[Extent]] = {}
    for info in infos:
        used.setdefault(tensors[info.name].storage.key, set()).add(info.extents[0])
    spare = {key: places[key].size - sum(extent.size for extent in extents) for key, extents in used.items()}
    wasteful = sum(spare[tensors[info.name].storage.key] > 0 for info in infos)
    repeated = sum(info.num_bytes > info.extents[0].size for info in infos)
    notes = []
    if wasteful:
        idle = sum(size for size in spare.values() if size > 0)
        notes.append(f"{wasteful} tensors keep a storage larger than themselves ({idle} bytes belong to no tensor)")
    if repeated:
        notes.append(f"{repeated} tensors are expanded views, which hold more elements than the file")
    return notes

"""The safetensors format: an 8-byte header length, a JSON header, then the tensors' bytes.

Reference: https://huggingface.co/docs/safetensors, section "Format". The reader here is stricter than the library:
a name or key that occurs twice is refused. `read_index` reads the header only; `lay_out` says where a new file's
bytes go. What does not live here: the header's JSON (`safetensors_header.py`), index files and folders (`folder.py`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import accumulate
from json.encoder import encode_basestring as quote
from pathlib import Path
from typing import Any

from ckptkit.errors import CorruptError, InternalError, UsageError
from ckptkit.formats import files
from ckptkit.formats.base import FileIndex, OutputFile
from ckptkit.formats.safetensors_header import AGAIN, METADATA, Header, parse_header
from ckptkit.types import DTYPES, TensorInfo, TensorSpec, new_extent

HEADER_LIMIT = 100_000_000  # bytes; the library's own limit
ALIGNMENT = 8
_COMPACT: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False}


def read_index(file: Path) -> FileIndex:
    """Return the tensors of a safetensors file, in file order, and its metadata.

    Raises CorruptError for anything that the format does not allow and for a dtype that ckptkit does not know.
    """
    raw, size = _read_header(file)
    with files.paused_gc():
        header = parse_header(file, raw)
        tensors = _tensors(file, header, 8 + len(raw), size)
    extra = header.unknown_keys
    notes = (f"`{file.name}`: unknown keys in its tensor entries: {', '.join(extra)}",) if extra else ()
    return FileIndex(file, tensors, header.metadata, notes)


def lay_out(name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> OutputFile:
    """Return the layout of a new safetensors file called `name`.

    Tensors go in order of falling element width, then as given, so that each is aligned to its elements. Raises
    UsageError for a tensor that the format cannot hold.
    """
    ordered = sorted(specs, key=lambda spec: -DTYPES[spec.dtype].bits) if _differ_in_width(specs) else specs
    kinds = {(spec.dtype, spec.shape): spec for spec in ordered}
    heads = {kind: (_entry_head(spec), spec.num_bytes) for kind, spec in kinds.items()}
    names = [spec.name for spec in ordered]
    common = [heads[spec.dtype, spec.shape] for spec in ordered]
    sizes = [size for _, size in common]
    *begins, total = accumulate(sizes, initial=0)
    ends = [*map(str, (*begins, total))]  # as text; the end of a tensor is where the next one begins
    entries = [f'"{METADATA}":{json.dumps(dict(metadata), **_COMPACT)}'] if metadata else []
    entries += [
        f"{name}:{{{text}[{begin},{end}]}}"
        for name, (text, _), begin, end in zip(map(quote, names), common, ends, ends[1:], strict=False)
    ]
    head = ("{" + ",".join(entries) + "}").encode()
    head += b" " * (-len(head) % ALIGNMENT)
    start = 8 + len(head)
    places = map(new_extent, zip([start + begin for begin in begins], sizes, strict=True))
    extents = dict(zip(names, zip(places, strict=True), strict=True))
    _check_writable(name, specs, extents.keys())
    if len(head) > HEADER_LIMIT:
        raise UsageError(
            f"the header of `{name}` would have {len(head)} bytes; the format allows {HEADER_LIMIT}",
            hint="use smaller shards",
        )
    return OutputFile(name, start + total, ((0, len(head).to_bytes(8, "little") + head),), extents)


def _differ_in_width(specs: Sequence[TensorSpec]) -> bool:
    return len({DTYPES[dtype].bits for dtype in {spec.dtype for spec in specs}}) > 1


def _entry_head(spec: TensorSpec) -> str:
    """Return what the entries of all tensors of one dtype and shape have in common."""
    return f'"dtype":"{spec.dtype}","shape":{json.dumps(spec.shape, **_COMPACT)},"data_offsets":'


def _check_writable(name: str, specs: Sequence[TensorSpec], names: Set[str]) -> None:
    """Raise UsageError for a tensor that cannot go into the file `name`; `names` are those of all of them."""
    texts = [spec.name for spec in specs if spec.dtype == "STR"]
    if texts:
        raise UsageError(
            f"`{name}` cannot hold the text value `{texts[0]}`: safetensors has no text tensors",
            hint="write a .ckpt file, or drop the value",
        )
    if METADATA in names:
        raise UsageError(f"`{METADATA}` is not allowed as the name of a tensor in a safetensors file")
    if len(names) < len(specs):
        counts = Counter(spec.name for spec in specs)
        raise InternalError(f"two tensors named `{max(counts, key=counts.__getitem__)}` for `{name}`")


def _read_header(file: Path) -> tuple[bytes, int]:
    """Return the header's bytes and the file's size; reads nothing before the length is known to be sound."""
    with files.opened(file) as descriptor:
        size = files.size_of(descriptor)
        head = files.pread(file, descriptor, min(files.HEAD_BYTES, size), 0)
        files.refuse_empty_or_pointer(file, head)
        if size < 8:
            raise CorruptError(f"`{file}` is cut: it has {size} bytes; the header's length alone takes 8", hint=AGAIN)
        length = int.from_bytes(head[:8], "little")
        if length > HEADER_LIMIT or (length + 8 > size and head[8:9] != b"{"):
            raise _not_safetensors(file, head, length, size)
        if length + 8 > size:
            raise CorruptError(
                f"`{file}` is cut: its header ends at byte {length + 8}; the file has {size} bytes",
                hint=AGAIN,
            )
        return files.pread(file, descriptor, length, 8), size


def _not_safetensors(file: Path, head: bytes, length: int, size: int) -> CorruptError:
    looks = files.describe(head) if head[8:9] != b"{" else ""
    return CorruptError(
        f"`{file}` is not a safetensors file: its first 8 bytes state a header of {length} bytes, "
        f"and the file has {size} (headers may have {HEADER_LIMIT})",
        why=f"it looks like {looks}" if looks else "",
        hint=AGAIN,
    )


def _tensors(file: Path, header: Header, start: int, size: int) -> tuple[TensorInfo, ...]:
    """Return the tensors in file order; `start` is where the data begins, `size` is the file's."""
    kinds, begins = header.kinds, header.begins
    tensors = [
        TensorInfo(name, shape, dtype, file, (new_extent((start + begin, count)),))
        for name, (dtype, shape, count), begin in zip(header.names, kinds, begins, strict=True)
    ]
    *in_order, end = accumulate([count for _, _, count in kinds], initial=0)
    if begins != in_order or start + end != size:
        tensors.sort(key=lambda tensor: tensor.extents[0])
        _check_ranges(file, tensors, start, size)
    return tuple(tensors)


def _check_ranges(file: Path, tensors: Sequence[TensorInfo], start: int, size: int) -> None:
    """Raise CorruptError unless the tensors, sorted by offset, fill the data from `start` to `size` exactly once."""
    ends = [sum(tensor.extents[0]) for tensor in tensors]
    needed = max(ends, default=start)
    if needed > size:
        raise CorruptError(
            f"`{file}` is cut: its header needs {needed} bytes; the file has {size}",
            items=[tensor.name for tensor, end in zip(tensors, ends, strict=True) if end > size],
            why="the tensors at the end are missing in part or whole",
            hint=AGAIN,
        )
    position, previous = start, "the header"
    for tensor, end in zip(tensors, ends, strict=True):
        begin = tensor.extents[0].offset
        if begin != position:
            how = "overlaps" if begin < position else "leaves unused bytes after"
            raise CorruptError(
                f"tensor `{tensor.name}` of `{file}` starts at byte {begin} and {how} `{previous}`, "
                f"which ends at {position}",
                hint=AGAIN,
            )
        position, previous = end, tensor.name
    if position < size:
        raise CorruptError(
            f"`{file}` has {size - position} bytes after its last tensor; its header needs {position} bytes, "
            f"and the file has {size}",
            hint=AGAIN,
        )

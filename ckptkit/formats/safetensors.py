"""The safetensors format: an 8-byte header length, a JSON header, then the tensors' bytes.

Reference: https://huggingface.co/docs/safetensors, section "Format". The reader here is stricter than the library:
a name or key that occurs twice is refused. `read_index` reads the header only; `lay_out` says where a new file's
bytes go. What does not live here: index files and folders (`folder.py`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from json.encoder import encode_basestring as quote
from math import prod
from pathlib import Path
from typing import Any

from ckptkit.errors import CorruptError, InternalError, UsageError
from ckptkit.formats import files
from ckptkit.formats.base import FileIndex, OutputFile
from ckptkit.types import DTYPES, Extent, Shape, TensorInfo, TensorSpec, item_bytes

HEADER_LIMIT = 100_000_000  # bytes; the library's own limit
ALIGNMENT = 8
METADATA = "__metadata__"
AGAIN = "download or save the file again"

_WIDTHS = {name: dtype.bits // 8 for name, dtype in DTYPES.items() if name != "STR"}
_PACKED = ("F4", "F6_E2M3", "F6_E3M2")
_COMPACT: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False}
_ENTRY_KEYS = frozenset(("dtype", "shape", "data_offsets"))


def read_index(file: Path) -> FileIndex:
    """Return the tensors of a safetensors file, in file order, and its metadata.

    Raises CorruptError for anything that the format does not allow and for a dtype that ckptkit does not know.
    """
    raw, size = _read_header(file)
    with files.paused_gc():
        header, extra = _parse(file, raw)
        metadata = _metadata(file, header.pop(METADATA, None))
        tensors = _tensors(file, header, 8 + len(raw), size)
    notes = (f"`{file.name}`: unknown keys in its tensor entries: {', '.join(extra)}",) if extra else ()
    return FileIndex(file, tensors, metadata, notes)


def lay_out(name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> OutputFile:
    """Return the layout of a new safetensors file called `name`.

    Tensors go in order of falling element width, then as given, so that each is aligned to its elements. Raises
    UsageError for a tensor that the format cannot hold.
    """
    ordered = sorted(specs, key=lambda spec: -DTYPES[spec.dtype].bits)
    entries = [f'"{METADATA}":{json.dumps(dict(metadata), **_COMPACT)}'] if metadata else []
    kinds: dict[tuple[str, Shape], tuple[str, int]] = {}  # what many entries have in common: text, and bytes
    spans = []
    position = 0
    for spec in ordered:
        kind = kinds.get((spec.dtype, spec.shape))
        if kind is None:
            text = f'"dtype":"{spec.dtype}","shape":{json.dumps(spec.shape, **_COMPACT)}'
            kind = kinds[spec.dtype, spec.shape] = text, spec.num_bytes
        text, size = kind
        entries.append(f'{quote(spec.name)}:{{{text},"data_offsets":[{position},{position + size}]}}')
        spans.append((position, size))
        position += size
    head = ("{" + ",".join(entries) + "}").encode()
    head += b" " * (-len(head) % ALIGNMENT)
    start = 8 + len(head)
    extents = {spec.name: (Extent(start + begin, size),) for spec, (begin, size) in zip(ordered, spans, strict=True)}
    _check_writable(name, specs, extents.keys())
    if len(head) > HEADER_LIMIT:
        raise UsageError(
            f"the header of `{name}` would have {len(head)} bytes; the format allows {HEADER_LIMIT}",
            hint="use smaller shards",
        )
    return OutputFile(name, start + position, ((0, len(head).to_bytes(8, "little") + head),), extents)


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


def _parse(file: Path, raw: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the header as a dict, and the unknown keys of its tensor entries; raises CorruptError."""
    try:
        header = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"the header of `{file}` is not valid JSON: {error}", hint=AGAIN) from error
    if not isinstance(header, dict):
        raise CorruptError(f"the header of `{file}` is not a JSON object", hint=AGAIN)
    if b"\\" not in raw and raw.count(b'"') == 2 * _num_strings(header):
        return header, ()
    return header, _parse_with_care(file, raw, header)


def _num_strings(header: Mapping[str, Any]) -> int:
    """Return the number of JSON strings in a header without duplicates or unknown keys.

    A name has 4 more strings in its entry: three keys and the dtype. Without backslashes every quote in the text
    delimits a string; so if the text has no more than this, nothing was dropped in parsing it.
    """
    total = 5 * len(header)
    if METADATA in header:
        metadata = header[METADATA]
        total += 2 * len(metadata) - 4 if isinstance(metadata, dict) else -4
    return total


def _parse_with_care(file: Path, raw: bytes, header: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse duplicate keys and names that are no text; return the unknown keys of tensor entries."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
            raise CorruptError(
                f"duplicate keys in the header of `{file}`",
                items=sorted(set(twice)),
                why="one name would stand for two tensors",
                hint="save the file again with a writer that keeps names unique",
            )
        return result

    json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    extra: set[str] = set()
    for name, entry in header.items():
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CorruptError(f"a tensor name in `{file}` is not valid Unicode: {name!r}") from error
        if name != METADATA and isinstance(entry, dict):
            extra |= entry.keys() - _ENTRY_KEYS
    return tuple(sorted(extra))


def _metadata(file: Path, value: object) -> dict[str, str]:
    """Return the metadata; missing, null and {} are the same."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CorruptError(f"`{METADATA}` of `{file}` is not a JSON object", hint=AGAIN)
    odd = [f"{key} = {json.dumps(item)}" for key, item in value.items() if not isinstance(item, str)]
    if odd:
        raise CorruptError(
            f"`{METADATA}` of `{file}` holds values that are not text",
            items=odd,
            hint="save each as a string",
        )
    return value


def _tensors(file: Path, header: Mapping[str, Any], start: int, size: int) -> tuple[TensorInfo, ...]:
    """Return the tensors in file order; `start` is where the data begins, `size` is the file's."""
    tensors = []
    position = 0
    in_order = True
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            count = _WIDTHS[dtype]
            for length in shape:
                if type(length) is not int or length < 0:
                    raise ValueError
                count *= length
            if type(shape) is not list or type(begin) is not int or type(end) is not int:
                raise ValueError
            if begin < 0 or end - begin != count:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise _bad_entry(file, name, entry) from None
        in_order &= begin == position
        position = end
        tensors.append(TensorInfo(name, tuple(shape), dtype, file, (Extent(start + begin, count),)))
    if not in_order or start + position != size:
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


def _bad_entry(file: Path, name: str, entry: object) -> CorruptError:
    """Return the error for an entry of the header that is not sound."""
    where = f"tensor `{name}` of `{file}`"
    if not isinstance(entry, dict) or not entry.keys() >= _ENTRY_KEYS:
        return CorruptError(f"{where} needs an entry with `dtype`, `shape` and `data_offsets`", hint=AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        return CorruptError(f"{where} has a dtype that is not text: {json.dumps(dtype)}", hint=AGAIN)
    if dtype not in _WIDTHS:
        packed = dtype in _PACKED
        return CorruptError(
            f"{where} has dtype `{dtype}`, which is not supported",
            why="its elements are packed, several in a byte" if packed else "",
            hint="dequantise the checkpoint first" if packed else f"supported: {', '.join(_WIDTHS)}",
        )
    if not _are_sizes(shape):
        return CorruptError(f"{where} has shape {json.dumps(shape)}; its lengths must be ints >= 0", hint=AGAIN)
    if not _are_sizes(offsets) or len(offsets) != 2:
        return CorruptError(f"{where} has data_offsets {json.dumps(offsets)}; they must be two ints >= 0", hint=AGAIN)
    needed = prod(shape) * item_bytes(dtype)
    return CorruptError(
        f"{where} takes bytes {offsets[0]} to {offsets[1]}, {offsets[1] - offsets[0]} in all; "
        f"{dtype} {shape} needs {needed}",
        hint=AGAIN,
    )


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)

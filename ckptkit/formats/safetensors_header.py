"""The header of a safetensors file: JSON text -> the tensors' names, dtypes, shapes and offsets, each checked.

A header as the library writes it (an entry's keys in its order, no blanks, no escapes) is cut by one pattern, which
takes half as long as a JSON parser and its objects. Any other header, and any with a fault, goes the long way, which
alone raises: what the pattern takes, both ways read alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import sub
from pathlib import Path
from typing import Any

from ckptkit.errors import CorruptError
from ckptkit.types import DTYPES, Shape, item_bytes

METADATA = "__metadata__"
AGAIN = "download or save the file again"

_WIDTHS = {name: dtype.bits // 8 for name, dtype in DTYPES.items() if name != "STR"}
_PACKED = ("F4", "F6_E2M3", "F6_E3M2")
_ENTRY_KEYS = frozenset(("dtype", "shape", "data_offsets"))
_INT = "(0|[1-9][0-9]*)"
_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{("dtype":"[A-Z0-9_]+","shape":\[[0-9,]*\]),"data_offsets":\[' + f"{_INT},{_INT}" + r"\]\}"
)

Kind = tuple[str, Shape, int]  # dtype, shape, bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The entries of a header, in its order: `begins` are offsets in the data. `unknown_keys` are those in entries."""

    names: list[str]
    kinds: list[Kind]
    begins: list[int]
    metadata: Mapping[str, str]
    unknown_keys: tuple[str, ...] = ()


def parse_header(file: Path, raw: bytes) -> Header:
    """Return the header of `file`, which is `raw`; CorruptError for anything that the format does not allow.

    Whether the tensors fill the data is not looked at here.
    """
    try:
        text = raw.decode("utf-8")
    except ValueError as error:
        raise _not_json(file, error) from error
    return _plain(file, text) or _any(file, text)


def _plain(file: Path, text: str) -> Header | None:
    """Return a header that is as the library writes it; None for any other, sound or not."""
    if '":{"dtype":' not in text:  # a header with blanks is told from its text, before it is searched for entries
        return None
    head, *cut = _ENTRY.split(text)
    names, kinds, begins, ends, gaps = (cut[number::5] for number in range(5))
    if not names or gaps.pop().rstrip(" ") != "}" or not {","}.issuperset(gaps):
        return None
    if len({METADATA, *names}) <= len(names):
        return None
    try:
        first = json.loads(head.removesuffix(",") + "}")
        known = {kind: _kind(**json.loads(f"{{{kind}}}")) for kind in set(kinds)}
        starts, stops = [*map(int, begins)], [*map(int, ends)]
    except (ValueError, KeyError, RecursionError):
        return None
    if head.endswith(",") != (first.keys() == {METADATA}) or not _holds_all(head, first):
        return None
    found = [known[kind] for kind in kinds]
    if [size for _, _, size in found] != [*map(sub, stops, starts)]:
        return None
    return Header(names, found, starts, _metadata(file, first.get(METADATA)))


def _kind(dtype: str, shape: list[int]) -> Kind:
    return dtype, tuple(shape), _WIDTHS[dtype] * prod(shape)


def _any(file: Path, text: str) -> Header:
    """Return any header; raises CorruptError."""
    header, unknown = _parse(file, text)
    metadata = _metadata(file, header.pop(METADATA, None))
    kinds, begins = [], []
    for name, entry in header.items():
        try:
            dtype, lengths, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if not _are_sizes(lengths) or not _are_sizes([begin, end]):
                raise ValueError
            kind = _kind(dtype, lengths)
            if end - begin != kind[2]:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise _bad_entry(file, name, entry) from None
        kinds.append(kind)
        begins.append(begin)
    return Header(list(header), kinds, begins, metadata, unknown)


def _parse(file: Path, text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the header as a dict, and the unknown keys of its tensor entries; raises CorruptError."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_json(file, error) from error
    if not isinstance(header, dict):
        raise CorruptError(f"the header of `{file}` is not a JSON object", hint=AGAIN)
    if _holds_all(text, header):
        return header, ()
    return header, _parse_with_care(file, text, header)


def _not_json(file: Path, error: Exception) -> CorruptError:
    return CorruptError(f"the header of `{file}` is not valid JSON: {error}", hint=AGAIN)


def _holds_all(text: str, header: Mapping[str, Any]) -> bool:
    """Say whether `header` holds all that stands in `text`: no key was dropped as a duplicate, none is unknown."""
    return "\\" not in text and text.count('"') == 2 * _num_strings(header)


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


def _parse_with_care(file: Path, text: str, header: Mapping[str, Any]) -> tuple[str, ...]:
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

    json.loads(text, object_pairs_hook=unique)
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

"""Files of JSON lines: one object a line, each with its number, counted from 1, which every error names.

A line is read when it is asked for. What does not live here: what an object means; files that are written a line at a
time, whose last line may be torn (`journal.py`, the log of a run).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CorruptError, UsageError
from ckptkit.formats import files

_BOM = b"\xef\xbb\xbf"
_HINT = 'a line is `{"text": ...}`, `{"prompt": ..., "response": ...}` or `{"input_ids": [...]}`'
_OTHER_KINDS = (
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
    (b"\x1f\x8b", "compressed with gzip", "decompress it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it first"),
    (b"PK\x03\x04", "a zip archive", "take the file out of it first"),
    (b"PAR1", "a Parquet file", "save it as JSONL: one JSON object a line"),
    (b"[", "one JSON list, not lines", "write each of its objects on a line of its own"),
)


@dataclass(slots=True)
class Oddities:
    """What was odd about a file, and handled: filled while its lines are read."""

    blank: int = 0
    crlf: int = 0
    bom: bool = False

    def notes(self, file: Path) -> list[str]:
        """Return a line for each kind."""
        found = []
        if self.bom:
            found.append(f"`{file}` starts with a byte order mark, which was passed over")
        if self.crlf:
            found.append(f"`{file}` has lines that end as Windows does, which was passed over")
        if self.blank:
            found.append(f"`{file}` has {self.blank} blank lines, which were passed over")
        return found


def read_objects(
    file: Path, oddities: Oddities, *, option: str, wanted: str, longest: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line that is not blank.

    `option` is where the user named the file, `wanted` says what it should be, and `longest` is how many bytes a line
    may have: a file without line breaks must not fill the memory. UsageError when it is no regular file, or of another
    kind; CorruptError when it is empty, and for a line that is no JSON object.
    """
    with open(files.regular_file(file, option), "rb") as stream:
        head = stream.read(files.HEAD_BYTES)
        files.refuse_empty_or_pointer(file, head)
        _refuse_other_kinds(file, head, wanted)
        stream.seek(0)
        for number in range(1, 1 << 62):
            raw = stream.readline(longest + 1)
            if not raw:
                return
            if len(raw) > longest:
                raise damaged(file, number, f"is longer than {longest >> 20} MiB")
            if number == 1 and raw.startswith(_BOM):
                oddities.bom, raw = True, raw.removeprefix(_BOM)
            oddities.crlf += raw.endswith(b"\r\n")
            if raw.strip():
                yield number, _object(file, number, raw)
            else:
                oddities.blank += 1


def _refuse_other_kinds(file: Path, head: bytes, wanted: str) -> None:
    for magic, what, hint in _OTHER_KINDS:
        if head.lstrip(_BOM + b" \t\r\n").startswith(magic):
            raise UsageError(f"`{file}` is {what}, and {wanted}", hint=hint)


class _TwiceError(Exception):
    """A key that an object has twice: which value counts would be a guess."""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(next(key for key in keys if keys.count(key) > 1))
    return found


def _object(file: Path, number: int, raw: bytes) -> dict[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8"), object_pairs_hook=_object_of)
    except _TwiceError as error:
        raise damaged(file, number, f"has the key `{error}` twice") from None
    except (ValueError, RecursionError) as error:
        raise damaged(file, number, f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise damaged(file, number, "is not a JSON object")
    return row


def damaged(file: Path, number: int, what: str) -> CorruptError:
    """Return the error for a line that cannot be used."""
    return CorruptError(f"line {number} of `{file}` {what}", hint=_HINT)


def no_lines(file: Path) -> UsageError:
    """Return the error for a file whose lines are all blank."""
    return UsageError(f"`{file}` has no lines", hint='write one such as `{"text": "A sentence."}`')

"""Lines of a JSONL file: what kind each is, and its values, with the line's number in every error.

A kind is told by keys: `text`; `prompt` and `response`; `input_ids`, perhaps with `loss_mask` or `labels`. What does
not live here: making tokens (`tokenizing.py`), checking ids (`documents.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptkitError, CorruptError, UsageError
from ckptkit.formats import files
from ckptkit.train.documents import DataSettings

TEXT, PROMPT, IDS = "text", "prompt", "ids"
AUTO = "auto"
_LONGEST_LINE = 64 << 20  # bytes: a file without line breaks must not fill the memory
_HINT = 'a line is `{"text": ...}`, `{"prompt": ..., "response": ...}` or `{"input_ids": [...]}`'
_NO_TEXT = (
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
    (b"\x1f\x8b", "compressed with gzip", "decompress it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it first"),
    (b"PK\x03\x04", "a zip archive", "take the file out of it first"),
    (b"PAR1", "a Parquet file", "save it as JSONL: one JSON object a line"),
    (b"[", "one JSON list, not lines", "write each of its objects on a line of its own"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """Line `number` of a file, counted from 1, and the JSON object that it holds."""

    number: int
    row: dict[str, Any]


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


def read_lines(file: Path, oddities: Oddities, option: str) -> Iterator[Line]:
    """Yield the lines of a file that are not blank; `option` is where the user named it.

    UsageError when it is no regular file, or of another kind; CorruptError for a line that is no JSON object.
    """
    with open(files.regular_file(file, option), "rb") as stream:
        head = stream.read(files.HEAD_BYTES)
        files.refuse_empty_or_pointer(file, head)
        _refuse_other_kinds(file, head)
        stream.seek(0)
        for number in range(1, 1 << 62):
            raw = stream.readline(_LONGEST_LINE + 1)
            if not raw:
                return
            if len(raw) > _LONGEST_LINE:
                raise damaged(file, number, f"is longer than {_LONGEST_LINE >> 20} MiB")
            if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
                oddities.bom, raw = True, raw[3:]
            oddities.crlf += raw.endswith(b"\r\n")
            if raw.strip():
                yield Line(number, _object(file, number, raw))
            else:
                oddities.blank += 1


def _refuse_other_kinds(file: Path, head: bytes) -> None:
    for magic, what, hint in _NO_TEXT:
        if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(magic):
            raise UsageError(f"`{file}` is {what}, and a corpus is JSONL or MindRecord", hint=hint)


def _object(file: Path, number: int, raw: bytes) -> dict[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(file, number, f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise damaged(file, number, "is not a JSON object")
    return row


def kinds_of(line: Line, data: DataSettings) -> list[str]:
    """Return the kinds that a line could be, by its keys."""
    return [kind for kind in (TEXT, PROMPT, IDS) if all(key in line.row for key in keys_of(kind, data))]


def keys_of(kind: str, data: DataSettings) -> tuple[str, ...]:
    """Return the keys that a line of a kind must have."""
    return {TEXT: (data.text_key,), PROMPT: (data.prompt_key, data.response_key), IDS: (data.ids_key,)}[kind]


def kind_of(file: Path, line: Line, data: DataSettings, before: str | None) -> str:
    """Return the kind of a line, which must be that of the lines `before` it, if there are any, and `data.format`.

    UsageError for a line of no kind, of more than one without `data.format`, or of another than those before it.
    """
    found = kinds_of(line, data)
    if data.format != AUTO:
        if data.format in found:
            return data.format
        missing = [key for key in keys_of(data.format, data) if key not in line.row]
        raise _usage(file, line, f"has no `{missing[0]}`, and `data.format` is `{data.format}`")
    if not found:
        raise _usage(file, line, f"has neither {_wanted(data)}")
    if len(found) > 1:
        raise UsageError(
            f"line {line.number} of `{file}` could be read as {' or as '.join(f'`{kind}`' for kind in found)}",
            hint=f"say which: `data.format: {found[0]}`",
        )
    if before is not None and before != found[0]:
        raise UsageError(
            f"line {line.number} of `{file}` is of the kind `{found[0]}`, and those before it are `{before}`",
            why="a corpus is of one kind: what counts in the loss must not change unseen",
            hint="make two files of it, or set `data.format` where each line has the keys of one kind",
        )
    return found[0]


def text_of(file: Path, line: Line, key: str) -> str:
    """Return the text at a key; CorruptError when it is none, or is no Unicode."""
    text = line.row[key]
    if not isinstance(text, str):
        raise damaged(file, line.number, f"has a `{key}` that is no text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a character, as `"\ud83d"` of JSON
        raise damaged(file, line.number, f"has a `{key}` that is not Unicode: {error.reason}") from None
    return text


def _wanted(data: DataSettings) -> str:
    return f"`{data.text_key}`, nor `{data.prompt_key}` and `{data.response_key}`, nor `{data.ids_key}`"


def _usage(file: Path, line: Line, what: str) -> CkptkitError:
    return UsageError(
        f"line {line.number} of `{file}` {what}",
        items=[f"it has `{key}`" for key in line.row],
        hint="name its keys with `data.text_key`, `data.prompt_key` and `data.response_key`, or `data.ids_key`",
    )


def damaged(file: Path, number: int, what: str) -> CorruptError:
    """Return the error for a line that cannot be read."""
    return CorruptError(f"line {number} of `{file}` {what}", hint=_HINT)

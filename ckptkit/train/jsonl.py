"""Lines of a JSONL file: what kind each is, and its values, with the line's number in every error.

A kind is told by keys: `text`; `prompt` and `response`; `input_ids`, perhaps with `loss_mask` or `labels`. What does
not live here: reading lines (`formats/json_lines.py`), making tokens (`tokenizing.py`), checking ids (`documents.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptkitError, UsageError
from ckptkit.formats.json_lines import Oddities, damaged, read_objects
from ckptkit.train.documents import DataSettings

TEXT, PROMPT, IDS = "text", "prompt", "ids"
AUTO = "auto"
_LONGEST_LINE = 64 << 20  # bytes: a file without line breaks must not fill the memory


@dataclass(frozen=True, slots=True)
class Line:
    """Line `number` of a file, counted from 1, and the JSON object that it holds."""

    number: int
    row: dict[str, Any]


def read_lines(file: Path, oddities: Oddities, option: str) -> Iterator[Line]:
    """Yield the lines of a file that are not blank; `option` is where the user named it.

    UsageError when it is no regular file, or of another kind; CorruptError for a line that is no JSON object.
    """
    wanted = "a corpus is JSONL or MindRecord"
    for number, row in read_objects(file, oddities, option=option, wanted=wanted, longest=_LONGEST_LINE):
        yield Line(number, row)


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

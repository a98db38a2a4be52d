"""Text into tokens by the model's tokenizer.json: which special tokens a document has, and which count in the loss.

- What tokenizer.json puts before and after a text (often a start token) stays, once: where the text has it already, it
  is not put there again.
- `data.eos` ends a document with the end token, where it does not end with it already.
- Prompt and response are one text when tokens are made of it, as in the text that a user would write. A token counts
  in the loss when its last character is of the response, and so do the end token and all behind the response. Where a
  token reaches over the border, or where the prompt alone would have had other tokens, the line is counted
  (`Tokenized.joined`).

What does not live here: reading lines (`jsonl.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.formats import files
from ckptkit.formats.tokenizer import TOKENIZER
from ckptkit.formats.tokenizer import open_tokenizer as load
from ckptkit.train.documents import DataSettings

# tokenizer_config.json is what a model is trained and prompted with; config.json may name several, any of which ends it
_NAMED = ("tokenizer_config.json", "special_tokens_map.json")
_NUMBERED = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The ids of a document, and which count in the loss; `joined`: a token reaches over prompt and response."""

    ids: list[int]
    learned: list[bool]
    joined: bool = False


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer.json, read; `eos` is the end token of documents, None for none, and `eos_from` where it was found."""

    file: Path
    tokenizer: Any
    eos: int | None
    eos_from: str = ""

    def document(self, text: str, prompt: str = "") -> Tokenized:
        """Return the tokens of `prompt` and `text` as one document; those of the prompt do not count in the loss."""
        encoding = self.tokenizer.encode(prompt + text)
        before, after = _added(encoding.special_tokens_mask)
        ids = list(encoding.ids)
        core = ids[before : len(ids) - after]
        first = _first_of_response(encoding.offsets[before : len(ids) - after], len(prompt))
        joined = bool(prompt) and core[:first] != self.tokenizer.encode(prompt, add_special_tokens=False).ids
        start, end = ids[:before], ids[len(ids) - after :]
        if start and core[:before] == start:
            start = []
        if end and core[len(core) - after :] == end:
            end = []
        found = start + core + end
        if self.eos is not None and found[-1:] != [self.eos]:
            found.append(self.eos)
        masked = len(start) + first
        return Tokenized(found, [False] * masked + [True] * (len(found) - masked), joined)


def _added(special: list[int]) -> tuple[int, int]:
    """Return how many tokens tokenizer.json has put before a text and after it: the ones at both ends of the mask."""
    before = next((place for place, one in enumerate(special) if not one), len(special))
    after = next((place for place, one in enumerate(reversed(special[before:])) if not one), len(special) - before)
    return before, after


def _first_of_response(offsets: list[tuple[int, int]], border: int) -> int:
    """Return the first token that ends behind the prompt's `border` characters."""
    if not border:
        return 0
    return next((place for place, (_, end) in enumerate(offsets) if end > border), len(offsets))


def open_tokenizer(data: DataSettings, model_folder: Path) -> TextTokenizer:
    """Return the tokenizer of `data.tokenizer` (a file, or its folder), else that of the model's folder.

    UsageError when the file, the package `tokenizers` or, with `data.eos`, the end token is missing; CorruptError for a
    file that is no tokenizer.
    """
    file = data.tokenizer or model_folder / TOKENIZER
    file = file / TOKENIZER if file.is_dir() else file
    if not file.is_file():
        raise UsageError(
            f"no such file: `{file}`",
            why="the corpus is text, and tokens have to be made of it",
            hint="name the model's tokenizer.json with `data.tokenizer`, or give lines with `input_ids`",
        )
    tokenizer = load(file, asked_by="the corpus is text", extra="train")
    if not data.eos:
        return TextTokenizer(file, tokenizer, None)
    eos, where = _end_token(tokenizer, list(dict.fromkeys((file.parent, model_folder))))
    return TextTokenizer(file, tokenizer, eos, where)


def _end_token(tokenizer: Any, folders: list[Path]) -> tuple[int, str]:
    """Return the id of the end token and the name of the file that says so."""
    for file in (folder / name for folder in folders for name in _NAMED + _NUMBERED):
        if not file.is_file():
            continue
        for value in _named_ends(file):
            number = value if type(value) is int else tokenizer.token_to_id(value)
            if number is None:
                raise UsageError(
                    f"the end token `{value}` of `{file}` is no token of the tokenizer",
                    hint="use files of one model, or set `data.eos: false`",
                )
            return number, file.name
    raise UsageError(
        "no file says which token ends a document",
        items=[f"no end token in `{folder}`" for folder in folders],
        hint=f"put the model's `{_NAMED[0]}` or `{_NUMBERED[1]}` beside its tokenizer.json, or set `data.eos: false`",
    )


def _named_ends(file: Path) -> Iterator[int | str]:
    """Yield the end tokens that a file names: the text of one, its number, or several numbers."""
    found = files.read_json_object(file)
    value = found.get("eos_token" if file.name in _NAMED else "eos_token_id")
    if isinstance(value, dict):
        value = value.get("content")
    values = value if isinstance(value, list) else [value]
    wanted = str if file.name in _NAMED else int
    yield from (one for one in values if type(one) is wanted)

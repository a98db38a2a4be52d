"""A model's tokenizer.json, as the package `tokenizers` reads it. What is made of a text: there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptkit.errors import CorruptError, UsageError

TOKENIZER = "tokenizer.json"


def open_tokenizer(file: Path, *, asked_by: str, extra: str) -> Any:
    """Return the tokenizer of `file`, which neither cuts nor fills.

    UsageError where the package is not installed, which names who asked and the extra of ours to install;
    CorruptError for a file that it cannot read.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError(
            f"{asked_by}, and the package `tokenizers` is not installed",
            hint=f'`pip install "ckptkit-mindspore[{extra}]"`, or give lines with `input_ids`',
        ) from None
    try:
        made: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - it raises nothing narrower
        raise CorruptError(
            f"`{file}` cannot be read: {str(error).splitlines()[0]}", hint="download or save it again"
        ) from None
    made.no_padding()  # a tokenizer.json may ask for either, and would cut documents, or fill them, unseen
    made.no_truncation()
    return made

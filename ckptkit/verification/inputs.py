"""The token sequences that both sides run: several lengths, real text, far positions, both sides of a window.

Everything follows from config.json and the tokenizer, so two machines make the same inputs; a dump carries its own
all the same. What does not live here: running them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.errors import CorruptError, UsageError
from ckptkit.formats import files
from ckptkit.formats.tokenizer import open_tokenizer
from ckptkit.verification.runners.job import Input

INPUTS = "inputs.json"
MAX_TOKENS = 512
TEXT = (
    "The weights of a model are numbers, and a number has one right place. In 1969, 12.5% of 800 engineers said: "
    '"Check it twice!" - "Why?" she asked; because nobody sees a wrong one until the loss does.\n'
    "def add(a, b):\n    return a + b  # 3 + 4 == 7\n"
    "\u4e2d\u6587, \u65e5\u672c\u8a9e, \u0440\u0443\u0441\u0441\u043a\u0438\u0439, caf\u00e9 \U0001f642"
)
_LENGTHS = (1, 7, 64)
_SPREAD = 24  # tokens of the input whose positions lie far apart
_NEAR = 4  # of them at the far end, side by side


def make_inputs(
    config: Mapping[str, Any], folder: Path | None, *, windows: Sequence[int], max_tokens: int = MAX_TOKENS
) -> tuple[list[Input], list[str]]:
    """Return the inputs for a model, none longer than `max_tokens` or than the model's positions, and notes.

    `folder` is where a tokenizer.json may lie. `windows` are the sizes of sliding windows, of which window - 1,
    window and window + 1 are tried. Seeded ids are drawn from the whole vocabulary.
    """
    vocab = _positive(config, "vocab_size")
    positions = _positive(config, "max_position_embeddings", 2048)
    most = min(max_tokens, positions)
    notes: list[str] = []
    inputs = [Input(f"ids-{n}", _ids(vocab, n)) for n in _LENGTHS if n <= most]
    text = _text(folder, vocab, most)
    if isinstance(text, str):
        notes.append(text)
    else:
        inputs.append(Input("text", text))
    for window in dict.fromkeys(windows):
        lengths = [n for n in (window - 1, window, window + 1) if 0 < n <= most]
        inputs += [Input(f"window {window}, ids-{n}", _ids(vocab, n)) for n in lengths]
        if window + 1 > most:
            notes.append(
                f"no input is longer than the sliding window of {window}: `--max-tokens {window + 1}` makes one"
                if window + 1 <= positions
                else f"the sliding window of {window} is longer than any sequence of this model"
            )
    original, reach = _scaled_positions(config, positions)
    if original is not None and original < most:
        longer = min(most, 2 * original + 1)
        inputs.append(Input(f"beyond {original} positions, ids-{longer}", _ids(vocab, longer)))
    inputs.append(_far(vocab, reach, most))
    return list({item.name: item for item in inputs}.values()), notes


def _ids(vocab: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng([20261130, count]).integers(0, vocab, count).tolist())


def _far(vocab: int, positions: int, most: int) -> Input:
    """Return an input of at most `most` tokens whose positions lie over all that the model has, so that every rotary
    frequency shows."""
    count = min(_SPREAD, positions, most)
    near = min(_NEAR, count - 1)
    start = np.linspace(0, positions - 1 - near, count - near).astype(int).tolist()
    places = sorted({*start, *range(positions - near, positions)})
    return Input(f"positions 0..{positions - 1}", _ids(vocab, len(places)), tuple(places))


def _text(folder: Path | None, vocab: int, most: int) -> tuple[int, ...] | str:
    """Return the ids of a text, or why there is none."""
    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.is_file():
        return "no tokenizer.json, so no real text was tried"
    try:
        ids = open_tokenizer(file, asked_by="a text would be tried", extra="verify").encode(TEXT).ids
    except (UsageError, CorruptError) as error:
        return f"no real text was tried: {error.what}"
    ids = [number for number in ids if number < vocab][:most]
    return tuple(ids) if ids else "the tokenizer makes nothing of a text, so no real text was tried"


def _scaled_positions(config: Mapping[str, Any], positions: int) -> tuple[int | None, int]:
    """Return the positions that a scaled model was first trained with (None: not scaled), and all that it has."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key)
        if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type", "default")) == "default":
            continue
        original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
        stretched = int(positions * factor) if isinstance(factor, int | float) and 1 < factor < 1e4 else positions
        if isinstance(original, int) and original > 0:
            return original, positions if original < positions else stretched
        return positions, stretched  # the model says what it was trained with, and reaches further
    return None, positions


def _positive(config: Mapping[str, Any], key: str, otherwise: int | None = None) -> int:
    number = config.get(key, otherwise)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UsageError(
            f"config.json has no usable `{key}`: {number!r}",
            why="without it no tokens can be made to run",
            hint="give the model's own config.json with `--config`",
        )
    return number


def write_inputs(inputs: Sequence[Input], folder: Path) -> None:
    """Write the inputs into a dump's folder."""
    rows = [{"name": item.name, "ids": item.ids, "positions": item.positions} for item in inputs]
    (folder / INPUTS).write_text(json.dumps({"schema": 1, "inputs": rows}))


def read_inputs(folder: Path) -> list[Input]:
    """Return the inputs of a dump; CorruptError when there are none."""
    found = files.read_json_object(folder / INPUTS) if (folder / INPUTS).is_file() else {}
    with suppress(KeyError, TypeError, ValueError):
        rows = found["inputs"]
        inputs = [
            Input(
                str(row["name"]),
                tuple(int(number) for number in row["ids"]),
                None if row["positions"] is None else tuple(int(number) for number in row["positions"]),
            )
            for row in rows
        ]
        if inputs and all(i.ids and (i.positions is None or len(i.positions) == len(i.ids)) for i in inputs):
            return inputs
    raise CorruptError(
        f"`{folder}` is no dump of a forward pass: it has no readable `{INPUTS}`",
        hint="make one with `ckptkit verify A --dump DIR`",
    )

"""The loss on a text: lines of a file become tokens, logits a loss, and the loss is held against what it must be.

A line of the file is a JSON object with `input_ids`, with `text`, or with `prompt` and `response`, which are joined.
What does not live here: running the networks (`forward.py`), statistics of weights (`statistics.py`).

Shapes: T tokens, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import fsum, isfinite, log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import UsageError
from ckptkit.formats.json_lines import Oddities, damaged, no_lines, read_objects
from ckptkit.formats.tokenizer import open_tokenizer
from ckptkit.verification.forward import Dump, Forward
from ckptkit.verification.runners.job import Floats, Input

MARGIN = 1.0  # nats below ln(V): a network that knows nothing is at ln(V) or above it, whatever the text
LINES = 8
HIGH = 2 / 3  # of ln(V): no verdict, but worth a look; a right SmolLM2-135M is at 0.3 on plain sentences
FEW_TOKENS = 64  # with fewer, chance decides much
_ROWS = 64  # positions at a time
_LONGEST_LINE = 16 << 20

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """Line `number` of a file, counted from 1: `ids`, or `text` that has to be tokenised."""

    number: int
    text: str
    ids: tuple[int, ...] | None = None


def read_lines(file: Path, most: int = LINES) -> list[Line]:
    """Return the first `most` lines of a file of JSON lines; empty ones are passed over.

    UsageError when there is no such file or no line in it, or it is of another kind; CorruptError, which names the
    line, for one that is damaged.
    """
    wanted = "the text of `--sanity` is JSONL"
    rows = read_objects(file, Oddities(), option="the text of `--sanity`", wanted=wanted, longest=_LONGEST_LINE)
    found = [_line(file, number, row) for number, row in islice(rows, most)]
    if not found:
        raise no_lines(file)
    return found


def _line(file: Path, number: int, row: Mapping[str, Any]) -> Line:
    if "input_ids" in row:
        ids = row["input_ids"]
        if not (isinstance(ids, list) and all(type(n) is int for n in ids)):
            raise damaged(file, number, "has `input_ids` that are no list of whole numbers")
        return Line(number, "", tuple(ids))
    keys = ("text",) if "text" in row else ("prompt", "response")
    parts = [row.get(key) for key in keys]
    if not all(isinstance(part, str) for part in parts):
        why = "has neither `text`, nor `prompt` and `response`, nor `input_ids`"
        raise damaged(file, number, "has a `text` that is no text" if "text" in row else why)
    return Line(number, "".join(str(part) for part in parts))


def make_text_inputs(
    file: Path, lines: Sequence[Line], tokenizer: Path | None, *, vocab: int, max_tokens: int
) -> tuple[list[Input], list[str]]:
    """Return an input for each line, at most `max_tokens` long, and notes; `tokenizer` is a tokenizer.json.

    UsageError when text has no tokenizer, and for ids outside the vocabulary; lines of one token have no next one,
    and are passed over with a note.
    """
    encode = None
    if any(line.ids is None for line in lines):
        encode = _encoder(file, tokenizer)
    inputs, notes, cut = [], [], 0
    for line in lines:
        ids = _ids(file, line, encode)
        odd = [number for number in ids if not 0 <= number < vocab]
        if odd:
            raise UsageError(
                f"line {line.number} of `{file}` has token {odd[0]}, and the vocabulary has {vocab}",
                why="these tokens are of another model's tokenizer",
                hint="use the tokenizer.json and the config.json of one model",
            )
        cut += len(ids) > max_tokens
        if len(ids[:max_tokens]) < 2:
            notes.append(f"line {line.number} has {len(ids)} tokens: none has a token after it, so it is passed over")
        else:
            inputs.append(Input(f"line {line.number}", ids[:max_tokens]))
    if not inputs:
        raise UsageError(f"no line of `{file}` has two tokens", hint="give sentences, or a larger `--max-tokens`")
    if cut:
        notes.append(f"{cut} lines are longer than {max_tokens} tokens (`--max-tokens`), and were cut there")
    return inputs, notes


def _ids(file: Path, line: Line, encode: Callable[[str], Sequence[int]] | None) -> tuple[int, ...]:
    if line.ids is not None:
        return line.ids
    assert encode is not None
    try:
        return tuple(encode(line.text))
    except (UnicodeEncodeError, TypeError) as error:  # half a character, as `"\ud83d"` of JSON
        raise damaged(file, line.number, f"has text that is not Unicode: {error}") from None


def _encoder(file: Path, tokenizer: Path | None) -> Callable[[str], Sequence[int]]:
    if tokenizer is None:
        raise UsageError(
            f"`{file}` has text, and there is no tokenizer.json to make tokens of it",
            hint="put it beside A, name its folder with `--config`, or give lines with `input_ids`",
        )
    made = open_tokenizer(tokenizer, asked_by=f"`{file}` has text", extra="verify")
    return lambda text: list(made.encode(text).ids)


def token_losses(logits_TV: Floats, ids: Sequence[int]) -> Doubles:
    """Return the cross-entropy, in nats, of every token but the first, (T - 1,): log(sum(exp(z))) - z[next token].

    In float64. Where a logit is NaN or inf, the loss is NaN.
    """
    found: Doubles = np.empty(len(ids) - 1)
    with np.errstate(invalid="ignore"):
        for start in range(0, len(found), _ROWS):
            rows = slice(start, min(start + _ROWS, len(found)))
            z_TV = np.asarray(logits_TV[rows], np.float64)
            shifted_TV = z_TV - z_TV.max(1, keepdims=True)  # exact where it matters, and exp cannot overflow
            next_T = shifted_TV[np.arange(len(z_TV)), list(ids[rows.start + 1 : rows.stop + 1])]
            found[rows] = np.log(np.exp(shifted_TV).sum(1)) - next_T
            found[rows][~np.isfinite(z_TV).all(1)] = np.nan
    return found


@dataclass(frozen=True, slots=True)
class LineLoss:
    """The mean loss of a line, in nats, over its `tokens` that have one before them."""

    name: str
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a side, line by line."""

    lines: tuple[LineLoss, ...]

    @property
    def tokens(self) -> int:
        return sum(line.tokens for line in self.lines)

    @property
    def mean(self) -> float:
        """The mean over all tokens of all lines."""
        return fsum(line.loss * line.tokens for line in self.lines) / self.tokens


def loss_of(dump: Dump) -> Loss | None:
    """Return the loss of what a side left behind; None when its parameters were not all loaded, so nothing ran."""
    if not dump.result.loaded:
        return None
    lines = []
    for number, item in enumerate(dump.inputs):
        found = token_losses(dump.logits(number), item.ids)
        lines.append(LineLoss(item.name, len(found), float(found.mean())))
    return Loss(tuple(lines))


def loss_bound(forward: Forward) -> float:
    """Return how far apart rounding may put the two sides' mean losses, in nats.

    The logits of an input may be off by d = bound * max |a|. A loss is log(sum(exp(z))) - z[i]; the first part changes
    by at most max |dz|, and so does the second: by 2 d in all, and the mean by the mean of that over the tokens.
    """
    rows = [(row.tokens - 1, 2 * row.bound * row.distance.largest) for row in forward.rows if row.distance]
    return fsum(count * most for count, most in rows) / max(1, sum(count for count, _ in rows))


def faults_of_loss(label: str, loss: Loss, vocab: int) -> Iterator[str]:
    """Yield what is wrong with a side's loss by itself."""
    if not isfinite(loss.mean):
        yield f"the loss of {label} is not finite"
    elif loss.mean > log(vocab) - MARGIN:
        yield (
            f"the loss of {label} is {loss.mean:.3f} nats, not {MARGIN:g} below ln({vocab}) = {log(vocab):.3f}:"
            " it is that of a model that knows nothing"
        )


def high_loss(loss: Loss, vocab: int) -> str:
    """Return what to say of a loss that is below the margin, and yet high for a trained network; or nothing."""
    part = loss.mean / log(vocab)
    return f"the loss is {part:.0%} of ln({vocab}), high for a trained network" if part > HIGH else ""


def faults_of_pair(a: Loss, b: Loss, forward: Forward) -> Iterator[str]:
    """Yield what is wrong with the losses of two sides, and with the logits that they come from."""
    gap, most = abs(a.mean - b.mean), loss_bound(forward)
    if isfinite(gap) and gap > most:
        yield f"the losses of A and B are {gap:.2e} nats apart, and rounding explains {most:.1e}"
    for key, (one, two) in forward.readings.items():
        yield f"{key} is {one} in A and {two} in B, as the networks read their config.json"
    for row in forward.rows:
        if row.why:
            yield f"the logits of {row.name}: {row.why}"

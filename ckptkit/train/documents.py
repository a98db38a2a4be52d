"""The tokens of a corpus: documents one after another in flat arrays, each token with its part in the loss.

A list of Python ints takes 8 bytes a token and more; this takes 5. What is checked here holds for every source: ids
within the embedding, masks as long as the ids. What does not live here: reading files (`jsonl.py`, `mindrecord.py`),
making tokens of text (`tokenizing.py`), rows (`packing.py`).

Shapes: N tokens of all documents, D documents, T tokens of one.
"""

# ruff: noqa: N815 - fields name their axes, as variables do

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ckptkit.errors import CkptkitError, CorruptError, UsageError
from ckptkit.train.arrays import Flags as Flags
from ckptkit.train.arrays import Ints as Ints
from ckptkit.train.arrays import Longs as Longs

IGNORED = -100  # the label of a token without loss, as transformers has it
_LARGEST = 2**31 - 1


class DataSettings(Protocol):
    """What a corpus needs to know of the section `data` of a configuration."""

    @property
    def path(self) -> Path: ...
    @property
    def format(self) -> str: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def packing(self) -> bool: ...
    @property
    def tokenizer(self) -> Path | None: ...
    @property
    def text_key(self) -> str: ...
    @property
    def prompt_key(self) -> str: ...
    @property
    def response_key(self) -> str: ...
    @property
    def ids_key(self) -> str: ...
    @property
    def eos(self) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Documents in the order of their file: document d has the tokens offsets_D1[d] to offsets_D1[d + 1].

    ids_N int32; learned_N bool: a token counts in the loss where the one before it predicts it; offsets_D1 int64.
    `empty` documents had no token, and `untaught` ones no token that could count: neither is here.
    """

    ids_N: Ints
    learned_N: Flags
    offsets_D1: Longs
    empty: int = 0
    untaught: int = 0

    def __len__(self) -> int:
        return len(self.offsets_D1) - 1

    def document(self, index: int) -> tuple[Ints, Flags]:
        """Return the ids and the learned tokens of one document, each (T,)."""
        tokens = slice(int(self.offsets_D1[index]), int(self.offsets_D1[index + 1]))
        return self.ids_N[tokens], self.learned_N[tokens]


class DocumentsBuilder:
    """Collect documents. `unit` is what one of them is in the file (`line`, `record`), `vocab` the embedding's rows."""

    def __init__(self, file: Path, unit: str, vocab: int) -> None:
        self._file, self._unit, self._vocab = file, unit, vocab
        self._ids, self._learned, self._offsets = array("i"), bytearray(), array("q", [0])
        self._empty = self._untaught = 0

    def add(self, number: int, ids: Ints | Longs | Sequence[int], learned: Flags | Sequence[bool]) -> None:
        """Add the document at `number` of the file, T ids and T flags; UsageError for an id that is no row."""
        ids_T = np.asarray(ids, np.int64)
        odd_T = (ids_T < 0) | (ids_T >= self._vocab)
        if odd_T.any():
            raise self._no_row(number, int(ids_T[odd_T][0]))
        learned_T = np.asarray(learned, np.bool_)
        if not ids_T.size:
            self._empty += 1
        elif not learned_T[1:].any():  # nothing predicts the first
            self._untaught += 1
        else:
            self._ids.frombytes(ids_T.astype(np.int32).tobytes())
            self._learned += learned_T.tobytes()
            self._offsets.append(len(self._ids))

    def skip_empty(self) -> None:
        """Count a document that has nothing in it."""
        self._empty += 1

    def finish(self) -> Documents:
        """Return what was added, read-only."""
        arrays = (
            np.frombuffer(self._ids, np.int32),
            np.frombuffer(self._learned, np.bool_),
            np.frombuffer(self._offsets, np.int64),
        )
        for values in arrays:
            values.flags.writeable = False
        return Documents(*arrays, empty=self._empty, untaught=self._untaught)

    def _no_row(self, number: int, token: int) -> UsageError:
        if token < 0:
            return UsageError(
                f"{self._unit} {number} of `{self._file}` has the token {token}, and ids start at 0",
                hint=f"{IGNORED} and its like belong into `labels`, not among the ids",
            )
        return UsageError(
            f"{self._unit} {number} of `{self._file}` has the token {token}, and the embedding has {self._vocab} rows",
            why="these tokens are of another model's tokenizer",
            hint="use the tokenizer of the model that is trained",
        )


def ids_document(where: str, row: Mapping[str, Any], ids_key: str) -> tuple[Ints | Longs, Flags]:
    """Return the ids and the learned tokens of a row that has ids, each (T,); `where` names it in errors.

    `loss_mask` (0 or 1 a token), or `labels` (the ids themselves, not moved by one, or -100), tell which count in the
    loss; without either, all do. Nothing is put behind the ids, `data.eos` or not.
    CorruptError for values that are none, and for an `attention_mask` with zeros.
    """
    ids_T = _whole_numbers(where, row[ids_key], ids_key)
    if "attention_mask" in row and not _as_long(where, row, "attention_mask", ids_T).all():
        raise _damaged(where, "has an `attention_mask` with zeros", "give the ids without their padding")
    if "loss_mask" in row and "labels" in row:
        raise _damaged(where, "has `loss_mask` and `labels`", "give one of them")
    if "loss_mask" in row:
        mask_T = _as_long(where, row, "loss_mask", ids_T)
        if not np.isin(mask_T, (0, 1)).all():
            raise _damaged(where, "has a `loss_mask` with other numbers than 0 and 1", "give 1 for a token with loss")
        return ids_T, mask_T == 1
    if "labels" not in row:
        return ids_T, np.ones(len(ids_T), np.bool_)
    labels_T = _as_long(where, row, "labels", ids_T)
    learned_T: Flags = labels_T != IGNORED
    if (labels_T != ids_T)[learned_T].any():
        hint = f"`labels` are not moved by one: each is the id at its own place, or {IGNORED}"
        raise _damaged(where, f"has `labels` that are neither its `{ids_key}` nor {IGNORED}", hint)
    return ids_T, learned_T


def _as_long(where: str, row: Mapping[str, Any], key: str, ids_T: Ints | Longs) -> Ints | Longs:
    values = _whole_numbers(where, row[key], key)
    if len(values) != len(ids_T):
        raise _damaged(where, f"has {len(ids_T)} ids and {len(values)} numbers in `{key}`", "give one for each id")
    return values


def _whole_numbers(where: str, values: Any, key: str) -> Ints | Longs:
    if isinstance(values, np.ndarray):
        if values.ndim == 1 and values.dtype in (np.int32, np.int64):
            return values
    elif isinstance(values, list) and all(type(n) is int for n in values):
        if all(-_LARGEST <= n <= _LARGEST for n in values):
            return np.array(values, np.int64)
        raise _damaged(where, f"has numbers in `{key}` that no 32 bits hold", "these are no ids of tokens")
    raise _damaged(where, f"has `{key}` that are no list of whole numbers", "give one flat list, such as `[1, 2, 3]`")


def _damaged(where: str, what: str, hint: str) -> CkptkitError:
    return CorruptError(f"{where} {what}", hint=hint)

"""The moment of training that a checkpoint is of: what it says of its step and epoch, for `common.json` of a result.

Each of these may say it: the folder of an iteration and its `common.json`; tensors that MindFormers and MindSpore save
beside the weights (`epoch_num`, `step_num`, `global_step`, `loss_scale`, `global_batch_size`); the names of the ranks'
files. What does not live here: reading the first and the last of these (`formats/`), and writing (`sharding.py`).
"""

from __future__ import annotations

import struct
from math import isfinite
from typing import Any

from ckptkit.commands.source import Source
from ckptkit.formats.files import listed, opened, pread
from ckptkit.formats.mindformers_folder import COMMON, COMMON_KEYS
from ckptkit.formats.mindformers_write import Saved
from ckptkit.types import TensorInfo

EPOCH, STEP, GLOBAL_STEP, BATCH_SIZE = "epoch_num", "step_num", "global_step", "global_batch_size"
_NUMBERS = {"I32": "<i", "I64": "<q", "F32": "<f", "F64": "<d"}


def moment(source: Source) -> tuple[Saved, list[str]]:
    """Return the moment of training that a source is of, and notes on what to settle before a run goes on from it.

    What `common.json` says comes first, then the tensors, then the names of the ranks' files, whose step counts from
    the start of the epoch. The iteration is that of the folder, else the step, as MindFormers names it. MindFormers
    counts epochs from 1, so of a known step and an unknown epoch the first is written: 0 would be -1 for a resumed run.
    The size of a batch is null where nothing says it, at which MindFormers fails: of 0 it would begin anew.
    """
    ranks = source.ranks
    iteration = ranks.iteration if ranks is not None else None
    number = iteration.number if iteration is not None else None
    epoch, step = (ranks.saved if ranks is not None and iteration is None else None) or (None, number)
    common = (iteration.common if iteration is not None else None) or {}
    told = {key: value for key, value in common.items() if value is not None}
    stored = {key: value for key in COMMON_KEYS if (value := _stored_number(source, key)) is not None}
    found = stored | told
    epoch = found.get(EPOCH, epoch)
    step = _first(found.get(STEP), found.get(GLOBAL_STEP), step, 0)
    counters = {EPOCH: _first(epoch, 1 if step else 0), STEP: step, GLOBAL_STEP: found.get(GLOBAL_STEP, step)}
    notes = _disagreements(told, stored)
    if step and epoch is None:
        notes.append(f"nothing says the epoch of step {step}: `{COMMON}` has {EPOCH} 1; set it before a run goes on")
    if found.get(BATCH_SIZE, 0) <= 0:
        notes.append(
            f"SRC says no {BATCH_SIZE}, by which MindFormers divides: set it in `{COMMON}` before a run goes on"
        )
    return Saved(int(_first(number, step)), {key: counters.get(key, found.get(key)) for key in COMMON_KEYS}), notes


def _first(*values: Any) -> Any:
    """Return the first value that is known; None when none is."""
    return next((value for value in values if value is not None), None)


def _disagreements(told: dict[str, Any], stored: dict[str, float]) -> list[str]:
    """Return a note on the counters that `common.json` and the tensors say differently."""
    odd = [
        f"{key}: {told[key]}, and the tensor {stored[key]}"
        for key in stored
        if told.get(key, stored[key]) != stored[key]
    ]
    return [f"`{COMMON}` of SRC, which is followed, and its tensors disagree in {listed(odd)}"] if odd else []


def _stored_number(source: Source, name: str) -> float | None:
    """Return the number in a tensor of one element; None when there is none, or it can be no such counter."""
    info = source.checkpoint.tensors.get(name)
    if info is not None and source.joined is not None:
        info = next(info for _, info in source.joined.parts_of(name))
    if info is None or info.num_elements != 1 or info.dtype not in _NUMBERS:
        return None
    number = _number_in(info)
    is_whole = isinstance(number, int)
    return number if isfinite(number) and number >= 0 and (is_whole or name == "loss_scale") else None


def _number_in(info: TensorInfo) -> float:
    with opened(info.file) as descriptor:
        data = b"".join(pread(info.file, descriptor, size, offset) for offset, size in info.extents)
    number: float = struct.unpack(_NUMBERS[info.dtype], data)[0]
    return number

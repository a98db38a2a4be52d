"""`state.json`: where a run stands after an update, all of it but the tensors; lies in each step folder.

    schema                 1
    step                   optimizer updates done; an fp16 overflow that was tried again counts once
    micro_step             micro-batches done, overflows and changes of the micro-batch's size included
    rows, batch_size       rows of the corpus, and of a global batch
    epoch, sample_counter  where the next row is: its epoch, and epoch * rows + its place there; follow from step, rows
                           and batch_size, and are checked against them
    moments_begun          the update after which the moments were zero: 0, but where they were lost
    slots                  fixed micro-batch slots of an update
    world_size             processes of the run
    mode                   "jit": the last bits of other modes differ
    scaler, adaptive       what these keep, or null
    seeds, versions        by name
    maths, config_hash     the keys of the config that alter the maths, and their digest
    corpus_fingerprint     of the rows, in their order
    best                   {"step", "loss", "held_out"} of the best evaluation, or null; the last tells of which set
    loss                   the training loss of this step, or null
    seal                   the xxh3-128 of all bytes before this last entry

No time and no host: two runs that do the same have the same bytes here. What does not live here: the tensors and their
digests (`step_files.py`), what a change of config means, and where rows lie in an epoch (`order.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ckptkit.errors import CorruptError, InternalError, UsageError
from ckptkit.formats.files import read_error
from ckptkit.formats.seal import is_sealed, sealed
from ckptkit.train.order import position_of, samples_before

STATE_FILE = "state.json"
SCHEMA = 1
_COUNTS = (
    "step", "epoch", "sample_counter", "rows", "batch_size", "micro_step", "moments_begun", "slots", "world_size",
)  # fmt: skip
_AT_LEAST_ONE = ("rows", "batch_size", "slots", "world_size")
_TEXTS = ("mode", "config_hash", "corpus_fingerprint")
_OBJECTS = ("seeds", "versions", "maths")
_OBJECTS_OR_NULL = ("scaler", "adaptive", "best")
_REMEDY = "restore the folder from a copy, or go on from another step"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The fields of `state.json`, but for schema and seal; see this module's docstring."""

    step: int
    epoch: int
    sample_counter: int
    rows: int
    batch_size: int
    micro_step: int
    slots: int
    config_hash: str
    corpus_fingerprint: str
    moments_begun: int = 0
    world_size: int = 1
    mode: str = "jit"
    scaler: Mapping[str, Any] | None = None
    adaptive: Mapping[str, Any] | None = None
    seeds: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    maths: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, Any] | None = None
    loss: float | None = None


def dump_state(state: RunState) -> bytes:
    """Return `state` as the bytes of `state.json`; InternalError when it contradicts itself."""
    content = {"schema": SCHEMA} | {f.name: getattr(state, f.name) for f in fields(RunState)}
    if faults := [*_odd_types(content), *_contradictions(content)]:
        raise InternalError("the state of the run contradicts itself", items=faults)
    return sealed(json.dumps(content, indent=1, allow_nan=False).removesuffix("\n}").encode())


def read_state(folder: Path) -> RunState:
    """Return the state in the step folder `folder`.

    Raises CorruptError when the file is gone, damaged or contradicts itself, UsageError for another schema,
    ResourceError when it cannot be read.
    """
    path = folder / STATE_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CorruptError(f"`{path}` is gone", hint=_REMEDY) from None
    except OSError as error:
        raise read_error(path, error) from error
    return parse_state(data, path)


def parse_state(data: bytes, path: Path) -> RunState:
    """Return the state that the bytes of a `state.json` hold; errors are those of `read_state`, and name `path`."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"`{path}` is not valid JSON", why=str(error), hint=_REMEDY) from None
    if not isinstance(content, dict):
        raise CorruptError(f"`{path}` is not the state of a run", hint=_REMEDY)
    if not is_sealed(data):
        raise CorruptError(f"`{path}` is not as it was written: its seal does not fit", hint=_REMEDY)
    if content.get("schema") != SCHEMA:
        raise UsageError(
            f"`{path}` has schema {content.get('schema')!r}; this version reads {SCHEMA}",
            hint="go on with the version of ckptkit that wrote it",
        )
    known = {f.name for f in fields(RunState)}
    odd = [f"`{name}` is missing" for name in sorted(known - content.keys())]
    odd += [f"`{name}` is unknown" for name in sorted(content.keys() - known - {"schema", "seal"})]
    if faults := odd or [*_odd_types(content), *_contradictions(content)]:
        raise CorruptError(f"`{path}` contradicts itself", items=faults, hint=_REMEDY)
    return RunState(**{name: content[name] for name in known})


def _odd_types(content: Mapping[str, Any]) -> Iterator[str]:
    for name in _COUNTS:
        value, least = content[name], int(name in _AT_LEAST_ONE)
        if type(value) is not int or value < least:
            yield f"`{name}` is {value!r}, no whole number from {least} on"
    for name in _TEXTS:
        if not isinstance(content[name], str):
            yield f"`{name}` is {content[name]!r}, no text"
    for name in (*_OBJECTS, *_OBJECTS_OR_NULL):
        if not isinstance(content[name], Mapping) and (content[name] is not None or name in _OBJECTS):
            yield f"`{name}` is {content[name]!r}, no object"
    if content["loss"] is not None and not _is_number(content["loss"]):
        yield f"`loss` is {content['loss']!r}, no number"


def _contradictions(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of the counters does not go together; they are whole numbers, or nothing is yielded."""
    if any(type(content[name]) is not int or content[name] < (name in _AT_LEAST_ONE) for name in _COUNTS):
        return
    step, told = content["step"], (content["epoch"], content["sample_counter"])
    rows, batch = content["rows"], content["batch_size"]
    derived = position_of(step, rows, batch).epoch, samples_before(step, rows, batch)
    if told != derived:
        yield (
            f"after {step} updates of {batch} rows from {rows} the position is epoch "
            f"{derived[0]}, sample {derived[1]}; it says epoch {told[0]}, sample {told[1]}"
        )
    if content["moments_begun"] > step:
        yield f"moments began at zero after {content['moments_begun']} updates, and there were {step}"
    if content["micro_step"] < step:
        yield f"{step} updates took at least as many micro-batches; it says {content['micro_step']}"
    best = content["best"]
    if best is None or not isinstance(best, Mapping):
        return
    is_step = type(best.get("step")) is int and 0 <= best["step"] <= step
    if not is_step or not _is_number(best.get("loss")) or not isinstance(best.get("held_out"), str):
        yield f"`best` is {dict(best)!r}: a step up to {step}, its loss, and of which held-out set"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

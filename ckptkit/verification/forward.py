"""Level forward: the same tokens through both sides, and the distance of their logits against a measured bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.errors import CorruptError
from ckptkit.formats import files
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.disk import file_digest
from ckptkit.mapping.state_names import is_state
from ckptkit.plan.join import Joined
from ckptkit.quantities import numbers_text
from ckptkit.types import Region
from ckptkit.verification.inputs import read_inputs, write_inputs
from ckptkit.verification.logits import TOO_SENSITIVE, UNITS_OF_CONSTANTS, Distance, bound, distance
from ckptkit.verification.process import run_process
from ckptkit.verification.runners.job import (
    REPORT,
    SCHEMA,
    SEAL,
    Computed,
    ComputedInput,
    ComputedRow,
    Floats,
    Input,
    InputResult,
    Job,
    Piece,
    Result,
    Stored,
    TapResult,
    inputs_digest,
    seal_of,
)


@dataclass(frozen=True, slots=True)
class Dump:
    """What one side left behind: the inputs, the runner's report, a file of logits for each input, and for one input,
    where it was asked, a file for each output inside of the network."""

    folder: Path
    inputs: list[Input]
    result: Result

    def logits(self, number: int) -> Floats:
        """Return the logits (T, V) of input `number`; CorruptError when they are not those that were written."""
        row = self.result.inputs[number]
        return self._read(row.file, row.digest)

    def tap(self, name: str) -> Floats:
        """Return an output inside of the network, (T, H); CorruptError as for logits."""
        row = next(row for row in self.result.taps if row.name == name)
        return self._read(row.file, row.digest)

    def _read(self, name: str, digest: str) -> Floats:
        file = self.folder / name
        if not file.is_file() or file_digest(file) != digest:
            raise CorruptError(
                f"`{file}` does not hold the numbers that `{REPORT}` beside it promises",
                hint="make the dump again, or copy it again",
            )
        values: Floats = np.load(file, allow_pickle=False)
        return values


@dataclass(frozen=True, slots=True)
class Row:
    """One input: the distance and its bound, or why it was not run on both sides; `why` says what is wrong."""

    name: str
    tokens: int
    distance: Distance | None
    bound: float
    sensitivity: float | None
    skipped: str = ""
    why: str = ""


@dataclass(slots=True)
class Forward:
    """The comparison of two dumps. `readings` are the fields that the two sides read from config.json differently, and
    the constants that they made of it; `constants_differ` when these differ by no more than rounding."""

    a: Dump
    b: Dump
    readings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    constants_differ: bool = False

    @property
    def ok(self) -> bool:
        """Both sides are loaded, read the config alike, and agree on every input, of which there is at least one."""
        sound = self.a.result.loaded and self.b.result.loaded and not self.readings
        return sound and any(row.distance for row in self.rows) and not any(row.why for row in self.rows)


def stored_tensors(
    checkpoint: Checkpoint, joined: Joined | None, *, rounded: Mapping[str, str], rows: Mapping[str, int]
) -> Iterator[Stored]:
    """Yield every weight of a checkpoint, whole, over what is stored; training state stays behind.

    `rounded` are the dtypes that tensors are rounded to, by name, so that both sides run the same values; `rows` the
    rows of padded tensors without their padding.
    """
    for name, info in checkpoint.tensors.items():
        if is_state(name):
            continue
        shape = (rows.get(name, info.shape[0]), *info.shape[1:]) if info.shape else ()
        whole = Region.whole(info.shape)
        parts = [(whole, info)] if joined is None else list(joined.parts_of(name))
        pieces = [
            Piece(part, used.relative_to(region.start), used.start)
            for region, part in parts
            if (used := region.common(Region.whole(shape))).size or not shape
        ]
        yield Stored(name, shape, info.dtype, tuple(pieces), rounded.get(name, ""))


def run_side(runner: str, job: Job, folder: Path, step: Callable[[str], None]) -> Dump:
    """Run a job in a process of its own; `folder`, which exists and is empty, becomes the dump."""
    write_inputs(job.inputs, folder)
    run_process(runner, job, folder, step)
    return open_dump(folder)


def open_dump(folder: Path) -> Dump:
    """Open what `run_side` left, here or on another machine; CorruptError when it is not whole."""
    inputs = read_inputs(folder)
    result = _read_report(folder)
    names = [item.name for item in inputs], [row.name for row in result.inputs]
    if result.inputs_digest != inputs_digest(inputs) or (result.loaded and names[0] != names[1]):
        raise CorruptError(f"`{folder}`: `{REPORT}` is not about the inputs beside it", hint="make the dump again")
    return Dump(folder, inputs, result)


def _read_report(folder: Path) -> Result:
    file = folder / REPORT
    if not file.is_file():
        raise CorruptError(
            f"`{folder}` is no complete dump: it has no `{REPORT}`",
            why="the report is written last, so the run that should have written it was stopped",
            hint="make it again with `ckptkit verify A --dump DIR`",
        )
    found = files.read_json_object(file)
    if found.get("schema") == SCHEMA and found.get(SEAL) != seal_of(found):
        raise CorruptError(
            f"`{file}` was changed after the run that wrote it", hint="make the dump again, or copy it again"
        )
    try:
        if found.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        rows = [InputResult(**row) for row in found.pop("inputs")]
        known = {key.name for key in fields(Result)}
        shapes = [(name, tuple(net), tuple(tensor)) for name, net, tensor in found.pop("shapes")]
        benign = [(name, why) for name, why in found.pop("benign")]
        taps = [TapResult(**row) for row in found.pop("taps")]
        computed = _computed(found.pop("computed", {}))
        rest = {key: value for key, value in found.items() if key in known}
        return Result(**rest, inputs=rows, taps=taps, computed=computed, shapes=shapes, benign=benign)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            f"`{file}` is no report of this version of ckptkit: {error}", hint="make the dump again"
        ) from None


def _computed(found: Mapping[str, Any]) -> Computed:
    rows = [ComputedRow(**row) for row in found.get("rows", [])]
    inputs = [ComputedInput(**row) for row in found.get("inputs", [])]
    return Computed(**{**found, "rows": rows, "inputs": inputs})


def part_of(result: Result) -> str:
    """Return which layers alone were run (`layers 0, 40-43 of 80`); empty for all."""
    total = result.reading["layers"]
    if result.layers is None or len(result.layers) == total:
        return ""
    words = numbers_text(result.layers).replace(",", ", ")
    return f"layer{'s' if len(result.layers) > 1 else ''} {words} of {total}"


def compare(a: Dump, b: Dump) -> Forward:
    """Compare two dumps; a side that was not loaded whole has nothing to compare.

    CorruptError when they are of other inputs.
    """
    far_off, differ = _constants(a.result, b.result)
    forward = Forward(a, b, {**_readings(a.result, b.result), **far_off}, constants_differ=differ)
    if not (a.result.loaded and b.result.loaded):
        return forward
    if a.inputs != b.inputs:
        raise CorruptError(f"`{a.folder}` and `{b.folder}` are of other inputs", hint="make both dumps again")
    forward.rows += [_row(a, b, number, differ) for number in range(len(a.inputs))]
    return forward


def _row(a: Dump, b: Dump, number: int, constants_differ: bool) -> Row:
    name, tokens = a.inputs[number].name, len(a.inputs[number].ids)
    rows = a.result.inputs[number], b.result.inputs[number]
    skipped = next((row.skipped for row in rows if row.skipped), "")
    if skipped:
        return Row(name, tokens, None, 0.0, None, skipped)
    sensitivities = [row.sensitivity for row in rows]
    limit = bound(sensitivities, [row.constants for row in rows] if constants_differ else [])
    worst = max((s for s in sensitivities if s is not None), default=None)
    a_TV, b_TV = a.logits(number), b.logits(number)
    if a_TV.shape != b_TV.shape:
        why = f"A's logits are {a_TV.shape}, B's {b_TV.shape}"
        return Row(name, tokens, None, limit, worst, why=why)
    found = distance(a_TV, b_TV)
    return Row(name, tokens, found, limit, worst, why=_why(rows, found, limit, worst))


def _why(rows: Sequence[InputResult], found: Distance, limit: float, worst: float | None) -> str:
    """Return what is wrong with an input's logits; empty when they agree."""
    if found.not_finite:
        return f"{found.not_finite} logits are NaN or inf"
    shaky = [label for label, row in zip("AB", rows, strict=True) if not row.repeated]
    if shaky:
        return f"two runs of {' and of '.join(shaky)} do not give the same bits"
    if worst is None:
        return "no side measured its sensitivity, so there is no bound"
    if not np.isfinite(worst) or worst > TOO_SENSITIVE:
        return f"rounding alone moves the logits by {worst:.1e}: nothing can be proved"
    if found.relative > limit:
        return f"relative distance {found.relative:.1e}, bound {limit:.1e}"
    return ""


def _readings(a: Result, b: Result) -> dict[str, tuple[Any, Any]]:
    """Return what the two sides take the config for, where they differ."""
    one, two = a.reading, b.reading
    return {key: (one[key], two[key]) for key in one if key in two and one[key] != two[key]}


def _constants(a: Result, b: Result) -> tuple[dict[str, tuple[Any, Any]], bool]:
    """Return the rotary frequencies that are too far apart (the first of them), and whether any bit differs."""
    one, two = (np.array(next(iter(r.constants.values()), []), np.float32) for r in (a, b))
    if not (one.size and two.size):
        return {}, False
    if one.shape != two.shape:
        return {"the number of rotary frequencies": (one.size, two.size)}, True
    with np.errstate(invalid="ignore"):
        off = ~(np.abs(one - two) <= UNITS_OF_CONSTANTS * np.spacing(np.maximum(np.abs(one), np.abs(two))))
    if off.any():
        first = int(off.argmax())
        return {f"rotary frequency {first}": (float(one[first]), float(two[first]))}, True
    return {}, not np.array_equal(one, two)

"""What a runner is told and what it leaves behind: files, so that both sides can be of different machines.

A job is a folder with `job.json`. A result is a folder with `report.json` and, for each input, `logits-N.npy` of
shape (tokens, vocabulary) in float32. What does not live here: running (`run_net.py`), and comparing two results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptkit.cast import Caster
from ckptkit.formats.file_pool import FilePool
from ckptkit.formats.io import read_region
from ckptkit.types import DTYPES, Extent, Region, Shape, TensorInfo

JOB = "job.json"
REPORT = "report.json"
SCHEMA = 1
SEAL = "seal"

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Piece:
    """`source`, a region of the stored tensor `info`, is what lies from `start` on in the whole tensor."""

    info: TensorInfo
    source: Region
    start: Shape


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor, and the pieces of files that make it. `rounded` is a dtype to round its values to, or empty."""

    name: str
    shape: Shape
    dtype: str
    pieces: tuple[Piece, ...]
    rounded: str = ""

    def read(self, pool: FilePool) -> Floats:
        """Return the values, exact but for `rounded`; of F16, BF16 or F32 (others are refused before)."""
        out = np.empty(self.shape, DTYPES[self.dtype].carrier)
        for piece in self.pieces:
            box: tuple[Any, ...] = Region.whole(piece.source.shape).shifted(piece.start).slices()
            read_region(piece.info, piece.source, out=out[(*box, ...)], pool=pool)
        if self.rounded:
            dtype, out = self.rounded, Caster(self.dtype, self.rounded)(out)
        else:
            dtype = self.dtype
        wide = out if dtype == "F32" else Caster(dtype, "F32")(out)
        values: Floats = wide.view(np.float32).reshape(self.shape)
        return values


@dataclass(frozen=True, slots=True)
class Input:
    """One sequence: token ids, (T,), and their positions, (T,); None for 0, 1, 2, ..."""

    name: str
    ids: tuple[int, ...]
    positions: tuple[int, ...] | None = None


def inputs_digest(inputs: Sequence[Input]) -> str:
    """Return the xxh3-128 of inputs, however they are stored."""
    rows = [[item.name, list(item.ids), item.positions and list(item.positions)] for item in inputs]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(rows).encode()))


def seal_of(report: Mapping[str, Any]) -> str:
    """Return the xxh3-128 of a report without its seal, by which a changed one is told."""
    rest = {key: value for key, value in report.items() if key != SEAL}
    return str(xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode()))


@dataclass(frozen=True, slots=True)
class Job:
    """One forward pass: `tensors` into the network that `config` (config.json) describes, then `inputs` through it.

    `dialect` and `variant` name the tensors' naming and the layout of fused ones. With `sensitivity`, the inputs run
    a third time with every weight moved by one unit in its last place. `trace` is the name of an input whose outputs
    inside of the network are kept. With `stream`, one block of the network is in memory at a time; `layers` are those
    to run, one after another as if there were no others, None for all. `compute` is a dtype (`fp16`, `bf16`) that the
    inputs are run in once more, or empty.
    """

    config: Mapping[str, Any]
    dialect: str
    variant: str
    device: str
    tensors: Sequence[Stored]
    inputs: Sequence[Input]
    sensitivity: bool = True
    trace: str = ""
    stream: bool = False
    layers: tuple[int, ...] | None = None
    compute: str = ""

    def write(self, folder: Path) -> None:
        """Write the job to `folder`, which exists."""
        files = {str(p.info.file.absolute()): None for t in self.tensors for p in t.pieces}
        numbers = {file: number for number, file in enumerate(files)}
        data = {
            "schema": SCHEMA,
            "config": dict(self.config),
            "dialect": self.dialect,
            "variant": self.variant,
            "device": self.device,
            "sensitivity": self.sensitivity,
            "trace": self.trace,
            "stream": self.stream,
            "layers": self.layers,
            "compute": self.compute,
            "inputs": [[i.name, i.ids, i.positions] for i in self.inputs],
            "files": list(files),
            "tensors": [
                [t.name, t.shape, t.dtype, t.rounded, [_piece_row(p, numbers) for p in t.pieces]] for t in self.tensors
            ],
        }
        (folder / JOB).write_text(json.dumps(data))

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Read the job in `folder`, which this very version of ckptkit wrote."""
        data = json.loads((folder / JOB).read_text())
        files = [Path(file) for file in data["files"]]
        tensors = tuple(
            Stored(name, tuple(shape), dtype, tuple(_piece(row, files) for row in pieces), rounded)
            for name, shape, dtype, rounded, pieces in data["tensors"]
        )
        inputs = tuple(
            Input(name, tuple(ids), None if positions is None else tuple(positions))
            for name, ids, positions in data["inputs"]
        )
        return cls(
            data["config"], data["dialect"], data["variant"], data["device"], tensors, inputs, data["sensitivity"],
            data["trace"], data["stream"], None if data["layers"] is None else tuple(data["layers"]),
            data["compute"],
        )  # fmt: skip


def _piece_row(piece: Piece, numbers: Mapping[str, int]) -> list[Any]:
    info = piece.info
    return [
        info.name, info.shape, info.dtype, numbers[str(info.file.absolute())], info.extents, info.strides,
        piece.source.start, piece.source.stop, piece.start,
    ]  # fmt: skip


def _piece(row: Sequence[Any], files: Sequence[Path]) -> Piece:
    name, shape, dtype, file, extents, strides, start, stop, target = row
    info = TensorInfo(
        name, tuple(shape), dtype, files[file], tuple(Extent(*extent) for extent in extents),
        None if strides is None else tuple(strides),
    )  # fmt: skip
    return Piece(info, Region(tuple(start), tuple(stop)), tuple(target))


@dataclass(slots=True)
class InputResult:
    """What became of one input. `repeated`: a second run gave the same bits. `sensitivity`: the largest change of a
    logit when every weight moves by one unit in its last place, relative to the largest logit, and `constants` what
    the rotary frequencies do then, at far positions; None if not measured. `digest` is the xxh3-128 of the logits'
    file; `skipped` says why it was not run, or is empty."""

    name: str
    file: str = ""
    digest: str = ""
    repeated: bool = False
    not_finite: int = 0
    largest: float = 0.0
    sensitivity: float | None = None
    constants: float | None = None
    seconds: float = 0.0
    skipped: str = ""


@dataclass(slots=True)
class TapResult:
    """An output inside of the network, (T, H): its name, file and the file's xxh3-128, the largest finite magnitude,
    how many numbers are not finite, and its sensitivity, as that of logits."""

    name: str
    file: str
    digest: str
    largest: float
    not_finite: int
    sensitivity: float | None = None


@dataclass(slots=True)
class ComputedRow:
    """An output inside of the network, or the logits, when it computes in another dtype. `relative` is the error of the
    traced input's: the largest change against fp32 over the largest magnitude in fp32; None where it was not measured
    or is no number. `largest` is the largest magnitude of the output and of what is on the way to it, in fp32, over
    all inputs: `at` this place, for this `input`. `not_finite` numbers of all inputs are inf or NaN in that dtype,
    first at the place `lost`."""

    name: str
    relative: float | None = None
    largest: float = 0.0
    at: str = ""
    input: str = ""
    not_finite: int = 0
    lost: str = ""


@dataclass(slots=True)
class ComputedInput:
    """An input's logits in another dtype: how far from fp32, relative to the largest (None where some are no number),
    and at how many of the `tokens` positions the likeliest token is the same."""

    name: str
    tokens: int
    relative: float | None
    top1: int
    not_finite: int


@dataclass(slots=True)
class Computed:
    """A run in another `dtype` (empty: there was none). `kept` says what stayed in float32; `unfit` are parameters that
    the dtype does not hold: a number is beyond its range, or all become 0; `rows` are in the order of the network."""

    dtype: str = ""
    kept: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    rows: list[ComputedRow] = field(default_factory=list)
    inputs: list[ComputedInput] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """What a runner reports. `reading` is what the network takes the config for, under names that all runners share;
    `settings` what was set so that fp32 is fp32. `missing` are parameters that no tensor fills (NaN), `benign` those
    that need none, with the reason; `unexpected` tensors that no parameter takes; `shapes` those that differ (name,
    parameter's, tensor's); `altered` parameters that, once all is loaded, do not hold what their file does. When any
    of these has an entry, but for `benign`, no input is run. `constants` enter the arithmetic and are in no file
    (rotary frequencies). `layers` are those that were run, None for all, and `left_out` the tensors of the others."""

    runner: str
    device: str
    versions: dict[str, str]
    settings: dict[str, Any]
    reading: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    parameters: int = 0
    missing: list[str] = field(default_factory=list)
    benign: list[tuple[str, str]] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[tuple[str, Shape, Shape]] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    constants: dict[str, list[float]] = field(default_factory=dict)
    inputs: list[InputResult] = field(default_factory=list)
    taps: list[TapResult] = field(default_factory=list)
    computed: Computed = field(default_factory=Computed)
    inputs_digest: str = ""
    layers: list[int] | None = None
    left_out: list[str] = field(default_factory=list)
    load_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def loaded(self) -> bool:
        """Whether every parameter holds its tensor, and every tensor is in one."""
        return not (self.missing or self.unexpected or self.shapes or self.altered)

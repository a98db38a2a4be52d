"""What runs each side of level forward: its config.json, naming, runner, device and job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from ckptkit.commands.choose import Spoke, choose_source
from ckptkit.commands.sides import Asked, Sides, own_config
from ckptkit.commands.source import Source, find_config
from ckptkit.errors import UsageError
from ckptkit.formats.files import listed
from ckptkit.mapping.rules import resolve
from ckptkit.mapping.state_names import is_state
from ckptkit.mapping.tables import Tables
from ckptkit.verification.forward import stored_tensors
from ckptkit.verification.layers import traced_input
from ckptkit.verification.runners.devices import parse_device
from ckptkit.verification.runners.expressible import MCORE, why_not
from ckptkit.verification.runners.facts import read_facts
from ckptkit.verification.runners.job import Input, Job

Runner = Literal["auto", "builtin", "mindformers"]
Steps = Callable[[int], Callable[[str], None]]  # the number of steps -> a function that is told of each


@dataclass(frozen=True, slots=True)
class Devices:
    """The device of each side."""

    a: str = "cpu"
    b: str = "cpu"


@dataclass(frozen=True, slots=True)
class Side:
    """One side as it is run. `why` says why this runner; `left_out` are tensors that a table ignores."""

    source: Source
    config: Mapping[str, Any]
    spoke: Spoke
    runner: str
    why: str
    device: str
    left_out: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.source.checkpoint.folder

    @property
    def windows(self) -> list[int]:
        """The sizes of its sliding windows, as its config.json says."""
        found = read_facts(self.config).reading()["window"]
        return [size for size in dict.fromkeys(found) if size is not None]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a network is run: block by block (`stream`), some `layers` alone, whether its inside is shown, and in
    which dtype once more (`compute`; empty for none)."""

    stream: bool = False
    layers: tuple[int, ...] | None = None
    inside: bool = False
    compute: str = ""


WHOLE = Extent()


def side_of(sides: Sides, label: Literal["a", "b"], runner: Runner, device: str, extent: Extent = WHOLE) -> Side:
    """Return a side of two as it is to be run; UsageError when nothing here can run it."""
    source, spoke = (sides.a, sides.spoke_a) if label == "a" else (sides.b, sides.spoke_b)
    own = sides.own_config(source)
    config = sides.config if own is None else own  # one that says nothing is not the other side's
    if config is None:
        raise UsageError(
            "level forward needs the model's config.json, and neither A nor B has one beside it",
            hint="pass `--config FOLDER`, or stop before it with `--level weights`",
        )
    return _side(source, config, spoke, sides.tables, (runner, extent), device)


def one_side(source: Source, asked: Asked, tables: Tables, runner: Runner, device: str, extent: Extent = WHOLE) -> Side:
    """Return a checkpoint that is run alone."""
    config = find_config(source, asked.config)[0] if asked.config else own_config(source.checkpoint)
    if config is None:
        raise UsageError("level forward needs the model's config.json", hint="pass `--config FOLDER`")
    spoke: Spoke = ("", "")
    try:
        family = tables.family(asked.model) if asked.model else tables.for_config(config)
    except UsageError:
        if asked.model:
            raise
    else:
        options = ("--dialect-a", "--variant-a")
        spoke = choose_source(source, tables, family, asked.dialect_a, asked.variant_a, options=options)
    return _side(source, config, spoke, tables, (runner, extent), device)


def check_runs(runner: str, devices: Mapping[str, str | None]) -> None:
    """Raise UsageError for a runner that there is not, or an option that names no device."""
    if runner not in get_args(Runner):
        raise UsageError(f"unknown runner `{runner}`", hint="`auto`, `builtin` or `mindformers`")
    for option, device in devices.items():
        if device is not None:
            parse_device(device, option=option)


def _side(
    source: Source, config: Mapping[str, Any], spoke: Spoke, tables: Tables, how: tuple[Runner, Extent], device: str
) -> Side:
    # what no network here can express is known before anything is read
    _check_layers(how[1].layers, read_facts(config).layers)
    spoke = spoke if spoke[0] else ("hf", "")
    chosen, why = _runner(config, spoke, *how, device)
    if chosen == "builtin":
        _check_compute(how[1].compute, device)
    left_out = tuple(_ignored(source, config, spoke, tables))
    _check_dtypes(source, left_out)
    return Side(source, config, spoke, chosen, why, device, left_out)


def _check_dtypes(source: Source, left_out: Collection[str]) -> None:
    """Raise UsageError for weights in float64: both networks compute in float32, and would prove nothing of them."""
    tensors = source.checkpoint.tensors.values()
    wide = [t.name for t in tensors if t.dtype == "F64" and not is_state(t.name) and t.name not in left_out]
    if wide:
        raise UsageError(
            f"`{source.checkpoint.path}` has weights in F64, which no weight of these networks is",
            items=wide,
            why="both networks run in float32",
            hint="stop before level forward with `--level weights`, or cast first: `ckptkit convert --dtype fp32`",
        )


def _check_layers(layers: Sequence[int] | None, total: int) -> None:
    """Raise UsageError for layers that a model of `total` does not have."""
    beyond = [layer for layer in layers or () if layer >= total]
    if beyond:
        raise UsageError(
            f"`--layers` names layer {beyond[0]}, and the model has layers 0 to {total - 1}",
            why="config.json says so (`num_hidden_layers`)",
            hint="name layers that it has",
        )


def _check_compute(compute: str, device: str) -> None:
    """Raise UsageError for a dtype in which MindSpore does not compute on a device."""
    if compute == "bf16" and parse_device(device)[0] == "cpu":
        raise UsageError(
            "MindSpore does not compute in bf16 on a CPU (`--compute`): its kernels there have float32 and float16",
            why="matrix products, softmax, gather and others have no bfloat16 kernel",
            hint="`--compute fp16`; or run this side on Ascend, and the other one here with `--dump`",
        )


def _ignored(source: Source, config: Mapping[str, Any], spoke: Spoke, tables: Tables) -> list[str]:
    """Return the tensors that the tables leave behind for a written reason: no net takes them."""
    try:
        rules = resolve(tables.for_config(config), config, *spoke)
    except UsageError:
        return []
    where: Literal["hf", "dialect"] = "hf" if spoke[0] == "hf" else "dialect"
    return [name for name in source.checkpoint.tensors if rules.ignored(name, where) is not None]


def _runner(config: Mapping[str, Any], spoke: Spoke, runner: Runner, extent: Extent, device: str) -> tuple[str, str]:
    """Return the runner of a side, and why it is this one."""
    if spoke[0] == "hf":
        lacking = [name for name in ("torch", "transformers") if find_spec(name) is None]
        if not lacking:
            return "torch", "HuggingFace's naming"
        if find_spec("mindspore") is None:
            raise _not_installed(lacking)
        return "builtin", f"{listed(lacking)} not installed"
    if find_spec("mindspore") is None:
        raise _not_installed(["mindspore"])
    reason = why_not(config, *spoke, device)
    if extent.stream or extent.layers is not None:
        reason = reason or "its network runs whole"
    if extent.inside and spoke[0] == MCORE:
        reason = reason or "its graph does not show what happens inside"
    if extent.compute:
        reason = reason or "it is made for one dtype, which is float32 here (`--compute`)"
    if find_spec("mindformers") is None:
        reason = "mindformers is not installed"
    if runner == "mindformers":
        if reason is not None:
            raise UsageError(f"MindFormers cannot run this side: {reason}", hint="use `--runner builtin`")
        return "mindformers", "as told"
    if runner == "auto" and reason is None and spoke[0] == MCORE:
        reason = "its mcore attention computes in float16 (`--runner mindformers` takes it all the same)"
    if runner == "auto" and reason is None:
        return "mindformers", "its own model can express config.json"
    return "builtin", "as told" if runner == "builtin" else f"not mindformers: {reason}"


def _not_installed(names: Sequence[str]) -> UsageError:
    return UsageError(
        f"level forward runs both frameworks, and not all are installed: {', '.join(names)}",
        hint='`pip install "ckptkit-mindspore[verify]"`; or run each side where it is, with `--dump` and `--against`',
    )


def make_job(
    side: Side, inputs: Sequence[Input], extent: Extent, *, rounded: Mapping[str, str], sensitivity: bool
) -> Job:
    """Return what a side's runner is told."""
    manifest = side.source.manifest or {}
    padded = manifest.get("layout", {}).get("padded", {})
    rows = {name: int(sizes[0]) for name, sizes in padded.items()}
    tensors = stored_tensors(side.source.checkpoint, side.source.joined, rounded=rounded, rows=rows)
    left_out = set(side.left_out)
    kept = tuple(tensor for tensor in tensors if tensor.name not in left_out)
    trace = traced_input(inputs) if extent.inside else ""
    return Job(
        side.config, *side.spoke, side.device, kept, tuple(inputs), sensitivity, trace, extent.stream, extent.layers,
        extent.compute,
    )  # fmt: skip

"""`ckptkit verify`: is B what A is? By its files, then by its weights, then by what both compute."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Literal, get_args

from ckptkit.commands.check import check_source
from ckptkit.commands.defaults import Defaults
from ckptkit.commands.forward_sides import (
    WHOLE,
    Devices,
    Extent,
    Runner,
    Side,
    Steps,
    check_runs,
    make_job,
    one_side,
    side_of,
)
from ckptkit.commands.ranks import open_stored
from ckptkit.commands.sanity import sanity as check_sanity
from ckptkit.commands.sides import Asked, Sides, asked_of, open_side, open_sides
from ckptkit.commands.source import Source, load_own_tables, open_source
from ckptkit.commands.verify_options import check_sides, layers_of, refuse_idle
from ckptkit.commands.verify_report import Found, report_on
from ckptkit.errors import UsageError
from ckptkit.formats.rank_folders import find_ranks
from ckptkit.report import Report
from ckptkit.verification.compute import COMPUTES
from ckptkit.verification.dumps import DumpFolder, check_dump_target
from ckptkit.verification.files import unlike_config
from ckptkit.verification.forward import Dump, compare, open_dump, part_of, run_side
from ckptkit.verification.inputs import MAX_TOKENS, make_inputs
from ckptkit.verification.layers import compare_layers
from ckptkit.verification.sanity import LINES
from ckptkit.verification.weights import Compared, Progress, load_status, rounding
from ckptkit.verification.weights import compare as compare_weights

Level = Literal["files", "weights", "forward", "layers"]
LEVELS: tuple[str, ...] = get_args(Level)


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How to verify: up to which level, on which devices and runner; `keep_going` past a level that failed."""

    level: str = "forward"
    runner: Runner = "auto"
    devices: Devices = field(default_factory=Devices)
    max_tokens: int = MAX_TOKENS
    keep_going: bool = False
    extent: Extent = WHOLE
    workers: int = 2
    progress: Progress | None = None
    steps: Steps | None = None
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether networks are run."""
        return self.level in ("forward", "layers")


def verify(
    a: str | Path,
    b: str | Path | None = None,
    *,
    level: str = "forward",
    runner: Runner = "auto",
    device: str = "cpu",
    device_a: str | None = None,
    device_b: str | None = None,
    max_tokens: int = MAX_TOKENS,
    keep_going: bool = False,
    stream: bool = False,
    layers: str | Sequence[int] | None = None,
    compute: str | None = None,
    dump: str | Path | None = None,
    against: str | Path | None = None,
    overwrite: bool = False,
    sanity: str | Path | None = None,
    lines: int = LINES,
    model: str | None = None,
    config: str | Path | None = None,
    table: str | Path | Sequence[str | Path] = (),
    dialect_a: str | None = None,
    dialect_b: str | None = None,
    variant_a: str | None = None,
    variant_b: str | None = None,
    strategy_a: str | Path | None = None,
    strategy_b: str | Path | None = None,
    step_a: int | None = None,
    step_b: int | None = None,
    workers: int = 2,
    progress: Progress | None = None,
    steps: Steps | None = None,
    defaults: Collection[str] = (),
) -> Report:
    """Prove that the checkpoint `b` is what `a` is and return a report; its exit code is 0 if so, else 1.

    Levels, each with those before it: `files` (structure, digests, ranks, shapes as config.json says), `weights`
    (every element of both sides, and the load status of each parameter), `forward` (the same tokens through both, each
    in a process of its own, within a bound that is measured), `layers` (what both networks give inside, the first
    output that is off, and why). A level that fails ends the run, unless `keep_going`; `layers` looks further in any
    case. With `stream`, one block of the network is in memory at a time; `layers` (`0,1,40-43`, or numbers) are those
    to run, as if there were no others. With `compute` (`fp16` or `bf16`, at level `layers`) each side also runs in that
    dtype: what it costs against fp32, layer by layer, and what leaves the dtype's range, which is a failure.

    With `sanity`, a file of JSON lines, there are no levels: the loss on its first `lines` lines, and the statistics
    of every weight, are looked at instead.

    Without `b`, `a` alone is run: `dump` keeps what came of it in a folder, `against` compares it with such a folder,
    which another machine may have made. `device` is `cpu`, `cuda`, `ascend`, or one with a number (`cuda:1`), for both
    sides or each; `runner` is what runs MindSpore's naming: `builtin`, `mindformers`, or `auto`, which takes
    MindFormers where it can express the model. `max_tokens` bounds the longest input. The other options are those of
    `diff`. `progress` is told of bytes, `steps` of inputs that were run. `defaults` names the options that nobody asked
    for: one that does nothing is passed over with a note, not refused.

    Raises UsageError, CorruptError, ResourceError; CoverageError when a side's ranks do not go together.
    """
    if level not in LEVELS:
        raise UsageError(f"unknown level `{level}`", hint=f"one of {', '.join(LEVELS)}")
    given = Defaults(defaults)
    told = {
        "b": b, "sanity": sanity, "lines": lines, "level": level, "keep_going": keep_going, "dump": dump,
        "against": against, "overwrite": overwrite, "runner": runner, "device": device, "device_a": device_a,
        "device_b": device_b, "max_tokens": max_tokens, "stream": stream, "layers": layers, "compute": compute,
        "dialect_b": dialect_b, "variant_b": variant_b, "strategy_b": strategy_b, "step_b": step_b,
    }  # fmt: skip
    check_runs(runner, {"--device": device, "--device-a": device_a, "--device-b": device_b})
    untold = {name: parameter.default for name, parameter in signature(verify).parameters.items()}
    refuse_idle(told, untold, given)
    asked = asked_of(
        model, config, table, (dialect_a, dialect_b), (variant_a, variant_b), (strategy_a, strategy_b), (step_a, step_b)
    )
    how = How(
        level=level, runner=runner, max_tokens=max_tokens, notes=tuple(given.notes),
        devices=Devices(device if device_a is None else device_a, device if device_b is None else device_b),
        keep_going=keep_going or level == "layers", workers=workers, progress=progress, steps=steps,
        extent=Extent(stream, layers_of(layers), level == "layers", compute or ""),
    )  # fmt: skip
    if sanity is not None:
        report = check_sanity(
            a, b, text=sanity, lines=lines, max_tokens=max_tokens, asked=asked, runner=runner, devices=how.devices,
            workers=workers, progress=progress, steps=steps,
        )  # fmt: skip
        for note in given.notes:
            report.add("note", note)
        return report
    check_sides(b, dump, against, level)
    _check_compute(compute, level)
    if b is not None:
        return _verify_two(Path(a), Path(b), asked, how)
    target = None if dump is None else DumpFolder(Path(dump), overwrite=overwrite)
    return _verify_one(Path(a), asked, how, target, None if against is None else Path(against))


def _check_compute(compute: str | None, level: str) -> None:
    if compute is None:
        return
    if compute not in COMPUTES:
        raise UsageError(f"`--compute {compute}` is no dtype to compute in", hint=f"one of {', '.join(COMPUTES)}")
    if level != "layers":
        raise UsageError(
            "`--compute` looks at every output inside of the networks, which level layers shows",
            hint=f"`--level layers --compute {compute}`",
        )


def _verify_two(a: Path, b: Path, asked: Asked, how: How) -> Report:
    sides = open_sides(a, b, asked)
    runners: list[Side] = []
    if how.runs:  # what cannot be run is known before anything is read
        sides.check_layouts()
        runners = [
            side_of(sides, "a", how.runner, how.devices.a, how.extent),
            side_of(sides, "b", how.runner, how.devices.b, how.extent),
        ]
    found = Found(how.level, a, b, sides, compute=how.extent.compute, notes=[*how.notes])
    steps = (asked.step_a, asked.step_b)
    found.files = [
        check_source(_as_stored(side, step), how.progress) for side, step in zip((sides.a, sides.b), steps, strict=True)
    ]
    found.unlike = _unlike_config(sides)
    if how.level == "files" or not (found.ok or how.keep_going):
        return report_on(found)
    compared = compare_weights(sides.pair(), sides.a.joined, sides.b.joined, workers=how.workers, progress=how.progress)
    odd = sides.odd_state(sides.a), sides.odd_state(sides.b)
    found.compared, found.status = compared, load_status(compared, sides.kept(), odd)
    if how.level == "weights" or not (found.ok or how.keep_going):
        return report_on(found)
    if not any(parameter.status in ("missing", "shape") for parameter in found.status.parameters):
        _run_both(found, runners, how, compared)
    return report_on(found)


def _as_stored(side: Source, step: int | None) -> Source:
    """Return a side as it is stored: shard by shard, and compared with its manifest, which no other `step` has."""
    path = side.checkpoint.path
    if step is not None:
        return Source(side.checkpoint, None)
    if side.ranks is None:
        return side if side.manifest is None else open_source(path)
    return open_stored(path) if find_ranks(path) and side.manifest is not None else Source(side.checkpoint, None)


def _unlike_config(sides: Sides) -> list[str]:
    """Say in what each side is not what its own config.json asks."""
    if sides.rules() is None:
        return []
    found = []
    for label, side, other in (("A", sides.a, sides.b), ("B", sides.b, sides.a)):
        try:
            own = others = sides.own_rules(side)
        except UsageError as error:
            found.append(f"{label}: {error.what}")
            continue
        with suppress(UsageError):  # of the other side, which is said there
            others = sides.own_rules(side, other)
        found += [f"{label}: {line}" for line in unlike_config(side.checkpoint.tensors, own, others)]
    return found


def _run_both(found: Found, runners: Sequence[Side], how: How, compared: Compared) -> None:
    """Run both sides, one after the other, so that one copy of the model is in memory at a time.

    A's runs show how sensitive the logits are.
    """
    one, two = runners
    inputs, notes = make_inputs(one.config, one.folder, windows=one.windows, max_tokens=how.max_tokens)
    found.notes += notes
    found.runners = [one, two]
    steps = how.steps((5 if how.extent.compute else 3) * len(inputs)) if how.steps else lambda _: None
    with ExitStack() as stack:
        of_a, of_b = rounding(compared)
        jobs = [
            make_job(one, inputs, how.extent, rounded=of_a, sensitivity=True),
            make_job(two, inputs, how.extent, rounded=of_b, sensitivity=False),
        ]
        a, b = (run_side(side.runner, job, _scratch(stack), steps) for side, job in zip(runners, jobs, strict=True))
        found.forward = compare(a, b)
        if how.level == "layers":
            found.layers = compare_layers(a, b, (jobs[0], jobs[1]))


def _check_alike(other: Dump, how: How) -> None:
    """Raise UsageError for a dump of another part of the network, or of too little of it."""
    total = other.result.reading["layers"]
    layers = tuple(range(total)) if how.extent.layers is None else how.extent.layers
    if layers != tuple(range(total) if other.result.layers is None else other.result.layers):
        raise UsageError(
            f"`{other.folder}` is of {part_of(other.result) or 'all layers'}, and `--layers` asks for others",
            hint="give the `--layers` that the dump was made with, or make it again",
        )
    if how.level == "layers" and not other.result.taps:
        raise UsageError(
            f"`{other.folder}` shows nothing of the inside of its network",
            why="it was made at level forward",
            hint="make it with `--level layers`, or compare with it at level forward",
        )


def _scratch(stack: ExitStack) -> Path:
    """Return a folder for a dump that nobody asked for; it is gone when `stack` ends."""
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptkit-dump-")))


def _verify_one(path: Path, asked: Asked, how: How, target: DumpFolder | None, against: Path | None) -> Report:
    """Run one checkpoint alone, into a dump or against one."""
    if target is not None:
        check_dump_target(target, [path])
    other = None if against is None else open_dump(against)
    if other is not None:
        _check_alike(other, how)
    source = open_side(path, asked.strategy_a, asked.step_a, "a")
    side = one_side(source, asked, load_own_tables(asked.table), how.runner, how.devices.a, how.extent)
    found = Found(how.level, path, target.path if target else against or path, None, compute=how.extent.compute)
    found.notes += how.notes
    found.files = [check_source(_as_stored(source, asked.step_a), how.progress)]
    if other is None:
        inputs, notes = make_inputs(side.config, side.folder, windows=side.windows, max_tokens=how.max_tokens)
        found.notes += notes
    else:
        inputs = other.inputs
    found.runners = [side]
    job = make_job(side, inputs, how.extent, rounded={}, sensitivity=True)
    steps = how.steps((3 if how.extent.compute else 2) * len(inputs)) if how.steps else lambda _: None
    with ExitStack() as stack:
        folder = _scratch(stack) if target is None else stack.enter_context(target.partial())
        found.dump = dump = run_side(side.runner, job, folder, steps)
        if other is not None:
            found.forward = compare(dump, other)
            if how.level == "layers":
                found.layers = compare_layers(other, dump, (None, job))
        if target is not None and dump.result.loaded:
            target.finish(folder)
    return report_on(found)

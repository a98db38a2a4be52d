"""`ckptkit verify`: is B what A is? By its files, then by its weights, then by what both compute."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ckptkit.commands.check import check_source
from ckptkit.commands.forward_sides import WHOLE, Devices, Extent, Runner, Side, Steps, make_job, one_side, side_of
from ckptkit.commands.ranks import open_stored
from ckptkit.commands.sanity import sanity as check_sanity
from ckptkit.commands.sides import Asked, Sides, asked_of, open_side, open_sides
from ckptkit.commands.source import Source, load_own_tables, open_source
from ckptkit.commands.verify_report import Found, report_on
from ckptkit.errors import UsageError
from ckptkit.formats.rank_folders import find_ranks
from ckptkit.report import Report
from ckptkit.verification.dumps import DumpFolder, check_dump_target
from ckptkit.verification.files import unlike_config
from ckptkit.verification.forward import compare, open_dump, run_side
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
) -> Report:
    """Prove that the checkpoint `b` is what `a` is and return a report; its exit code is 0 if so, else 1.

    Levels, each with those before it: `files` (structure, digests, ranks, shapes as config.json says), `weights`
    (every element of both sides, and the load status of each parameter), `forward` (the same tokens through both, each
    in a process of its own, within a bound that is measured), `layers` (what both networks give inside, the first
    output that is off, and why). A level that fails ends the run, unless `keep_going`; `layers` looks further in any
    case. With `stream`, one block of the network is in memory at a time; `layers` (`0,1,40-43`, or numbers) are those
    to run, as if there were no others. With `sanity`, a file of JSON lines, there are no levels: the loss on its first
    `lines` lines, and the statistics of every weight, are looked at instead.

    Without `b`, `a` alone is run: `dump` keeps what came of it in a folder, `against` compares it with such a folder,
    which another machine may have made. `device` is `cpu`, `cuda`, `ascend`, or one with a number (`cuda:1`), for both
    sides or each; `runner` is what runs MindSpore's naming: `builtin`, `mindformers`, or `auto`, which takes
    MindFormers where it can express the model. `max_tokens` bounds the longest input. The other options are those of
    `diff`. `progress` is told of bytes, `steps` of inputs that were run.

    Raises UsageError, CorruptError, ResourceError; CoverageError when a side's ranks do not go together.
    """
    if level not in LEVELS:
        raise UsageError(f"unknown level `{level}`", hint=f"one of {', '.join(LEVELS)}")
    asked = asked_of(
        model, config, table, (dialect_a, dialect_b), (variant_a, variant_b), (strategy_a, strategy_b), (step_a, step_b)
    )
    how = How(
        level=level, runner=runner, devices=Devices(device_a or device, device_b or device), max_tokens=max_tokens,
        keep_going=keep_going or level == "layers", workers=workers, progress=progress, steps=steps,
        extent=Extent(stream, layers_of(layers), level == "layers"),
    )  # fmt: skip
    if sanity is not None:
        _refuse_beside_sanity({"--dump": dump, "--against": against, "--layers": layers, "--stream": stream or None,
                               "--level": None if level == "forward" else level})  # fmt: skip
        return check_sanity(
            a, b, text=sanity, lines=lines, max_tokens=max_tokens, asked=asked, runner=runner, devices=how.devices,
            workers=workers, progress=progress, steps=steps,
        )  # fmt: skip
    _check_sides(b, dump, against, level)
    if b is None:
        _refuse_of_b({"--device-b": device_b, "--dialect-b": dialect_b, "--variant-b": variant_b,
                      "--strategy-b": strategy_b, "--step-b": step_b})  # fmt: skip
    if b is not None:
        return _verify_two(Path(a), Path(b), asked, how)
    target = None if dump is None else DumpFolder(Path(dump), overwrite=overwrite)
    return _verify_one(Path(a), asked, how, target, None if against is None else Path(against))


def layers_of(text: str | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the layers that `0,1,40-43` names, in rising order; UsageError for anything else."""
    if text is None:
        return None
    found: set[int] = set()
    for word in text.split(",") if isinstance(text, str) else map(str, text):
        first, dash, last = word.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)) or int(last or first) < int(first):
            raise UsageError(f"`--layers {text}` names no layers", hint="write it like `0,1,40-43`")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def _check_sides(b: str | Path | None, dump: str | Path | None, against: str | Path | None, level: str) -> None:
    """Raise UsageError unless two checkpoints are named, or one that is run into a dump or against one."""
    for option, told in (("--dump", dump), ("--against", against)):
        if b is not None and told is not None:
            raise UsageError(
                f"`{option}` runs one checkpoint, and two were named",
                hint="leave out B, or leave out the option",
            )
    if b is None and dump is not None and against is not None:
        raise UsageError("`--dump` and `--against` are two runs", hint="give one, and then the other")
    if b is None and dump is None and against is None:
        raise UsageError(
            "there is nothing to compare with",
            hint="name a second checkpoint, or run one side alone with `--dump DIR` or `--against DIR`",
        )
    if b is None and level not in ("forward", "layers"):
        raise UsageError(f"`--level {level}` reads both checkpoints", hint="name the second one")


def _refuse_of_b(told: Mapping[str, object]) -> None:
    for option, value in told.items():
        if value is not None:
            raise UsageError(f"`{option}` is about a second checkpoint, and none is named", hint="leave it out")


def _refuse_beside_sanity(told: Mapping[str, object]) -> None:
    for option, value in told.items():
        if value is not None:
            raise UsageError(f"`{option}` does nothing with `--sanity`", hint="leave out one of the two")


def _verify_two(a: Path, b: Path, asked: Asked, how: How) -> Report:
    sides = open_sides(a, b, asked)
    runners: list[Side] = []
    if how.runs:  # what cannot be run is known before anything is read
        sides.check_layouts()
        runners = [
            side_of(sides, "a", how.runner, how.devices.a, how.extent),
            side_of(sides, "b", how.runner, how.devices.b, how.extent),
        ]
    found = Found(how.level, a, b, sides)
    steps = (asked.step_a, asked.step_b)
    found.files = [
        check_source(_as_stored(side, step), how.progress) for side, step in zip((sides.a, sides.b), steps, strict=True)
    ]
    found.unlike = _unlike_config(sides)
    if how.level == "files" or not (found.ok or how.keep_going):
        return report_on(found)
    compared = compare_weights(sides.pair(), sides.a.joined, sides.b.joined, workers=how.workers, progress=how.progress)
    found.compared, found.status = compared, load_status(compared, sides.kept())
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
    rules = sides.rules()
    if rules is None:
        return []
    pairs = zip("AB", (sides.a, sides.b), rules, strict=True)
    return [f"{label}: {line}" for label, side, its in pairs for line in unlike_config(side.checkpoint.tensors, its)]


def _run_both(found: Found, runners: Sequence[Side], how: How, compared: Compared) -> None:
    """Run both sides, one after the other, so that one copy of the model is in memory at a time.

    A's runs show how sensitive the logits are.
    """
    one, two = runners
    inputs, notes = make_inputs(one.config, one.folder, windows=one.windows, max_tokens=how.max_tokens)
    found.notes += notes
    found.runners = [one, two]
    steps = how.steps(3 * len(inputs)) if how.steps else lambda _: None
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


def _scratch(stack: ExitStack) -> Path:
    """Return a folder for a dump that nobody asked for; it is gone when `stack` ends."""
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptkit-dump-")))


def _verify_one(path: Path, asked: Asked, how: How, target: DumpFolder | None, against: Path | None) -> Report:
    """Run one checkpoint alone, into a dump or against one."""
    if target is not None:
        check_dump_target(target, [path])
    other = None if against is None else open_dump(against)
    source = open_side(path, asked.strategy_a, asked.step_a, "a")
    side = one_side(source, asked, load_own_tables(asked.table), how.runner, how.devices.a, how.extent)
    found = Found(how.level, path, target.path if target else against or path, None)
    found.files = [check_source(_as_stored(source, asked.step_a), how.progress)]
    if other is None:
        inputs, found.notes = make_inputs(side.config, side.folder, windows=side.windows, max_tokens=how.max_tokens)
    else:
        inputs = other.inputs
    found.runners = [side]
    job = make_job(side, inputs, how.extent, rounded={}, sensitivity=True)
    steps = how.steps(2 * len(inputs)) if how.steps else lambda _: None
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

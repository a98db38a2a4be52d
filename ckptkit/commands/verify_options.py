"""Which options of `ckptkit verify` go together: one that would do nothing is refused, or passed over as a default.

What does not live here: what the options mean (`verify.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptkit.commands.defaults import Defaults
from ckptkit.errors import UsageError
from ckptkit.quantities import parse_layers

_OF_RUNS = ("runner", "device", "device_a", "device_b", "max_tokens", "stream", "layers")
_OF_LEVELS = ("dump", "against", "layers", "stream", "compute", "level", "keep_going", "overwrite")
_OF_B = ("device_b", "dialect_b", "variant_b", "strategy_b", "step_b")


def refuse_idle(told: Mapping[str, Any], otherwise: Mapping[str, Any], given: Defaults) -> None:
    """Raise UsageError for an option that does nothing beside the others; note it where it is a default.

    `told` are the options by name; one is told when it is neither None nor what `otherwise` has.
    """
    for name, why in _idle(told):
        if told[name] is not None and told[name] != otherwise.get(name):
            option = f"--{name.replace('_', '-')}"
            given.pass_over(name, UsageError(f"`{option}` {why}", hint="leave it out"))


def _idle(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the options that do nothing beside the others, and why."""
    if told["sanity"] is not None:
        yield from ((name, "does nothing with `--sanity`") for name in _OF_LEVELS)
        return
    yield "lines", "does nothing without `--sanity`"
    if told["level"] in ("files", "weights"):
        yield from ((name, f"does nothing at level {told['level']}, which runs no network") for name in _OF_RUNS)
    if told["level"] == "files":
        yield "keep_going", "does nothing at level files, after which there is no other"
    if told["b"] is None:
        yield from ((name, "is about a second checkpoint, and none is named") for name in _OF_B)
        yield "keep_going", "does nothing where one checkpoint is run alone"
    if told["against"] is not None:
        yield "max_tokens", "does nothing with `--against`: the inputs are those of the dump"
    if told["dump"] is None:
        yield "overwrite", "does nothing without `--dump`"


def check_sides(b: str | Path | None, dump: str | Path | None, against: str | Path | None, level: str) -> None:
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


def layers_of(text: str | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the layers that `0,1,40-43` names, in rising order; UsageError for anything else."""
    if text is None:
        return None
    words = text if isinstance(text, str) else ",".join(map(str, text))
    try:
        return parse_layers(words)
    except ValueError as error:
        raise UsageError(
            f"`--layers {words}` names no layers", why=str(error), hint="write it like `0,1,40-43`"
        ) from None

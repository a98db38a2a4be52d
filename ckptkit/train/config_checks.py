"""Limits between the settings of a training config: what one key says about another.

What does not live here: limits of a single key (`config_models.py`), and what only the model, the corpus or the folder
of the run can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptkit.train.config_models import TrainConfig

_FP16_KEYS = ("loss_scale", "initial_scale", "growth_interval")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with the setting `key` (`optimizer.lr`), why that matters, and the remedy."""

    key: str
    what: str
    hint: str = ""
    why: str = ""

    def text(self) -> str:
        """Return all of it in one line."""
        return f"{self.what}{f' ({self.hint})' if self.hint else ''}"


class Contradictions(ValueError):
    """What is wrong between the settings of a config; pydantic keeps it beside its own message."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.text() for problem in problems))
        self.problems = tuple(problems)


def contradictions(config: TrainConfig) -> list[Problem]:
    """Return every setting that contradicts another one."""
    return [problem for check in (_sizes, _steps, _precision, _eval, _files) for problem in check(config)]


def divisors(number: int) -> list[int]:
    """Return the divisors of a whole number above 0, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def is_same(one: Path, two: Path) -> bool:
    """Say whether two names are of one file, or would be: links and `..` are followed."""
    try:
        return one.samefile(two)
    except OSError:
        return one.resolve() == two.resolve()


def _sizes(config: TrainConfig) -> Iterator[Problem]:
    training = config.training
    batch, micro = training.batch_size, training.micro_batch
    if batch % micro:
        some = ", ".join(map(str, divisors(batch)))
        yield Problem(
            "training.micro_batch",
            f"`training.micro_batch` is {micro}, which does not divide `training.batch_size`, {batch}",
            f"choose one of {some}",
        )
    least = training.adaptive.min_micro_batch
    if training.adaptive.enabled and least > micro:
        yield Problem(
            "training.adaptive.min_micro_batch",
            f"`training.adaptive.min_micro_batch` is {least}, above `training.micro_batch`, {micro}",
            f"choose {micro} or less",
        )


def _steps(config: TrainConfig) -> Iterator[Problem]:
    schedule, stop = config.schedule, config.training.stop_at_step
    if schedule.warmup_steps >= schedule.total_steps:
        yield Problem(
            "schedule.warmup_steps",
            f"`schedule.warmup_steps` is {schedule.warmup_steps}, not below `schedule.total_steps`, "
            f"{schedule.total_steps}",
            "the learning rate needs a step after its rise: shorten the warm-up",
        )
    if schedule.min_lr > config.optimizer.lr:
        yield Problem(
            "schedule.min_lr",
            f"`schedule.min_lr` is {schedule.min_lr}, above `optimizer.lr`, {config.optimizer.lr}",
            "`optimizer.lr` is the highest learning rate: choose a smaller `schedule.min_lr`",
        )
    if stop is not None and stop > schedule.total_steps:
        yield Problem(
            "training.stop_at_step",
            f"`training.stop_at_step` is {stop}, above `schedule.total_steps`, {schedule.total_steps}",
            "the schedule ends there: leave `training.stop_at_step` out, or plan for more steps",
        )


def _precision(config: TrainConfig) -> Iterator[Problem]:
    precision = config.precision
    if precision.compute == "bf16" and config.training.device == "cpu":
        yield Problem(
            "precision.compute",
            "`precision.compute` is `bf16`, which `training.device` `cpu` does not train",
            "choose `fp32`, or `fp16` with its loss scale, or train on `ascend`",
            "MindSpore's CPU kernels do not train in bfloat16",
        )
    given = [key for key in _FP16_KEYS if key in precision.model_fields_set]
    if precision.compute != "fp16":
        for key in given:
            yield Problem(
                f"precision.{key}",
                f"`precision.{key}` does nothing with `precision.compute` `{precision.compute}`",
                "leave it out, or choose `fp16`",
                "only fp16's gradients are small enough to vanish",
            )
    elif precision.loss_scale != "dynamic":
        for key in given:
            if key != "loss_scale":
                yield Problem(
                    f"precision.{key}",
                    f"`precision.{key}` does nothing with `precision.loss_scale` {precision.loss_scale:g}",
                    "leave it out, or choose `dynamic`",
                    "a loss scale that is a number stays as it is",
                )


def _eval(config: TrainConfig) -> Iterator[Problem]:
    held_out = config.eval
    settings = {"every": held_out.every, "batches": held_out.batches, "at_start": held_out.at_start}
    wanted = [key for key, value in settings.items() if value]
    if wanted and held_out.path is None:
        yield Problem(
            f"eval.{wanted[0]}",
            f"`eval.{wanted[0]}` needs `eval.path`, and there is none",
            "name a held-out corpus with `eval.path`, or leave the section out",
        )
    if config.checkpoint.keep_best and (held_out.path is None or held_out.every is None):
        missing = "path" if held_out.path is None else "every"
        yield Problem(
            "checkpoint.keep_best",
            f"`checkpoint.keep_best` needs `eval.{missing}`, and there is none",
            "give `eval.path` and `eval.every`, or leave `checkpoint.keep_best` out",
            "the best checkpoint is the one with the lowest loss on a held-out corpus",
        )
    elif config.checkpoint.keep_best and held_out.every is not None and held_out.every % config.checkpoint.every:
        yield Problem(
            "checkpoint.keep_best",
            f"`eval.every`, {held_out.every}, is no multiple of `checkpoint.every`, {config.checkpoint.every}",
            "make it one, or leave `checkpoint.keep_best` out",
            "only a step that is saved can be kept as the best",
        )


def _files(config: TrainConfig) -> Iterator[Problem]:
    """Refuse to write over what is read."""
    if is_same(config.checkpoint.folder, config.model.path):
        yield Problem(
            "checkpoint.folder",
            "`checkpoint.folder` is `model.path`: checkpoints would lie among the weights that they began with",
            "give the run a folder of its own",
        )
    read = {"data.path": config.data.path, "eval.path": config.eval.path}
    for key, path in read.items():
        if path is not None and config.log.file is not None and is_same(config.log.file, path):
            yield Problem(
                "log.file", f"`log.file` is `{key}`: lines would be added to what is trained on", "choose another file"
            )

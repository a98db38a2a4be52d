"""A trial before the real run: 1 % of the rows, 100 updates, in a folder of its own that is removed.

It answers: does the loss fall, does the memory suffice, does a checkpoint load back bit for bit, what will the whole
run need. The schedule is squeezed into the trial's updates, so that the learning rate goes all its way.
"""

from __future__ import annotations

import shutil
import signal
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptkit.formats.disk import folder_beside
from ckptkit.memory import allowed_bytes
from ckptkit.report import human_bytes
from ckptkit.train.begin import Origin
from ckptkit.train.config_models import TrainConfig
from ckptkit.train.driver import Choices, Outcome, train
from ckptkit.train.log_file import LOG, read_log
from ckptkit.train.step_bytes import digest_of
from ckptkit.train.step_files import Floats
from ckptkit.train.step_read import tensors_in
from ckptkit.train.step_scan import load_newest

STEPS = 100
SHARE = 0.01  # of the rows


@dataclass(frozen=True, slots=True)
class Smoke:
    """What a trial found. `first_loss` and `last_loss` are means over the first and the last tenth of its updates.

    `step_seconds` is the median of an update; `run_seconds` that times the updates of the whole run, and
    `disk_bytes` what its checkpoints take at most, the one being written included.
    """

    steps: int
    rows: int
    all_rows: int
    first_loss: float
    last_loss: float
    peak_bytes: int
    allowed_bytes: int | None
    loads_back: bool
    step_seconds: float
    save_stall: float
    run_seconds: float
    epochs: float
    checkpoint_bytes: int
    disk_bytes: int
    free_bytes: int

    @property
    def falls(self) -> bool:
        return self.last_loss < self.first_loss

    @property
    def fits(self) -> bool:
        return self.allowed_bytes is None or self.peak_bytes < self.allowed_bytes

    @property
    def has_room(self) -> bool:
        return self.disk_bytes < self.free_bytes

    @property
    def ok(self) -> bool:
        return self.falls and self.fits and self.loads_back and self.has_room

    @property
    def headline(self) -> str:
        return f"trial of {self.steps} updates: " + ("all is well" if self.ok else "look at what says no")

    def answers(self) -> list[tuple[str, str]]:
        """Return (label, text) of each answer."""
        limit = "not known" if self.allowed_bytes is None else human_bytes(self.allowed_bytes)
        return [
            ("data", f"{self.rows} of {self.all_rows} rows; the whole run sees each {self.epochs:.2f} times"),
            ("loss falls", f"{_yes(self.falls)}: {self.first_loss:.4f} to {self.last_loss:.4f}"),
            ("memory fits", f"{_yes(self.fits)}: at most {human_bytes(self.peak_bytes)} of {limit}"),
            ("loads back", f"{_yes(self.loads_back)}: every tensor of the last checkpoint, bit for bit"),
            ("disk fits", f"{_yes(self.has_room)}: {human_bytes(self.disk_bytes)} for checkpoints of "
                          f"{human_bytes(self.checkpoint_bytes)}, {human_bytes(self.free_bytes)} free"),
            ("whole run", f"{_span(self.run_seconds)}, {self.step_seconds:.3f} s an update here"),
        ]  # fmt: skip

    def data(self) -> dict[str, Any]:
        """Return all figures and answers as plain data."""
        told = {"falls": self.falls, "fits": self.fits, "has_room": self.has_room}
        return asdict(self) | told


def try_out(config: TrainConfig, origin: Callable[[], Origin], say: Callable[[str], None]) -> Smoke:
    """Run the trial and return what it found; the folder of the run is not touched."""
    run = config.checkpoint.folder
    then = "or choose another `checkpoint.folder`"
    with folder_beside(run, ".smoke", why="a trial has a folder beside that of its run", then=then) as folder:
        smaller = _smaller(config, folder)
        kept: dict[str, str] = {}

        def keep(name: str, array: Floats) -> None:
            kept[name] = digest_of(array)

        out = train(smaller, origin, Choices(share=SHARE), say, at_end=keep)
        if out.stopped is not None:  # half a trial has no answers, and nothing of it stays
            signal.raise_signal(out.stopped)
        return _found(config, smaller, out, folder, kept)


def _smaller(config: TrainConfig, folder: Path) -> TrainConfig:
    """Return the config of the trial."""
    schedule, total = config.schedule, config.schedule.total_steps
    steps = min(STEPS, total)
    warmup = min(round(schedule.warmup_steps * steps / total), steps - 1)
    changed = {
        "schedule": schedule.model_copy(update={"total_steps": steps, "warmup_steps": warmup}),
        "checkpoint": config.checkpoint.model_copy(
            update={"folder": folder, "every": max(1, steps // 2), "save_at_end": True}
        ),
        "training": config.training.model_copy(update={"stop_at_step": None}),
        "eval": config.eval.model_copy(update={"path": None, "every": None, "at_start": False}),
        "log": config.log.model_copy(update={"file": None, "tensorboard": None}),
    }
    return config.model_copy(update=changed)


def _found(config: TrainConfig, smaller: TrainConfig, out: Outcome, folder: Path, kept: dict[str, str]) -> Smoke:
    lines = [line for _, line in sorted(read_log(folder / LOG).steps.items())]
    losses = [line["loss"] for line in lines]
    tenth = max(1, len(losses) // 10)
    seconds = statistics.median(line["step_seconds"] for line in lines[1:] or lines)
    loaded = load_newest(folder)
    assert loaded is not None, "the trial saves at its end"
    stored = {name: digest_of(array) for name, array in tensors_in(loaded.content)}
    size = loaded.content.num_bytes
    kept_at_once = config.checkpoint.keep_last + int(config.checkpoint.keep_best) + 1
    total = config.schedule.total_steps
    return Smoke(
        steps=len(lines), rows=out.rows, all_rows=out.all_rows,
        first_loss=statistics.fmean(losses[:tenth]), last_loss=statistics.fmean(losses[-tenth:]),
        peak_bytes=out.peak_bytes, allowed_bytes=allowed_bytes(), loads_back=stored == kept,
        step_seconds=seconds, save_stall=max(line["save_stall"] for line in lines), run_seconds=seconds * total,
        epochs=total * config.training.batch_size / out.all_rows, checkpoint_bytes=size,
        disk_bytes=size * kept_at_once, free_bytes=shutil.disk_usage(folder).free,
    )  # fmt: skip


def _yes(answer: bool) -> str:
    return "yes" if answer else "NO"


def _span(seconds: float) -> str:
    """Return a time as people say it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"

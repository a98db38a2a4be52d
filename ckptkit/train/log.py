"""What a run writes down while it trains: a table, `log.jsonl`, TensorBoard.

Every step has a line in the file; `log.every` is how often the table and TensorBoard get one. Steps are counts of
updates done: the first line is step 1. Lines of a file have a `kind`: `step` (the keys of `StepLine`), `eval` (those of
`Evaluation`, and `after_step`) and `note` (a text that was printed, too). What does not live here: how lines are
stored (`log_file.py`).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from ckptkit.train.log_events import Events, open_events
from ckptkit.train.log_file import AFTER, LOG, add_line, open_lines
from ckptkit.train.log_table import Table, open_table

_SHOWN_IN_TENSORBOARD = (
    "loss", "lr", "grad_norm", "scale", "tokens_per_second", "data_wait", "step_seconds", "memory_bytes", "save_stall",
    "micro_batch", "recompute",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One update.

    `loss` is the float32's exact value, a mean over the `tokens` with weight of the global batch; `grad_norm` is the
    global norm before clipping; `scale` is the loss scale that the update was made with, None in fp32, and `overflows`
    the tries before it. `data_wait`, `step_seconds` and `save_stall` are seconds (waiting for the batch, for all of the
    step, for a checkpoint's snapshot or writer). `memory_bytes` is the step's peak. `recompute` counts layers.
    `sample_ids` are the batch's rows, `ids` in the file; None unless they were asked for.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    scale: float | None
    overflows: int
    tokens: int
    tokens_per_second: float
    data_wait: float
    step_seconds: float
    memory_bytes: int
    save_stall: float
    micro_batch: int
    recompute: int
    sample_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """`loss` is the mean over all `tokens` that count of a held-out set, `perplexity` e to it; `seconds` is what it
    took."""

    loss: float
    perplexity: float
    tokens: int
    seconds: float


class LogSettings(Protocol):
    """The `log` section of a config."""

    @property
    def every(self) -> int: ...
    @property
    def file(self) -> Path | None: ...
    @property
    def tensorboard(self) -> Path | None: ...
    @property
    def sample_ids(self) -> bool: ...
    @property
    def console(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Log:
    """The open logs of a run; made by `open_log`, and to be closed."""

    settings: LogSettings
    path: Path
    fd: int
    table: Table
    events: Events | None

    def step(self, line: StepLine) -> None:
        """Write one update down."""
        data = dataclasses.asdict(line)
        ids = data.pop("sample_ids")
        if ids is not None and self.settings.sample_ids:
            data["ids"] = ids
        add_line(self.path, self.fd, {"kind": "step", **data})
        if line.step % self.settings.every:
            return
        if self.settings.console:
            self.table.row(data)
        if self.events is not None:
            shown = {f"train/{key}": data[key] for key in _SHOWN_IN_TENSORBOARD if data[key] is not None}
            self.events.add(line.step, shown)

    def eval(self, step: int, found: Evaluation) -> None:
        """Write down what an evaluation after `step` updates found; it is printed, whatever `log.every` says."""
        add_line(self.path, self.fd, {"kind": "eval", AFTER: step, **dataclasses.asdict(found)})
        if self.settings.console:
            figures = f"loss {found.loss:.4f}, perplexity {found.perplexity:.4g}"
            self.table.say(f"eval after step {step}: {figures} over {found.tokens} tokens, {found.seconds:.2f}s")
        if self.events is not None:
            self.events.add(step, {"eval/loss": found.loss, "eval/perplexity": found.perplexity})

    def note(self, text: str, **data: Any) -> None:
        """Print a text and write it down, with `data` (plain values) beside it; also with `log.console` off."""
        add_line(self.path, self.fd, {"kind": "note", "text": text, **data})
        self.table.say(text)

    def close(self) -> None:
        os.close(self.fd)
        if self.events is not None:
            self.events.close()


def open_log(settings: LogSettings, run: Path, start: int, stream: TextIO | None = None) -> Log:
    """Open the logs of the run in the folder `run`, which goes on after `start` updates; the table goes to stderr.

    UsageError for a file that is no log, ResourceError for one that cannot be written.
    """
    path = settings.file or run / LOG
    fd = open_lines(path)
    events = None if settings.tensorboard is None else open_events(settings.tensorboard, start + 1)
    return Log(settings, path, fd, open_table(stream or sys.stderr), events)

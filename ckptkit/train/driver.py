"""The loop of `resume-train`: from where a run begins to where it ends, with logs, evaluations and checkpoints.

The order after an update: its line in the log, then, where one is due, an evaluation and a checkpoint. So a kill loses
no line of an update that a checkpoint has. What does not live here: where a run begins (`begin.py`), arithmetic
(`step.py`), files (`step_write.py`), which settings a step has (`adaptive.py`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.report import human_bytes
from ckptkit.train.adaptive import Policy, ladder, state_from_json
from ckptkit.train.arrays import Floats
from ckptkit.train.batches import Batches, StepData
from ckptkit.train.begin import Begun, Origin, begin, check_same_run, held
from ckptkit.train.build import Built, build
from ckptkit.train.config_models import TrainConfig
from ckptkit.train.corpus import Corpus, first_rows, open_corpus
from ckptkit.train.decisions import Adaptive, open_adaptive
from ckptkit.train.evaluate import evaluate
from ckptkit.train.log import Evaluation, Log, StepLine, open_log
from ckptkit.train.maths import config_hash, maths_of
from ckptkit.train.memory import Meter, default_limit, open_meter
from ckptkit.train.order import position_of
from ckptkit.train.prefetch import Prefetch
from ckptkit.train.prune import Keep
from ckptkit.train.saver import Saver
from ckptkit.train.schedule import lr_at
from ckptkit.train.signals import stopping
from ckptkit.train.state import RunState
from ckptkit.train.step import StepResult
from ckptkit.train.step_write import Snapshot, Written, write_step


@dataclass(slots=True)
class Outcome:
    """How a run ended: the update it began after and the last one, losses, seconds by what took them.

    `stopped` is the signal that ended it early, or None. `first_loss` and `loss` are those of the first and the last
    update of this process, None when there was none. `rows` of the corpus' `all_rows` were trained on.
    """

    resumed_from: int
    step: int
    total_steps: int
    rows: int
    all_rows: int
    first_loss: float | None = None
    loss: float | None = None
    evaluation: Evaluation | None = None
    best: dict[str, Any] | None = None
    stopped: int | None = None
    checkpoint: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    tokens: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Choices:
    """What is said beside the config; `share` of the rows are used, the first ones, and a batch of them at least."""

    accept_changes: bool = False
    without_optimizer: bool = False
    share: float = 1.0


AtEnd = Callable[[str, Floats], None]


def train(
    config: TrainConfig,
    origin: Callable[[], Origin],
    choices: Choices,
    say: Callable[[str], None],
    *,
    at_end: AtEnd | None = None,
) -> Outcome:
    """Train until the last step, or `stop_at_step`, or a signal; `say` gets `resumed from step N` before the first.

    `origin` is asked for the model where the run has no checkpoint. `at_end` gets every tensor of the last state.
    Raises UsageError, CorruptError, ResourceError, and DivergedError when the loss or a gradient is no number.
    """
    with held(config.checkpoint.folder):
        begun = begin(config, origin, without_optimizer=choices.without_optimizer)
        built = build(config, begun, without_optimizer=choices.without_optimizer)
        corpus = open_corpus(config.data, begun.folder, built.vocab)
        rows = max(round(len(corpus) * choices.share), min(config.training.batch_size, len(corpus)))
        used = corpus if rows == len(corpus) else first_rows(corpus, rows)
        notes = [*begun.notes, *built.notes]
        if begun.state is not None:
            notes += check_same_run(config, begun.state, used, accept_changes=choices.accept_changes)
        say(f"resumed from step {begun.step}")
        run = _Run(config, begun, built, used, notes, forget=choices.accept_changes)
        run.out.all_rows = len(corpus)
        return run.go(at_end)


class _Run:
    """One process of a run: what is open while it lasts."""

    def __init__(
        self, config: TrainConfig, begun: Begun, built: Built, corpus: Corpus, notes: list[str], *, forget: bool
    ) -> None:
        self.config, self.begun, self.built, self.corpus, self.forget = config, begun, built, corpus, forget
        self.folder = config.checkpoint.folder
        self.batches = Batches(corpus, config.training.batch_size, config.data.seed, config.data.shuffle)
        self.maths = maths_of(config)
        self.held_out: Corpus | None = None
        if config.eval.path is not None:
            self.held_out = open_corpus(config.data, begun.folder, built.vocab, path=config.eval.path)
        self.micro_step = begun.state.micro_step if begun.state else 0
        total, stop = config.schedule.total_steps, config.training.stop_at_step
        self.last = total if stop is None else min(total, stop)
        rows = len(corpus)
        self.out = Outcome(begun.step, begun.step, total, rows, rows, seconds=dict(begun.seconds), notes=notes)
        self.out.seconds |= built.seconds
        if begun.state is not None and begun.state.best is not None:
            if self.held_out is None or begun.state.best["held_out"] == self._held_out_name():
                self.out.best = dict(begun.state.best)
            else:
                self.out.notes.append("the held-out set is another one than before: its best loss begins anew")
        if begun.content is not None:
            self.out.checkpoint = begun.content.path
        self.saved = begun.step if begun.content is not None else None
        self.previous = self.out.checkpoint
        self.written: SimpleQueue[tuple[Written, float]] = SimpleQueue()
        self.stall = 0.0
        self.stop = threading.Event()
        self.meter: Meter = open_meter()

    def go(self, at_end: AtEnd | None) -> Outcome:
        """Run to the end, and close what is open whatever happens."""
        with ExitStack() as stack:
            self.log: Log = open_log(self.config.log, self.folder, self.begun.step)
            stack.callback(self.log.close)
            self.adaptive: Adaptive | None = self._open_adaptive()
            if self.adaptive is not None:
                stack.callback(self.adaptive.close)
            self.saver = stack.enter_context(Saver(self._write, background=self.config.checkpoint.background))
            for text in (*self.out.notes, *self.corpus.statistics.lines()):
                self.log.note(text)
            stack.enter_context(stopping(self._stop_by))
            prefetch = stack.enter_context(Prefetch(self.batches, self.begun.step))
            if self.config.eval.at_start and self.begun.step == 0 and self.last:
                self._evaluate()
            while self.out.step < self.last and not self.stop.is_set():
                self._update(prefetch)
            self._end()
            if at_end is not None:
                for name, array in self.built.trainer.state().items():
                    at_end(name, array)
        return self.out

    def _update(self, prefetch: Prefetch) -> None:
        """Make one update and all that comes after it."""
        started = time.perf_counter()
        data, waited = prefetch.next()
        micro_batch, recompute = self._setting()
        lr = lr_at(self.config.schedule, self.config.optimizer.lr, data.step)
        self.meter.start()
        result = self.built.trainer.step(data, lr=lr, micro_batch=micro_batch, recompute=recompute)
        peak = self.meter.peak_bytes()
        seconds = time.perf_counter() - started
        self._count(data, result, peak, seconds, micro_batch)
        stall, self.stall = self.stall, 0.0
        self.log.step(
            StepLine(
                step=self.out.step, epoch=data.epoch, loss=result.loss, lr=lr, grad_norm=result.grad_norm,
                scale=result.scale, overflows=result.overflows, tokens=data.tokens,
                tokens_per_second=data.tokens / seconds, data_wait=waited, step_seconds=seconds, memory_bytes=peak,
                save_stall=stall, micro_batch=micro_batch, recompute=len(recompute), sample_ids=data.samples,
            )
        )  # fmt: skip
        self._after(peak)

    def _setting(self) -> tuple[int, frozenset[int]]:
        """Return the micro-batch of the next step, and the layers that it recomputes."""
        if self.adaptive is None:
            return self.config.training.micro_batch, self.built.recompute
        setting = self.adaptive.setting
        return setting.micro_batch, self.built.all_layers if setting.recompute else self.built.recompute

    def _count(self, data: StepData, result: StepResult, peak: int, seconds: float, micro_batch: int) -> None:
        out = self.out
        out.step, out.loss = data.step + 1, result.loss
        out.tokens, out.peak_bytes = out.tokens + data.tokens, max(out.peak_bytes, peak)
        if out.first_loss is None:
            out.first_loss, out.seconds["first update, compilation included"] = result.loss, seconds
        self.micro_step += self.config.training.batch_size // micro_batch * (1 + result.overflows)

    def _after(self, peak: int) -> None:
        """Do what is due after an update."""
        step = self.out.step
        if self.adaptive is not None:
            decision = self.adaptive.after(step, peak)
            if decision is not None:
                self.log.note(decision.text(self.adaptive.policy.limit_bytes), after_step=step)
        every = self.config.eval.every
        if every is not None and step % every == 0:
            self._evaluate()
        if step % self.config.checkpoint.every == 0:
            self._save()
        self._tell_saved()

    def _evaluate(self) -> None:
        if self.held_out is None:
            return
        found = evaluate(
            self.built.trainer, self.held_out, batch_size=self.config.training.batch_size,
            micro_batch=self._setting()[0], most=self.config.eval.batches,
        )  # fmt: skip
        self.out.evaluation = found
        self.log.eval(self.out.step, found)
        if not math.isfinite(found.loss):
            text = f"the held-out loss at step {self.out.step} is {found.loss}"
            self.out.notes.append(text)
            self.log.note(text)
        elif self.out.best is None or found.loss < self.out.best["loss"]:
            self.out.best = {"step": self.out.step, "loss": found.loss, "held_out": self._held_out_name()}

    def _held_out_name(self) -> str:
        """Return what tells a held-out set from another one, whose losses are not to be compared."""
        most = self.config.eval.batches
        name = "" if self.held_out is None else self.held_out.fingerprint
        return name if most is None else f"{name}, {most} batches"

    def _write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint, in the thread of the saver."""
        started, settings = time.perf_counter(), self.config.checkpoint
        best = snapshot.state.best["step"] if settings.keep_best and snapshot.state.best else None
        resumed = frozenset({self.begun.step} if self.begun.content is not None else ())
        written = write_step(
            self.folder, snapshot, side_files=self.begun.side_files, facts=self.begun.facts, previous=self.previous,
            keep=Keep(settings.keep_last, best, resumed),
        )  # fmt: skip
        self.previous = written.folder
        self.written.put((written, time.perf_counter() - started))

    def _save(self) -> None:
        """Hand what the run is now to the writer: copies, so that the next update alters nothing of it."""
        started = time.perf_counter()
        weights, moments = self.built.trainer.snapshot()
        self.saver.save(Snapshot(self._state(), weights, moments, self.built.frozen))
        self.stall += time.perf_counter() - started
        self.saved = self.out.step

    def _tell_saved(self) -> None:
        """Write down which checkpoints are on the disk by now."""
        while not self.written.empty():
            written, seconds = self.written.get()
            self.out.checkpoint = written.folder
            self.log.note(
                f"saved `{written.folder.name}`, {human_bytes(written.num_bytes)} in {seconds:.2f} s",
                after_step=written.step, bytes=written.num_bytes, seconds=seconds, removed=list(written.removed),
            )  # fmt: skip
            for note in written.notes:
                self.out.notes.append(note)
                self.log.note(note)

    def _state(self) -> RunState:
        """Return where the run stands."""
        step, rows = self.out.step, len(self.corpus)
        training, trainer = self.config.training, self.built.trainer
        return RunState(
            step=step, epoch=position_of(step, rows, training.batch_size).epoch,
            sample_counter=self.batches.samples_before(step), rows=rows, batch_size=training.batch_size,
            micro_step=self.micro_step, moments_begun=trainer.moments_begun,
            slots=training.batch_size // training.micro_batch,
            config_hash=config_hash(self.maths), corpus_fingerprint=self.corpus.fingerprint,
            scaler=trainer.scaler.state(), adaptive=self.adaptive.state.to_json() if self.adaptive else None,
            seeds={"data": self.config.data.seed, "dropout": training.seed},
            versions=self.built.versions, maths=self.maths, best=self.out.best, loss=self.out.loss,
        )  # fmt: skip

    def _end(self) -> None:
        """Save what was not saved yet, and wait until it is on the disk."""
        due = self.stop.is_set() or self.config.checkpoint.save_at_end
        if due and self.saved != self.out.step:
            self._save()
        self.saver.finish()
        self._tell_saved()

    def _open_adaptive(self) -> Adaptive | None:
        training = self.config.training
        settings = training.adaptive
        if not settings.enabled:
            return None
        limit = settings.limit_bytes or default_limit()
        if limit is None:
            raise UsageError(
                "the system does not say how much memory there is, so `training.adaptive` has no limit",
                hint="give it one: `training.adaptive.limit: 16GB`",
            )
        whole = self.built.recompute == self.built.all_layers
        rungs = ladder(training.batch_size, training.micro_batch, settings.min_micro_batch, recomputes_all=whole)
        kept = self.begun.state.adaptive if self.begun.state else None
        state = None if kept is None else state_from_json(kept)
        if self.meter.note:
            self.out.notes.append(self.meter.note)
        policy = Policy(rungs, limit, settings.grow_below, settings.patience)
        return open_adaptive(self.folder, policy, state, self.begun.step, forget=self.forget)

    def _stop_by(self, number: int) -> None:
        self.out.stopped = number
        self.stop.set()

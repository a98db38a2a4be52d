"""`ckptkit resume-train`: train, or go on training exactly where a run was stopped."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.commands.choose import choose
from ckptkit.commands.common import open_input
from ckptkit.commands.convert import plan_by_tables
from ckptkit.commands.defaults import Defaults
from ckptkit.commands.parallel import WHOLE, Parallel
from ckptkit.commands.source import find_config, load_own_tables
from ckptkit.commands.write import Progress
from ckptkit.errors import CkptkitError, UsageError
from ckptkit.formats.model_config import side_files
from ckptkit.formats.registry import HF
from ckptkit.mapping.state_names import is_state
from ckptkit.plan.build import Target
from ckptkit.report import Report, human_bytes

if TYPE_CHECKING:
    from ckptkit.train.begin import Origin
    from ckptkit.train.config import ModelConfig, TrainConfig
    from ckptkit.train.driver import Outcome
    from ckptkit.train.smoke import Smoke

# options of `convert` that a message may name, and the keys of a config that stand for them
_KEYS = {
    "--config": "config", "--model": "family", "--from": "dialect", "--from-variant": "variant", "--step": "step",
    "--src-strategy": "strategy", "--table": "table",
}  # fmt: skip
_OPTION = re.compile(rf"({'|'.join(sorted(_KEYS, key=len, reverse=True))})(?![a-z-])( ?)")


def resume_train(
    config: str | Path,
    *,
    sets: Sequence[str] = (),
    stop_at_step: int | None = None,
    smoke: bool = False,
    accept_changes: bool = False,
    without_optimizer: bool = False,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> Report:
    """Train as the YAML file `config` says, from its newest whole checkpoint, or from the model's weights.

    `sets` are `key=value` over the file. The run saves and ends at `stop_at_step`; the schedule stays that of
    `schedule.total_steps`. `smoke` is a small trial of the same run in a folder of its own, which is removed.
    `accept_changes` goes on although settings that alter the maths, or the corpus, are not those of the checkpoint;
    `without_optimizer` although its moments are lost. `say` gets `resumed from step N` before the first update.

    Raises UsageError (2), CoverageError (3), ResourceError (4), CorruptError (5), DivergedError (6).
    """
    _check_installed()
    from ckptkit.train.config import load_config
    from ckptkit.train.driver import Choices, train
    from ckptkit.train.smoke import try_out

    told = [*sets, *([f"training.stop_at_step={stop_at_step}"] if stop_at_step is not None else [])]
    settings = load_config(Path(config), told)
    choices = Choices(accept_changes=accept_changes, without_optimizer=without_optimizer)

    def origin() -> Origin:
        return model_origin(settings.model, progress)

    if smoke:
        return _smoke_report(try_out(settings, origin, say))
    return _report(settings, train(settings, origin, choices, say))


def plot_run(run: str | Path) -> Report:
    """Draw the log of a run, its folder or the file itself, as a PNG: `plot.png` beside the log."""
    from ckptkit.train import plot

    run = Path(run)
    target = (run if run.is_dir() else run.parent) / "plot.png"
    plot.plot_run(run, target)
    report = Report("resume-train", f"drew `{target}`")
    report.data = {"plot": str(target)}
    return report


def _check_installed() -> None:
    from importlib.util import find_spec

    lacking = [name for name in ("mindspore", "pydantic", "tokenizers") if find_spec(name) is None]
    if lacking:
        raise UsageError(
            f"`resume-train` needs packages that are not installed: {', '.join(lacking)}",
            hint='`pip install "ckptkit-mindspore[train]"`',
        )


def model_origin(model: ModelConfig, progress: Progress | None) -> Origin:
    """Return the model that a run begins with, of any naming and layout, as float32 under HuggingFace's names.

    Training state in it stays behind: a new run has moments of its own.
    """
    try:
        return _model_origin(model, progress)
    except CkptkitError as error:
        error.why, error.hint = _in_words_of_config(error.why), _in_words_of_config(error.hint)
        raise


def _in_words_of_config(text: str) -> str:
    """Return a text about options of `convert` as one about the keys of a config that stand for them."""
    return _OPTION.sub(lambda found: f"model.{_KEYS[found[1]]}" + (": " if found[2] else ""), text)


def _model_origin(model: ModelConfig, progress: Progress | None) -> Origin:
    from ckptkit.train.begin import Origin
    from ckptkit.train.step_files import facts_in, read_side_files
    from ckptkit.train.weights import load_weights

    strategy = None if model.strategy is None else str(model.strategy)
    source = open_input(model.path, Parallel(src_strategy=strategy, step=model.step))
    config, side, notes = find_config(source, model.config)
    tables = load_own_tables(list(model.table))
    choice = choose(
        source, config, tables, model=model.family, from_dialect=model.dialect, to_dialect="hf", variant=None,
        from_variant=model.variant, given=Defaults(()),
    )  # fmt: skip
    target = Target(HF, 1 << 62, dtype="F32", drop_state=True)
    plan = plan_by_tables(source, choice, config, side, target, WHOLE.target(Defaults(()), model.path))
    state = sum(map(is_state, source.checkpoint.tensors))
    if state:
        notes.append(f"{state} tensors of training state of `{model.path}` stay behind: a run has moments of its own")
    beside = model.config or source.checkpoint.folder
    folder = beside if beside.is_dir() else beside.parent
    apart = {path.name: path for path in side_files(folder)} if model.config is not None else {}
    advance = progress(plan.tensor_bytes, 0) if progress else lambda _: None
    return Origin(
        config=config,
        folder=folder,
        side_files=read_side_files(apart | {name: path for path, name in plan.side}) | dict(plan.extra),
        facts=facts_in(plan.facts),
        weights=lambda: load_weights(plan, source_digests=source.promised_digests, progress=advance),
        notes=(*notes, *plan.notes),
    )


def _report(config: TrainConfig, out: Outcome) -> Report:
    """Return what a run did; a run that was stopped is one that did what it was told."""
    where = config.checkpoint.folder
    report = Report("resume-train", f"`{where}`: step {out.step} of {out.total_steps}{_how_it_ended(out)}")
    report.add("from", f"step {out.resumed_from}")
    if out.loss is not None and out.first_loss is not None:
        report.add("loss", f"{out.first_loss:.4f} at step {out.resumed_from + 1}, {out.loss:.4f} at step {out.step}")
        report.add("tokens", f"{out.tokens} that count in the loss")
        report.add("memory", f"at most {human_bytes(out.peak_bytes)}")
    if out.evaluation is not None:
        report.add("held out", f"loss {out.evaluation.loss:.4f}, perplexity {out.evaluation.perplexity:.4g}")
    if out.best is not None:
        report.add("best", f"loss {out.best['loss']:.4f} on the held-out set, at step {out.best['step']}")
    took = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in out.seconds.items())
    report.add("took", took)
    if out.checkpoint is not None:
        report.add("saved", f"`{out.checkpoint}`")
    for note in out.notes:
        report.add("note", note)
    report.data = {
        "folder": str(where), "resumed_from": out.resumed_from, "step": out.step, "total_steps": out.total_steps,
        "first_loss": out.first_loss, "loss": out.loss, "tokens": out.tokens, "peak_bytes": out.peak_bytes,
        "stopped": out.stopped, "best": out.best, "seconds": out.seconds, "notes": out.notes,
        "evaluation": None if out.evaluation is None else
            {"loss": out.evaluation.loss, "perplexity": out.evaluation.perplexity, "tokens": out.evaluation.tokens},
        "checkpoint": None if out.checkpoint is None else str(out.checkpoint),
    }  # fmt: skip
    return report


def _how_it_ended(out: Outcome) -> str:
    if out.stopped is not None:
        return f", stopped by {signal.Signals(out.stopped).name}"
    return "" if out.step > out.resumed_from else "; there was nothing to do"


def _smoke_report(found: Smoke) -> Report:
    """Return what a trial found; exit code 1 when one of its questions was answered with no."""
    report = Report("resume-train", found.headline, exit_code=0 if found.ok else 1)
    for label, text in found.answers():
        report.add(label, text)
    report.data = {"smoke": found.data()}
    return report

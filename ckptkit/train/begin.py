"""Where a run begins: at its newest whole checkpoint, or at the weights of a model.

What does not live here: which checkpoint is whole (`step_scan.py`), how a model's weights are read (`weights.py`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.formats.disk import disk_error, lock, make_folder
from ckptkit.formats.manifest import read_manifest
from ckptkit.formats.model_config import read_config
from ckptkit.train.arrays import Floats
from ckptkit.train.config_models import TrainConfig
from ckptkit.train.corpus import Corpus
from ckptkit.train.maths import changed_maths, maths_of
from ckptkit.train.state import RunState
from ckptkit.train.step_files import SideFiles, facts_in, side_files_in
from ckptkit.train.step_read import StepContent, tensors_in
from ckptkit.train.step_scan import load_newest
from ckptkit.types import Shape

_LOCK = ".lock"
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Origin:
    """A model to begin with: its config.json, the files beside it, what manifests say of it, and its weights.

    `folder` is where its tokenizer lies. Of the weights, nothing but headers is read until `weights` is called.
    """

    config: Mapping[str, Any]
    folder: Path
    side_files: SideFiles
    facts: Mapping[str, Any]
    weights: Callable[[], dict[str, Floats]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """What a run begins with: `content` is the checkpoint that it goes on from, None for a fresh run.

    `weights` are those of a fresh run. `seconds` says how long reading took, by what was done.
    """

    config: Mapping[str, Any]
    folder: Path
    side_files: SideFiles
    facts: Mapping[str, Any]
    content: StepContent | None
    weights: Mapping[str, Floats]
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def state(self) -> RunState | None:
        return self.content.state if self.content else None

    @property
    def step(self) -> int:
        return self.state.step if self.state else 0

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the weights, by name."""
        if self.content is not None:
            return self.content.shapes
        return {name: array.shape for name, array in self.weights.items()}

    def tensors(self) -> Iterator[tuple[str, Floats]]:
        """Yield weights, then moments, one at a time."""
        if self.content is not None:
            return tensors_in(self.content)
        return iter(self.weights.items())


@contextlib.contextmanager
def held(run: Path) -> Iterator[None]:
    """Hold the folder of a run, made if need be; UsageError while another process does.

    A folder that was made here goes again when the block fails before anything was written to it.
    """
    made = not run.exists()
    try:
        make_folder(run)
        fd = os.open(run / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise disk_error(error, run) from error
    try:
        if not lock(fd):
            raise UsageError(
                f"another process trains in `{run}`", hint="wait for it, or choose another `checkpoint.folder`"
            )
        yield
    except BaseException:
        if made and [path.name for path in run.iterdir()] == [_LOCK]:
            (run / _LOCK).unlink()
            run.rmdir()
        raise
    finally:
        os.close(fd)


def begin(config: TrainConfig, origin: Callable[[], Origin], *, without_optimizer: bool) -> Begun:
    """Read what the run begins with; `origin` is asked for the model where there is no checkpoint.

    `without_optimizer` lets a checkpoint count that has lost its moments, which are zero then. Raises CorruptError when
    there are checkpoints and none is whole: a run never begins anew in silence.
    """
    started = time.perf_counter()
    settings = config.checkpoint
    found = load_newest(settings.folder, verify=settings.verify_on_load, without_optimizer=without_optimizer)
    if found is None:
        model = origin()
        weights = model.weights()
        seconds = {"load": time.perf_counter() - started}
        return Begun(model.config, model.folder, model.side_files, model.facts, None, weights, model.notes, seconds)
    folder = found.content.path
    seconds = {"verify": time.perf_counter() - started}
    notes = found.notes
    side, facts = side_files_in(folder), facts_in(read_manifest(folder) or {})
    return Begun(read_config(folder), folder, side, facts, found.content, {}, notes, seconds)


def check_same_run(config: TrainConfig, state: RunState, corpus: Corpus, *, accept_changes: bool) -> list[str]:
    """Return notes about what is not as it was when `state` was saved; UsageError unless that is accepted.

    What alters the maths is refused, and so is another corpus: the same step would mean something else.
    """
    changed = [
        f"{key}: {_short(old)} -> {_short(new)}" for key, old, new in changed_maths(state.maths, maths_of(config))
    ]
    if state.corpus_fingerprint != corpus.fingerprint:
        changed.append(f"the corpus: {state.rows} rows then, {len(corpus)} now, and not the same ones")
    if changed and not accept_changes:
        raise UsageError(
            f"the run in `{config.checkpoint.folder}` was begun with other settings",
            items=changed,
            why="it would no longer be the run that an uninterrupted one would have been",
            hint="take them back; `--accept-changes` if they are meant; or begin anew in another `checkpoint.folder`",
        )
    return [f"changed since step {state.step}: {text}" for text in changed]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

"""The network, the optimizer and the loss scale of a run, filled with what the run begins with.

MindSpore is loaded here, and nowhere before: a config that is wrong is refused sooner.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptkit import __version__
from ckptkit.errors import CoverageError
from ckptkit.train.begin import Begun
from ckptkit.train.config_models import TrainConfig
from ckptkit.train.maths import changed_maths, maths_of
from ckptkit.train.net import TrainNet, prepare
from ckptkit.train.scaler import make_scaler
from ckptkit.train.signals import unbroken
from ckptkit.train.state import RunState
from ckptkit.train.step import Trainer
from ckptkit.train.step_scan import check_fits, odd_shapes
from ckptkit.verification.runners.facts import read_facts


@dataclass(frozen=True, slots=True)
class Built:
    """What trains, the layers that the config recomputes and all of them, the names that are not trained, and the
    rows of the embedding; `seconds` says how long loading took."""

    trainer: Trainer
    recompute: frozenset[int]
    all_layers: frozenset[int]
    frozen: frozenset[str]
    vocab: int
    versions: dict[str, str]
    notes: tuple[str, ...]
    seconds: dict[str, float]


def build(config: TrainConfig, begun: Begun, *, without_optimizer: bool) -> Built:
    """Return what trains, with its weights and state in place.

    Raises UsageError for a model, a device or a precision that cannot be had, CoverageError when the weights are not
    those of the model that config.json describes, or moments are lacking and `without_optimizer` does not allow it.
    """
    facts = read_facts(begun.config)
    recompute = config.recompute.selected(facts.layers)
    started = time.perf_counter()
    with unbroken():
        import mindspore

        prepare(mindspore, config.training.device, config.training.threads)
    imported = time.perf_counter()
    precision, training = config.precision, config.training
    net = TrainNet(
        mindspore, facts, compute=precision.compute, dropout=training.dropout, seed=training.seed,
        ce_chunk=precision.ce_chunk,
    )  # fmt: skip
    scaler = make_scaler(precision.compute, precision.loss_scale, precision.initial_scale, precision.growth_interval)
    trainer = Trainer(net, config.optimizer, scaler)
    zero = _check(trainer, begun, without_optimizer=without_optimizer)
    if begun.state is not None:
        trainer.moments_begun = begun.state.moments_begun
        if zero == 2 * len(net.trained):
            trainer.moments_begun = begun.step
    idle = _fill(trainer, begun)
    if begun.state is not None and begun.state.scaler is not None and not _scales_anew(config, begun.state):
        scaler.load(begun.state.scaler)
    seconds = {"framework": imported - started, "load": time.perf_counter() - imported + begun.seconds.get("load", 0.0)}
    versions = {"ckptkit": __version__, "mindspore": mindspore.__version__, "numpy": np.__version__}
    frozen = frozenset(net.names) - net.trained
    return Built(
        trainer, recompute, frozenset(range(facts.layers)), frozen, facts.vocab, versions,
        (*_notes(config, begun, versions), *_zero_notes(zero, trainer), *idle), seconds,
    )  # fmt: skip


def _scales_anew(config: TrainConfig, state: RunState) -> bool:
    """Say whether the loss scale was set to something else than when `state` was saved."""
    changed = {key for key, _, _ in changed_maths(state.maths, maths_of(config))}
    return not changed.isdisjoint({"precision.compute", "precision.loss_scale", "precision.initial_scale"})


def _check(trainer: Trainer, begun: Begun, *, without_optimizer: bool) -> int:
    """Return how many moments begin at zero; CoverageError when weights or moments are not the network's."""
    net = trainer.net
    if begun.content is not None:
        lacking = check_fits(begun.content, net.shapes, trainer.optimizer.names, without_optimizer=without_optimizer)
        return len(lacking)
    if odd := odd_shapes(begun.shapes, net.shapes):
        raise CoverageError(
            "the weights are not those of the network that config.json describes",
            items=odd,
            hint="`ckptkit verify` says where the two part",
        )
    return 0


def _zero_notes(count: int, trainer: Trainer) -> list[str]:
    if not count:
        return []
    some = "" if count == 2 * len(trainer.net.trained) else "; with the others' correction their first steps are larger"
    return [f"{count} moments begin at zero, as `--without-optimizer` says{some}"]


def _fill(trainer: Trainer, begun: Begun) -> list[str]:
    """Set weights and moments; return a note about moments of parameters that are not trained any more."""
    known = {*trainer.net.names, *trainer.optimizer.moments}
    idle = 0
    for name, values in begun.tensors():
        if name in known:
            trainer.load({name: values})
        else:
            idle += 1
    return [f"{idle} moments are of parameters that are frozen now, and were left out"] if idle else []


def _notes(config: TrainConfig, begun: Begun, versions: dict[str, str]) -> list[str]:
    """Return what is no error: other versions than the checkpoint's, rows longer than the model is made for."""
    notes = []
    before: dict[str, Any] = dict(begun.state.versions) if begun.state else {}
    changed = [f"{name} {before[name]} -> {now}" for name, now in versions.items() if before.get(name, now) != now]
    if changed:
        notes.append(f"made with other versions, so the last bits may differ: {', '.join(changed)}")
    length, most = config.data.seq_length, begun.config.get("max_position_embeddings")
    if type(most) is int and length > most:
        notes.append(f"`data.seq_length` {length} is more than the model's `max_position_embeddings`, {most}")
    if dropped := begun.config.get("attention_dropout"):
        notes.append(f"config.json's `attention_dropout`, {dropped}, is not applied; `training.dropout` is another one")
    if begun.config.get("output_router_logits"):
        notes.append("the auxiliary loss of config.json's `output_router_logits` is not part of the loss")
    return notes

"""Which settings the numbers of a run depend on: a run that goes on with others would not be the run that began.

Every setting is either among the maths or in `NOT_MATHS` with its reason; a test holds the two against the model, so
that a new setting cannot be forgotten. What does not live here: what happens when they differ (the driver).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptkit.train.config_models import TrainConfig

Maths = dict[str, Any]

_IN_CHECKPOINT = "the weights and config.json of a run are in its checkpoints; this one is read once"
_IN_FINGERPRINT = "the corpus is compared by its fingerprint, which is made of its rows"
_SAME_BITS = "gradients have the same bits with and without"
_OUTSIDE = "what is saved or shown, not what is computed"
_MACHINE = "as the memory of the machine is: it decides when a setting changes, and decisions taken are repeated"

NOT_MATHS: Mapping[str, str] = {
    "model": _IN_CHECKPOINT,
    "data.path": _IN_FINGERPRINT,
    "data.format": _IN_FINGERPRINT,
    "data.tokenizer": _IN_FINGERPRINT,
    "data.text_key": _IN_FINGERPRINT,
    "data.prompt_key": _IN_FINGERPRINT,
    "data.response_key": _IN_FINGERPRINT,
    "data.ids_key": _IN_FINGERPRINT,
    "training.stop_at_step": "the run ends sooner, and goes on as if it had not",
    "training.threads": "1, 2 and 4 threads gave the same bits when that was measured (MindSpore 2.9, CPU)",
    "training.adaptive.limit": _MACHINE,
    "training.adaptive.grow_below": _MACHINE,
    "training.adaptive.patience": _MACHINE,
    "training.adaptive.min_micro_batch": _MACHINE,
    "recompute": _SAME_BITS,
    "checkpoint": _OUTSIDE,
    "eval": _OUTSIDE,
    "log": _OUTSIDE,
}
"""Settings, and sections as a whole, that may change while a run is stopped, and why."""

_OF_FP16 = {"precision.loss_scale", "precision.initial_scale", "precision.growth_interval"}
_OF_DYNAMIC = {"precision.initial_scale", "precision.growth_interval"}


def maths_of(config: TrainConfig) -> Maths:
    """Return the settings that alter the numbers, by dotted key, as JSON has them, in the order of their keys.

    The loss scale counts with fp16 alone; the number of a device (`ascend:1`) does not, its kind does.
    """
    passed_over = set() if config.precision.compute == "fp16" else _OF_FP16
    if config.precision.loss_scale != "dynamic":
        passed_over = passed_over | _OF_DYNAMIC
    found = {
        key: value
        for key, value in _leaves(config.model_dump(mode="json"), "")
        if key not in passed_over and not is_free(key)
    }
    found["training.device"] = config.training.device.partition(":")[0]
    return dict(sorted(found.items()))


def is_free(key: str) -> bool:
    """Is the setting `key`, or a section that it is in, one of `NOT_MATHS`?"""
    parts = key.split(".")
    return any(".".join(parts[:depth]) in NOT_MATHS for depth in range(1, len(parts) + 1))


def config_hash(maths: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the maths in hex; the order of keys is no matter."""
    return hashlib.sha256(_canonical(dict(maths)).encode()).hexdigest()


def changed_maths(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, old value, new value) of each setting that differs, by key; None where a side does not have it.

    A key that one side lacks and that is None on the other is no difference: it is off on both.
    """
    keys = sorted({*old, *new})
    pairs = [(key, old.get(key), new.get(key)) for key in keys]
    return [(key, a, b) for key, a, b in pairs if _canonical(a) != _canonical(b)]


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _canonical(value: Any) -> str:
    """Return JSON that tells 1 from 1.0 and from true; floats in their shortest exact form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)

"""Names as training wrappers leave them: `module.`, `_orig_mod.`, `base_model.model.` in front of every tensor.

A prefix is taken off only at the start of a name and only when every tensor carries it, again and again in any
nesting. Adapters that were never merged are refused: without them the base model would come out, unchanged.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from ckptkit.errors import CoverageError
from ckptkit.formats.base import Checkpoint

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.")
ADAPTER_CONFIG = "adapter_config.json"
_BASE = ".base_layer."
_ADAPTER = re.compile(r"(^|\.)lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.|$)|\.mindpet_delta_lora_")

_MERGE = "merge the adapter first (PEFT: `model.merge_and_unload()`), then convert the merged model"


def unwrap(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with wrapper prefixes taken off, and a note that says so.

    Raises CoverageError for unmerged adapters, for a prefix that only some tensors carry, and when two tensors
    would get one name.
    """
    _refuse_adapters(checkpoint)
    if not any(name.startswith(WRAPPERS) or _BASE in name for name in checkpoint.tensors):
        return checkpoint
    names = {name: name for name in checkpoint.tensors}
    taken = ""
    while prefix := next((p for p in WRAPPERS if any(n.startswith(p) for n in names.values())), None):
        _refuse_some(checkpoint, names, prefix)
        names = {stored: name.removeprefix(prefix) for stored, name in names.items()}
        taken += prefix
    names, layered = _without_base_layer(names)
    _refuse_collisions(checkpoint, names)
    notes = [f"`{taken}` was taken off the front of all {len(names)} names"] if taken else []
    notes += [f"`.base_layer` was taken out of {layered} names"] if layered else []
    tensors = {names[stored]: replace(info, name=names[stored]) for stored, info in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors, notes=(*checkpoint.notes, *notes))


def adapter_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the tensors that belong to a LoRA adapter."""
    return [name for name in checkpoint.tensors if "lora_" in name and _ADAPTER.search(name)]


def _without_base_layer(names: dict[str, str]) -> tuple[dict[str, str], int]:
    changed = {stored: name.replace(_BASE, ".") for stored, name in names.items()}
    return changed, sum(changed[stored] != name for stored, name in names.items())


def _refuse_adapters(checkpoint: Checkpoint) -> None:
    adapters = adapter_names(checkpoint)
    if adapters:
        raise CoverageError(
            f"`{checkpoint.path.name}` holds {len(adapters)} LoRA adapter tensors that are not merged",
            items=adapters,
            why="without them the base model would come out, as if it had never been fine-tuned",
            hint=_MERGE,
        )
    if checkpoint.path.is_dir() and (checkpoint.path / ADAPTER_CONFIG).is_file():
        raise CoverageError(
            f"`{checkpoint.path.name}` holds a LoRA adapter ({ADAPTER_CONFIG}) beside the model",
            why="the model alone would come out, as if it had never been fine-tuned",
            hint=f"{_MERGE}; or take the adapter's files away, if the model alone is meant",
        )


def _refuse_some(checkpoint: Checkpoint, names: dict[str, str], prefix: str) -> None:
    odd = [stored for stored, name in names.items() if not name.startswith(prefix)]
    if odd:
        carriers = len(names) - len(odd)
        few, what = odd, "do not begin"
        if len(odd) > carriers:
            few, what = [stored for stored, name in names.items() if name.startswith(prefix)], "begin"
        raise CoverageError(
            f"{len(few)} of {len(names)} tensors of `{checkpoint.path.name}` {what} with `{prefix}`",
            items=few,
            why="a wrapper puts its prefix on every name; two models were mixed, or some tensors renamed",
            hint="save the unwrapped model again, so that all names agree",
        )


def _refuse_collisions(checkpoint: Checkpoint, names: dict[str, str]) -> None:
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise CoverageError(
            f"{len(twice)} names of `{checkpoint.path.name}` would stand for two tensors each",
            items=twice,
            why="a wrapper's prefix was taken off",
            hint="save the unwrapped model again",
        )

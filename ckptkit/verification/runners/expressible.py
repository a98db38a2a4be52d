"""What MindFormers' own networks cannot be configured to do, told from config.json alone: no framework is imported.

Read off MindFormers 1.9: the legacy `LlamaForCausalLM` (llama, mistral, qwen2) and the mcore `Qwen3ForCausalLM` and
`Qwen3MoeForCausalLM`. What it cannot do would not fail there: it would be left out. What does not live here: making
these networks (`mindformers_nets.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.verification.runners.devices import parse_device
from ckptkit.verification.runners.facts import Facts, read_facts

LEGACY, MCORE = "mindformers-legacy", "mindformers-mcore"
# Variants of each family, by dialect. `qkv_concat-1.4` has the names of `qkv_concat`, and another order.
_PLAIN_OR_FUSED = ("", "qkv_concat")
_VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    LEGACY: dict.fromkeys(("llama", "mistral", "qwen2"), _PLAIN_OR_FUSED),
    MCORE: {"qwen3": ("", "contiguous", "contiguous-qkv", "contiguous-mlp"), "qwen3_moe": ("", "contiguous-qkv")},
}


def why_not(config: Mapping[str, Any], dialect: str, variant: str, device: str) -> str | None:
    """Say why MindFormers' network cannot run a checkpoint of this config.json and naming; None when it can."""
    try:
        facts = read_facts(config)
    except UsageError as error:
        return error.what
    variants = _VARIANTS.get(dialect, {}).get(facts.model_type)
    if variants is None:
        return f"it has no network of {facts.model_type} with the naming `{dialect}`"
    if variant not in variants:
        return f"this release reads fused tensors in another order than `{variant}`"
    if dialect == MCORE and parse_device(device)[0] != "ascend":
        return "its mcore networks run on Ascend only"
    return next(_lacking(facts, dialect), None)


def _lacking(facts: Facts, dialect: str) -> Iterator[str]:
    """Yield what the network would leave out."""
    if any(facts.window):
        yield "its network has no sliding window"
    if facts.mlp_bias:
        yield "its network has no biases in the feed-forward part (`mlp_bias`)"
    yield from _lacking_in_legacy(facts) if dialect == LEGACY else _lacking_in_mcore(facts)


def _lacking_in_legacy(facts: Facts) -> Iterator[str]:
    rope = facts.rope
    if facts.heads * facts.head_dim != facts.hidden:
        yield "its network takes hidden / heads for the size of a head (`head_dim`)"
    if rope.type == "linear":
        yield "its own check of linear rotary scaling lets no factor pass"
    if rope.type == "dynamic":
        yield "its network has no dynamic rotary scaling while it trains"
    if rope.type in ("llama3", "yarn") and rope.factor < 1:
        yield f"it takes no rotary scaling by a factor below 1, and this is {rope.factor}"
    if rope.type == "yarn" and not rope.truncate:
        yield "its yarn rounds the bounds of its ramp (`truncate`)"
    if rope.type == "yarn" and rope.factor == 1 and rope.attention_factor != 1:
        yield "its yarn has no attention factor where it scales nothing"
    if rope.type == "yarn" and rope.beta_fast < rope.beta_slow:
        yield "its yarn wants `beta_fast` above `beta_slow`"


def _lacking_in_mcore(facts: Facts) -> Iterator[str]:
    if facts.rope.type != "default":
        yield f"rotary scaling of type `{facts.rope.type}` is not known to be the same in its mcore networks"
    if facts.o_bias:
        yield "its network has no bias in the attention's output projection (`attention_bias`)"
    if facts.experts and not all(facts.sparse_layers):
        yield "its network gives every layer experts (`mlp_only_layers`, `decoder_sparse_step`)"

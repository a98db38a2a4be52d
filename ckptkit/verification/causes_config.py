"""Hypotheses about config.json: what A's network took it for, one thing after another, in the place of B's.

Whether both sides were read alike is known from their readings; here is asked whether a difference explains what a
part computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ckptkit.verification.causes_case import Case, Repair
from ckptkit.verification.replay import Setting

# The facts that a part goes by, with their keys in config.json and names.
_KEYS = {
    "norm_eps": ("rms_norm_eps", "norm eps"),
    "norm_topk": ("norm_topk_prob", "norm_topk_prob"),
    "experts_per_token": ("num_experts_per_tok", "experts per token"),
}
_OF_PART = {
    "attention": ("norm_eps",),
    "mlp": ("norm_eps", "norm_topk", "experts_per_token"),
    "norm": ("norm_eps",),
}


def config_repairs(case: Case) -> Iterator[Repair]:
    """Yield A's reading in the place of B's, wherever the part goes by it and they differ."""
    for fact in _OF_PART.get(case.place.part, ()):
        key, name = _KEYS[fact]
        one, other = getattr(case.facts_a, fact), getattr(case.facts_b, fact)
        if one != other:
            yield _repair(name, key, f"{name} is {other!r}, and A's is {one!r}", {fact: one})
    if case.place.part == "attention":
        yield from _window(case)
        yield from _rotary(case)
        yield from _head_sizes(case)


def _repair(name: str, key: str, text: str, facts: dict[str, Any]) -> Repair:
    return Repair(
        name=name, text=f"{text} (`{key}`)", fields=(), hint=f"take `{key}` from A's config.json into B's",
        change=partial(_with_facts, facts),
    )  # fmt: skip


def _with_facts(facts: dict[str, Any], setting: Setting) -> Setting:
    return replace(setting, facts=replace(setting.facts, **facts))


def _window(case: Case) -> Iterator[Repair]:
    layer = case.place.layer
    one, other = case.facts_a.window[layer], case.facts_b.window[layer]
    if one != other:
        text = f"the sliding window of this layer is {other or 'off'}, and A's is {one or 'off'}"
        yield _repair("sliding window", "sliding_window", text, {"window": case.facts_a.window})


def _rotary(case: Case) -> Iterator[Repair]:
    """Yield A's frequencies, under the name of what makes them differ."""
    one, other = case.facts_a.rope, case.facts_b.rope
    same = np.array_equal(case.frequencies_a, case.wrong.frequencies)
    if (same and one.attention_factor == other.attention_factor) or 2 * len(
        case.frequencies_a
    ) != case.facts_b.head_dim:
        return
    if one.base != other.base and replace(one, base=other.base) == other:
        name, text = "rotary base", f"the rotary base is {other.base:g}, and A's is {one.base:g} (`rope_theta`)"
        hint = "take `rope_theta` from A's config.json into B's"
    elif one != other:
        base = " and base" if one.base != other.base else ""
        name = f"rotary scaling{base}"
        text = f"the {name} is {_words(case, other)}, and A's is {_words(case, one)} (`rope_scaling`)"
        hint = (
            "take what config.json says about rotary positions from A's into B's, in the spelling that B's reader knows"
        )
    else:
        first = int((case.frequencies_a != case.wrong.frequencies).argmax())
        pair = f"{case.wrong.frequencies[first]:.9g}, and A's {case.frequencies_a[first]:.9g}"
        name, text = "rotary frequencies", f"rotary frequency {first} is {pair}, and both read config.json alike"
        hint = "one of the two networks makes its frequencies in another way"
    yield Repair(name=name, text=text, fields=(), hint=hint, change=partial(_with_rotary, case))


def _words(case: Case, rope: Any) -> str:
    reading = rope.reading()
    return ", ".join(
        [reading.pop("type"), *(f"{key} {value}" for key, value in reading.items()), f"base {rope.base:g}"]
    )


def _with_rotary(case: Case, setting: Setting) -> Setting:
    changed = replace(setting.facts, rope=case.facts_a.rope)
    return replace(setting, facts=changed, frequencies=case.frequencies_a)


def _head_sizes(case: Case) -> Iterator[Repair]:
    """Yield A's heads where B has as many rows in heads of another size."""
    one, other = case.facts_a, case.facts_b
    sizes = {name: getattr(one, name) for name in ("heads", "kv_heads", "head_dim")}
    if all(getattr(other, name) == size for name, size in sizes.items()):
        return
    weights = case.wrong.weights
    fits = len(weights["q"]) == one.heads * one.head_dim and len(weights["k"]) == one.kv_heads * one.head_dim
    if not fits or len(weights.get("q_norm", np.zeros(one.head_dim))) != one.head_dim:
        return
    text = f"heads are {other.heads} and {other.kv_heads} of {other.head_dim}, and A's {one.heads} and {one.kv_heads} "
    repair = _repair("heads", "num_attention_heads", f"{text}of {one.head_dim}", sizes)
    yield replace(repair, change=lambda setting: replace(_with_facts(sizes, setting), frequencies=case.frequencies_a))

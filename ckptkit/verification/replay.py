"""One part of a network computed again in numpy, in float64, from what one side's network was given there.

It is a third writing of the arithmetic, for one purpose: to ask what a part would have given with other weights or
another config (`causes.py`). Weights and inputs are float32 numbers; products and sums are float64, so a replay is
away from a right network by what float32 rounded there. Angles of rotary positions are rounded as the networks do.
What does not live here: where weights come from (`layer_weights.py`).

Shapes: T tokens, N of them, Q query heads, K key heads, G = Q / K, D a head's size, F = D / 2 frequencies, H hidden,
E experts, I and O what a matrix takes and gives, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import UsageError
from ckptkit.verification.layer_weights import Weights
from ckptkit.verification.runners.facts import Facts
from ckptkit.verification.runners.job import Floats
from ckptkit.verification.runners.rope import inverse_frequencies, rotary_table

Doubles = NDArray[np.float64]
Values = NDArray[Any]
Tap = Callable[[str], Floats]  # an output of side A's network, by its name

PARTS = ("embedding", "attention", "mlp", "norm", "logits")
_BLOCK = 1 << 22  # elements of a matrix that are in float64 at a time


@dataclass(frozen=True, slots=True)
class Place:
    """A part of the network; `layer` counts from 0, and says nothing at its ends."""

    part: str
    layer: int = 0

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise UsageError(f"`{self.part}` is no part of a network", hint=f"one of {', '.join(PARTS)}")

    @property
    def tap(self) -> str:
        """Return the name of what the part gives."""
        return f"layers.{self.layer}.{self.part}" if self.part in ("attention", "mlp") else self.part


@dataclass(frozen=True, slots=True)
class Given:
    """What goes into a part: token ids and positions, (T,) both, and what came before, (T, H)."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    x: Floats

    def first(self, tokens: int) -> Given:
        """Return the first tokens; what the network gives for them does not depend on the rest."""
        return Given(self.ids[:tokens], self.positions[:tokens], self.x[:tokens])


@dataclass(frozen=True, slots=True)
class Setting:
    """What a part computes with: how config.json is read, its weights, its rotary frequencies, (F,)."""

    facts: Facts
    weights: Weights
    frequencies: Floats

    def having(self, **weights: Floats) -> Setting:
        """Return the setting with other weights in the place of some."""
        return replace(self, weights={**self.weights, **weights})


def given_at(place: Place, tap: Tap, ids: Sequence[int], positions: Sequence[int] | None, layers: int) -> Given:
    """Return what a part is given, out of the outputs before it; positions None are 0, 1, 2, ..."""
    spread = tuple(range(len(ids)) if positions is None else positions)
    if place.part == "embedding":
        return Given(tuple(ids), spread, np.zeros((len(ids), 0), np.float32))
    if place.part == "logits":
        return Given(tuple(ids), spread, tap("norm"))
    layer = layers if place.part == "norm" else place.layer
    x_TH = tap(f"layers.{layer - 1}" if layer else "embedding")
    if place.part == "mlp":
        x_TH = x_TH + tap(f"layers.{place.layer}.attention")
    return Given(tuple(ids), spread, x_TH)


def replay(place: Place, setting: Setting, given: Given) -> Doubles:
    """Return what the part gives, (T, H), or (T, V) for the logits; no warning is given for numbers out of range."""
    facts, weights, x_TH = setting.facts, setting.weights, given.x
    with np.errstate(all="ignore"):
        if place.part == "embedding":
            return embed(weights["embedding"], given.ids)
        if place.part == "attention":
            return attention(facts, place.layer, weights, x_TH, given.positions, setting.frequencies)
        if place.part == "mlp":
            return mlp(facts, weights, x_TH)
        return norm(weights["norm"], x_TH, facts.norm_eps) if place.part == "norm" else linear(x_TH, weights["head"])


def frequencies_at(facts: Facts, reported_F: Floats | None, positions: Sequence[int]) -> Floats:
    """Return the frequencies for an input: those that a network reported, else those of its config.

    `dynamic` has others once a sequence is longer than the original length; what a network reported is for less.
    """
    longest = max(positions, default=0) + 1
    if reported_F is None or not reported_F.size or (facts.rope.type == "dynamic" and longest > facts.rope.original):
        return inverse_frequencies(facts.rope, facts.head_dim, longest)
    return reported_F


def embed(weight_VH: Floats, ids: Sequence[int]) -> Doubles:
    """Return the rows of the ids, (T, H)."""
    return weight_VH[np.array(ids, np.intp)].astype(np.float64)


def norm(weight_H: Floats, x: Values, eps: float) -> Doubles:
    """Return x / rms(x) * weight over the last axis: Zhang and Sennrich (arXiv 1910.07467)."""
    wide = x.astype(np.float64)
    scale = 1 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + np.float64(np.float32(eps)))
    normed: Doubles = wide * scale * weight_H
    return normed


def linear(x_TI: Values, weight_OI: Floats, bias_O: Floats | None = None) -> Doubles:
    """Return x @ weight.T + bias, (T, O); the matrix becomes float64 a block of rows at a time."""
    wide_TI = x_TI.astype(np.float64)
    out_TO = np.empty((len(wide_TI), len(weight_OI)))
    rows = max(1, _BLOCK // max(1, weight_OI.shape[1]))
    for start in range(0, len(weight_OI), rows):
        block = weight_OI[start : start + rows].astype(np.float64)
        np.matmul(wide_TI, block.T, out=out_TO[:, start : start + rows])
    return out_TO if bias_O is None else out_TO + bias_O


def attention(
    facts: Facts, layer: int, weights: Weights, x_TH: Values, positions: Sequence[int], frequencies_F: Floats
) -> Doubles:
    """Return what attention adds to the residual, (T, H): norm, projections, qk-norm, rotary, softmax, projection.

    Each token sees itself and what came before it, within the layer's window; G query heads share a key head.
    """
    tokens, normed_TH = len(x_TH), norm(weights["attention_norm"], x_TH, facts.norm_eps)
    q_TQD, k_TKD, v_TKD = (
        linear(normed_TH, weights[name], weights.get(f"{name}_bias")).reshape(tokens, -1, facts.head_dim)
        for name in ("q", "k", "v")
    )
    if "q_norm" in weights:
        q_TQD, k_TKD = norm(weights["q_norm"], q_TQD, facts.norm_eps), norm(weights["k_norm"], k_TKD, facts.norm_eps)
    cos_TD, sin_TD = rotary_table(frequencies_F, positions, facts.rope.attention_factor)
    q_TQD, k_TKD = _rotate(q_TQD, cos_TD, sin_TD), _rotate(k_TKD, cos_TD, sin_TD)
    behind_TT = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    hidden_TT = (behind_TT < 0) | (behind_TT >= (facts.window[layer] or tokens))
    group = q_TQD.shape[1] // k_TKD.shape[1]
    mixed_TQD = np.empty_like(q_TQD)
    for head in range(q_TQD.shape[1]):  # one (T, T) at a time
        scores_TT = q_TQD[:, head] @ k_TKD[:, head // group].T * facts.head_dim**-0.5
        scores_TT[hidden_TT] = -np.inf
        mixed_TQD[:, head] = _softmax(scores_TT) @ v_TKD[:, head // group]
    return linear(mixed_TQD.reshape(tokens, -1), weights["o"], weights.get("o_bias"))


def mlp(facts: Facts, weights: Weights, x_TH: Values) -> Doubles:
    """Return what the feed-forward adds to the residual, (T, H): norm, then a SwiGLU or experts."""
    normed_TH = norm(weights["mlp_norm"], x_TH, facts.norm_eps)
    if "router" not in weights:
        return _swiglu(normed_TH, weights)
    shares_TE = routing(facts, weights["router"], normed_TH)
    out_TH = np.zeros(normed_TH.shape)
    for expert in np.flatnonzero(shares_TE.any(0)):
        tokens_N = np.flatnonzero(shares_TE[:, expert])
        out_TH[tokens_N] += shares_TE[tokens_N, expert, None] * expert_output(weights, expert, normed_TH[tokens_N])
    return out_TH


def routing(facts: Facts, router_EH: Floats, normed_TH: Doubles) -> Doubles:
    """Return each expert's share in each token's output, (T, E): the largest of a softmax over all, 0 elsewhere."""
    shares_TE = _softmax(linear(normed_TH, router_EH))
    chosen_TC = np.argsort(-shares_TE, axis=1, kind="stable")[:, : facts.experts_per_token]
    kept_TE = np.zeros_like(shares_TE)
    np.put_along_axis(kept_TE, chosen_TC, np.take_along_axis(shares_TE, chosen_TC, 1), 1)
    return kept_TE / kept_TE.sum(1, keepdims=True) if facts.norm_topk else kept_TE


def expert_output(weights: Weights, expert: int, normed_NH: Doubles) -> Doubles:
    """Return one expert's output for some tokens, (N, H)."""
    own = {name: weights[f"experts_{name}"][expert] for name in ("gate", "up", "down")}
    return _swiglu(normed_NH, own)


def _swiglu(x_NH: Doubles, weights: Weights) -> Doubles:
    """Shazeer (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""
    gate_NF, up_NF = (linear(x_NH, weights[name], weights.get(f"{name}_bias")) for name in ("gate", "up"))
    silu_NF = gate_NF * 0.5 * (1 + np.tanh(gate_NF / 2))  # x * sigmoid(x), and no exponential that overflows
    return linear(silu_NF * up_NF, weights["down"], weights.get("down_bias"))


def _rotate(x_THD: Doubles, cos_TD: Floats, sin_TD: Floats) -> Doubles:
    """Turn the pairs (i, i + D/2) of each head by the angles."""
    half = x_THD.shape[-1] // 2
    turned_THD = np.concatenate([-x_THD[..., half:], x_THD[..., :half]], axis=-1)
    rotated: Doubles = x_THD * cos_TD[:, None, :] + turned_THD * sin_TD[:, None, :]
    return rotated


def _softmax(x: Doubles) -> Doubles:
    powers = np.exp(x - x.max(-1, keepdims=True))
    shares: Doubles = powers / powers.sum(-1, keepdims=True)
    return shares

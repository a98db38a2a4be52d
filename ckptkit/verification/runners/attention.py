"""Attention of one layer over one sequence, causal, in transformers' eager order; no cache, no fused kernel.

Shapes: T tokens, N of them at a time, Q query heads, K key heads, G = Q / K query heads for each, D a head's size,
H hidden.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ckptkit.verification.runners.dialects import cut_qkv
from ckptkit.verification.runners.job import Floats
from ckptkit.verification.runners.kernels import Tensor
from ckptkit.verification.runners.layer import Layer

# Tokens whose scores are in memory at once: all at once would be gigabytes for a window of thousands.
BLOCK = 512


def causal_mask(tokens: int, window: int | None) -> Floats:
    """Return what is added to the scores, (T, T): 0 where a token may look, float32's minimum elsewhere."""
    return np.where(may_look(tokens, window), np.float32(0), np.finfo(np.float32).min)


def may_look(tokens: int, window: int | None) -> NDArray[np.bool_]:
    """Return which tokens (columns) each token of a sequence (rows) sees, (T, T).

    A token sees itself and what came before it; with a window, no more than `window` tokens, itself included. Order
    in the sequence counts, not the positions' numbers.
    """
    behind_TT = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    return (behind_TT >= 0) & (behind_TT < (tokens if window is None else window))


def attend(layer: Layer, x_TH: Tensor, rotary: tuple[Tensor, Tensor], mask_TT: Tensor) -> Tensor:
    """Return the attention's output, (T, H), of normed input; `rotary` has cosines and sines, (T, 1, D) both."""
    kernels, dialect = layer.kernels, layer.dialect
    q_TQD, k_TKD, v_TKD = _project(layer, x_TH)
    if layer.facts.qk_norm:
        q_TQD, k_TKD = layer.norm(dialect.q_norm, q_TQD), layer.norm(dialect.k_norm, k_TKD)
    q_TQD, k_TKD = kernels.rotate(q_TQD, *rotary), kernels.rotate(k_TKD, *rotary)
    k_KTD, v_KTD = k_TKD.transpose(1, 0, 2), v_TKD.transpose(1, 0, 2)
    tokens = x_TH.shape[0]
    blocks = [slice(start, start + BLOCK) for start in range(0, tokens, BLOCK)]
    mixed = [_mix(layer, q_TQD[block], k_KTD, v_KTD, mask_TT[block]) for block in blocks]
    return layer.linear(dialect.attention_out, mixed[0] if len(mixed) == 1 else kernels.join(mixed))


def _project(layer: Layer, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (T, Q, D), keys and values (T, K, D)."""
    facts, dialect = layer.facts, layer.dialect
    if len(dialect.qkv) == 1:
        fused_TR = layer.linear(dialect.qkv[0], x_TH)
        return cut_qkv(fused_TR, dialect.qkv_order, facts.heads, facts.kv_heads, facts.head_dim)
    q, k, v = (
        layer.linear(module, x_TH).reshape(x_TH.shape[0], heads, facts.head_dim)
        for module, heads in zip(dialect.qkv, (facts.heads, facts.kv_heads, facts.kv_heads), strict=True)
    )
    return q, k, v


def _mix(layer: Layer, q_NQD: Tensor, k_KTD: Tensor, v_KTD: Tensor, mask_NT: Tensor) -> Tensor:
    """Return the values that some queries look at, weighted, (N, Q * D)."""
    tokens, heads, size = q_NQD.shape
    groups, total, _ = k_KTD.shape
    q_KND = q_NQD.reshape(tokens, groups, -1, size).transpose(1, 2, 0, 3).reshape(groups, -1, size)
    products_KNT = layer.kernels.scores(q_KND, k_KTD)
    layer.see("q @ k", products_KNT)
    scores_KNT = products_KNT * size**-0.5
    masked_QNT = scores_KNT.reshape(heads, tokens, total) + mask_NT
    weights_KNT = layer.kernels.softmax(masked_QNT).reshape(groups, -1, total)
    mixed_KGND = layer.kernels.mix(weights_KNT, v_KTD).reshape(groups, -1, tokens, size)
    return mixed_KGND.transpose(2, 0, 1, 3).reshape(tokens, heads * size)

"""One layer of the network as two graphs, forward and backward, whose parameters are arguments: all layers that are
alike share one compilation.

A forward graph gives the layer's output and what the backward graph needs of it. A layer that is recomputed forgets the
latter and runs its forward graph again, so its gradients have the same bits. What does not live here: the formulas
(`pieces.py`, `experts.py`), the loop over layers (`net.py`).

Shapes: N tokens of all rows, H hidden, Q query heads, K key heads, D a head's size, P = rows * K groups of queries with
their keys, M = Q / K * T queries of one, R what a rotated row holds (heads * D).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.train.experts import make_dense, make_experts
from ckptkit.train.pieces import Function, Pieces, Tensor, make_pieces
from ckptkit.verification.runners.facts import Facts

# Arguments of both graphs beside the input and the parameters: cosines and sines of queries, those of keys, the mask,
# the matrix that swaps the halves of a head; with dropout, the masks of attention and of feed-forward.
NUM_TABLES = 6
NUM_DROPPED = 2


@dataclass(frozen=True, slots=True)
class Kind:
    """What sets one layer's graphs apart from another's. `names` are its parameters without their prefix, in the order
    of the arguments; `trained` are the indices of those that get a gradient; `narrow` is the dtype of
    matrix products, empty for float32; `dropout` is the share that is dropped."""

    names: tuple[str, ...]
    trained: tuple[int, ...]
    sparse: bool
    narrow: str
    dropout: float


@dataclass(frozen=True, slots=True)
class Block:
    """`forward(x, *tables, *dropped, *parameters)` returns y and what to keep; `backward(dy, x, *kept, *tables,
    *dropped, *parameters)` returns dx and the gradients of those that are trained."""

    forward: Function
    backward: Function


def make_block(ms: Any, facts: Facts, kind: Kind) -> Block:
    """Return the graphs, which are compiled when they are first called with tensors of a new shape."""
    pieces = make_pieces(ms, norm_eps=facts.norm_eps, narrow=getattr(ms, kind.narrow) if kind.narrow else None)
    attention, attention_back, kept_a = _attention(ms, pieces, facts, kind)
    if kind.sparse:
        mlp, mlp_back, kept_m = make_experts(ms, pieces, facts, kind.names)
    else:
        mlp, mlp_back, kept_m = make_dense(pieces, kind.names)
    norm, norm_scale, norm_back = pieces.norm, pieces.norm_scale, pieces.norm_back
    gain_a, gain_m = find(kind.names, "input_layernorm.weight"), find(kind.names, "post_attention_layernorm.weight")
    dropping, kept_scale = kind.dropout > 0, 1.0 / (1.0 - kind.dropout)
    first = NUM_TABLES + (NUM_DROPPED if dropping else 0)
    num_kept, trained = kept_a + kept_m + 3, kind.trained
    cast, float32 = ms.ops.Cast(), ms.float32

    def drop(added_NH: Tensor, keeps_NH: Tensor) -> Tensor:
        return added_NH * (cast(keeps_NH, float32) * kept_scale)

    def forward(x_NH: Tensor, *rest: Tensor) -> Any:
        tables, parameters = rest[:NUM_TABLES], rest[first:]
        scale_a_N1 = norm_scale(x_NH)
        added_NH, kept_attention = attention(norm(x_NH, parameters[gain_a], scale_a_N1), tables, parameters)
        if dropping:
            added_NH = drop(added_NH, rest[NUM_TABLES])
        middle_NH = x_NH + added_NH
        scale_m_N1 = norm_scale(middle_NH)
        added_NH, kept_mlp = mlp(norm(middle_NH, parameters[gain_m], scale_m_N1), parameters)
        if dropping:
            added_NH = drop(added_NH, rest[NUM_TABLES + 1])
        return (middle_NH + added_NH, scale_a_N1, middle_NH, scale_m_N1, *kept_attention, *kept_mlp)

    def backward(dy_NH: Tensor, x_NH: Tensor, *rest: Tensor) -> Any:
        kept, rest = rest[:num_kept], rest[num_kept:]
        tables, parameters = rest[:NUM_TABLES], rest[first:]
        scale_a_N1, middle_NH, scale_m_N1 = kept[0], kept[1], kept[2]
        dadded_NH = drop(dy_NH, rest[NUM_TABLES + 1]) if dropping else dy_NH
        gain_m_H = parameters[gain_m]
        dnormed_NH, from_mlp = mlp_back(
            norm(middle_NH, gain_m_H, scale_m_N1), dadded_NH, kept[3 + kept_a :], parameters
        )
        dpart_NH, dgain_m_H = norm_back(middle_NH, gain_m_H, scale_m_N1, dnormed_NH)
        dmiddle_NH = dy_NH + dpart_NH
        dadded_NH = drop(dmiddle_NH, rest[NUM_TABLES]) if dropping else dmiddle_NH
        gain_a_H = parameters[gain_a]
        normed_NH = norm(x_NH, gain_a_H, scale_a_N1)
        dnormed_NH, from_attention = attention_back(normed_NH, dadded_NH, kept[3 : 3 + kept_a], tables, parameters)
        dpart_NH, dgain_a_H = norm_back(x_NH, gain_a_H, scale_a_N1, dnormed_NH)
        # parameters come in the order: norm, attention, norm, feed-forward
        gradients = (dgain_a_H, *from_attention, dgain_m_H, *from_mlp)
        out: Any = (dmiddle_NH + dpart_NH,)
        for index in trained:
            out = (*out, gradients[index])
        return out

    return Block(ms.jit(forward), ms.jit(backward))


def find(names: Sequence[str], name: str) -> int:
    """Return the place of a parameter, -1 for one that the layer does not have."""
    return names.index(name) if name in names else -1


def _attention(ms: Any, pieces: Pieces, facts: Facts, kind: Kind) -> tuple[Function, Function, int]:
    """Return attention of a layer, its gradient and how many tensors the one keeps for the other.

    The gradients come in the order of the parameters: query, key, value, output (each weight, then bias), query norm,
    key norm.
    """
    heads, groups, size = facts.heads, facts.kv_heads, facts.head_dim
    transpose, times, ones, float32 = ms.ops.Transpose(), ms.ops.MatMul(), ms.ops.Ones(), ms.float32
    project, project_back, num_normed = _projections(pieces, facts, kind)
    attend, attend_back = pieces.attend, pieces.attend_back
    linear, linear_back, add_bias, bias_back = pieces.linear, pieces.linear_back, pieces.add_bias, pieces.bias_back
    out_w, out_b = find(kind.names, "self_attn.o_proj.weight"), find(kind.names, "self_attn.o_proj.bias")

    def split(x_NR: Tensor, count: int, tokens: int) -> Tensor:
        """Return (P, heads of a group * T, D)."""
        rows = x_NR.shape[0] // tokens
        turned = transpose(x_NR.reshape(rows, tokens, count, size), (0, 2, 1, 3))
        return turned.reshape(rows * groups, count // groups * tokens, size)

    def merge(x_PMD: Tensor, count: int, tokens: int) -> Tensor:
        """Return (N, heads * D)."""
        rows = x_PMD.shape[0] // groups
        turned = transpose(x_PMD.reshape(rows, count, tokens, size), (0, 2, 1, 3))
        return turned.reshape(rows * tokens, count * size)

    def attention(normed_NH: Tensor, tables: Any, parameters: Any) -> Any:
        tokens = tables[4].shape[-1]
        q_NR, k_NR, v_NR, kept = project(normed_NH, tables, parameters)
        q_PMD, k_PTD, v_PTD = split(q_NR, heads, tokens), split(k_NR, groups, tokens), split(v_NR, groups, tokens)
        o_PMD, p_PMT = attend(q_PMD, k_PTD, v_PTD, tables[4])
        o_NR = merge(o_PMD, heads, tokens)
        added_NH = linear(o_NR, parameters[out_w])
        if out_b >= 0:
            added_NH = add_bias(added_NH, parameters[out_b])
        return added_NH, (q_PMD, k_PTD, v_PTD, p_PMT, o_NR, *kept)

    def attention_back(normed_NH: Tensor, dadded_NH: Tensor, kept: Any, tables: Any, parameters: Any) -> Any:
        q_PMD, k_PTD, v_PTD, p_PMT, o_NR = kept[0], kept[1], kept[2], kept[3], kept[4]
        tokens = tables[4].shape[-1]
        do_NR, dout_w = linear_back(o_NR, parameters[out_w], dadded_NH)
        dots = times((do_NR * o_NR).reshape(-1, size), ones((size, 1), float32))
        dots = transpose(dots.reshape(-1, tokens, heads), (0, 2, 1)).reshape(q_PMD.shape[0], q_PMD.shape[1], 1)
        dq_PMD, dk_PTD, dv_PTD = attend_back(q_PMD, k_PTD, v_PTD, p_PMT, split(do_NR, heads, tokens), dots)
        dq_NR, dk_NR = merge(dq_PMD, heads, tokens), merge(dk_PTD, groups, tokens)
        dv_NR = merge(dv_PTD, groups, tokens)
        dnormed_NH, from_qkv, from_norms = project_back(normed_NH, dq_NR, dk_NR, dv_NR, kept[5:], tables, parameters)
        from_out: Any = (dout_w,)
        if out_b >= 0:
            from_out = (dout_w, bias_back(dadded_NH))
        return dnormed_NH, (*from_qkv, *from_out, *from_norms)

    return attention, attention_back, 5 + num_normed


def _projections(pieces: Pieces, facts: Facts, kind: Kind) -> tuple[Function, Function, int]:
    """Return what makes rotated queries, rotated keys, and values, its gradient, and how many tensors it keeps."""
    linear, linear_back, add_bias, bias_back = pieces.linear, pieces.linear_back, pieces.add_bias, pieces.bias_back
    norm, norm_scale, norm_back = pieces.norm, pieces.norm_scale, pieces.norm_back
    rotate, rotate_back = pieces.rotate, pieces.rotate_back
    q_w, k_w, v_w = (find(kind.names, f"self_attn.{part}_proj.weight") for part in "qkv")
    q_b, k_b, v_b = (find(kind.names, f"self_attn.{part}_proj.bias") for part in "qkv")
    q_gain, k_gain = find(kind.names, "self_attn.q_norm.weight"), find(kind.names, "self_attn.k_norm.weight")
    size, biased, normed = facts.head_dim, q_b >= 0, q_gain >= 0

    def module(x_NH: Tensor, weight: int, bias: int, parameters: Any) -> Tensor:
        y_NR = linear(x_NH, parameters[weight])
        return add_bias(y_NR, parameters[bias]) if biased else y_NR

    def project(x_NH: Tensor, tables: Any, parameters: Any) -> Any:
        q_NR, k_NR = module(x_NH, q_w, q_b, parameters), module(x_NH, k_w, k_b, parameters)
        kept: Any = ()
        if normed:
            shape_q, shape_k = q_NR.shape, k_NR.shape
            q_rD, k_rD = q_NR.reshape(-1, size), k_NR.reshape(-1, size)
            scale_q, scale_k = norm_scale(q_rD), norm_scale(k_rD)
            q_NR = norm(q_rD, parameters[q_gain], scale_q).reshape(shape_q)
            k_NR = norm(k_rD, parameters[k_gain], scale_k).reshape(shape_k)
            kept = (q_rD, k_rD, scale_q, scale_k)
        q_NR, k_NR = rotate(q_NR, tables[0], tables[1], tables[5]), rotate(k_NR, tables[2], tables[3], tables[5])
        return q_NR, k_NR, module(x_NH, v_w, v_b, parameters), kept

    def project_back(
        x_NH: Tensor, dq_NR: Tensor, dk_NR: Tensor, dv_NR: Tensor, kept: Any, tables: Any, parameters: Any
    ) -> Any:
        dq_NR = rotate_back(dq_NR, tables[0], tables[1], tables[5])
        dk_NR = rotate_back(dk_NR, tables[2], tables[3], tables[5])
        from_norms: Any = ()
        if normed:
            shape_q, shape_k = dq_NR.shape, dk_NR.shape
            dq_rD, dgain_q = norm_back(kept[0], parameters[q_gain], kept[2], dq_NR.reshape(-1, size))
            dk_rD, dgain_k = norm_back(kept[1], parameters[k_gain], kept[3], dk_NR.reshape(-1, size))
            dq_NR, dk_NR = dq_rD.reshape(shape_q), dk_rD.reshape(shape_k)
            from_norms = (dgain_q, dgain_k)
        by_q_NH, dq_w = linear_back(x_NH, parameters[q_w], dq_NR)
        by_k_NH, dk_w = linear_back(x_NH, parameters[k_w], dk_NR)
        by_v_NH, dv_w = linear_back(x_NH, parameters[v_w], dv_NR)
        from_qkv: Any = (dq_w, dk_w, dv_w)
        if biased:
            from_qkv = (dq_w, bias_back(dq_NR), dk_w, bias_back(dk_NR), dv_w, bias_back(dv_NR))
        return by_q_NH + by_k_NH + by_v_NH, from_qkv, from_norms

    return project, project_back, 4 if normed else 0

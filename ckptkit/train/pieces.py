"""The parts that a decoder's layer is made of, forward and backward, as functions over MindSpore tensors in a graph.

What lives here: norm, linear map, rotation, attention and SwiGLU, each with the formula of its gradient. What does not:
how they make a layer (`blocks.py`), experts (`experts.py`), the loss (`loss.py`).

The gradients are written down instead of derived by MindSpore for time and memory (docs/decisions/0006): a layer's
forward pass hands out exactly what its backward pass needs. On a CPU a broadcast costs ten times what a product of
equal shapes does, and a reduction over an axis as much; so both are matrix products with a column or row of ones here,
and masks and rotary tables come in with the shape of what they meet.

Shapes: N tokens of all rows, T of one row, H hidden, I and O what a map takes and gives, Q query heads, K key heads,
D a head's size, P = rows * K groups of queries with their keys, M = Q / K * T queries of one, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Tensor = Any  # mindspore.Tensor; the package has no types
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Functions for graphs; each is documented where it is made. A name with `_back` is the gradient of the other."""

    norm: Function
    norm_scale: Function
    norm_back: Function
    linear: Function
    linear_back: Function
    add_bias: Function
    bias_back: Function
    rotate: Function
    rotate_back: Function
    attend: Function
    attend_back: Function
    swiglu: Function
    swiglu_back: Function


def make_pieces(ms: Any, *, norm_eps: float, narrow: Any = None) -> Pieces:
    """Return the functions; `narrow` is the dtype that products of weights and of attention take and give, None for
    float32."""
    linear, linear_back = _linear(ms, narrow)
    add_bias, bias_back = _bias(ms)
    norm, norm_scale, norm_back = _norm(ms, norm_eps)
    rotate, rotate_back = _rotate(ms)
    attend, attend_back = _attend(ms, narrow)
    swiglu, swiglu_back = _swiglu(ms)
    return Pieces(
        norm=norm, norm_scale=norm_scale, norm_back=norm_back, linear=linear, linear_back=linear_back,
        add_bias=add_bias, bias_back=bias_back, rotate=rotate, rotate_back=rotate_back, attend=attend,
        attend_back=attend_back, swiglu=swiglu, swiglu_back=swiglu_back,
    )  # fmt: skip


def _norm(ms: Any, eps: float) -> tuple[Function, Function, Function]:
    """RMSNorm, Zhang and Sennrich (arXiv 1910.07467): y = x * r * g with r = (mean(x * x) + eps) ** -0.5."""
    times, transposed = ms.ops.MatMul(), ms.ops.MatMul(transpose_a=True)
    rsqrt, ones, float32 = ms.ops.Rsqrt(), ms.ops.Ones(), ms.float32

    def norm_scale(x_NH: Tensor) -> Tensor:
        """Return r, (N, 1)."""
        width = x_NH.shape[1]
        return rsqrt(times(x_NH * x_NH, ones((width, 1), float32)) * (1.0 / width) + eps)

    def norm(x_NH: Tensor, gain_H: Tensor, scale_N1: Tensor) -> Tensor:
        """Return y, (N, H), of x and its r."""
        return x_NH * times(scale_N1, gain_H.reshape(1, x_NH.shape[1]))

    def norm_back(x_NH: Tensor, gain_H: Tensor, scale_N1: Tensor, dy_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Return dx = dy * r * g - x * r ** 3 * sum(dy * g * x) / H, and dg = sum over tokens of dy * x * r."""
        width = x_NH.shape[1]
        product_NH = dy_NH * x_NH
        dgain_H = transposed(scale_N1, product_NH).reshape(width)
        cubed_N1 = scale_N1 * scale_N1 * scale_N1
        pull_N1 = times(product_NH, gain_H.reshape(width, 1)) * cubed_N1 * (-1.0 / width)
        pulled_NH = x_NH * times(pull_N1, ones((1, width), float32))
        return dy_NH * times(scale_N1, gain_H.reshape(1, width)) + pulled_NH, dgain_H

    return norm, norm_scale, norm_back


def _linear(ms: Any, narrow: Any) -> tuple[Function, Function]:
    plain, second, first = ms.ops.MatMul(), ms.ops.MatMul(transpose_b=True), ms.ops.MatMul(transpose_a=True)
    cast, wide, half = ms.ops.Cast(), ms.float32, narrow is not None

    def linear(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return x @ weight.T, (N, O), in float32."""
        if half:
            return cast(second(cast(x_NI, narrow), cast(weight_OI, narrow)), wide)
        return second(x_NI, weight_OI)

    def linear_back(x_NI: Tensor, weight_OI: Tensor, dy_NO: Tensor) -> tuple[Tensor, Tensor]:
        """Return dx = dy @ weight and dweight = dy.T @ x."""
        if half:
            dy_NO = cast(dy_NO, narrow)
            dx_NI = cast(plain(dy_NO, cast(weight_OI, narrow)), wide)
            return dx_NI, cast(first(dy_NO, cast(x_NI, narrow)), wide)
        return plain(dy_NO, weight_OI), first(dy_NO, x_NI)

    return linear, linear_back


def _bias(ms: Any) -> tuple[Function, Function]:
    times, ones, float32 = ms.ops.MatMul(), ms.ops.Ones(), ms.float32

    def add_bias(y_NO: Tensor, bias_O: Tensor) -> Tensor:
        return y_NO + times(ones((y_NO.shape[0], 1), float32), bias_O.reshape(1, y_NO.shape[1]))

    def bias_back(dy_NO: Tensor) -> Tensor:
        """Return dbias, the sum over tokens, (O,)."""
        return times(ones((1, dy_NO.shape[0]), float32), dy_NO).reshape(dy_NO.shape[1])

    return add_bias, bias_back


def _rotate(ms: Any) -> tuple[Function, Function]:
    """Rotary positions in HuggingFace's half layout: the pairs (i, i + D/2) of a head turn by an angle."""
    times, transposed = ms.ops.MatMul(), ms.ops.MatMul(transpose_b=True)

    def rotate(x_NR: Tensor, cos_NR: Tensor, sin_NR: Tensor, swap_DD: Tensor) -> Tensor:
        """Return x * cos + swapped(x) * sin; `swap` has a 1 or -1 in each row and column, so its product is exact."""
        swapped = times(x_NR.reshape(-1, swap_DD.shape[0]), swap_DD)
        return x_NR * cos_NR + swapped.reshape(x_NR.shape) * sin_NR

    def rotate_back(dy_NR: Tensor, cos_NR: Tensor, sin_NR: Tensor, swap_DD: Tensor) -> Tensor:
        back = transposed((dy_NR * sin_NR).reshape(-1, swap_DD.shape[0]), swap_DD)
        return dy_NR * cos_NR + back.reshape(dy_NR.shape)

    return rotate, rotate_back


def _attend(ms: Any, narrow: Any) -> tuple[Function, Function]:
    plain, second, first = (
        ms.ops.BatchMatMul(),
        ms.ops.BatchMatMul(transpose_b=True),
        ms.ops.BatchMatMul(transpose_a=True),
    )
    softmax, join, ones, cast = ms.ops.Softmax(-1), ms.ops.Concat(-1), ms.ops.Ones(), ms.ops.Cast()
    wide, half = ms.float32, narrow is not None

    def attend(q_PMD: Tensor, k_PTD: Tensor, v_PTD: Tensor, mask_PMT: Tensor) -> tuple[Tensor, Tensor]:
        """Return p @ v, (P, M, D), and p = softmax(q @ k.T + mask), (P, M, T); `q` is scaled already."""
        if half:
            scores_PMT = cast(second(cast(q_PMD, narrow), cast(k_PTD, narrow)), wide)
            p_PMT = softmax(scores_PMT + mask_PMT)
            return cast(plain(cast(p_PMT, narrow), cast(v_PTD, narrow)), wide), p_PMT
        p_PMT = softmax(second(q_PMD, k_PTD) + mask_PMT)
        return plain(p_PMT, v_PTD), p_PMT

    def attend_back(
        q_PMD: Tensor, k_PTD: Tensor, v_PTD: Tensor, p_PMT: Tensor, do_PMD: Tensor, dot_PM1: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv.

        dscores = p * (do @ v.T - dot), where dot = sum(do * o) = sum(p * dp) (Dao et al., arXiv 2205.14135, appendix
        B.2); the subtraction is one more column of `do` and of `v`.
        """
        if half:
            dp_PMT = cast(second(cast(do_PMD, narrow), cast(v_PTD, narrow)), wide) - dot_PM1
            ds_PMT, do_PMD = cast(p_PMT * dp_PMT, narrow), cast(do_PMD, narrow)
            dq_PMD, dk_PTD = plain(ds_PMT, cast(k_PTD, narrow)), first(ds_PMT, cast(q_PMD, narrow))
            return cast(dq_PMD, wide), cast(dk_PTD, wide), cast(first(cast(p_PMT, narrow), do_PMD), wide)
        minus_PT1 = ones((v_PTD.shape[0], v_PTD.shape[1], 1), wide) * (-1.0)
        ds_PMT = p_PMT * second(join((do_PMD, dot_PM1)), join((v_PTD, minus_PT1)))
        return plain(ds_PMT, k_PTD), first(ds_PMT, q_PMD), first(p_PMT, do_PMD)

    return attend, attend_back


def _swiglu(ms: Any) -> tuple[Function, Function]:
    """Shazeer's SwiGLU (arXiv 2002.05202): h = g * sigmoid(g) * u."""
    sigmoid = ms.ops.Sigmoid()

    def swiglu(gate_NF: Tensor, up_NF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return h, sigmoid(g) and g * sigmoid(g)."""
        sigmoid_NF = sigmoid(gate_NF)
        silu_NF = gate_NF * sigmoid_NF
        return silu_NF * up_NF, sigmoid_NF, silu_NF

    def swiglu_back(up_NF: Tensor, sigmoid_NF: Tensor, silu_NF: Tensor, dh_NF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return h, which is not kept, dg = dh * u * (s + g * s * (1 - s)) and du = dh * g * s."""
        slope_NF = sigmoid_NF + silu_NF - silu_NF * sigmoid_NF
        return silu_NF * up_NF, dh_NF * up_NF * slope_NF, dh_NF * silu_NF

    return swiglu, swiglu_back

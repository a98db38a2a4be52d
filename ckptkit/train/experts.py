"""Feed-forward of a layer, forward and backward, as functions for graphs: one SwiGLU, or a router over several.

Experts are computed densely: every expert over all tokens, each output times the router's weight, which is 0 where the
expert was not chosen. A graph's shapes are fixed, and this needs no count of tokens for each expert; it costs experts /
experts_per_token times the arithmetic. There is no loss that balances experts (`router_aux_loss_coef`), as transformers
adds none either unless it is asked for the router's logits. The choice itself has no gradient.

Shapes: N tokens, H hidden, F feed-forward, E experts, C experts chosen for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptkit.train.pieces import Function, Pieces, Tensor
from ckptkit.verification.runners.facts import Facts

Made = tuple[Function, Function, int]


def make_dense(pieces: Pieces, names: Sequence[str]) -> Made:
    """Return the SwiGLU of a layer, its gradient and how many tensors the one keeps for the other.

    Gradients come in the order of the parameters: gate, up, down, each weight, then bias.
    """
    linear, linear_back, add_bias, bias_back = pieces.linear, pieces.linear_back, pieces.add_bias, pieces.bias_back
    swiglu, swiglu_back = pieces.swiglu, pieces.swiglu_back
    gate_w, up_w, down_w = (names.index(f"mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
    biased = "mlp.gate_proj.bias" in names
    gate_b, up_b, down_b = gate_w + 1, up_w + 1, down_w + 1

    def dense(x_NH: Tensor, parameters: Any) -> Any:
        gate_NF, up_NF = linear(x_NH, parameters[gate_w]), linear(x_NH, parameters[up_w])
        if biased:
            gate_NF, up_NF = add_bias(gate_NF, parameters[gate_b]), add_bias(up_NF, parameters[up_b])
        inner_NF, sigmoid_NF, silu_NF = swiglu(gate_NF, up_NF)
        y_NH = linear(inner_NF, parameters[down_w])
        if biased:
            y_NH = add_bias(y_NH, parameters[down_b])
        return y_NH, (up_NF, sigmoid_NF, silu_NF)

    def dense_back(x_NH: Tensor, dy_NH: Tensor, kept: Any, parameters: Any) -> Any:
        dinner_NF, _ = linear_back(x_NH, parameters[down_w], dy_NH)
        inner_NF, dgate_NF, dup_NF = swiglu_back(kept[0], kept[1], kept[2], dinner_NF)
        _, ddown = linear_back(inner_NF, parameters[down_w], dy_NH)
        by_gate_NH, dgate = linear_back(x_NH, parameters[gate_w], dgate_NF)
        by_up_NH, dup = linear_back(x_NH, parameters[up_w], dup_NF)
        gradients: Any = (dgate, dup, ddown)
        if biased:
            gradients = (dgate, bias_back(dgate_NF), dup, bias_back(dup_NF), ddown, bias_back(dy_NH))
        return by_gate_NH + by_up_NH, gradients

    return dense, dense_back, 3


def make_experts(ms: Any, pieces: Pieces, facts: Facts, names: Sequence[str]) -> Made:
    """Return the router with its experts as `make_dense` does its SwiGLU; the router is computed in float32.

    Gradients come in the order of the parameters: router, then each expert's gate, up, down.
    """
    swiglu, swiglu_back = pieces.swiglu, pieces.swiglu_back
    linear, linear_back = pieces.linear, pieces.linear_back
    choose, choose_back = _router(ms, facts)
    count, router = facts.experts, names.index("mlp.gate.weight")
    first, times, wide, high, float32 = router + 1, ms.ops.MatMul(), facts.hidden, facts.moe_ffn, ms.float32
    ones, join, transposed = ms.ops.Ones(), ms.ops.Concat(1), ms.ops.MatMul(transpose_a=True)
    second = ms.ops.MatMul(transpose_b=True)

    def spread(column_N1: Tensor, width: int) -> Tensor:
        return times(column_N1, ones((1, width), float32))

    def inner(x_NH: Tensor, at: int, parameters: Any) -> Any:
        gate_NF, up_NF = linear(x_NH, parameters[at]), linear(x_NH, parameters[at + 1])
        inner_NF, sigmoid_NF, silu_NF = swiglu(gate_NF, up_NF)
        return inner_NF, up_NF, sigmoid_NF, silu_NF

    def experts(x_NH: Tensor, parameters: Any) -> Any:
        p_NE, chosen_NE, weights_NE, sums_N1 = choose(second(x_NH, parameters[router]))
        y_NH = x_NH * 0.0
        for expert in range(count):
            at = first + 3 * expert
            out_NH = linear(inner(x_NH, at, parameters)[0], parameters[at + 2])
            y_NH = y_NH + out_NH * spread(weights_NE[:, expert : expert + 1], wide)
        return y_NH, (p_NE, chosen_NE, weights_NE, sums_N1)

    def experts_back(x_NH: Tensor, dy_NH: Tensor, kept: Any, parameters: Any) -> Any:
        p_NE, chosen_NE, weights_NE, sums_N1 = kept[0], kept[1], kept[2], kept[3]
        dx_NH = x_NH * 0.0
        dweights: Any = ()
        gradients: Any = ()
        for expert in range(count):
            at = first + 3 * expert
            inner_NF, up_NF, sigmoid_NF, silu_NF = inner(x_NH, at, parameters)
            plain_NF, _ = linear_back(inner_NF, parameters[at + 2], dy_NH)
            dweights = (*dweights, times(plain_NF * inner_NF, ones((high, 1), float32)))
            weight_N1 = weights_NE[:, expert : expert + 1]
            _, ddown = linear_back(inner_NF, parameters[at + 2], dy_NH * spread(weight_N1, wide))
            _, dgate_NF, dup_NF = swiglu_back(up_NF, sigmoid_NF, silu_NF, plain_NF * spread(weight_N1, high))
            by_gate_NH, dgate = linear_back(x_NH, parameters[at], dgate_NF)
            by_up_NH, dup = linear_back(x_NH, parameters[at + 1], dup_NF)
            dx_NH = dx_NH + by_gate_NH + by_up_NH
            gradients = (*gradients, dgate, dup, ddown)
        dlogits_NE = choose_back(join(dweights), p_NE, chosen_NE, weights_NE, sums_N1)
        drouter = transposed(dlogits_NE, x_NH)
        return dx_NH + times(dlogits_NE, parameters[router]), (drouter, *gradients)

    return experts, experts_back, 4


def _router(ms: Any, facts: Facts) -> tuple[Function, Function]:
    """As `Qwen3MoeSparseMoeBlock` has it: softmax over all experts, the largest C, with `norm_topk` divided by their
    sum."""
    softmax, top, total = ms.ops.Softmax(-1), ms.ops.TopK(sorted=True), ms.ops.ReduceSum(keep_dims=True)
    one_hot, on, off = ms.ops.OneHot(), ms.Tensor(1.0, ms.float32), ms.Tensor(0.0, ms.float32)
    count, chosen_count, divided = facts.experts, facts.experts_per_token, facts.norm_topk
    add_up = ms.ops.ReduceSum()

    def choose(logits_NE: Tensor) -> Any:
        """Return the probabilities, 1 where an expert is chosen, the weights, and the sum that they were divided by."""
        p_NE = softmax(logits_NE)
        _, index_NC = top(p_NE, chosen_count)
        chosen_NE = add_up(one_hot(index_NC, count, on, off), 1)
        weights_NE = p_NE * chosen_NE
        sums_N1 = total(weights_NE, 1)
        if divided:
            weights_NE = weights_NE / sums_N1
        return p_NE, chosen_NE, weights_NE, sums_N1

    def choose_back(
        dweights_NE: Tensor, p_NE: Tensor, chosen_NE: Tensor, weights_NE: Tensor, sums_N1: Tensor
    ) -> Tensor:
        """Return the gradient of the router's logits."""
        dp_NE = dweights_NE
        if divided:
            dp_NE = (dweights_NE - total(dweights_NE * weights_NE, 1)) / sums_N1
        dp_NE = dp_NE * chosen_NE
        return p_NE * (dp_NE - total(dp_NE * p_NE, 1))

    return choose, choose_back

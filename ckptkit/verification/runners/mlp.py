"""Feed-forward of one layer: SwiGLU, or a router over experts that are each a SwiGLU (Qwen3-MoE's).

Shapes: T tokens, N those of one expert, H hidden, F feed-forward, E experts, C experts chosen for a token.
"""

from __future__ import annotations

import numpy as np

from ckptkit.verification.runners.dialects import cut_gate_up
from ckptkit.verification.runners.kernels import Tensor
from ckptkit.verification.runners.layer import Layer


def feed_forward(layer: Layer, x_TH: Tensor) -> Tensor:
    """Return down(silu(gate(x)) * up(x)), (T, H): Shazeer's SwiGLU (arXiv 2002.05202)."""
    dialect = layer.dialect
    if len(dialect.gate_up) == 1:
        gate_TF, up_TF = cut_gate_up(layer.linear(dialect.gate_up[0], x_TH), dialect.gate_up_order)
    else:
        gate_TF, up_TF = (layer.linear(module, x_TH) for module in dialect.gate_up)
    return layer.linear(dialect.down, layer.kernels.silu(gate_TF) * up_TF)


def route(layer: Layer, x_TH: Tensor) -> Tensor:
    """Return the sum over the experts chosen for each token, each times its weight, (T, H).

    As `Qwen3MoeSparseMoeBlock` has it: softmax over all experts, the largest C, their sum brought to 1 with
    `norm_topk_prob`; the experts' outputs are added in the experts' order.
    """
    kernels, facts = layer.kernels, layer.facts
    logits_TE = layer.linear(layer.dialect.router, x_TH)
    weights_TC, chosen_TC = kernels.top(kernels.probabilities(logits_TE), facts.experts_per_token)
    if facts.norm_topk:
        weights_TC = weights_TC / weights_TC.sum(axis=1, keepdims=True)
    total_TH = kernels.tensor(np.zeros(x_TH.shape, np.float32))
    for expert in np.unique(chosen_TC):
        tokens_N, slots_N = np.nonzero(chosen_TC == expert)
        out_NH = _expert(layer, int(expert), kernels.rows(x_TH, tokens_N))
        total_TH = kernels.add_rows(total_TH, tokens_N, out_NH * kernels.tensor(weights_TC[tokens_N, slots_N, None]))
    return total_TH


def _expert(layer: Layer, expert: int, x_NH: Tensor) -> Tensor:
    """Return one expert's output, (N, H)."""
    kernels, facts, names = layer.kernels, layer.facts, layer.dialect.expert_names
    if layer.dialect.experts == "each":
        gate, up, down = (name.format(expert) for name in names)
        return layer.linear(down, kernels.silu(layer.linear(gate, x_NH)) * layer.linear(up, x_NH))
    into, out = (layer.parameter(name) for name in names)
    into_label, out_label = (f"{name} of expert {expert}" for name in names)
    if layer.dialect.experts == "stacked":
        gate_NF, up_NF = cut_gate_up(layer.project(into_label, x_NH, into[expert]), "halves")
        return layer.project(out_label, kernels.silu(gate_NF) * up_NF, out[expert])
    hidden, wide = facts.hidden, facts.moe_ffn
    into_HR, out_FH = into[expert * hidden : (expert + 1) * hidden], out[expert * wide : (expert + 1) * wide]
    fused_NR = kernels.matmul(x_NH, into_HR)
    layer.see(into_label, fused_NR)
    gate_NF, up_NF = cut_gate_up(fused_NR, "halves")
    mixed_NF = kernels.silu(gate_NF) * up_NF
    layer.see(f"the input of {out_label}", mixed_NF)
    return kernels.matmul(mixed_NF, out_FH)

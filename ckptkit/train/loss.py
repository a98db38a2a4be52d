"""The two ends of the network as graphs: token ids to the first layer's input, the last one's output to the loss.

The logits of a few tokens exist at a time, and their gradient is made at once with the loss: it is softmax(z) minus 1
at the target, times the token's weight. So nothing is kept for the backward pass. All of it is float32 always. Losses
are added up in the order of the tokens' chunks; another size of chunk adds in another order, and has other last bits.

Shapes: N tokens of all rows, C those of one chunk, H hidden, V the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptkit.train.pieces import Function, Tensor, make_pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Graphs. `norm(x, gain, starts...)` cuts what it gives in chunks; see `make_ends`."""

    embed: Function
    embed_back: Function
    norm: Function
    norm_back: Function
    chunk_loss: Function
    chunk_grad: Function


def chunk_bounds(tokens: int, chunk: int) -> tuple[tuple[int, int], ...]:
    """Return the half-open ranges of tokens whose logits are made together."""
    return tuple((start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def make_ends(ms: Any, *, norm_eps: float, chunk: int, head_trained: bool) -> Ends:
    """Return the graphs; without `head_trained`, `chunk_grad` gives no gradient of the head."""
    embed, embed_back = _embedding(ms)
    norm, norm_back = _final_norm(ms, norm_eps, chunk)
    chunk_loss, chunk_grad = _chunks(ms, head_trained)
    graphs = {
        "embed": embed, "embed_back": embed_back, "norm": norm, "norm_back": norm_back,
        "chunk_loss": chunk_loss, "chunk_grad": chunk_grad,
    }  # fmt: skip
    return Ends(**{name: ms.jit(function) for name, function in graphs.items()})


def _embedding(ms: Any) -> tuple[Function, Function]:
    gather, scatter, zeros = ms.ops.Gather(), ms.ops.TensorScatterAdd(), ms.ops.ZerosLike()

    def embed(table_VH: Tensor, ids_N: Tensor) -> Tensor:
        return gather(table_VH, ids_N, 0)

    def embed_back(table_VH: Tensor, ids_N: Tensor, dx_NH: Tensor, *before_VH: Tensor) -> Tensor:
        """Return the gradient of the table, added to what a tied head gave, if that is given."""
        start_VH = before_VH[0] if len(before_VH) > 0 else zeros(table_VH)
        return scatter(start_VH, ids_N.reshape(-1, 1), dx_NH)

    return embed, embed_back


def _final_norm(ms: Any, eps: float, chunk: int) -> tuple[Function, Function]:
    pieces = make_pieces(ms, norm_eps=eps)
    apply_norm, norm_scale, pull_back = pieces.norm, pieces.norm_scale, pieces.norm_back
    join = ms.ops.Concat(0)

    def norm(x_NH: Tensor, gain_H: Tensor) -> Any:
        """Return the norm's r, then what it gives, chunk by chunk."""
        scale_N1 = norm_scale(x_NH)
        y_NH = apply_norm(x_NH, gain_H, scale_N1)
        tokens = x_NH.shape[0]
        out: Any = (scale_N1,)
        for start in range(0, tokens, chunk):
            stop = start + chunk if start + chunk < tokens else tokens
            out = (*out, y_NH[start:stop])
        return out

    def norm_back(x_NH: Tensor, gain_H: Tensor, scale_N1: Tensor, *dy: Tensor) -> Any:
        """Return dx and dgain of the chunks' gradients."""
        dy_NH = dy[0] if len(dy) == 1 else join(dy)
        return pull_back(x_NH, gain_H, scale_N1, dy_NH)

    return norm, norm_back


def _chunks(ms: Any, head_trained: bool) -> tuple[Function, Function]:
    plain, second, first = ms.ops.MatMul(), ms.ops.MatMul(transpose_b=True), ms.ops.MatMul(transpose_a=True)
    log_softmax, pick, ones, float32 = ms.ops.LogSoftmax(-1), ms.ops.GatherD(), ms.ops.Ones(), ms.float32
    softmax_less_one = ms.ops.SparseSoftmaxCrossEntropyWithLogits(is_grad=True)

    def summed(z_CV: Tensor, targets_C: Tensor, weights_C: Tensor) -> Tensor:
        count = targets_C.shape[0]
        chosen_C1 = pick(log_softmax(z_CV), 1, targets_C.reshape(-1, 1))
        return plain(weights_C.reshape(1, count), chosen_C1) * (-1.0)

    def chunk_loss(x_CH: Tensor, head_VH: Tensor, targets_C: Tensor, weights_C: Tensor) -> Tensor:
        """Return the sum of the tokens' cross entropies, each times its weight, (1, 1)."""
        return summed(second(x_CH, head_VH), targets_C, weights_C)

    def chunk_grad(
        x_CH: Tensor, head_VH: Tensor, targets_C: Tensor, weights_C: Tensor, factors_C: Tensor, *before_VH: Tensor
    ) -> Any:
        """Return that sum, dx, and dhead added to that of the chunks before; gradients are times `factors` instead."""
        count, width = x_CH.shape
        z_CV = second(x_CH, head_VH)
        slope_CV = softmax_less_one(z_CV, targets_C)  # divided by `count`
        factors_CH = plain(factors_C.reshape(count, 1) * float(count), ones((1, width), float32))
        total_11, dx_CH = summed(z_CV, targets_C, weights_C), plain(slope_CV, head_VH) * factors_CH
        if not head_trained:
            return total_11, dx_CH
        dhead_VH = first(slope_CV, x_CH * factors_CH)
        if len(before_VH) > 0:
            dhead_VH = before_VH[0] + dhead_VH
        return total_11, dx_CH, dhead_VH

    return chunk_loss, chunk_grad

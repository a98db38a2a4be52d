"""Stand-ins that let MindFormers' mcore training models run on a CPU, in graph mode, in fp32.

MindFormers 1.9 writes these models with primitives that have a kernel on Ascend only. Each stand-in below computes,
with operators that a CPU has, what MindSpore documents for the primitive of the same name. Nothing else is replaced:
parameters, names, shapes, fused layouts, norms, rotary embedding, attention and expert wiring are MindFormers' own.

`install()` must come before the first import of mindformers, whose modules bind the primitives' names when they are
imported. `keep_attention_in_float32(net)` comes after the net is built. Stand-ins are Cells, so a method that only
steers parallel or recomputed execution (`shard`, `recompute`, `add_prim_attr`) is accepted and does nothing.

Shape suffixes: B batch, N query heads, K key / value heads, S query length, T key length, D head size.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Self

import mindspore as ms
from mindspore import nn, ops

# Where MindFormers takes primitives from; each name is replaced wherever it occurs.
NAMESPACES = (
    "mindspore.ops.auto_generate",
    "mindspore.ops.auto_generate.gen_ops_prim",
    "mindspore.ops.operations",
    "mindspore.ops.operations.nn_ops",
)
MASKED_SCORE = -1e30


class Standin(nn.Cell):
    """A Cell in the place of a primitive: it takes a primitive's settings for parallel execution, to no effect."""

    def shard(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def recompute(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def add_prim_attr(self, *args: Any, **kwargs: Any) -> Self:
        return self


class AddExt(Standin):
    """`AddExt`: input + alpha * other."""

    def construct(self, input_, other, alpha=1):
        return input_ + other * alpha


class MeanExt(Standin):
    """`MeanExt`: the mean over the axes `dim`, all of them when None."""

    def construct(self, input_, dim=None, keepdim=False):
        return ops.mean(input_, dim, keepdim)


class Outer(Standin):
    """`Outer`: the outer product of two vectors."""

    def construct(self, input_, vec2):
        return ops.reshape(input_, (-1, 1)) * ops.reshape(vec2, (1, -1))


class SplitWithSize(Standin):
    """`SplitWithSize`: parts of the given sizes along `dim`."""

    def construct(self, input_, split_size, dim=0):
        return ops.split(input_, split_size, dim)


class SiLU(Standin):
    """`SiLU`: x * sigmoid(x)."""

    def construct(self, input_):
        return input_ * ops.sigmoid(input_)


class Swiglu(Standin):
    """`Swiglu`: a * sigmoid(a) * b, where a and b are the first and the second half of the input along `dim`."""

    def construct(self, input_, dim=-1):
        a, b = ops.chunk(input_, 2, dim)
        return a * ops.sigmoid(a) * b


class RmsNorm(Standin):
    """`RmsNorm`: x / sqrt(mean(x^2) + epsilon) * gamma over the last axis, and the reciprocal root."""

    def __init__(self, epsilon=1e-6):
        super().__init__()
        self.epsilon = epsilon

    def construct(self, x, gamma):
        rstd = ops.rsqrt(ops.mean(ops.square(x), -1, True) + self.epsilon)
        return x * rstd * gamma, rstd


class FlashAttentionScore(Standin):
    """`FlashAttentionScore`: softmax(scale * q k^T, masked where the mask is 1) v; BNSD, dense mask, no dropout.

    The primitive's outputs are (softmax max, softmax sum, softmax, attention). Only the last is right here; the
    others hold nothing that a forward run uses.
    """

    def __init__(
        self,
        head_num,
        keep_prob=1.0,
        scale_value=1.0,
        pre_tokens=2147483647,
        next_tokens=2147483647,
        inner_precise=0,
        input_layout="BSH",
        sparse_mode=0,
    ):
        super().__init__()
        if input_layout != "BNSD" or sparse_mode != 0 or keep_prob != 1.0:
            raise ValueError(f"only BNSD, sparse mode 0, no dropout: {input_layout}, {sparse_mode}, {keep_prob}")
        self.scale_value = scale_value

    def construct(
        self,
        query_BNSD,
        key_BKTD,
        value_BKTD,
        real_shift=None,
        drop_mask=None,
        padding_mask=None,
        attn_mask_B1ST=None,
        prefix=None,
    ):
        heads_per_group = query_BNSD.shape[1] // key_BKTD.shape[1]
        key_BNTD = ops.repeat_interleave(key_BKTD, heads_per_group, 1)
        value_BNTD = ops.repeat_interleave(value_BKTD, heads_per_group, 1)
        score_BNST = ops.matmul(query_BNSD, ops.transpose(key_BNTD, (0, 1, 3, 2))) * self.scale_value
        score_BNST = ops.masked_fill(score_BNST, ops.cast(attn_mask_B1ST, ms.bool_), MASKED_SCORE)
        out_BNSD = ops.matmul(ops.softmax(score_BNST, -1), value_BNTD)
        return out_BNSD, out_BNSD, out_BNSD, out_BNSD


class TopkExt(Standin):
    """`TopkExt`: the k largest (or smallest) values along `dim`, and their indices."""

    def construct(self, input_, k, dim=-1, largest=True, sorted_=True):
        return ops.topk(input_, k, dim, largest, sorted_)


class SortExt(Standin):
    """`SortExt`: the values sorted along `dim`, and their int64 indices; the order of equal values is free."""

    def construct(self, input_, dim=-1, descending=False, stable=False):
        values, indices = ops.sort(input_, dim, descending)
        return values, ops.cast(indices, ms.int64)


class CumsumExt(Standin):
    """`CumsumExt`: running sums along `dim`."""

    def construct(self, input_, dim, dtype=None):
        return ops.cumsum(input_, dim, dtype)


class FmodScalar(Standin):
    """`FmodScalar`: the remainder by a positive scalar, of integers that are not negative."""

    def construct(self, input_, other):
        return input_ - ops.floor_div(input_, other) * other


class IndexSelect(Standin):
    """`IndexSelect`: the slices of axis `dim` that `index` lists."""

    def construct(self, input_, dim, index):
        return ops.gather(input_, index, dim)


class GroupedMatmul(Standin):
    """`GroupedMatmul`: rows of x, grouped one after another, each times its own group's matrix of w.

    x is one (rows, in) tensor in a list, w one (groups, in, out) tensor in a list; `group_list` holds the number of
    the first row after each group. Every row meets every matrix and its own product is kept, for the sizes of the
    groups are not known when the graph is compiled.
    """

    def __init__(self, split_item=0, group_type=-1, transpose_a=False, transpose_b=False):
        super().__init__()
        if split_item != 3 or group_type != 0 or transpose_a or transpose_b:
            raise ValueError(f"only split_item 3 and group_type 0, no transpose: {split_item}, {group_type}")

    def construct(
        self,
        x,
        weight,
        bias=None,
        scale=None,
        offset=None,
        antiquant_scale=None,
        antiquant_offset=None,
        group_list=None,
    ):
        products = ops.matmul(ops.expand_dims(x[0], 0), weight[0])
        num_groups, num_rows, _ = products.shape
        past_end = ops.expand_dims(ops.arange(num_rows), 0) >= ops.expand_dims(group_list, 1)
        group_of_row = ops.expand_dims(ops.sum(ops.cast(past_end, ms.int32), 0), 0)
        own = group_of_row == ops.expand_dims(ops.cast(ops.arange(num_groups), ms.int32), 1)
        kept = ops.where(ops.expand_dims(own, 2), products, ops.zeros_like(products))
        return (ops.sum(kept, 0),)


class KeepFloat32(Standin):
    """`Cast` inside MindFormers' Attention: a cast down to float16, which flash attention wants, is left out."""

    def construct(self, input_, dtype):
        if dtype == ms.float16:
            return input_
        return ops.cast(input_, dtype)


def embedding(input_, weight):
    """Stand in for `mint.nn.functional.embedding`: the rows of `weight` that the ids name."""
    return ops.gather(weight, input_, 0)


STANDINS = (
    AddExt,
    MeanExt,
    Outer,
    SplitWithSize,
    SiLU,
    Swiglu,
    RmsNorm,
    FlashAttentionScore,
    TopkExt,
    SortExt,
    CumsumExt,
    FmodScalar,
    IndexSelect,
    GroupedMatmul,
)


def install() -> None:
    """Put every stand-in in its primitive's place; raise RuntimeError when mindformers is imported already."""
    if "mindformers" in sys.modules:
        raise RuntimeError("mindformers is imported already and holds the primitives")
    for namespace in map(importlib.import_module, NAMESPACES):
        for standin in STANDINS:
            if hasattr(namespace, standin.__name__):
                setattr(namespace, standin.__name__, standin)
    importlib.import_module("mindspore.mint.nn.functional").embedding = embedding


def keep_attention_in_float32(net: nn.Cell) -> None:
    """Leave out the casts to float16 in every Attention cell of a MindFormers net."""
    attention = importlib.import_module("mindformers.parallel_core.training_graph.transformer.attention")
    for _, cell in net.cells_and_names():
        if isinstance(cell, attention.Attention):
            cell.cast = KeepFloat32()

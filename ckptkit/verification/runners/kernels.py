"""The MindSpore operators that the builtin network uses: primitives that CPU, GPU and Ascend all have, in float32.

No `mint` and no fused kernel, which the CPU does not have. What does not live here: how they make a network, and
other dtypes (`low_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ckptkit.verification.runners.job import Floats

Tensor = Any  # mindspore.Tensor; the package has no types


class Kernels:
    """Operators, made once. Axes are named where they are used; the last one is what a norm or softmax goes over."""

    def __init__(self, mindspore: Any) -> None:
        ops = mindspore.ops
        self._ms = mindspore
        self._matmul = ops.MatMul()
        self._matmul_transposed = ops.MatMul(transpose_b=True)
        self._batched = ops.BatchMatMul()
        self._batched_transposed = ops.BatchMatMul(transpose_b=True)
        self._gather = ops.Gather()
        self._softmax = ops.Softmax(-1)
        self._mean = ops.ReduceMean(keep_dims=True)
        self._rsqrt = ops.Rsqrt()
        self._sigmoid = ops.Sigmoid()
        self._top = ops.TopK(sorted=True)
        self._scatter_add = ops.TensorScatterAdd()
        self._join = ops.Concat(0)
        self._join_last = ops.Concat(-1)

    def tensor(self, values: Any) -> Tensor:
        """Return a tensor of its own of a numpy array."""
        return self._ms.Tensor(values)

    def rows(self, table_VH: Tensor, index: Any) -> Tensor:
        """Return the rows of a matrix that an array names."""
        return self._gather(table_VH, self.tensor(index.astype(np.int32)), 0)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts one after another along their first axis."""
        return self._join(tuple(parts))

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias, (T, O)."""
        y_TO = self._matmul_transposed(x_TI, weight_OI)
        return y_TO if bias_O is None else y_TO + bias_O

    def matmul(self, x_TI: Tensor, weight_IO: Tensor) -> Tensor:
        return self._matmul(x_TI, weight_IO)

    def scores(self, q_KND: Tensor, k_KTD: Tensor) -> Tensor:
        """Return q @ k.T for each of K, (K, N, T)."""
        return self._batched_transposed(q_KND, k_KTD)

    def mix(self, p_KNT: Tensor, v_KTD: Tensor) -> Tensor:
        """Return p @ v for each of K, (K, N, D)."""
        return self._batched(p_KNT, v_KTD)

    def softmax(self, x: Tensor) -> Tensor:
        return self._softmax(x)

    def probabilities(self, logits_TE: Tensor) -> Tensor:
        """Return a router's softmax, in float32."""
        return self._softmax(logits_TE)

    def numbers(self, x: Tensor) -> Floats:
        """Return a tensor as an array in float32."""
        return np.array(x.asnumpy())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Zhang and Sennrich (arXiv 1910.07467), in transformers' order: scale by the root, then by the weight."""
        return weight * (x * self._rsqrt(self._mean(x * x, -1) + eps))

    def silu(self, x: Tensor) -> Tensor:
        return x * self._sigmoid(x)

    def top(self, x_TE: Tensor, count: int) -> tuple[Floats, Any]:
        """Return the largest `count` of each row and their indices, (T, count) both, as numpy arrays."""
        values, index = self._top(x_TE, count)
        return values.asnumpy(), index.asnumpy()

    def add_rows(self, total_TH: Tensor, index_N: Any, rows_NH: Tensor) -> Tensor:
        """Return `total`, with each of `rows` added to the row that its index names; none occurs twice."""
        return self._scatter_add(total_TH, self.tensor(index_N[:, None].astype(np.int32)), rows_NH)

    def rotate(self, x_TQD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        """Turn each head's pairs (i, i + D/2) by the angles: HuggingFace's half layout."""
        half = x_TQD.shape[-1] // 2
        swapped_TQD = self._join_last((-x_TQD[..., half:], x_TQD[..., :half]))
        return x_TQD * cos_T1D + swapped_TQD * sin_T1D

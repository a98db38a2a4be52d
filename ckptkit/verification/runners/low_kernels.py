"""The operators of the builtin network in fp16 or bf16, as MindFormers' own networks mix the dtypes.

Its defaults are `compute_dtype` float16 with `layernorm_compute_type`, `softmax_compute_type` and `rotary_dtype`
float32 (`LlamaConfig`, release 1.9); the sums of residuals have the compute dtype. What does not live here: float32
(`kernels.py`), and what is counted (`computing.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptkit.errors import UsageError
from ckptkit.verification.runners.computing import FORMATS
from ckptkit.verification.runners.job import Floats
from ckptkit.verification.runners.kernels import Kernels, Tensor

KEPT = (
    "RMSNorm but for the product with its weight: in float16 a square leaves the range at 256",
    "softmax, of attention's scores and of a router's",
    "the rotation of queries and keys",
    "sums inside of a matrix product, as far as the device has it so",
)


class LowKernels(Kernels):
    """Operators in `compute`: what they take and give is of that dtype but for the tables of `rotate`, which are of
    float32."""

    def __init__(self, mindspore: Any, compute: str) -> None:
        super().__init__(mindspore)
        self._format = FORMATS[compute]
        self._low, self._fp32 = getattr(mindspore, self._format.name), mindspore.float32

    def lower(self, x: Tensor) -> Tensor:
        """Return a tensor in the dtype."""
        return x.astype(self._low)

    def tensor(self, values: Any) -> Tensor:
        """Return a tensor of a numpy array; of numbers in the dtype, and a mask's minimum is the dtype's own."""
        if values.dtype != np.float32:
            return super().tensor(values)
        return self.lower(super().tensor(np.clip(values, -self._format.limit, self._format.limit)))

    def softmax(self, x: Tensor) -> Tensor:
        return self.lower(super().softmax(x.astype(self._fp32)))

    def probabilities(self, logits_TE: Tensor) -> Tensor:
        return super().probabilities(logits_TE.astype(self._fp32))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.astype(self._fp32)
        return weight * self.lower(wide * self._rsqrt(self._mean(wide * wide, -1) + eps))

    def rotate(self, x_TQD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        return self.lower(super().rotate(x_TQD.astype(self._fp32), cos_T1D, sin_T1D))

    def numbers(self, x: Tensor) -> Floats:
        return super().numbers(x.astype(self._fp32))

    def try_all(self, device: str) -> None:
        """Raise UsageError when the device does not have an operator in the dtype."""
        try:
            ones_KTD = self.lower(self._ms.Tensor(np.ones((2, 2, 2), np.float32)))
            one_TD = ones_KTD[0]
            mixed_KTD = self.mix(self.softmax(self.scores(ones_KTD, ones_KTD)), ones_KTD)
            gate_TD = self.silu(self.linear(self.rms_norm(one_TD, one_TD[0], 1e-5), one_TD)) * one_TD
            index_T = np.arange(2)
            sum_TD = self.add_rows(self.rows(self.matmul(gate_TD, one_TD), index_T), index_T, mixed_KTD[0])
            self.numbers(sum_TD)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(
                f"MindSpore {self._ms.__version__} does not compute in {self._format.name} on `{device}`",
                why=" ".join(str(error).split())[:200],
            ) from error

"""One layer of the builtin network: its parameters under the dialect's names, and what is made of them everywhere.

Shapes: T tokens, I and O what a module takes and gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptkit.verification.runners.dialects import Dialect
from ckptkit.verification.runners.facts import Facts
from ckptkit.verification.runners.kernels import Kernels, Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """`find` gives a parameter by its whole name, None for one that the network does not have; `prefix` is the
    layer's part of the names. `see` is told of what a matrix product takes and gives."""

    kernels: Kernels
    facts: Facts
    dialect: Dialect
    find: Callable[[str], Tensor | None]
    prefix: str
    see: Callable[[str, Tensor], None]

    def parameter(self, name: str) -> Tensor:
        return self.find(self.prefix + name)

    def linear(self, module: str, x_TI: Tensor) -> Tensor:
        """Run `x` through the module of that name, with its bias where the network has one, (T, O)."""
        return self.project(module, x_TI, self.parameter(f"{module}.weight"), self.parameter(f"{module}.bias"))

    def project(self, label: str, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias, (T, O), and let both be seen under that label."""
        self.see(f"the input of {label}", x_TI)
        y_TO = self.kernels.linear(x_TI, weight_OI, bias_O)
        self.see(label, y_TO)
        return y_TO

    def norm(self, module: str, x: Tensor) -> Tensor:
        """Return `x` normed over its last axis by the module of that name."""
        return self.kernels.rms_norm(x, self.parameter(f"{module}.weight"), self.facts.norm_eps)

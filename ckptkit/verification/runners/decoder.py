"""The builtin network: a decoder-only transformer in MindSpore whose parameters are those of a dialect, as stored.

It is made of functions over named parameters, so that a fused parameter stays as the checkpoint has it and only what
it gives is cut. What does not live here: attention (`attention.py`), feed-forward and experts (`mlp.py`), operators
(`kernels.py`), names and layouts (`dialects.py`). Shapes: T tokens, H hidden, V the vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ckptkit.errors import UsageError
from ckptkit.verification.runners.attention import attend, causal_mask
from ckptkit.verification.runners.dialects import Dialect, parameter_shapes
from ckptkit.verification.runners.facts import Facts
from ckptkit.verification.runners.job import Floats
from ckptkit.verification.runners.kernels import Kernels, Tensor
from ckptkit.verification.runners.layer import Layer
from ckptkit.verification.runners.low_kernels import LowKernels
from ckptkit.verification.runners.mlp import feed_forward, route
from ckptkit.verification.runners.net import Tap, Walk, Watch
from ckptkit.verification.runners.rope import inverse_frequencies, rotary_table


def _nobody(*_: Any) -> None:
    """Take what nobody asked for."""


class Decoder:
    """A network of `facts` with the parameters of `dialect`; `mindspore` is the package. No parameter is set yet.

    `layers` are those that it has, by number; None for all. `low` are the operators of another dtype that it can run
    in, too.
    """

    def __init__(
        self, mindspore: Any, facts: Facts, dialect: Dialect, layers: Sequence[int] | None = None,
        low: LowKernels | None = None,
    ) -> None:  # fmt: skip
        self.facts = facts
        self.dialect = dialect
        self.layers = tuple(range(facts.layers) if layers is None else layers)
        self.shapes = parameter_shapes(dialect, facts, self.layers)
        self.frequencies = inverse_frequencies(facts.rope, facts.head_dim)
        self._ms = mindspore
        self._kernels, self._low_kernels = Kernels(mindspore), low
        self._parameters: dict[str, Tensor] = {}
        self._lowered: dict[str, Tensor] = {}

    def put(self, name: str, values: Floats) -> None:
        """Set a parameter. Its storage is filled anew: a new parameter in its place would leave the old one alive."""
        tensor = self._ms.Tensor(np.ascontiguousarray(values))
        if name in self._parameters:
            self._parameters[name].set_data(tensor)
        else:
            self._parameters[name] = self._ms.Parameter(tensor, name=name, requires_grad=False)

    def get(self, name: str) -> Floats:
        """Return a copy of a parameter."""
        values: Floats = np.array(self._parameters[name].asnumpy())
        return values

    def free(self, names: Sequence[str]) -> None:
        """Forget parameters."""
        for name in names:
            self._parameters.pop(name, None)
        gc.collect()  # MindSpore's parameters are in cycles: they would stay until Python looks for such by itself

    def blocks(self) -> list[tuple[str, list[str]]]:
        """Return the blocks that `walk` runs, each with the names of its parameters."""
        dialect = self.dialect
        layers = [
            (f"layers.{i}", [name for name in self.shapes if name.startswith(dialect.prefix.format(i))])
            for i in self.layers
        ]
        head = dialect.embedding if self.facts.tied else dialect.head
        return [("embedding", [dialect.embedding]), *layers, ("head", [dialect.norm, head])]

    @contextmanager
    def lowered(self, names: Sequence[str]) -> Iterator[None]:
        """Have parameters in the other dtype too, for walks in it."""
        assert self._low_kernels is not None
        self._lowered.update((name, self._low_kernels.lower(self._parameters[name])) for name in names)
        try:
            yield
        finally:
            self._lowered.clear()

    def walk(
        self, ids: Sequence[int], positions: Sequence[int] | None, tap: Tap | None, watch: Watch | None = None, *,
        low: bool = False,
    ) -> Walk:  # fmt: skip
        """Run one sequence of token ids; positions None are 0, 1, 2, ...; see `Net.walk`, and `Computes.watched`."""
        facts, dialect, kernels, find = self.facts, self.dialect, self._kernels, self._parameters.get
        if low:
            assert self._low_kernels is not None
            kernels, find = self._low_kernels, self._lowered.get
        tell, see = tap or _nobody, watch or _nobody
        ids_T = self._checked(ids)
        rotary = self._rotary(range(len(ids)) if positions is None else positions)
        masks = {window: kernels.tensor(causal_mask(len(ids), window)) for window in set(facts.window)}
        yield "embedding"
        x_TH = kernels.rows(find(dialect.embedding), ids_T)
        tell("embedding", x_TH)
        for index in self.layers:
            name = f"layers.{index}"
            yield name
            prefix = dialect.prefix.format(index)
            layer = Layer(kernels, facts, dialect, find, prefix, partial(see, f"{name}.attention"))
            added_TH = attend(layer, layer.norm(dialect.attention_norm, x_TH), rotary, masks[facts.window[index]])
            tell(f"{name}.attention", added_TH)
            x_TH = x_TH + added_TH
            layer.see("the sum with it", x_TH)
            layer = replace(layer, see=partial(see, f"{name}.mlp"))
            normed_TH = layer.norm(dialect.mlp_norm, x_TH)
            added_TH = (route if facts.sparse_layers[index] else feed_forward)(layer, normed_TH)
            tell(f"{name}.mlp", added_TH)
            x_TH = x_TH + added_TH
            tell(name, x_TH)
        yield "head"
        x_TH = kernels.rms_norm(x_TH, find(dialect.norm), facts.norm_eps)
        tell("norm", x_TH)
        logits_TV = kernels.linear(x_TH, find(dialect.embedding if facts.tied else dialect.head))
        return kernels.numbers(logits_TV)

    def _checked(self, ids: Sequence[int]) -> Any:
        """Return the ids as an array; a gather of a row that is not there would give zeros, or anything."""
        if outside := [i for i in ids if not 0 <= i < self.facts.vocab]:
            raise UsageError(f"token id {outside[0]} is not in a vocabulary of {self.facts.vocab}")
        return np.array(ids, np.int32)

    def _rotary(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the positions, (T, 1, D) both: one for all heads."""
        table = rotary_table(self._frequencies(max(positions) + 1), positions, self.facts.rope.attention_factor)
        cos_T1D, sin_T1D = (self._kernels.tensor(values_TD[:, None, :]) for values_TD in table)
        return cos_T1D, sin_T1D

    def _frequencies(self, num_positions: int) -> Floats:
        """Return the frequencies for so many positions.

        `dynamic` has others beyond the original length; what was put in the place of the original ones then changes
        them by the same factor.
        """
        rope, size = self.facts.rope, self.facts.head_dim
        if rope.type != "dynamic" or num_positions <= rope.original:
            return self.frequencies
        change = self.frequencies.astype(np.float64) / inverse_frequencies(rope, size)
        longer: Floats = (inverse_frequencies(rope, size, num_positions) * change).astype(np.float32)
        return longer

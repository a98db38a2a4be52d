"""The network that is trained: its parameters under HuggingFace's names, and the loop over its layers.

The loop is Python; each layer is two graphs (`blocks.py`), and so are the ends (`loss.py`). The gradient is that of the
sum of the weighted tokens' cross entropies times a factor. What does not live here: one micro-batch's way through them
(`micro_batch.py`), updates (`step.py`), what config.json means (`verification/runners/facts.py`).

Shapes: R rows of a micro-batch, T tokens of a row, N = R * T, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import UsageError
from ckptkit.train.arrays import Floats
from ckptkit.train.blocks import Block, Kind, make_block
from ckptkit.train.dropout import ATTENTION, MLP, keeps, rounded_share
from ckptkit.train.loss import Ends, chunk_bounds, make_ends
from ckptkit.train.micro_batch import Pass, Slot
from ckptkit.train.pieces import Tensor
from ckptkit.train.tables import Tables
from ckptkit.verification.runners.dialects import find_dialect, parameter_shapes
from ckptkit.verification.runners.facts import Facts
from ckptkit.verification.runners.mindspore_exact import be_exact, mindspore_device

Gradients = dict[str, Tensor]
_NARROW = {"fp32": "", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class _Layer:
    names: tuple[str, ...]
    local: tuple[str, ...]
    sparse: bool
    window: int | None


def prepare(mindspore: Any, device: str, threads: int | None = None) -> None:
    """Choose the device, as the command line calls it, before the first tensor is made; arithmetic is exact from then.

    `threads` are those of the CPU's kernels. UsageError for a device that is not there.
    """
    target, index = mindspore_device(device, option="training.device")
    be_exact(mindspore, target, index)
    if threads is not None and target == "CPU":
        mindspore.device_context.cpu.op_tuning.threads_num(threads)


class TrainNet:
    """A decoder of `facts`. Its parameters are float32 and not set yet; `compute` is the dtype of matrix products.

    `dropout` is the share of what attention and feed-forward add that is dropped, masks keyed by `seed`; `ce_chunk` are
    the tokens whose logits exist at a time. UsageError for bf16 on a CPU, and for what HuggingFace has no names for.
    """

    def __init__(
        self, mindspore: Any, facts: Facts, *, compute: str = "fp32", dropout: float = 0.0, seed: int = 0,
        ce_chunk: int = 1024,
    ) -> None:  # fmt: skip
        if compute == "bf16" and mindspore.get_context("device_target") == "CPU":
            raise UsageError(
                "`precision.compute: bf16` does not train on a CPU",
                why="MindSpore's CPU operators have no bfloat16 matrix product",
                hint="set `fp32`, or `fp16` with its loss scale",
            )
        dialect = find_dialect("hf", "", facts)
        self.mindspore, self.facts, self.dialect, self.compute = mindspore, facts, dialect, compute
        self.shapes = parameter_shapes(dialect, facts)
        self.names = tuple(self.shapes)
        self.head = dialect.embedding if facts.tied else dialect.head
        self.parameters: dict[str, Tensor] = {}
        self._dropout, self._seed, self._chunk = rounded_share(dropout), seed, ce_chunk
        self._tables = Tables(mindspore, facts)
        self._layers = tuple(self._layer(index) for index in range(facts.layers))
        self._blocks: dict[Kind, Block] = {}
        self._add = mindspore.jit(_sums)
        self.train_only(self.names)

    def train_only(self, names: Sequence[str]) -> None:
        """Compute gradients of these parameters only; those of the others, and all below the lowest, cost nothing."""
        self.trained = frozenset(names)
        layers = [i for i, layer in enumerate(self._layers) if self.trained.intersection(layer.names)]
        embeds = self.dialect.embedding in self.trained
        self._lowest = 0 if embeds else min(layers, default=len(self._layers))
        self._ends: Ends = make_ends(
            self.mindspore, norm_eps=self.facts.norm_eps, chunk=self._chunk, head_trained=self.head in self.trained
        )

    def put(self, name: str, values: Floats) -> None:
        """Set a parameter to a copy of `values`; KeyError for a name, ValueError for a shape that it does not have."""
        if values.shape != self.shapes[name]:
            raise ValueError(f"{name} is {self.shapes[name]}, not {values.shape}")
        # no Parameter: a graph is compiled for each one that it is called with, and layers would share none
        self.parameters[name] = self.mindspore.Tensor(np.array(values, np.float32, order="C"))

    def get(self, name: str) -> Floats:
        """Return a copy of a parameter."""
        values: Floats = np.array(self.parameters[name].asnumpy())
        return values

    def gradients(
        self, slot: Slot, factor: float, recompute: frozenset[int], before: Gradients | None = None
    ) -> tuple[np.float32, Gradients]:
        """Return the sum of weighted cross entropies, and its gradient times `factor`, added to `before`, by name.

        Layers of `recompute` keep nothing but their input, and are computed again.
        """
        gradients: Gradients = dict(before or {})
        forward = Pass(self, slot, dropping=True)
        kept: dict[int, Sequence[Tensor]] = {}
        inputs: list[Tensor] = [forward.embed()]
        for index in range(len(self._layers)):
            out, *rest = forward.layer(index, inputs[index])
            inputs.append(out)
            if index >= self._lowest and index not in recompute:
                kept[index] = rest
            del rest
        loss, dx = self._head_gradients(forward, inputs.pop(), factor, gradients)
        for index in reversed(range(self._lowest, len(self._layers))):
            x = inputs.pop()
            needed = kept.pop(index) if index in kept else forward.layer(index, x)[1:]
            dx, *new = forward.layer_back(index, dx, x, needed)
            del needed
            trained = [name for name in self._layers[index].names if name in self.trained]
            self._take(gradients, dict(zip(trained, new, strict=True)))
        if self.dialect.embedding in self.trained:
            table, before_VH = self.parameters[self.dialect.embedding], gradients.get(self.dialect.embedding)
            starts = () if before_VH is None else (before_VH,)
            gradients[self.dialect.embedding] = self._ends.embed_back(table, forward.ids, dx, *starts)
        return loss, gradients

    def loss(self, slot: Slot) -> np.float32:
        """Return the sum of weighted cross entropies, without dropout."""
        chunks = self._chunks(slot)
        pieces = zip(chunks, *self._cut(slot.targets_RT, slot.weights_RT), strict=True)
        return _total([self._ends.chunk_loss(y, self.parameters[self.head], *piece) for y, *piece in pieces])

    def logits(self, slot: Slot) -> Floats:
        """Return the logits of all tokens, (N, V), without dropout: for tests, all of them exist at once."""
        chunks = self._chunks(slot)
        head = self.mindspore.ops.MatMul(transpose_b=True)
        return np.concatenate([head(y, self.parameters[self.head]).asnumpy() for y in chunks])

    def _chunks(self, slot: Slot) -> list[Tensor]:
        """Return what the final norm gives, (N, H), in chunks of tokens, without dropout."""
        forward = Pass(self, slot, dropping=False)
        x = forward.embed()
        for index in range(len(self._layers)):
            x = forward.layer(index, x)[0]
        chunks: list[Tensor]
        _, *chunks = self._ends.norm(x, self.parameters[self.dialect.norm])
        return chunks

    def values(self, slot: Slot) -> Iterator[tuple[str, Floats]]:
        """Yield what each part of the forward pass gives, with its name, in order; dropout as in training."""
        forward = Pass(self, slot, dropping=True)
        x = forward.embed()
        yield "the embedding", x.asnumpy()
        for index in range(len(self._layers)):
            x = forward.layer(index, x)[0]
            yield f"layer {index}", x.asnumpy()
        _, *chunks = self._ends.norm(x, self.parameters[self.dialect.norm])
        yield "the final norm", np.concatenate([chunk.asnumpy() for chunk in chunks])

    def _head_gradients(
        self, forward: Pass, x: Tensor, factor: float, gradients: Gradients
    ) -> tuple[np.float32, Tensor]:
        """Return the loss and the gradient of the last layer's output; add those of head and norm to `gradients`."""
        slot, ends, head = forward.slot, self._ends, self.parameters[self.head]
        gain, trained = self.parameters[self.dialect.norm], self.head in self.trained
        scale, *chunks = ends.norm(x, gain)
        cut = self._cut(slot.targets_RT, slot.weights_RT, slot.weights_RT * np.float32(factor))
        totals, slopes = [], []
        for y, *piece in zip(chunks, *cut, strict=True):
            before = (gradients[self.head],) if trained and self.head in gradients else ()
            total, dy, *dhead = ends.chunk_grad(y, head, *piece, *before)
            totals.append(total)
            slopes.append(dy)
            if dhead:
                gradients[self.head] = dhead[0]
        dx, dgain = ends.norm_back(x, gain, scale, *slopes)
        if self.dialect.norm in self.trained:
            self._take(gradients, {self.dialect.norm: dgain})
        return _total(totals), dx

    def _take(self, gradients: Gradients, new: Gradients) -> None:
        """Add new gradients to those that are there."""
        if not new:
            return
        names = list(new)
        if names[0] not in gradients:
            gradients |= new
            return
        sums = self._add(*(gradients[name] for name in names), *new.values())
        gradients |= zip(names, sums, strict=True)

    def _cut(self, *arrays: NDArray[Any]) -> list[list[Tensor]]:
        """Return each array, flat, in chunks."""
        bounds = chunk_bounds(arrays[0].size, self._chunk)
        return [[self.mindspore.Tensor(a.reshape(-1)[start:stop].copy()) for start, stop in bounds] for a in arrays]

    def _layer(self, index: int) -> _Layer:
        prefix = self.dialect.prefix.format(index)
        names = tuple(name for name in self.names if name.startswith(prefix))
        local = tuple(name.removeprefix(prefix) for name in names)
        return _Layer(names, local, self.facts.sparse_layers[index], self.facts.window[index])

    def block(self, index: int, *, dropping: bool) -> tuple[Block, list[Tensor], int | None]:
        """Return a layer's graphs, its parameters, and its window."""
        layer = self._layers[index]
        trained = tuple(place for place, name in enumerate(layer.names) if name in self.trained)
        share = self._dropout if dropping else 0.0
        kind = Kind(layer.local, trained, layer.sparse, _NARROW[self.compute], share)
        if kind not in self._blocks:
            self._blocks[kind] = make_block(self.mindspore, self.facts, kind)
        return self._blocks[kind], [self.parameters[name] for name in layer.names], layer.window

    def tables(self, slot: Slot) -> dict[int | None, tuple[Tensor, ...]]:
        return self._tables.make(slot.positions_RT, slot.segments_RT)

    def dropped(self, slot: Slot, index: int) -> list[Tensor]:
        """Return a layer's dropout masks."""
        if not self._dropout:
            return []
        rows = (self._seed, slot.counters, index)
        size = (slot.ids_RT.shape[1], self.facts.hidden, self._dropout)
        return [self.mindspore.Tensor(keeps(*rows, place, *size)) for place in (ATTENTION, MLP)]

    def embed(self, ids_N: Tensor) -> Tensor:
        return self._ends.embed(self.parameters[self.dialect.embedding], ids_N)


def _sums(*tensors: Tensor) -> Any:
    """Return the first half of the tensors, each plus one of the second half: a graph."""
    count = len(tensors) // 2
    out: Any = ()
    for index in range(count):
        out = (*out, tensors[index] + tensors[count + index])
    return out


def _total(totals: Sequence[Tensor]) -> np.float32:
    """Return the sum of the chunks' losses, in their order, in float32."""
    total = np.float32(0)
    for each in totals:
        total = total + each.asnumpy().reshape(())[()]
    return np.float32(total)

"""The weights of one part of a network in one common form, cut out of the tensors of whichever dialect.

The names and layouts are those of `runners/dialects.py`, a second writing of what the mapping tables say: a table's
error is not forgiven here. Values are float32 in the layout that a matrix product wants, (out, in). What is read is
what one part of one layer needs, and it stays as long as the caller keeps it: 4 bytes an element, with experts all of
them (three matrices of 768 x 2048 for each of 128 experts are 2.4 GB), and as much again while a fused tensor is cut
or single experts are gathered. What does not live here: arithmetic (`replay.py`), hypotheses (`causes.py`).

Shapes: Q query heads, K key heads, D a head's size, H hidden, F feed-forward, E experts, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import CoverageError
from ckptkit.formats.file_pool import FilePool
from ckptkit.verification.runners.dialects import Dialect, cut_gate_up, cut_qkv
from ckptkit.verification.runners.facts import Facts
from ckptkit.verification.runners.job import Floats, Stored

# Of the attention: attention_norm (H,), q (Q*D, H), k and v (K*D, H), o (H, Q*D), q_norm and k_norm (D,), and biases
# q_bias ... o_bias of a row each. Of a feed-forward: mlp_norm (H,), gate and up (F, H), down (H, F), their biases. Of
# experts: mlp_norm, router (E, H), experts_gate and experts_up (E, F, H), experts_down (E, H, F). Of the ends:
# embedding and head (V, H), norm (H,); own_head is a head that lies beside an embedding to which it is tied. A bias
# that no tensor holds has no entry.
Weights = dict[str, Floats]
Index = NDArray[np.intp]

QKV = ("q", "k", "v")
GATE_UP = ("gate", "up")
EXPERTS = ("experts_gate", "experts_up", "experts_down")


@dataclass(frozen=True, slots=True)
class SideWeights:
    """What one side's tensors hold, by part. `tensors` are by name; `pool` stays open as long as this is used."""

    tensors: Mapping[str, Stored]
    pool: FilePool
    facts: Facts
    dialect: Dialect

    def part(self, part: str, layer: int = 0) -> Weights:
        """Return the weights of a part: `embedding`, `attention`, `mlp`, `norm` or `logits`; `layer` counts from 0.

        The norms of a layer come with both of its parts, and with the final norm those of the last layer; embedding
        and head come together, for each may be the other. CoverageError when a tensor is not there.
        """
        if part == "attention":
            return self._norms(layer) | self._attention(layer)
        if part == "mlp":
            sparse = self.facts.sparse_layers[layer]
            return self._norms(layer) | (self._experts(layer) if sparse else self._feed_forward(layer))
        if part == "norm":
            return {"norm": self._read(self.dialect.norm), **self._norms(self.facts.layers - 1)}
        embedding = self._read(self.dialect.embedding)
        if not self.facts.tied:
            return {"embedding": embedding, "head": self._read(self.dialect.head)}
        own = {"own_head": self._read(self.dialect.head)} if self.dialect.head in self.tensors else {}
        return {"embedding": embedding, "head": embedding, **own}

    def field(self, part: str, layer: int, field: str) -> Floats | None:
        """Return one field of a part, or None; no more tensors are read than hold it."""
        if field in GATE_UP and self.facts.sparse_layers[layer]:
            return None
        if not all(name in self.tensors for name in self.names(field, layer)):
            return None
        if field in ("attention_norm", "mlp_norm", "o", "down", "router", "q_norm", "k_norm", "norm", "embedding"):
            return self._read(self.names(field, layer)[0])
        return self.part(part, layer).get(field)

    def names(self, field: str, layer: int = 0) -> tuple[str, ...]:
        """Return the tensors that hold a field of the common form, under the names that this side has for them."""
        dialect = self.dialect
        head = dialect.embedding if self.facts.tied else dialect.head
        whole = {"embedding": dialect.embedding, "norm": dialect.norm, "head": head, "own_head": dialect.head}
        if field in whole:
            return (whole[field],)
        prefix = dialect.prefix.format(layer)
        if field in EXPERTS:
            return tuple(prefix + name for name in _expert_tensors(dialect, self.facts, field))
        kind = "bias" if field.endswith("_bias") else "weight"
        return (f"{prefix}{_modules(dialect)[field.removesuffix('_bias')]}.{kind}",)

    def _read(self, name: str) -> Floats:
        if name not in self.tensors:
            raise CoverageError(f"`{name}` is not among the tensors of this side")
        return self.tensors[name].read(self.pool)

    def _one(self, field: str, layer: int) -> Floats:
        return self._read(self.names(field, layer)[0])

    def _norms(self, layer: int) -> Weights:
        return {field: self._one(field, layer) for field in ("attention_norm", "mlp_norm")}

    def _with_bias(self, fields: tuple[str, ...], layer: int) -> Weights:
        """Return modules that are tensors of their own, with those biases that are there."""
        biases = [f"{field}_bias" for field in fields if self.names(f"{field}_bias", layer)[0] in self.tensors]
        return {field: self._one(field, layer) for field in (*fields, *biases)}

    def _attention(self, layer: int) -> Weights:
        found = self._with_bias(("o",), layer)
        if self.facts.qk_norm:
            found |= {field: self._one(field, layer) for field in ("q_norm", "k_norm")}
        if len(self.dialect.qkv) == 1:
            return found | self._cut(QKV, qkv_rows(self.facts, self.dialect.qkv_order), layer)
        return found | self._with_bias(QKV, layer)

    def _feed_forward(self, layer: int) -> Weights:
        found = self._with_bias(("down",), layer)
        if len(self.dialect.gate_up) == 1:
            return found | self._cut(GATE_UP, gate_up_rows(self.facts.ffn, self.dialect.gate_up_order), layer)
        return found | self._with_bias(GATE_UP, layer)

    def _cut(self, fields: tuple[str, ...], rows: tuple[Index, ...], layer: int) -> Weights:
        """Return the parts of a fused module, and of its bias where it has one."""
        whole = self._with_bias(fields[:1], layer)
        cut: Weights = {}
        for name, values in whole.items():
            suffix = name.removeprefix(fields[0])
            cut |= {field + suffix: values[index] for field, index in zip(fields, rows, strict=True)}
        return cut

    def _experts(self, layer: int) -> Weights:
        dialect, facts = self.dialect, self.facts
        found = {"router": self._one("router", layer)}
        if dialect.experts == "each":
            return found | {field: self._gathered(field, layer) for field in EXPERTS}
        into, out = self._one("experts_gate", layer), self._one("experts_down", layer)
        if dialect.experts == "stacked":
            gate_EFH, up_EFH = into[:, : facts.moe_ffn], into[:, facts.moe_ffn :]
        else:
            shape = (facts.experts, facts.hidden, facts.moe_ffn)
            gate_EFH, up_EFH = (part.reshape(shape).transpose(0, 2, 1) for part in cut_gate_up(into, "halves"))
            out = out.reshape(facts.experts, facts.moe_ffn, facts.hidden).transpose(0, 2, 1)
        return found | {"experts_gate": gate_EFH, "experts_up": up_EFH, "experts_down": out}

    def _gathered(self, field: str, layer: int) -> Floats:
        """Return a matrix of every expert, (E, ...), filled in one by one so that no two copies of all are made."""
        names = self.names(field, layer)
        first = self._read(names[0])
        whole = np.empty((len(names), *first.shape), np.float32)
        for expert, name in enumerate(names):
            whole[expert] = self._read(name)
        return whole


def qkv_rows(facts: Facts, order: str) -> tuple[Index, Index, Index]:
    """Return which rows of a fused tensor are q, k and v, in the order that the network takes them."""
    count = (facts.heads + 2 * facts.kv_heads) * facts.head_dim
    rows: Any = np.arange(count)[None]
    q, k, v = cut_qkv(rows, order, facts.heads, facts.kv_heads, facts.head_dim)
    return q.reshape(-1), k.reshape(-1), v.reshape(-1)


def gate_up_rows(ffn: int, order: str) -> tuple[Index, Index]:
    """Return which rows of a fused tensor are gate and up."""
    gate, up = cut_gate_up(np.arange(2 * ffn)[None], order)
    return gate.reshape(-1), up.reshape(-1)


def _modules(dialect: Dialect) -> dict[str, str]:
    """Return the module of each field of a layer, without the layer's prefix; fused fields share one."""
    fields = {
        "attention_norm": dialect.attention_norm, "mlp_norm": dialect.mlp_norm, "o": dialect.attention_out,
        "q_norm": dialect.q_norm, "k_norm": dialect.k_norm, "down": dialect.down, "router": dialect.router,
    }  # fmt: skip
    for parts, modules in ((QKV, dialect.qkv), (GATE_UP, dialect.gate_up)):
        every = modules * len(parts) if len(modules) == 1 else modules
        fields |= dict(zip(parts, every, strict=True))
    return fields


def _expert_tensors(dialect: Dialect, facts: Facts, field: str) -> list[str]:
    if dialect.experts == "each":
        name = dialect.expert_names[EXPERTS.index(field)]
        return [f"{name.format(expert)}.weight" for expert in range(facts.experts)]
    return [dialect.expert_names[1 if field == "experts_down" else 0]]

"""Tiny config.json contents for any family, made from its catalogue's dims: no family is known by name here.

Sizes are small, pairwise different where nothing ties them, and uneven: 4 query heads over 2 KV heads, a head size
that is not hidden / heads, 12 experts (so that text order would put 10 before 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ckptkit.mapping.expr import Leaf, evaluate
from ckptkit.mapping.op import Array
from ckptkit.mapping.rows import Family
from ckptkit.mapping.rules import RuleSet
from ckptkit.types import Region

SIZES = {
    "vocab": 14, "hidden": 10, "ffn": 9, "moe_ffn": 3, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 6,
    "experts": 12, "sparse_step": 2,
}  # fmt: skip
OTHER_SIZE = 5


def tiny_config(family: Family, **changed: Any) -> dict[str, Any]:
    """Return a config.json for `family`; `changed` are sizes by dim name, or `flags` for all flags at once."""
    catalogue = family.catalogue
    sizes = {**SIZES, **changed}
    config: dict[str, Any] = {
        dim.key: sizes.get(name, OTHER_SIZE) for name, dim in catalogue.dims.items() if dim.key is not None
    }
    flags = {flag.key: changed.get("flags", False) for flag in catalogue.flags.values() if flag.key is not None}
    lists = {s.excluding: [1] for s in catalogue.sets.values() if s.excluding is not None}
    return config | flags | lists | {"model_type": family.model_types[0]}


def tiny_configs(family: Family) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield labelled configs: grouped, one and all KV heads, with every flag set, every layer of a kind."""
    yield "grouped", tiny_config(family)
    yield "one KV head", tiny_config(family, kv_heads=1)
    yield "as many KV heads as heads", tiny_config(family, kv_heads=4, flags=True)
    yield "every flag", tiny_config(family, flags=True, layers=2, sparse_step=1)
    yield "three groups of three", tiny_config(family, heads=9, kv_heads=3, head_dim=2, sparse_step=1)


def numbered_tensors(rules: RuleSet) -> dict[str, Array]:
    """Return the HF tensors of a rule set, each element of all of them with a number of its own."""
    leaves = {leaf.name: leaf for rule in rules.rules for leaf in rule.sources}
    arrays, first = {}, 0
    for leaf in leaves.values():
        size = int(np.prod(leaf.shape))
        arrays[leaf.name] = np.arange(first, first + size, dtype="uint32").reshape(leaf.shape)
        first += size
    return arrays


def forward(rules: RuleSet, tensors: dict[str, Array]) -> dict[str, Array]:
    """Return the dialect's tensors, made of HF's."""

    def read(leaf: Leaf, region: Region) -> Array:
        assert tensors[leaf.name].shape == leaf.shape
        return tensors[leaf.name][region.slices()]

    return {r.target: evaluate(r.expr, Region.whole(r.expr.shape), read) for r in rules.rules}


def backward(rules: RuleSet, tensors: dict[str, Array]) -> dict[str, Array]:
    """Return HF's tensors, made of the dialect's."""

    def read(leaf: Leaf, region: Region) -> Array:
        assert tensors[leaf.name].shape == leaf.shape
        return tensors[leaf.name][region.slices()]

    return {
        leaf.name: evaluate(back, Region.whole(leaf.shape), read)
        for rule in rules.rules
        for leaf, back in zip(rule.sources, rule.inverse, strict=True)
    }

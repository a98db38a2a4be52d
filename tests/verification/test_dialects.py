"""The builtin network's own list of names and layouts, against the mapping tables that it must not read.

What holds: for every table with a network here, the same names with the same shapes; and what the tables' ops put
together, the network's cuts take apart, told by numbers. No framework runs; the forward pass is in test_decoder.py.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from runner_jobs import Config, config_of

from ckptkit.errors import UsageError
from ckptkit.mapping.expr import Leaf, evaluate
from ckptkit.mapping.rules import resolve
from ckptkit.mapping.tables import load_tables
from ckptkit.types import Region
from ckptkit.verification.runners.attention import causal_mask
from ckptkit.verification.runners.builtin import build
from ckptkit.verification.runners.dialects import DIALECTS, cut_gate_up, cut_qkv, find_dialect, parameter_shapes
from ckptkit.verification.runners.facts import read_facts
from ckptkit.verification.runners.job import Job

TABLES = load_tables()
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
SPOKES = [
    (family, dialect, variant)
    for family in FAMILIES
    for dialect in dict.fromkeys(("hf", *TABLES.dialects(family)))
    for variant in dict.fromkeys(("", *TABLES.variants(family, dialect)))
]


def configs(family: str) -> list[Config]:
    """Return the plain model, and one with all biases, one key head, dense layers, heads of another size."""
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    if family.startswith("qwen3"):
        biases = {"attention_bias": True}
    dense = {"mlp_only_layers": [1], "decoder_sparse_step": 1} if family == "qwen3_moe" else {}
    return [
        config_of(family, head_dim=12, **dense),
        config_of(family, num_attention_heads=6, num_key_value_heads=3, head_dim=10, **biases, **dense),
        config_of(family, num_key_value_heads=1, head_dim=6, tie_word_embeddings=True, **biases),
    ]


def test_every_table_of_these_families_has_a_dialect_here_and_the_other_way_round() -> None:
    assert {(dialect, variant) for _, dialect, variant in SPOKES} == set(DIALECTS)


@pytest.mark.parametrize(("family", "name", "variant"), SPOKES)
def test_names_and_shapes_are_those_of_the_table(family: str, name: str, variant: str) -> None:
    for config in configs(family):
        facts = read_facts(config)
        dialect = find_dialect(name, variant, facts)
        rules = resolve(TABLES.family(family), config, name, variant)
        expected = {rule.target: rule.expr.shape for rule in rules.rules}
        if facts.tied:
            expected.pop(dialect.head, None)
        assert parameter_shapes(dialect, facts) == expected


def fused_and_parts(config: Config, name: str, variant: str, part: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the fused tensor that has `part` in its name, made by the table, and those that it is made of.

    Every element has a number of its own. Shapes (rows, hidden).
    """
    rules = resolve(TABLES.family(config["model_type"]), config, name, variant)
    rule = next(rule for rule in rules.rules if f"{part}.weight" in rule.target)
    numbers, first = {}, 0
    for leaf in rule.sources:
        size = int(np.prod(leaf.shape))
        numbers[leaf.name] = np.arange(first, first + size, dtype=np.uint32).reshape(leaf.shape)
        first += size

    def read(leaf: Leaf, region: Region) -> Any:
        return numbers[leaf.name][region.slices()]

    return evaluate(rule.expr, Region.whole(rule.expr.shape), read), list(numbers.values())


FUSED = [spoke for spoke in SPOKES if spoke[1] != "hf" and spoke[1:] != ("mindformers-legacy", "")]


@pytest.mark.parametrize(("family", "name", "variant"), FUSED)
def test_a_cut_takes_apart_what_the_table_puts_together(family: str, name: str, variant: str) -> None:
    """What a projection gives for the unit vectors is its weight, transposed."""
    for config in configs(family):
        facts = read_facts(config)
        dialect = find_dialect(name, variant, facts)
        fused, parts = fused_and_parts(config, name, variant, dialect.qkv[0])
        cut = cut_qkv(fused.T, dialect.qkv_order, facts.heads, facts.kv_heads, facts.head_dim)
        assert all(np.array_equal(c.reshape(len(c), -1), part.T) for c, part in zip(cut, parts, strict=True))
        if all(facts.sparse_layers):
            continue
        fused, parts = fused_and_parts(config, name, variant, dialect.gate_up[0])
        cut = cut_gate_up(fused.T, dialect.gate_up_order)
        assert all(np.array_equal(c, part.T) for c, part in zip(cut, parts, strict=True))


@pytest.mark.parametrize(
    ("variant", "read_as", "part"), [("", "contiguous", "linear_qkv"), ("contiguous", "", "mlp.linear_fc1")]
)
def test_a_cut_of_another_order_does_not(variant: str, read_as: str, part: str) -> None:
    config = configs("qwen3")[0]
    facts = read_facts(config)
    dialect = find_dialect("mindformers-mcore", read_as, facts)
    fused, parts = fused_and_parts(config, "mindformers-mcore", variant, part)
    sizes = facts.heads, facts.kv_heads, facts.head_dim
    is_qkv = part == "linear_qkv"
    cut = cut_qkv(fused.T, dialect.qkv_order, *sizes) if is_qkv else cut_gate_up(fused.T, dialect.gate_up_order)
    assert not any(np.array_equal(c.reshape(len(c), -1), part.T) for c, part in zip(cut, parts, strict=True))


def test_a_token_sees_itself_what_came_before_and_no_more_than_its_window() -> None:
    seen = causal_mask(5, None) == 0
    assert np.array_equal(seen, np.tri(5, dtype=bool))
    seen = causal_mask(5, 2) == 0
    assert np.array_equal(seen, np.tri(5, dtype=bool) & ~np.tri(5, k=-2, dtype=bool))
    assert np.array_equal(causal_mask(5, 5), causal_mask(5, None))
    assert causal_mask(5, 2)[4, 0] == np.finfo(np.float32).min


def job(family: str = "llama", dialect: str = "hf", variant: str = "", device: str = "cpu", **config: Any) -> Job:
    return Job(config_of(family, **config), dialect, variant, device, (), ())


REFUSED = {
    "no layout `hf`, variant `stackd`": job(variant="stackd"),
    "no layout `megatron`": job(dialect="megatron"),
    "`mindformers-legacy` has no names for a qwen3": job("qwen3", "mindformers-legacy"),
    "`--device tpu` is no device": job(device="tpu"),
    "`--device cpu:1` is no device": job(device="cpu:1"),
    "`--device cuda:` is no device": job(device="cuda:"),
    "`hidden_act`": job(hidden_act="gelu"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_job_that_cannot_be_run_is_refused_before_a_framework_is_imported(words: str) -> None:
    before = set(sys.modules)
    with pytest.raises(UsageError, match=words):
        build(REFUSED[words])
    assert "mindspore" not in sys.modules.keys() - before

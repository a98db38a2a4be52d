"""Fused tensors against plain loops over heads, rows and experts, written from the layouts' descriptions.

A table may be invertible and still wrong; these tests know the order of the rows from another source: MindFormers'
documentation of its layouts (per KV group [its q heads, its k head, its v head]; gate and up rows by turns; experts
(E*H, 2F) with a gate half and an up half).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_configs import forward, numbered_tensors, tiny_config

from ckptkit.mapping.op import Array
from ckptkit.mapping.rules import resolve
from ckptkit.mapping.tables import load_tables

TABLES = load_tables()
HEADS = [(4, 2, 6), (4, 1, 6), (4, 4, 6), (9, 3, 2)]


def tensors(family: str, dialect: str, variant: str, **changed: Any) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return HF's tensors and the dialect's, of a tiny model."""
    entry = TABLES.family(family)
    rules = resolve(entry, tiny_config(entry, **changed), dialect, variant)
    hub = numbered_tensors(rules)
    return hub, forward(rules, hub)


def grouped_rows(q: Array, k: Array, v: Array, heads: int, kv_heads: int, head_dim: int) -> list[Array]:
    """Return the rows of a grouped QKV, one by one."""
    rows = []
    per_group = heads // kv_heads
    for group in range(kv_heads):
        for head in range(group * per_group, (group + 1) * per_group):
            rows += [q[head * head_dim + i] for i in range(head_dim)]
        rows += [k[group * head_dim + i] for i in range(head_dim)]
        rows += [v[group * head_dim + i] for i in range(head_dim)]
    return rows


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize(
    ("family", "dialect", "variant", "fused"),
    [
        ("llama", "mindformers-legacy", "qkv_concat", "model.layers.{}.attention.w_qkv."),
        ("mistral", "mindformers-legacy", "qkv_concat", "model.layers.{}.attention.w_qkv."),
        ("qwen2", "mindformers-legacy", "qkv_concat", "model.layers.{}.attention.w_qkv."),
        ("qwen3", "mindformers-mcore", "", "decoder.layers.{}.self_attention.linear_qkv."),
        ("qwen3", "mindformers-mcore", "contiguous-mlp", "decoder.layers.{}.self_attention.linear_qkv."),
        ("qwen3_moe", "mindformers-mcore", "", "decoder.layers.{}.self_attention.linear_qkv."),
    ],
)
def test_qkv_and_its_bias_are_grouped_by_kv_head(
    family: str, dialect: str, variant: str, fused: str, heads: int, kv_heads: int, head_dim: int
) -> None:
    hub, made = tensors(family, dialect, variant, heads=heads, kv_heads=kv_heads, head_dim=head_dim, flags=True)
    kinds = 0
    for layer in range(3):
        for kind in ("weight", "bias"):
            parts = [hub.get(f"model.layers.{layer}.self_attn.{p}_proj.{kind}") for p in "qkv"]
            name = fused.format(layer) + kind
            assert (name in made) == (parts[0] is not None)
            if parts[0] is not None:
                np.testing.assert_array_equal(made[name], np.stack(grouped_rows(*parts, heads, kv_heads, head_dim)))  # type: ignore[arg-type]
                kinds += 1
    assert kinds == (3 if family == "mistral" else 6)


@pytest.mark.parametrize(
    ("family", "dialect", "variant", "fused"),
    [
        ("llama", "mindformers-legacy", "qkv_concat-1.4", "model.layers.{}.attention.w_qkv."),
        ("qwen2", "mindformers-legacy", "qkv_concat-1.4", "model.layers.{}.attention.w_qkv."),
        ("qwen3", "mindformers-mcore", "contiguous", "decoder.layers.{}.self_attention.linear_qkv."),
        ("qwen3", "mindformers-mcore", "contiguous-qkv", "decoder.layers.{}.self_attention.linear_qkv."),
        ("qwen3_moe", "mindformers-mcore", "contiguous", "decoder.layers.{}.self_attention.linear_qkv."),
    ],
)
def test_contiguous_qkv_is_q_then_k_then_v(family: str, dialect: str, variant: str, fused: str) -> None:
    hub, made = tensors(family, dialect, variant, flags=True)
    for layer in range(3):
        for kind in ("weight", "bias"):
            rows = [row for p in "qkv" for row in hub[f"model.layers.{layer}.self_attn.{p}_proj.{kind}"]]
            np.testing.assert_array_equal(made[fused.format(layer) + kind], np.stack(rows))


@pytest.mark.parametrize(
    ("family", "dialect", "variant", "fused", "by_turns"),
    [
        ("llama", "mindformers-legacy", "qkv_concat", "model.layers.{}.feed_forward.w_gate_hidden.weight", True),
        ("llama", "mindformers-legacy", "qkv_concat-1.4", "model.layers.{}.feed_forward.w_gate_hidden.weight", False),
        ("qwen3", "mindformers-mcore", "", "decoder.layers.{}.mlp.linear_fc1.weight", True),
        ("qwen3", "mindformers-mcore", "contiguous-qkv", "decoder.layers.{}.mlp.linear_fc1.weight", True),
        ("qwen3", "mindformers-mcore", "contiguous-mlp", "decoder.layers.{}.mlp.linear_fc1.weight", False),
        ("qwen3", "mindformers-mcore", "contiguous", "decoder.layers.{}.mlp.linear_fc1.weight", False),
    ],
)
def test_gate_and_up_rows_go_by_turns_or_one_after_the_other(
    family: str, dialect: str, variant: str, fused: str, by_turns: bool
) -> None:
    hub, made = tensors(family, dialect, variant)
    for layer in range(3):
        gate, up = (hub[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
        pairs = zip(gate, up, strict=True)
        rows = [row for pair in pairs for row in pair] if by_turns else [*gate, *up]
        np.testing.assert_array_equal(made[fused.format(layer)], np.stack(rows))


@pytest.mark.parametrize("variant", ["", "contiguous"])
def test_experts_lie_one_below_the_other_transposed_gate_half_then_up_half(variant: str) -> None:
    hub, made = tensors("qwen3_moe", "mindformers-mcore", variant)
    experts, hidden, ffn = 12, 10, 3
    sparse = [layer for layer in range(3) if f"model.layers.{layer}.mlp.gate.weight" in hub]
    assert sparse == []  # of 3 layers only number 1 is a multiple of the step, and mlp_only_layers holds it
    hub, made = tensors("qwen3_moe", "mindformers-mcore", variant, sparse_step=1)
    for layer in (0, 2):
        weight1 = made[f"decoder.layers.{layer}.mlp.experts.weight1"]
        weight2 = made[f"decoder.layers.{layer}.mlp.experts.weight2"]
        assert weight1.shape == (experts * hidden, 2 * ffn)
        assert weight2.shape == (experts * ffn, hidden)
        for e in range(experts):
            prefix = f"model.layers.{layer}.mlp.experts.{e}."
            gate, up = hub[prefix + "gate_proj.weight"], hub[prefix + "up_proj.weight"]
            down = hub[prefix + "down_proj.weight"]
            for h in range(hidden):
                for f in range(ffn):
                    assert weight1[e * hidden + h, f] == gate[f, h]
                    assert weight1[e * hidden + h, ffn + f] == up[f, h]
                    assert weight2[e * ffn + f, h] == down[h, f]
    assert "decoder.layers.1.mlp.linear_fc1.weight" in made
    assert "decoder.layers.1.mlp.experts.weight1" not in made


def test_stacked_experts_are_as_transformers_5_saves_them() -> None:
    hub, made = tensors("qwen3_moe", "hf", "stacked", sparse_step=1)
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        both = [
            np.concatenate([hub[f"{prefix}{e}.gate_proj.weight"], hub[f"{prefix}{e}.up_proj.weight"]])
            for e in range(12)
        ]
        down = [hub[f"{prefix}{e}.down_proj.weight"] for e in range(12)]
        np.testing.assert_array_equal(made[prefix + "gate_up_proj"], np.stack(both))
        np.testing.assert_array_equal(made[prefix + "down_proj"], np.stack(down))
    assert made["model.layers.1.mlp.gate_proj.weight"].shape == (9, 10)


def test_the_oracle_tells_grouped_from_contiguous() -> None:
    """The broken control: with several KV heads the two orders differ, so a mix-up would not pass."""
    _, grouped = tensors("llama", "mindformers-legacy", "qkv_concat")
    _, plain = tensors("llama", "mindformers-legacy", "qkv_concat-1.4")
    for name in ("attention.w_qkv.weight", "feed_forward.w_gate_hidden.weight"):
        assert not np.array_equal(grouped[f"model.layers.0.{name}"], plain[f"model.layers.0.{name}"])

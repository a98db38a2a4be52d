"""How a checkpoint's parameters are called and how fused ones are laid out, written down a second time.

The mapping tables say the same as data; this network must not read them, or it would forgive their errors. Sources:
the modules of transformers 4.57 and, for `stacked`, 5; MindFormers' legacy `LlamaForCausalLM` (`w_qkv` and
`w_gate_hidden` with `qkv_concat`) and its mcore `GPTModel`. The functions that cut what a fused projection gives take
numpy arrays and MindSpore tensors alike. What does not live here: arithmetic (`decoder.py` and what it uses).

Shapes: T tokens, Q query heads, K key heads, G = Q / K, D a head's size, H hidden, F feed-forward, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.verification.runners.facts import Facts

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Names of parameters: whole ones, then of one layer, without their prefix. A module's are NAME.weight, NAME.bias.

    `qkv` are three modules or one: `groups` has for each key head its query heads, the key, the value; `parts` all
    queries, then all keys, then all values. `gate_up` are two modules or one: with `turns`, a row of gate and a row of
    up by turns; with `halves`, all of gate first. `experts` is `each` (modules of every expert), `stacked` (E, 2F, H)
    and (E, H, F), or `columns` (E*H, 2F) and (E*F, H), both gate before up.
    """

    embedding: str
    norm: str
    head: str
    prefix: str
    attention_norm: str
    mlp_norm: str
    qkv: tuple[str, ...]
    qkv_order: str = ""
    attention_out: str
    q_norm: str = ""
    k_norm: str = ""
    gate_up: tuple[str, ...]
    gate_up_order: str = ""
    down: str
    router: str = ""
    experts: str = ""
    expert_names: tuple[str, ...] = ()


_HF = Dialect(
    embedding="model.embed_tokens.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
    prefix="model.layers.{}.",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.o_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    router="mlp.gate",
    experts="each",
    expert_names=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
)
_LEGACY = Dialect(
    embedding="model.tok_embeddings.embedding_weight",
    norm="model.norm_out.weight",
    head="lm_head.weight",
    prefix="model.layers.{}.",
    attention_norm="attention_norm",
    mlp_norm="ffn_norm",
    qkv=("attention.wq", "attention.wk", "attention.wv"),
    attention_out="attention.wo",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)
_LEGACY_FUSED = replace(_LEGACY, qkv=("attention.w_qkv",), gate_up=("feed_forward.w_gate_hidden",))
_MCORE = Dialect(
    embedding="embedding.word_embeddings.weight",
    norm="decoder.final_layernorm.weight",
    head="output_layer.weight",
    prefix="decoder.layers.{}.",
    attention_norm="input_layernorm",
    mlp_norm="pre_mlp_layernorm",
    qkv=("self_attention.linear_qkv",),
    qkv_order="groups",
    attention_out="self_attention.linear_proj",
    q_norm="self_attention.q_layernorm",
    k_norm="self_attention.k_layernorm",
    gate_up=("mlp.linear_fc1",),
    gate_up_order="turns",
    down="mlp.linear_fc2",
    router="mlp.router",
    experts="columns",
    expert_names=("mlp.experts.weight1", "mlp.experts.weight2"),
)
DIALECTS: dict[tuple[str, str], Dialect] = {
    ("hf", ""): _HF,
    ("hf", "stacked"): replace(
        _HF, experts="stacked", expert_names=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    ),
    ("mindformers-legacy", ""): _LEGACY,
    ("mindformers-legacy", "qkv_concat"): replace(_LEGACY_FUSED, qkv_order="groups", gate_up_order="turns"),
    ("mindformers-legacy", "qkv_concat-1.4"): replace(_LEGACY_FUSED, qkv_order="parts", gate_up_order="halves"),
    ("mindformers-mcore", ""): _MCORE,
    ("mindformers-mcore", "contiguous-qkv"): replace(_MCORE, qkv_order="parts"),
    ("mindformers-mcore", "contiguous-mlp"): replace(_MCORE, gate_up_order="halves"),
    ("mindformers-mcore", "contiguous"): replace(_MCORE, qkv_order="parts", gate_up_order="halves"),
}


def find_dialect(name: str, variant: str, facts: Facts) -> Dialect:
    """Return the dialect; UsageError for one that is not here, or that has no names for what the network has."""
    dialect = DIALECTS.get((name, variant))
    if dialect is None:
        raise UsageError(
            f"the builtin network knows no layout `{name}`, variant `{variant}`",
            hint="it knows " + ", ".join(f"{a}:{b}" if b else a for a, b in DIALECTS),
        )
    if (facts.qk_norm and not dialect.q_norm) or (any(facts.sparse_layers) and not dialect.experts):
        raise UsageError(
            f"`{name}` has no names for a {facts.model_type} network", why="MindFormers' net of that kind is Llama's"
        )
    return dialect


def parameter_shapes(dialect: Dialect, facts: Facts, layers: Iterable[int] | None = None) -> dict[str, Shape]:
    """Return every parameter of a network that has `layers` (None: all), with its shape; a tied head has none."""
    shapes: dict[str, Shape] = {dialect.embedding: (facts.vocab, facts.hidden)}
    for layer in range(facts.layers) if layers is None else layers:
        prefix = dialect.prefix.format(layer)
        shapes |= {prefix + name: shape for name, shape in _layer(dialect, facts, layer)}
    shapes[dialect.norm] = (facts.hidden,)
    if not facts.tied:
        shapes[dialect.head] = (facts.vocab, facts.hidden)
    return shapes


def _layer(dialect: Dialect, facts: Facts, layer: int) -> Iterator[tuple[str, Shape]]:
    rows_q, rows_kv = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    yield f"{dialect.attention_norm}.weight", (facts.hidden,)
    rows = (rows_q, rows_kv, rows_kv) if len(dialect.qkv) == 3 else (rows_q + 2 * rows_kv,)
    for module, count in zip(dialect.qkv, rows, strict=True):
        yield from _module(module, (count, facts.hidden), bias=facts.qkv_bias)
    yield from _module(dialect.attention_out, (facts.hidden, rows_q), bias=facts.o_bias)
    if facts.qk_norm:
        yield f"{dialect.q_norm}.weight", (facts.head_dim,)
        yield f"{dialect.k_norm}.weight", (facts.head_dim,)
    yield f"{dialect.mlp_norm}.weight", (facts.hidden,)
    if facts.sparse_layers[layer]:
        yield f"{dialect.router}.weight", (facts.experts, facts.hidden)
        yield from _experts(dialect, facts)
        return
    count = 2 * facts.ffn // len(dialect.gate_up)
    for module in dialect.gate_up:
        yield from _module(module, (count, facts.hidden), bias=facts.mlp_bias)
    yield from _module(dialect.down, (facts.hidden, facts.ffn), bias=facts.mlp_bias)


def _module(name: str, shape: Shape, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def _experts(dialect: Dialect, facts: Facts) -> Iterator[tuple[str, Shape]]:
    experts, wide, hidden = facts.experts, facts.moe_ffn, facts.hidden
    if dialect.experts == "each":
        for expert in range(experts):
            for name, shape in zip(dialect.expert_names, [(wide, hidden), (wide, hidden), (hidden, wide)], strict=True):
                yield f"{name.format(expert)}.weight", shape
        return
    stacked = dialect.experts == "stacked"
    into = (experts, 2 * wide, hidden) if stacked else (experts * hidden, 2 * wide)
    out = (experts, hidden, wide) if stacked else (experts * wide, hidden)
    yield dialect.expert_names[0], into
    yield dialect.expert_names[1], out


def cut_qkv(fused_TR: Any, order: str, heads: int, kv_heads: int, head_dim: int) -> tuple[Any, Any, Any]:
    """Cut what a fused projection gives, (T, (Q+2K)*D), in queries (T, Q, D), keys and values (T, K, D)."""
    tokens = fused_TR.shape[0]
    if order == "groups":
        group = heads // kv_heads
        grouped = fused_TR.reshape(tokens, kv_heads, group + 2, head_dim)
        q_TKGD, k_TKD, v_TKD = grouped[:, :, :group], grouped[:, :, group], grouped[:, :, group + 1]
        return q_TKGD.reshape(tokens, heads, head_dim), k_TKD, v_TKD
    parts = fused_TR.reshape(tokens, heads + 2 * kv_heads, head_dim)
    return parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]


def cut_gate_up(fused_TR: Any, order: str) -> tuple[Any, Any]:
    """Cut what a fused projection gives, (T, 2F), in gate and up, (T, F) both."""
    tokens, rows = fused_TR.shape
    if order == "turns":
        pairs = fused_TR.reshape(tokens, rows // 2, 2)
        return pairs[:, :, 0], pairs[:, :, 1]
    return fused_TR[:, : rows // 2], fused_TR[:, rows // 2 :]

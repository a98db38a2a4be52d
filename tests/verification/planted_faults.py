"""Faults made in numpy in the tensors of a dialect, or in what config.json says, and the cause that each must have.

What does not live here: the tests (`test_causes.py`), the models (`tap_models.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tap_models import NEAR, SPREAD, Arrays, Planted

LEGACY, MCORE = "mindformers-legacy", "mindformers-mcore"
HEADS, KV = 8, 4
Plant = Callable[[Arrays], None]
Where = tuple[str, int]
ATTENTION, MLP = ("attention", 1), ("mlp", 1)


def legacy(name: str, layer: int = 1) -> str:
    return f"model.layers.{layer}.{name}"


def mcore(name: str, layer: int = 1) -> str:
    return f"decoder.layers.{layer}.{name}"


def both(*plants: Plant) -> Plant:
    def plant(tensors: Arrays) -> None:
        for one in plants:
            one(tensors)

    return plant


def rows(name: str, index: Callable[[int], np.ndarray]) -> Plant:
    """Put the rows of a tensor in another order; `index` makes it of their number."""

    def plant(tensors: Arrays) -> None:
        tensors[name] = tensors[name][index(len(tensors[name]))]

    return plant


def interleaved(size: int) -> Callable[[int], np.ndarray]:
    """Return what brings halves to interleaved pairs in each head."""
    return lambda count: np.arange(count).reshape(-1, 2, size // 2).transpose(0, 2, 1).reshape(-1)


def halved(size: int) -> Callable[[int], np.ndarray]:
    return lambda count: np.arange(count).reshape(-1, size // 2, 2).transpose(0, 2, 1).reshape(-1)


def swapped(one: str, other: str) -> Plant:
    def plant(tensors: Arrays) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return plant


def transposed(name: str) -> Plant:
    def plant(tensors: Arrays) -> None:
        tensors[name] = tensors[name].T

    return plant


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Plant:
    def plant(tensors: Arrays) -> None:
        tensors[name] = change(tensors[name]).astype(np.float32)

    return plant


def groups_to_parts(size: int, shards: int = 1) -> Callable[[int], np.ndarray]:
    """Return what brings a grouped QKV, of which each key head has its queries, to q, k, v within each shard."""

    def index(count: int) -> np.ndarray:
        grouped = np.arange(count).reshape(shards, KV // shards, HEADS // KV + 2, size)
        parts = [grouped[:, :, : HEADS // KV], grouped[:, :, HEADS // KV], grouped[:, :, HEADS // KV + 1]]
        return np.concatenate([part.reshape(shards, -1) for part in parts], axis=1).reshape(-1)

    return index


def turns(count: int) -> np.ndarray:
    """Return what brings halves to turns."""
    return np.arange(count).reshape(2, -1).T.reshape(-1)


def shifted(steps: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: np.roll(values, steps, axis=0)


def cut_wrongly(tensors: Arrays) -> None:
    """Cut q, k and v out of a grouped tensor as if it were plain."""
    names = [legacy(f"self_attn.{part}_proj.weight") for part in "qkv"]
    size = len(tensors[names[0]]) // HEADS
    whole = np.concatenate([tensors[name] for name in names])
    fused = np.empty_like(whole)
    fused[groups_to_parts(size)(len(whole))] = whole
    ends = [HEADS * size, (HEADS + KV) * size]
    tensors.update(zip(names, np.split(fused, ends), strict=True))


def biased(tensors: Arrays) -> None:
    """Give layer 1 biases; those of the other layers are zero."""
    rng = np.random.default_rng(3)
    for layer in range(3):
        for part in "qkvo":
            rows_of = len(tensors[legacy(f"self_attn.{part}_proj.weight", layer)])
            values = rng.standard_normal(rows_of, np.float32) * np.float32(layer == 1)
            tensors[legacy(f"self_attn.{part}_proj.bias", layer)] = values


def layers_swapped(one: str, other: str) -> Plant:
    def plant(tensors: Arrays) -> None:
        for name in [name for name in tensors if name.startswith(one)]:
            swapped(name, other + name.removeprefix(one))(tensors)

    return plant


def experts(name: str, order: list[int]) -> Plant:
    """Put the experts of a tensor in columns in another order."""
    return changed(name, lambda v: v.reshape(len(order), -1, v.shape[1])[order].reshape(v.shape))


def columns_swapped(values: np.ndarray) -> np.ndarray:
    return np.concatenate(np.split(values, 2, axis=1)[::-1], axis=1)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, where it is, its name, B's tensors. Without `alone` it is found only with A's weights at hand."""

    planted: Planted
    where: Where
    name: str
    tensors: tuple[str, ...] = ()
    hint: str = ""
    item: Any = NEAR
    alone: bool = True
    also: tuple[Where, ...] = ()  # other parts that the same fault reaches


ORDER = [3, 0, 2, 1, 7, 4, 6, 5]
W_QKV, W_GATE = legacy("attention.w_qkv.weight"), legacy("feed_forward.w_gate_hidden.weight")
QKV_MC, FC1 = mcore("self_attention.linear_qkv.weight"), mcore("mlp.linear_fc1.weight")
WQ, WK, WV, WO = (legacy(f"attention.{name}.weight") for name in ("wq", "wk", "wv", "wo"))
BQ, BK, BV = (legacy(f"attention.{name}.bias") for name in ("wq", "wk", "wv"))
W1, W2, W3 = (legacy(f"feed_forward.{name}.weight") for name in ("w1", "w2", "w3"))
EVERY = tuple((part, layer) for layer in range(3) for part in ("attention", "mlp"))
EACH_ATTENTION = tuple(place for place in EVERY if place[0] == "attention")
ENDS = (("embedding", 0), ("norm", 0), ("logits", 0))


def llama(plant: Plant, variant: str = "", model: str = "llama") -> Planted:
    return Planted(model, LEGACY, variant, plant)


def qwen3(plant: Plant | None = None, variant: str = "", model: str = "qwen3", **config: Any) -> Planted:
    return Planted(model, MCORE, variant, plant, config)


QKV_ORDER, GATE_ORDER = "order of the fused QKV", "order of the fused gate and up"
FAULTS: dict[str, Fault] = {
    # rotary permutation
    "q and k in pairs": Fault(
        llama(both(rows(WQ, interleaved(4)), rows(WK, interleaved(4)))), ATTENTION, "rotary permutation", (WQ, WK)
    ),
    "k alone in pairs": Fault(llama(rows(WK, interleaved(4))), ATTENTION, "rotary permutation", (WK,)),
    "q halved twice": Fault(
        Planted("qwen3", "hf", "", rows(legacy("self_attn.q_proj.weight"), halved(12))), ATTENTION,
        "rotary permutation", (legacy("self_attn.q_proj.weight"),),
    ),
    "q and k in pairs, biases too": Fault(
        llama(both(*(rows(name, interleaved(4)) for name in (WQ, WK, BQ, BK))), model="qwen2"), ATTENTION,
        "rotary permutation", (WQ, WK, BQ, BK),
    ),
    "biases alone in pairs": Fault(
        llama(both(rows(BQ, interleaved(4)), rows(BK, interleaved(4))), model="qwen2"), ATTENTION,
        "bias order", (BQ, BK),
    ),
    # fused orders
    "plain for grouped": Fault(
        llama(rows(W_QKV, groups_to_parts(4)), "qkv_concat"), ATTENTION, QKV_ORDER, (W_QKV,), "qkv_concat-1.4"
    ),
    "plain for grouped, biases too": Fault(
        llama(both(rows(W_QKV, groups_to_parts(4)), rows(legacy("attention.w_qkv.bias"), groups_to_parts(4))),
              "qkv_concat", "qwen2"),
        ATTENTION, QKV_ORDER, (W_QKV, legacy("attention.w_qkv.bias")), "qkv_concat-1.4",
    ),
    "a plain bias beside a grouped weight": Fault(
        llama(rows(legacy("attention.w_qkv.bias"), groups_to_parts(4)), "qkv_concat", "qwen2"), ATTENTION,
        "bias order", (legacy("attention.w_qkv.bias"),),
    ),
    "plain in each of two shards": Fault(
        llama(rows(W_QKV, groups_to_parts(4, 2)), "qkv_concat"), ATTENTION, QKV_ORDER, (W_QKV,), "ranks"
    ),
    "contiguous for grouped": Fault(
        qwen3(rows(QKV_MC, groups_to_parts(12))), ATTENTION, QKV_ORDER, (QKV_MC,), "contiguous-qkv"
    ),
    "grouped for contiguous": Fault(
        qwen3(rows(QKV_MC, lambda n: np.argsort(groups_to_parts(12)(n))), "contiguous"), ATTENTION, QKV_ORDER,
        (QKV_MC,), "contiguous-mlp",
    ),
    "q, k and v cut out of a grouped tensor as plain": Fault(
        Planted("llama", "hf", "", cut_wrongly), ATTENTION, QKV_ORDER,
        tuple(legacy(f"self_attn.{part}_proj.weight") for part in "qkv"),
    ),
    "turns for halves": Fault(
        llama(rows(W_GATE, turns), "qkv_concat-1.4"), MLP, GATE_ORDER, (W_GATE,), "`--variant-b qkv_concat`"
    ),
    "halves for turns": Fault(
        qwen3(rows(FC1, lambda n: np.argsort(turns(n)))), MLP, GATE_ORDER, (FC1,), "`--variant-b contiguous-mlp`"
    ),
    # exchanged and transposed
    "k and v": Fault(
        llama(both(swapped(WK, WV), swapped(BK, BV)), model="qwen2"), ATTENTION, "k and v exchanged", (WK, WV, BK, BV)
    ),
    "q and k": Fault(llama(swapped(WQ, WK), model="llama square"), ATTENTION, "q and k exchanged", (WQ, WK)),
    "gate and up": Fault(llama(swapped(W1, W3)), MLP, "gate and up exchanged", (W1, W3)),
    "wo transposed": Fault(llama(transposed(WO), model="llama square"), ATTENTION, "transposed", (WO,)),
    "w2 transposed": Fault(llama(transposed(W2), model="llama square"), MLP, "transposed", (W2,)),
    "all transposed": Fault(
        llama(both(*map(transposed, (WQ, WK, WV, WO))), model="llama square"), ATTENTION, "transposed", (WQ, WK, WV, WO)
    ),
    "norms": Fault(
        qwen3(swapped(mcore("input_layernorm.weight"), mcore("pre_mlp_layernorm.weight"))), ATTENTION,
        "norms exchanged", (mcore("input_layernorm.weight"), mcore("pre_mlp_layernorm.weight")), also=(MLP,),
    ),
    "q and k norms": Fault(
        qwen3(swapped(mcore("self_attention.q_layernorm.weight"), mcore("self_attention.k_layernorm.weight"))),
        ATTENTION, "norms exchanged",
        (mcore("self_attention.q_layernorm.weight"), mcore("self_attention.k_layernorm.weight")),
    ),
    "final norm less by one": Fault(
        llama(changed("model.norm_out.weight", lambda v: v - 1)), ("norm", 0), "norm offset", ("model.norm_out.weight",)
    ),
    "layers": Fault(
        qwen3(layers_swapped("decoder.layers.0.", "decoder.layers.2.")), ("attention", 0), "layers exchanged",
        tuple(mcore(f"{name}.weight", 0) for name in (
            "input_layernorm", "self_attention.linear_proj", "self_attention.q_layernorm",
            "self_attention.k_layernorm", "self_attention.linear_qkv",
        )),
        also=(("mlp", 0), ("attention", 2), ("mlp", 2)),
    ),
    # biases
    "biases zero": Fault(
        llama(both(*(changed(name, np.zeros_like) for name in (BQ, BK, BV))), model="qwen2"), ATTENTION,
        "bias missing", (BQ, BK, BV), alone=False,
    ),
    "the bias of v zero": Fault(
        llama(changed(BV, np.zeros_like), model="qwen2"), ATTENTION, "bias missing", (BV,)
    ),
    "a bias one row late": Fault(llama(changed(BK, shifted(1)), model="qwen2"), ATTENTION, "bias shifted", (BK,)),
    "a bias five rows early": Fault(
        llama(changed(BQ, shifted(-5)), model="qwen2"), ATTENTION, "bias shifted", (BQ,), alone=False
    ),
    "a bias plus a constant": Fault(
        llama(changed(BQ, lambda v: v + 0.25), model="qwen2"), ATTENTION, "bias shifted", (BQ,), alone=False
    ),
    # config.json
    "rotary base": Fault(
        qwen3(rope_theta=1e4), ATTENTION, "rotary base", hint="rope_theta", also=EACH_ATTENTION
    ),
    "no rotary scaling": Fault(
        Planted("llama tied", LEGACY, "", None, {"rope_scaling": None}), ATTENTION, "rotary scaling",
        also=EACH_ATTENTION,
    ),
    "rotary base at far positions": Fault(
        qwen3(rope_theta=5001.0), ATTENTION, "rotary base", item=SPREAD, also=EACH_ATTENTION
    ),
    "norm eps": Fault(
        qwen3(rms_norm_eps=1e-6), ("attention", 0), "norm eps", hint="rms_norm_eps", also=(*EVERY, ("norm", 0))
    ),
    "no window": Fault(
        Planted("mistral", LEGACY, "", None, {"sliding_window": None}), ATTENTION, "sliding window",
        hint="sliding_window", also=EACH_ATTENTION,
    ),
    "a window in a layer without": Fault(
        Planted("qwen2 window", LEGACY, "", None, {"max_window_layers": 0}), ("attention", 0), "sliding window"
    ),
    "heads of another size": Fault(
        Planted("llama square", LEGACY, "", None, {"num_attention_heads": 12, "num_key_value_heads": 12}), ATTENTION,
        "heads", hint="num_attention_heads", also=EACH_ATTENTION,
    ),
    "biases that A has not": Fault(
        Planted("llama", "hf", "", biased, {"attention_bias": True}), ATTENTION, "bias too many",
        tuple(legacy(f"self_attn.{part}_proj.bias") for part in "qkvo"), "attention_bias",
    ),
    # ends
    "a head of its own beside a tied one": Fault(
        Planted("llama tied", "hf", "", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"][::-1]}),
                {"tie_word_embeddings": False}),
        ("logits", 0), "tied head", ("lm_head.weight",), "tie_word_embeddings",
    ),
    "a tied head beside one of its own": Fault(
        Planted("llama", "hf", "", lambda t: t.pop("lm_head.weight"), {"tie_word_embeddings": True}),
        ("logits", 0), "tied head", ("model.embed_tokens.weight",), "tie_word_embeddings", alone=False,
    ),
    "embedding and head": Fault(
        llama(swapped("model.tok_embeddings.embedding_weight", "lm_head.weight")), ("embedding", 0),
        "embedding and head exchanged", ("model.tok_embeddings.embedding_weight", "lm_head.weight"),
        also=(("logits", 0),),
    ),
    "embedding scaled": Fault(
        llama(changed("model.tok_embeddings.embedding_weight", lambda v: v * np.float32(32**0.5))), ("embedding", 0),
        "embedding scaled", ("model.tok_embeddings.embedding_weight",),
    ),
    "embedding rows": Fault(
        llama(changed("model.tok_embeddings.embedding_weight", shifted(3))), ("embedding", 0),
        "rows of the embedding moved", ("model.tok_embeddings.embedding_weight",),
    ),
    # experts
    "router rows": Fault(
        qwen3(rows(mcore("mlp.router.weight"), lambda _: np.array(ORDER)), model="qwen3_moe"), MLP, "expert order",
        (mcore("mlp.router.weight"),),
    ),
    "experts": Fault(
        qwen3(both(experts(mcore("mlp.experts.weight1"), ORDER), experts(mcore("mlp.experts.weight2"), ORDER)),
              model="qwen3_moe"),
        MLP, "expert order", (mcore("mlp.experts.weight1"), mcore("mlp.experts.weight2")),
    ),
    "gate and up of experts": Fault(
        qwen3(changed(mcore("mlp.experts.weight1"), columns_swapped), model="qwen3_moe"), MLP, "gate and up exchanged",
        (mcore("mlp.experts.weight1"),),
    ),
    "turns in experts": Fault(
        Planted("qwen3_moe", "hf", "stacked", changed(
            legacy("mlp.experts.gate_up_proj"), lambda v: v.reshape(8, 2, 10, -1).swapaxes(1, 2).reshape(v.shape))),
        MLP, GATE_ORDER, (legacy("mlp.experts.gate_up_proj"),),
    ),
    "one expert more": Fault(
        qwen3(model="qwen3_moe", num_experts_per_tok=3), MLP, "experts per token", hint="num_experts_per_tok",
        also=(("mlp", 0), ("mlp", 2)),
    ),
    "norm_topk_prob": Fault(
        qwen3(model="qwen3_moe", norm_topk_prob=False), MLP, "norm_topk_prob", hint="norm_topk_prob",
        also=(("mlp", 0), ("mlp", 2)),
    ),
    # found by A's weights alone
    "heads": Fault(
        Planted("qwen3", "hf", "", rows(
            legacy("self_attn.q_proj.weight"), lambda n: np.arange(n).reshape(HEADS, -1)[ORDER].reshape(-1))),
        ATTENTION, "heads permuted", (legacy("self_attn.q_proj.weight"),), alone=False,
    ),
    "q of another layer": Fault(
        llama(swapped(WQ, legacy("attention.wq.weight", 2))), ATTENTION, "layers exchanged", (WQ,), alone=False,
        also=(("attention", 2),),
    ),
    "columns of o": Fault(
        llama(changed(WO, lambda v: v[:, ::-1])), ATTENTION, "columns permuted", (WO,), alone=False
    ),
}  # fmt: skip

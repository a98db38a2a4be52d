"""MindFormers' own networks, configured from the facts of a config.json for plain float32.

Legacy is `LlamaForCausalLM` for llama, mistral and qwen2, wherever MindSpore runs. Mcore is `Qwen3ForCausalLM` and
`Qwen3MoeForCausalLM`, on Ascend. What does not live here: what these cannot express (`expressible.py`), the runner
(`mindformers.py`).
"""

from __future__ import annotations

import math
from typing import Any

from ckptkit.verification.runners.facts import Facts
from ckptkit.verification.runners.frameworks import framework
from ckptkit.verification.runners.rope_facts import Rope

_LEGACY_DTYPES = (
    "compute_dtype", "param_init_type", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype",
)  # fmt: skip
_MCORE_DTYPES = (
    "compute_dtype", "layernorm_compute_dtype", "moe_router_dtype", "params_dtype", "rotary_dtype",
    "softmax_compute_dtype",
)  # fmt: skip
_CONTIGUOUS_QKV, _CONTIGUOUS_MLP = ("contiguous", "contiguous-qkv"), ("contiguous", "contiguous-mlp")


def make_legacy(facts: Facts, variant: str, length: int) -> Any:
    """Return a `LlamaForCausalLM` for one sequence of exactly `length` tokens."""
    llama = framework("mindformers.models.llama", extra="mindformers")
    method, scaling = _extension(facts.rope)
    config = llama.LlamaConfig(
        batch_size=1,
        seq_length=length,
        # The table of positions: with one beyond the first, and, for the checks of scaling, beyond what is scaled.
        max_position_embedding=max(length, facts.rope.original + 1, 2),
        vocab_size=facts.vocab,
        hidden_size=facts.hidden,
        intermediate_size=facts.ffn,
        num_layers=facts.layers,
        num_heads=facts.heads,
        n_kv_heads=facts.kv_heads,
        rms_norm_eps=facts.norm_eps,
        theta=facts.rope.base,
        extend_method=method,
        scaling_factor=scaling,
        tie_word_embeddings=facts.tied,
        qkv_has_bias=facts.qkv_bias,
        attn_proj_has_bias=facts.o_bias,
        qkv_concat=variant == "qkv_concat",
        pad_token_id=facts.vocab,  # no id that occurs: the network masks its pad token
        use_past=False,
        use_flash_attention=False,
        fused_rms_norm=False,
        use_rope_slice=True,  # rotates halves by slices; the other way is a product that a CPU refuses
        **dict.fromkeys(_LEGACY_DTYPES, "float32"),
    )
    return llama.LlamaForCausalLM(config).set_train(False)


def _extension(rope: Rope) -> tuple[str, Any]:
    """Return the legacy network's words for rotary scaling: the method, and its numbers."""
    if rope.type == "llama3":
        names = {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        return "LLAMA3", {"factor": rope.factor, "original_max_position_embeddings": rope.original, **names}
    if rope.type == "yarn":
        # It multiplies by (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).
        mscale = (rope.attention_factor - 1) / (0.1 * math.log(rope.factor)) if rope.factor > 1 else 1.0
        betas = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "mscale": mscale, "mscale_all_dim": 0.0}
        return "YARN", {"factor": rope.factor, "original_max_position_embeddings": rope.original, **betas}
    return "None", 1.0


def make_mcore(mindspore: Any, facts: Facts, variant: str, length: int, target: str) -> Any:
    """Return a `Qwen3ForCausalLM` or `Qwen3MoeForCausalLM` for one sequence of exactly `length` tokens.

    `target` is MindSpore's name of the device.
    """
    build_context = framework("mindformers", extra="mindformers").build_context
    context = {"mode": mindspore.GRAPH_MODE, "device_target": target}
    build_context({"use_legacy": False, "run_mode": "train", "use_parallel": False, "context": context, "parallel": {}})
    settings: dict[str, Any] = {
        "batch_size": 1,
        "seq_length": length,
        "vocab_size": facts.vocab,
        "hidden_size": facts.hidden,
        "intermediate_size": facts.ffn,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "hidden_act": facts.activation,
        "max_position_embeddings": length,
        "rms_norm_eps": facts.norm_eps,
        "rope_theta": facts.rope.base,
        "tie_word_embeddings": facts.tied,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": facts.vocab,  # as above
        "position_embedding_type": "rope",
        "use_contiguous_weight_layout_attention": variant in _CONTIGUOUS_QKV,
        "use_interleaved_weight_layout_mlp": variant not in _CONTIGUOUS_MLP,
        **dict.fromkeys(_MCORE_DTYPES, "float32"),
    }
    if facts.model_type == "qwen3":
        models = framework("mindformers.models.qwen3", extra="mindformers")
        return models.Qwen3ForCausalLM(models.Qwen3Config(**settings)).set_train(False)
    settings |= {
        "num_experts": facts.experts,
        "num_experts_per_tok": facts.experts_per_token,
        "moe_intermediate_size": facts.moe_ffn,
        "norm_topk_prob": facts.norm_topk,
        "moe_grouped_gemm": True,  # all that it has
        "moe_router_topk_scaling_factor": 1.0,  # without one its router multiplies by None
    }
    models = framework("mindformers.models.qwen3_moe", extra="mindformers")
    return models.Qwen3MoeForCausalLM(models.Qwen3MoeConfig(**settings)).set_train(False)

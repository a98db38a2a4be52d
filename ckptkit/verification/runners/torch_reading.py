"""What a transformers model took its config.json for: read off the modules that it built.

The keys are those that every runner reports, with the same types, so that two readings can be compared. What does not
live here: building the model (`torch.py`), and the reading of a config.json without a network (`facts.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptkit.errors import InternalError, UsageError


def read_model(model: Any) -> dict[str, Any]:
    """Return the reading of a `...ForCausalLM` model of transformers 4 or 5."""
    config, layers = model.config, list(model.model.layers)
    embedding, attention = model.model.embed_tokens.weight, layers[0].self_attn
    head_dim = attention.head_dim
    return {
        "model_type": config.model_type,
        "layers": len(layers),
        "hidden": embedding.shape[1],
        "heads": attention.q_proj.weight.shape[0] // head_dim,
        "kv_heads": attention.k_proj.weight.shape[0] // head_dim,
        "head_dim": head_dim,
        "vocab": embedding.shape[0],
        "norm_eps": float(_one(module.variance_epsilon for module in model.modules() if _is_norm(module))),
        "tied": model.lm_head.weight is embedding,
        "window": [_window(config, index) for index in range(len(layers))],
        "qkv_bias": attention.q_proj.bias is not None,
        "o_bias": attention.o_proj.bias is not None,
        "qk_norm": hasattr(attention, "q_norm"),
        **_read_rotary(model.model.rotary_emb),
        **_read_mlps(config, [layer.mlp for layer in layers]),
    }


def _is_norm(module: Any) -> bool:
    return hasattr(module, "variance_epsilon")


def _one(values: Iterable[Any]) -> Any:
    """Return the value that all have; a reading has room for one."""
    found = set(values)
    if len(found) != 1:
        raise InternalError(f"the layers of one network differ: {sorted(found)}")
    return found.pop()


def _window(config: Any, layer: int) -> int | None:
    """Return the width of the mask that the model makes for a layer, None for all that came before."""
    if config.model_type == "llama":  # masks nothing, whatever config.json says
        return None
    size: int | None = config.sliding_window
    if config.model_type in ("mistral", "qwen3_moe"):  # one mask for all layers, whatever `layer_types` says
        return size
    if config.layer_types[layer] != "sliding_attention":
        return None
    if size is None:
        raise UsageError(
            f"layer {layer} has sliding attention in config.json, which gives it no window",
            why="`use_sliding_window` is off, or `sliding_window` is null",
        )
    return size


def _read_rotary(rotary: Any) -> dict[str, Any]:
    config = rotary.config
    table = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    base: Any = table.get("rope_theta", getattr(config, "rope_theta", None))  # in the table since transformers 5
    return {"rope_base": float(base), "rope": _read_scaling(rotary, table)}


def _read_scaling(rotary: Any, table: dict[str, Any]) -> dict[str, Any]:
    original = "original_max_position_embeddings"
    kind = rotary.rope_type
    if kind == "default":
        return {"type": kind}
    factor = {"type": kind, "factor": float(table["factor"])}
    if kind == "linear":
        return factor
    if kind == "dynamic":  # no release reads an original length of its own here
        return factor | {original: rotary.original_max_seq_len}
    length = table.get(original) or rotary.config.max_position_embeddings
    if kind == "llama3":
        return factor | {key: float(table[key]) for key in ("low_freq_factor", "high_freq_factor")} | {original: length}
    if kind == "yarn":
        return factor | {
            "beta_fast": float(table.get("beta_fast") or 32),
            "beta_slow": float(table.get("beta_slow") or 1),
            "attention_factor": float(rotary.attention_scaling),
            original: length,
            "truncate": bool(table.get("truncate", True)),
        }
    raise UsageError(f"no forward run with rotary scaling of type `{kind}`")


def _read_mlps(config: Any, mlps: list[Any]) -> dict[str, Any]:
    sparse = [hasattr(mlp, "experts") for mlp in mlps]
    dense = [mlp for mlp, is_sparse in zip(mlps, sparse, strict=True) if not is_sparse]
    reading = {
        "ffn": dense[0].gate_proj.weight.shape[0] if dense else config.intermediate_size,
        "activation": config.hidden_act,
        "mlp_bias": bool(dense) and dense[0].gate_proj.bias is not None,
        "experts": 0,
        "experts_per_token": 0,
        "moe_ffn": 0,
        "norm_topk": False,
        "sparse_layers": sparse,
    }
    if config.model_type == "qwen3_moe" and any(sparse):
        reading |= {
            "experts": config.num_experts,
            "experts_per_token": config.num_experts_per_tok,
            "moe_ffn": config.moe_intermediate_size,
            "norm_topk": bool(config.norm_topk_prob),
        }
    return reading

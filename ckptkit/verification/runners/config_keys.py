"""Keys of config.json by what they do to a forward pass: data only, for `facts.py`.

Keys that a family reads are not here; `facts.py` reads them.
"""

from __future__ import annotations

from typing import Any

# Change nothing in an fp32 forward pass without dropout, cache or generation.
HARMLESS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "add_cross_attention", "architectures",
    "attention_dropout", "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dtype", "early_stopping", "embd_pdrop", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob", "id2label", "initializer_range", "is_decoder",
    "is_encoder_decoder", "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length", "max_new_tokens",
    "max_sequence_length", "min_length", "model_max_length", "model_type", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_router_logits", "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "remove_invalid_values", "repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate",
    "router_aux_loss_coef", "router_jitter_noise", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version",
    "use_bfloat16", "use_cache", "use_flash_attention", "use_flash_attn",
})  # fmt: skip

# Change the arithmetic in nets of other families; each with the value that changes nothing (None and False never do).
MATHS: dict[str, Any] = {
    "add_bias_linear": None,
    "add_qkv_bias": None,
    "alibi": None,
    "apply_residual_connection_post_layernorm": None,
    "attention_chunk_size": None,
    "attention_multiplier": None,
    "attention_sinks": None,
    "attn_logit_softcapping": None,
    "attn_temperature_tuning": None,
    "clip_qkv": None,
    "dim_model_base": None,
    "embedding_multiplier": 1,
    "embedding_scale": 1,
    "final_logit_softcapping": None,
    "first_k_dense_replace": 0,
    "head_dim_ratio": 1,
    "hidden_activation": "silu",
    "layernorm_type": None,
    "llama_4_scaling_beta": None,
    "logit_scale": 1,
    "logits_scaling": 1,
    "moe_layer_freq": None,
    "n_group": 1,
    "n_shared_experts": 0,
    "no_rope_layer_interval": 0,
    "no_rope_layers": None,
    "norm_after": None,
    "num_shared_experts": 0,
    "parallel_attn": None,
    "post_norm": None,
    "pruned_heads": {},
    "qk_clip": None,
    "qk_clip_threshold": None,
    "qk_layernorm": None,
    "quantization_config": None,
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1,
    "rope_interleave": None,
    "rope_interleaved": None,
    "rope_ratio": 1,
    "rotary_dim": None,
    "rotary_pct": 1,
    "routed_scaling_factor": 1,
    "scale_depth": None,
    "scale_emb": 1,
    "scoring_func": "softmax",
    "shared_expert_intermediate_size": 0,
    "topk_group": 1,
    "use_alibi": None,
    "use_dynamic_ntk": None,
    "use_logn_attn": None,
    "use_mrope": None,
    "use_parallel_residual": None,
    "use_qk_clip": None,
    "use_qk_norm": None,
}

# Other families' names of what these families call otherwise. One beside a missing field may well be its value, and
# the default would then be wrong in silence.
ALIASES: dict[str, tuple[str, ...]] = {
    "rms_norm_eps": (
        "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_epsilon",
    ),
    "rope_theta": ("base", "rope_base", "rotary_base", "rotary_emb_base", "theta"),
    "vocab_size": ("n_vocab", "padded_vocab_size"),
    "hidden_size": ("d_model", "dim", "n_embd"),
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "hidden_dim", "n_inner"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("multi_query_group_num", "n_kv_heads", "num_kv_heads", "num_query_groups"),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "hidden_act": ("activation", "activation_function"),
    "num_experts": ("n_routed_experts",),
    "moe_intermediate_size": ("expert_ffn_hidden_size", "moe_ffn_hidden_size"),
    "num_experts_per_tok": ("moe_topk", "moe_top_k", "num_experts_per_token"),
    "max_position_embeddings": ("max_seq_len", "n_positions", "seq_length"),
    "tie_word_embeddings": ("tie_embeddings", "tie_weights"),
}  # fmt: skip

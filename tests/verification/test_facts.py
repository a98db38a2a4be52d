"""config.json is read as transformers reads it, in both spellings, and what cannot be expressed is refused by name.

That the readings are those of the networks that transformers builds is in test_decoder.py; defaults of transformers'
configuration classes are compared here, in a child process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from runner_jobs import LLAMA3, config_of, in_5s_words

from ckptkit.errors import UsageError
from ckptkit.verification.runners.facts import read_facts
from ckptkit.verification.runners.rope_facts import Rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        read_facts(config)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_config_is_read_without_a_remark(family: str) -> None:
    facts = read_facts(config_of(family))
    assert (facts.notes, facts.unknown) == ((), ())
    assert (facts.model_type, facts.layers, facts.hidden, facts.heads, facts.kv_heads) == (family, 2, 32, 4, 2)
    assert (facts.ffn, facts.vocab, facts.norm_eps, facts.tied, facts.activation) == (40, 67, 1e-5, False, "silu")
    assert facts.rope == Rope("default", 5000.0)
    assert facts.head_dim == (12 if family.startswith("qwen3") else 8)
    assert facts.qk_norm == family.startswith("qwen3")
    assert (facts.qkv_bias, facts.o_bias, facts.mlp_bias) == (family == "qwen2", False, False)
    assert facts.experts == (6 if family == "qwen3_moe" else 0)


def test_the_reading_has_the_keys_and_types_that_all_runners_share() -> None:
    reading = read_facts(config_of("qwen3_moe", rope_scaling=YARN, mlp_only_layers=[0])).reading()
    assert reading == {
        "model_type": "qwen3_moe", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 12, "ffn": 40,
        "vocab": 67, "norm_eps": 1e-5, "rope_base": 5000.0, "tied": False, "window": [None, None],
        "activation": "silu", "qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": True, "experts": 6,
        "experts_per_token": 2, "moe_ffn": 10, "norm_topk": True, "sparse_layers": [False, True],
        "rope": {
            "type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "attention_factor": 1.1386294361119891, "original_max_position_embeddings": 32, "truncate": True,
        },
    }  # fmt: skip
    assert json.loads(json.dumps(reading)) == reading
    assert [type(reading[key]) for key in ("layers", "norm_eps", "rope_base", "tied")] == [int, float, float, bool]


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, {"rope_type": "linear", "factor": 2}])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_mean_the_same(family: str, scaling: dict[str, Any] | None) -> None:
    old = config_of(family, rope_scaling=scaling)
    facts = read_facts(in_5s_words(old))
    assert facts == read_facts(old)
    assert (facts.rope.base, facts.notes) == (5000.0, ())
    assert facts.rope.type == (scaling or {"rope_type": "default"})["rope_type"]


def test_both_spellings_at_once_must_agree() -> None:
    old = config_of("llama", rope_scaling=LLAMA3)
    assert read_facts(old | in_5s_words(old)) == read_facts(old)
    assert "two rotary bases" in refusal(old | in_5s_words(old) | {"rope_theta": 10000.0})
    other = {**in_5s_words(old)["rope_parameters"], "factor": 4.0}
    assert "contradict each other" in refusal(old | {"rope_parameters": other})
    assert "`rope_type` and `type`" in refusal(config_of("llama", rope_scaling={**LLAMA3, "type": "yarn"}))


def test_the_older_word_for_the_type_is_read() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    assert read_facts(config_of("llama", rope_scaling=scaling)).rope == Rope("linear", 5000.0, 2.0)


@pytest.mark.parametrize(
    ("scaling", "attention_factor"),
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.1386294361119891 / 1.0693147180559945),
        ({"mscale": 2.0}, 1.1386294361119891),  # alone it counts for nothing
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_says_what_cosines_are_multiplied_by(scaling: dict[str, Any], attention_factor: float) -> None:
    assert read_facts(config_of("llama", rope_scaling=YARN | scaling)).rope.attention_factor == attention_factor


def test_an_original_length_that_is_not_given_is_the_longest_position() -> None:
    facts = read_facts(config_of("llama", rope_scaling=without(YARN, "original_max_position_embeddings")))
    assert facts.rope.original == 128
    assert "original_max_position_embeddings` is missing" in facts.notes[0]
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    facts = read_facts(config_of("llama", rope_scaling=dynamic))
    assert facts.rope.original == 128
    assert "does not read it for `dynamic`" in facts.notes[0]


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (config_of("mistral"), [None, None]),
        (config_of("mistral", sliding_window=5), [5, 5]),
        (without(config_of("mistral"), "sliding_window"), [4096, 4096]),
        (config_of("llama", sliding_window=5), [None, None]),
        (config_of("qwen2", sliding_window=5), [None, None]),
        (config_of("qwen2", sliding_window=5, use_sliding_window=True), [None, None]),  # from layer 28 on
        (config_of("qwen2", sliding_window=5, use_sliding_window=True, max_window_layers=1), [None, 5]),
        (config_of("qwen3", sliding_window=5, use_sliding_window=True, max_window_layers=0), [5, 5]),
        (config_of("qwen3_moe", sliding_window=5, use_sliding_window=True, max_window_layers=1), [5, 5]),
        (config_of("qwen3_moe", sliding_window=5), [None, None]),
        (
            config_of(
                "qwen2", sliding_window=5, use_sliding_window=True,
                layer_types=["sliding_attention", "full_attention"],
            ),
            [5, None],
        ),
    ],
)  # fmt: skip
def test_a_window_is_on_where_transformers_has_it_on(config: dict[str, Any], window: list[int | None]) -> None:
    assert read_facts(config).reading()["window"] == window


@pytest.mark.parametrize(
    ("changed", "sparse"),
    [
        ({}, [True, True, True, True]),
        ({"mlp_only_layers": [0, 2]}, [False, True, False, True]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [False, False, False, True]),
    ],
)
def test_a_layer_is_sparse_unless_a_list_or_a_step_leaves_it_out(changed: dict[str, Any], sparse: list[bool]) -> None:
    assert read_facts(config_of("qwen3_moe", num_hidden_layers=4, **changed)).reading()["sparse_layers"] == sparse


def test_without_a_sparse_layer_there_are_no_experts() -> None:
    for changed in ({"num_experts": 0}, {"mlp_only_layers": [0, 1]}):
        reading = read_facts(config_of("qwen3_moe", **changed)).reading()
        assert [reading[key] for key in ("experts", "experts_per_token", "moe_ffn", "norm_topk")] == [0, 0, 0, False]


def test_the_count_of_experts_may_go_by_another_name() -> None:
    config = config_of("qwen3_moe")
    renamed = {**without(config, "num_experts"), "num_local_experts": 6}
    assert read_facts(renamed) == read_facts(config)
    assert "`num_local_experts` 7" in refusal({**config, "num_local_experts": 7})


def test_a_missing_key_is_transformers_default_and_is_noted() -> None:
    facts = read_facts(without(config_of("llama"), "rms_norm_eps", "rope_theta", "num_key_value_heads"))
    assert (facts.norm_eps, facts.rope.base, facts.kv_heads) == (1e-6, 10000.0, 4)
    assert len(facts.notes) == 2  # as many key heads as heads is what a llama without the key means
    facts = read_facts(without(config_of("mistral", hidden_size=256), "num_attention_heads", "num_key_value_heads"))
    assert (facts.heads, facts.kv_heads, len(facts.notes)) == (32, 8, 2)
    facts = read_facts(without(config_of("qwen3"), "head_dim"))
    assert facts.head_dim == 128
    assert facts.notes == ("`head_dim` is missing: 128, transformers' default for qwen3",)


def test_a_missing_key_beside_one_that_looks_like_it_is_refused() -> None:
    config = {**without(config_of("llama"), "rms_norm_eps"), "layer_norm_epsilon": 1e-5}
    assert "no `rms_norm_eps`, and `layer_norm_epsilon`" in refusal(config)
    facts = read_facts({**config_of("llama"), "layer_norm_epsilon": 1e-5})  # beside the key it is only odd
    assert facts.unknown == ("layer_norm_epsilon",)


def test_a_key_of_which_nothing_is_known_is_named() -> None:
    scaling = {**LLAMA3, "colour": 1}
    facts = read_facts(config_of("llama", rope_scaling=scaling, surprise=1, use_mrope=False, attention_dropout=0.5))
    assert facts.unknown == ("surprise", "rope_scaling.colour")


def test_a_key_that_this_family_does_not_read_is_noted_when_it_asks_for_something() -> None:
    facts = read_facts(config_of("llama", sliding_window=5, num_experts=None, norm_topk_prob=False))
    assert facts.notes == ("`sliding_window` is 5: transformers' llama does not read it",)
    assert read_facts(config_of("mistral", attention_bias=True)).qkv_bias is False


REFUSED: dict[str, dict[str, Any]] = {
    "`model_type`": config_of("gemma"),
    "rotary type `longrope`": config_of("llama", rope_scaling={"rope_type": "longrope", "factor": 2.0}),
    "rotary type `su`": config_of("llama", rope_scaling={"type": "su"}),
    "lacks parameters\n  high_freq_factor": config_of("llama", rope_scaling=without(LLAMA3, "high_freq_factor")),
    "has no `rope_type`": config_of("llama", rope_scaling={"factor": 2.0}),
    "parameters of another rotary scheme": config_of("llama", rope_scaling={**YARN, "short_factor": [1.0]}),
    "`rope_scaling.factor` of config.json is '4'": config_of("llama", rope_scaling={**YARN, "factor": "4"}),
    "low_freq_factor of 4.0": config_of("llama", rope_scaling={**LLAMA3, "low_freq_factor": 4.0}),
    "differs by kind of layer": config_of("qwen3", rope_parameters={"full_attention": {"rope_type": "default"}}),
    "`partial_rotary_factor`": config_of("llama", partial_rotary_factor=0.5),
    "`rope_parameters.partial_rotary_factor`": config_of("llama", rope_parameters={"partial_rotary_factor": 0.5}),
    "`original_max_position_embeddings` is 16": config_of(
        "llama", rope_scaling=YARN, original_max_position_embeddings=16
    ),
    "`hidden_act`": config_of("llama", hidden_act="gelu"),
    "attn_logit_softcapping  50.0": config_of("llama", attn_logit_softcapping=50.0),
    "logit_scale  0.5": config_of("qwen2", logit_scale=0.5),
    "qk_clip_threshold  100": config_of("qwen3", qk_clip_threshold=100),
    "shared_expert_intermediate_size  8": config_of("qwen3_moe", shared_expert_intermediate_size=8),
    "quantization_config": config_of("llama", quantization_config={"bits": 4}),
    "`num_attention_heads`, 4, is no multiple": config_of("llama", num_key_value_heads=3),
    "`head_dim` is 9": config_of("llama", head_dim=9),
    "`head_dim` of config.json is null": {**config_of("qwen3"), "head_dim": None},
    "`rms_norm_eps` of config.json is None": {**config_of("llama"), "rms_norm_eps": None},
    "`hidden_size` of config.json is 32.5": config_of("llama", hidden_size=32.5),
    "`num_hidden_layers` of config.json is True": config_of("llama", num_hidden_layers=True),
    "`tie_word_embeddings` of config.json is 'yes'": config_of("llama", tie_word_embeddings="yes"),
    "`sliding_window` of config.json is 0": config_of("mistral", sliding_window=0),
    "no list of 2 types": config_of("qwen2", layer_types=["full_attention"]),
    "chunked_attention": config_of("qwen3", layer_types=["chunked_attention", "full_attention"]),
    "no window is on": config_of("qwen3", layer_types=["sliding_attention", "full_attention"]),
    "more than `num_experts`, 6": config_of("qwen3_moe", num_experts_per_tok=7),
    "`rope_theta` of config.json is 1.0": config_of("llama", rope_theta=1.0),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_the_network_cannot_express_is_refused_by_name(words: str) -> None:
    assert words in refusal(REFUSED[words])


NEUTRAL = {
    "attn_logit_softcapping": None, "logit_scale": 1.0, "use_mrope": False, "partial_rotary_factor": 1.0,
    "shared_expert_intermediate_size": 0, "quantization_config": None, "qk_layernorm": False,
}  # fmt: skip


def test_a_key_that_would_change_the_arithmetic_passes_with_a_value_that_does_not() -> None:
    facts = read_facts({**config_of("llama"), **NEUTRAL})
    assert (facts.notes, facts.unknown) == ((), ())


THEIR_DEFAULTS = """
import json, transformers
for family in {families!r}:
    config = transformers.AutoConfig.for_model(family)
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    own = {{key: getattr(config, key) for key in keys}}
    own["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own["window"] = config.sliding_window if family == "mistral" else None
    if family == "qwen3_moe":
        own |= {{key: getattr(config, key) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}}
        own["norm_topk_prob"] = config.norm_topk_prob
    print(json.dumps(own))
"""


@pytest.mark.frameworks
def test_an_empty_config_is_what_it_is_to_transformers() -> None:
    code = THEIR_DEFAULTS.format(families=FAMILIES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    for family, line in zip(FAMILIES, lines, strict=True):
        facts = read_facts({"model_type": family})
        ours = {
            "vocab_size": facts.vocab, "hidden_size": facts.hidden, "intermediate_size": facts.ffn,
            "num_hidden_layers": facts.layers, "num_attention_heads": facts.heads,
            "num_key_value_heads": facts.kv_heads, "rms_norm_eps": facts.norm_eps, "rope_theta": facts.rope.base,
            "tie_word_embeddings": facts.tied, "head_dim": facts.head_dim, "window": facts.window[0],
        }  # fmt: skip
        if family == "qwen3_moe":
            ours |= {
                "num_experts": facts.experts, "num_experts_per_tok": facts.experts_per_token,
                "moe_intermediate_size": facts.moe_ffn, "norm_topk_prob": facts.norm_topk,
            }  # fmt: skip
        assert ours == json.loads(line)

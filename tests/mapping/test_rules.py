"""From a config.json to rules: sizes are read before they are derived, and what is missing is named."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_configs import tiny_config

from ckptkit.errors import CkptkitError, UsageError
from ckptkit.mapping import rules as rules_module
from ckptkit.mapping.dims import Formula
from ckptkit.mapping.rules import RuleSet, Tie, resolve
from ckptkit.mapping.tables import load_tables
from ckptkit.types import Shape

TABLES = load_tables()
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 20, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def llama(dialect: str = "hf", variant: str = "", **changed: Any) -> RuleSet:
    config = {key: value for key, value in {**LLAMA, **changed}.items() if value != "absent"}
    return resolve(TABLES.family("llama"), config, dialect, variant)


def shapes(rules: RuleSet) -> dict[str, Shape]:
    return {rule.target: rule.expr.shape for rule in rules.rules}


def test_head_dim_is_read_and_not_taken_for_hidden_over_heads() -> None:
    found = shapes(llama())
    assert found["model.layers.0.self_attn.q_proj.weight"] == (32, 20)
    assert found["model.layers.0.self_attn.k_proj.weight"] == (16, 20)
    assert found["model.layers.0.self_attn.o_proj.weight"] == (20, 32)


@pytest.mark.parametrize("value", [None, "absent"])
def test_without_head_dim_an_exact_quotient_is_taken(value: object) -> None:
    assert shapes(llama(head_dim=value))["model.layers.0.self_attn.k_proj.weight"] == (10, 20)


def test_without_head_dim_a_quotient_that_is_not_whole_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        llama(head_dim="absent", hidden_size=22)
    assert "`head_dim`" in caught.value.what
    assert "22 / 4 is not a whole number" in caught.value.what
    assert "mappings/hf/llama.toml" in caught.value.why
    assert "head_dim" in caught.value.hint


def test_without_kv_heads_there_are_as_many_as_heads() -> None:
    found = shapes(llama(num_key_value_heads="absent"))
    assert found["model.layers.0.self_attn.k_proj.weight"] == (32, 20)


@pytest.mark.parametrize("dialect", ["hf", "mindformers-legacy"])
def test_heads_that_are_no_multiple_of_kv_heads_are_refused(dialect: str) -> None:
    with pytest.raises(UsageError) as caught:
        llama(dialect, num_key_value_heads=3)
    assert "`num_attention_heads` = 4 is not a multiple of `num_key_value_heads` = 3" in caught.value.what


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_a_missing_key_is_named_with_the_table_and_the_remedy(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        llama(**{key: "absent"})
    assert caught.value.what == f"config.json has no `{key}`"
    assert "mappings/hf/llama.toml" in caught.value.why
    assert key in caught.value.hint


@pytest.mark.parametrize("value", ["32", 3.0, -1, True, [4]])
def test_a_size_that_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"`vocab_size` in config.json is .*, not a whole number"):
        llama(vocab_size=value)


def test_a_flag_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`attention_bias` in config.json is 'yes', not true or false"):
        llama(attention_bias="yes")


def test_attention_bias_gives_q_k_v_and_o_a_bias_and_mlp_bias_the_others() -> None:
    biases = [name for name in shapes(llama(attention_bias=True)) if name.endswith(".bias")]
    assert [b.split(".")[-2] for b in biases[:4]] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert len(biases) == 8
    assert len([n for n in shapes(llama(mlp_bias=True)) if n.endswith(".bias")]) == 6
    assert not [n for n in shapes(llama()) if n.endswith(".bias")]


def test_qwen2_has_biases_on_q_k_v_whatever_config_json_says() -> None:
    entry = TABLES.family("qwen2")
    for said in ({}, {"attention_bias": False}, {"attention_bias": True}):
        rules = resolve(entry, {**tiny_config(entry), **said}, "hf")
        biases = [rule.target for rule in rules.rules if rule.target.endswith(".bias")]
        assert [b.split(".")[-2] for b in biases] == ["q_proj", "k_proj", "v_proj"] * 3


@pytest.mark.parametrize(("said", "tied"), [(True, True), (False, False), ("absent", False), (None, False)])
def test_the_tie_is_read_from_config_json(said: object, tied: bool) -> None:
    rules = llama("mindformers-legacy", tie_word_embeddings=said)
    assert rules.tied is tied
    twin = ("model.embed_tokens.weight", "lm_head.weight", "model.tok_embeddings.embedding_weight")
    assert rules.ties == (Tie("lm_head.weight", twin[0], "lm_head.weight", twin[2]),)
    assert "lm_head.weight" in shapes(rules)


def test_a_cut_of_a_weight_goes_with_its_bias_where_the_bias_has_that_axis() -> None:
    cuts = {
        rule.target.removeprefix("model.layers.0.attention."): (rule.tp_axis, rule.tp_unit)
        for rule in llama("mindformers-legacy", attention_bias=True).rules
    }
    assert cuts["wq.weight"] == cuts["wq.bias"] == (0, 8)
    assert cuts["wo.weight"] == (1, 8)
    assert cuts["wo.bias"] == (None, 1)
    assert cuts["model.norm_out.weight"] == (None, 1)


def test_a_cut_of_the_embedding_may_be_left_undone() -> None:
    rule = llama("mindformers-legacy").rules[0]
    assert (rule.tp_axis, rule.tp_unless, rule.tp_indivisible) == (0, "vocab_emb_dp", "replicate")
    assert (rule.stage, rule.layer) == ("first", None)


def test_experts_are_cut_between_experts() -> None:
    entry = TABLES.family("qwen3_moe")
    rules = resolve(entry, tiny_config(entry, sparse_step=1), "mindformers-mcore")
    weight1 = next(rule for rule in rules.rules if rule.target.endswith("experts.weight1"))
    assert (weight1.tp_axis, weight1.ep_axis, weight1.ep_unit) == (None, 0, 10)
    assert weight1.expr.shape == (120, 6)
    assert [leaf.name.split(".")[-3] for leaf in weight1.sources[::2]] == [str(i) for i in range(12)]


@pytest.mark.parametrize(
    ("changed", "sparse"),
    [
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 1, "mlp_only_layers": None}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, [1, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 2]}, [1, 3]),
        ({"num_experts": 0, "decoder_sparse_step": 1, "mlp_only_layers": []}, []),
    ],
)
def test_sparse_layers_are_those_of_the_hf_model(changed: dict[str, Any], sparse: list[int]) -> None:
    entry = TABLES.family("qwen3_moe")
    rules = resolve(entry, {**tiny_config(entry, layers=4), **changed}, "hf")
    routers = [rule.layer for rule in rules.rules if rule.target.endswith("mlp.gate.weight")]
    dense = [rule.layer for rule in rules.rules if rule.target.endswith("mlp.up_proj.weight")]
    assert routers == sparse
    assert dense == [i for i in range(4) if i not in sparse]


def test_a_list_of_layers_that_is_no_list_is_refused() -> None:
    entry = TABLES.family("qwen3_moe")
    with pytest.raises(UsageError, match=r"`mlp_only_layers` in config.json is 3, not a list"):
        resolve(entry, {**tiny_config(entry), "mlp_only_layers": 3}, "hf")
    with pytest.raises(UsageError, match=r"a layer step of 0 chooses no layers"):
        resolve(entry, tiny_config(entry, sparse_step=0), "hf")


def test_ignored_names_have_their_written_reason_on_their_side_only() -> None:
    rules = llama("mindformers-legacy")
    assert rules.ignored("model.layers.11.self_attn.rotary_emb.inv_freq", "hf") is not None
    assert rules.ignored("model.rotary_emb.inv_freq", "hf") is not None
    assert rules.ignored("model.rotary_emb.inv_freq", "dialect") is None
    assert rules.ignored("model.layers.0.attention.attention_dropout.seed", "dialect") is not None
    assert rules.ignored("model.layers.x.self_attn.rotary_emb.inv_freq", "hf") is None
    assert rules.ignored("xmodel.rotary_emb.inv_freq", "hf") is None
    assert rules.ignored("lm_head.weight", "hf") is None


def test_a_head_size_that_the_legacy_net_cannot_hold_is_said() -> None:
    assert llama("mindformers-legacy", head_dim=5).warnings == ()
    (said,) = llama("mindformers-legacy").warnings
    assert said.startswith("heads*head_dim is 32 and hidden is 20: ")
    assert llama("hf").warnings == ()


def test_config_keys_that_change_the_arithmetic_are_reported() -> None:
    mistral, qwen = TABLES.family("mistral"), TABLES.family("qwen2")
    assert mistral.warned({"sliding_window": None}) == mistral.warned({}) == []
    assert mistral.warned({"sliding_window": 4096})[0].startswith("`sliding_window` is 4096: ")
    assert qwen.warned({"use_sliding_window": False, "sliding_window": 4096}) == []
    assert len(qwen.warned({"use_sliding_window": True})) == 1
    assert mistral.refused({"sliding_window": 4096}) == []
    assert len(mistral.refused({"quantization_config": {"bits": 4}})) == 1


def test_the_tables_of_a_rule_set_are_all_named() -> None:
    assert llama("mindformers-legacy", "qkv_concat").table_files == (
        "mappings/hf/llama.toml",
        "mappings/mindformers-legacy/llama.toml",
        "mappings/mindformers-legacy/llama.qkv_concat.toml",
    )
    entry = TABLES.family("mistral")
    rules = resolve(entry, tiny_config(entry), "mindformers-legacy", "qkv_concat")
    assert rules.family == "mistral"
    assert rules.table_files == (
        "mappings/hf/llama.toml",
        "mappings/hf/mistral.toml",
        "mappings/mindformers-legacy/llama.toml",
        "mappings/mindformers-legacy/mistral.toml",
        "mappings/mindformers-legacy/llama.qkv_concat.toml",
    )


def test_a_bad_number_in_a_row_names_the_row() -> None:
    entry = TABLES.family("qwen3_moe")
    config = {**tiny_config(entry, sparse_step=1), "num_experts": 0}
    assert resolve(entry, config, "mindformers-mcore").rules
    with pytest.raises(CkptkitError, match=r"config.json has no `num_experts`"):
        resolve(entry, {k: v for k, v in config.items() if k != "num_experts"}, "mindformers-mcore")


@pytest.mark.parametrize(
    ("text", "value"),
    [("6", 6), ("a", 4), ("a*b", 12), ("2*a*b", 24), ("a + 2*b", 10), ("a*b/2", 6), ("b*a/b+1", 5)],
)
def test_a_formula_is_a_sum_of_products(text: str, value: int) -> None:
    assert Formula.parse(text).value({"a": 4, "b": 3}.__getitem__) == value


@pytest.mark.parametrize("text", ["", "a-b", "a**b", "a*", "(a)", "a b", "A", "1.5", "-1", "a//b"])
def test_what_is_no_formula_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a product or sum"):
        Formula.parse(text)


@pytest.mark.parametrize("text", ["a/b", "b/0"])
def test_a_quotient_that_is_not_whole_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole number"):
        Formula.parse(text).value({"a": 4, "b": 3}.__getitem__)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("at_once", [1, 2])
def test_rules_come_layer_by_layer_however_many_layers_are_made_at_once(
    family: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(TABLES.family(family))
    wanted = resolve(TABLES.family(family), config, "hf").rules
    layers = [rule.layer for rule in wanted if rule.layer is not None]
    assert layers == sorted(layers)
    assert len(set(layers)) > 1
    monkeypatch.setattr(rules_module, "LAYERS_AT_ONCE", at_once)
    assert resolve(TABLES.family(family), config, "hf").rules == wanted

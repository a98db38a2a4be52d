"""Choosing a table: by family, alias, config.json or tensor names; and a user's own family in one file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_configs import backward, forward, numbered_tensors, tiny_config

from ckptkit.errors import UsageError
from ckptkit.mapping.expr import Leaf
from ckptkit.mapping.rules import resolve
from ckptkit.mapping.tables import HUB, Tables, load_tables

TABLES = load_tables()


@pytest.mark.parametrize(
    ("word", "family"),
    [
        ("llama", "llama"),
        ("llama2", "llama"),
        ("LLaMA3.1", "llama"),
        ("codellama", "llama"),
        ("vicuna", "llama"),
        ("yi", "llama"),
        ("mistral", "mistral"),
        ("qwen1.5", "qwen2"),
        ("qwen2.5", "qwen2"),
        ("qwen3", "qwen3"),
        ("qwen3_moe", "qwen3_moe"),
    ],
)
def test_a_family_is_found_by_its_name_or_an_alias(word: str, family: str) -> None:
    assert TABLES.family(word).name == family


def test_an_unknown_family_names_those_there_are_and_the_way_out() -> None:
    with pytest.raises(UsageError) as caught:
        TABLES.family("lama2")
    assert "did you mean llama2?" in caught.value.items
    assert all(name in caught.value.why for name in TABLES.families())
    assert "--table" in caught.value.hint


def test_config_json_decides_by_model_type_or_without_one_by_architectures() -> None:
    assert TABLES.for_config({"model_type": "qwen2"}).name == "qwen2"
    assert TABLES.for_config({"architectures": ["Qwen3MoeForCausalLM"]}).name == "qwen3_moe"


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "mamba", "architectures": ["LlamaForCausalLM"]}, {"model_type": 3, "architectures": "x"}],
)
def test_a_config_json_that_no_table_knows_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        TABLES.for_config(config)
    assert "llama" in caught.value.why
    assert "--model" in caught.value.hint
    assert "--table" in caught.value.hint


def test_mindformers_means_legacy_where_it_exists_else_mcore() -> None:
    chosen = {name: TABLES.mindformers_dialect(TABLES.family(name)) for name in TABLES.families()}
    assert chosen["llama"] == chosen["qwen2"] == chosen["mistral"] == "mindformers-legacy"
    assert chosen["qwen3"] == chosen["qwen3_moe"] == "mindformers-mcore"


def test_variants_are_those_of_the_family_and_of_the_one_it_extends() -> None:
    assert TABLES.variants("mistral", "mindformers-legacy") == ("qkv_concat", "qkv_concat-1.4")
    assert TABLES.variants("qwen3_moe", "mindformers-mcore") == (
        "contiguous",
        "contiguous-mlp",
        "contiguous-qkv",
    )
    assert TABLES.variants("qwen3_moe", HUB) == ("stacked",)
    assert TABLES.variants("llama", "nowhere") == ()
    with pytest.raises(UsageError, match=r"have no variant `qkv`"):
        TABLES.family("llama").table("mindformers-legacy", "qkv")
    with pytest.raises(UsageError, match=r"the llama family has no mindformers-mcore table"):
        TABLES.family("llama").table("mindformers-mcore", "")


@pytest.mark.parametrize("family", TABLES.families())
def test_a_checkpoint_is_recognised_by_its_names(family: str) -> None:
    entry = TABLES.family(family)
    config = tiny_config(entry, sparse_step=1)
    for dialect in (HUB, *TABLES.dialects(family)):
        for variant in ("", *TABLES.variants(family, dialect)):
            names = [rule.target for rule in resolve(entry, config, dialect, variant).rules]
            best = TABLES.detect(names, entry)
            top = [m for m in best if m.matched == best[0].matched]
            assert (dialect, variant) in [(m.dialect, m.variant) for m in top]
            assert {m.dialect for m in top} == {dialect}
            assert best[0].matched == best[0].total == len(names)


def test_two_variants_with_the_same_names_are_both_candidates() -> None:
    entry = TABLES.family("llama")
    names = [r.target for r in resolve(entry, tiny_config(entry), "mindformers-legacy", "qkv_concat").rules]
    found = TABLES.detect(names, entry)
    top = {(m.dialect, m.variant) for m in found if m.matched == len(names)}
    assert top == {("mindformers-legacy", "qkv_concat"), ("mindformers-legacy", "qkv_concat-1.4")}


def test_names_that_no_table_knows_give_no_candidate() -> None:
    assert TABLES.detect(["transformer.h.0.attn.c_attn.weight", "wte.weight"]) == []


def test_a_name_with_a_prefix_is_not_taken_for_the_tensor() -> None:
    assert TABLES.detect(["module.model.embed_tokens.weight"]) == []


def test_without_a_family_all_families_are_tried() -> None:
    entry = TABLES.family("qwen3")
    names = [rule.target for rule in resolve(entry, tiny_config(entry), "mindformers-mcore").rules]
    best = TABLES.detect(names)[0]
    assert (best.family, best.dialect, best.matched, best.absent) == ("qwen3", "mindformers-mcore", len(names), 0)


def test_choosing_and_detecting_do_not_import_numpy() -> None:
    code = (
        "import sys\n"
        "from ckptkit.mapping.tables import load_tables\n"
        "tables = load_tables()\n"
        "tables.check()\n"
        "tables.detect(['lm_head.weight'], tables.for_config({'model_type': 'llama'}))\n"
        "assert 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_only_the_tables_that_are_needed_are_parsed(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "broken.toml").write_text("not TOML")
    text = (Path(__file__).parents[2] / "mappings" / "hf" / "llama.toml").read_text()
    (tmp_path / "hf" / "llama.toml").write_text(text)
    tables = Tables(tmp_path)
    assert tables.families() == ("broken", "llama")
    assert tables.family("llama").name == "llama"
    with pytest.raises(UsageError, match=r"broken.toml` is not valid TOML"):
        tables.family("llama2")


OWN = """
family = "mine"
model_types = ["mine"]
dialect = "mindformers-legacy"

[dims]
hidden = "d_model"
layers = "n_layer"
heads = "n_head"

[ranges]
layer = "layers"

[[tensor]]
hf = "wte.weight"
shape = [16, "hidden"]
target = "model.tok_embeddings.embedding_weight"
stage = "first"

[[tensor]]
hf = ["h.{layer}.q.weight", "h.{layer}.k.weight"]
shape = [["hidden", "hidden"], ["hidden", "hidden"]]
bias = true
target = "model.layers.{layer}.attention.qk.weight"
ops = [{ op = "rope-permute", axis = 0, blocks = "2*heads", to = "pairs" }]
tp = { axis = 0, unit = "heads" }

[[ignore]]
hf = "h.{layer}.mask"
why = "buffer"
"""
CONFIG = {"model_type": "mine", "d_model": 8, "n_layer": 2, "n_head": 2}


def test_a_users_own_family_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN.replace("ops = [", 'ops = [{ op = "concat" }, '))
    tables = load_tables([path])
    entry = tables.for_config(CONFIG)
    assert entry.name == "mine"
    assert tables.dialects(entry) == ("mindformers-legacy",)
    rules = resolve(entry, CONFIG, tables.mindformers_dialect(entry))
    hub = numbered_tensors(rules)
    assert set(hub) >= {"wte.weight", "h.0.q.weight", "h.1.k.bias"}
    made = forward(rules, hub)
    assert made["model.layers.1.attention.qk.weight"].shape == (16, 8)
    assert made["model.layers.1.attention.qk.bias"].shape == (16,)
    for name, array in backward(rules, made).items():
        np.testing.assert_array_equal(array, hub[name])
    assert rules.rules[1].origin == f"{path} row 2"
    assert rules.ignored("h.1.mask", "hf") == "buffer"
    assert resolve(entry, CONFIG, HUB).rules[0].expr == Leaf("wte.weight", (16, 8))


def test_a_users_row_with_too_few_shapes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN.replace('[["hidden", "hidden"], ["hidden", "hidden"]]', '["hidden", "hidden"]'))
    with pytest.raises(UsageError, match=r"mine.toml row 2: `shape` must be a list of 2 shapes"):
        load_tables([path])


def test_a_users_file_can_extend_a_shipped_family(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'family = "mine"\nmodel_types = ["mine"]\ndialect = "mindformers-legacy"\nextends = "llama"\n'
        '[[tensor]]\nhf = "model.layers.{layer}.self_attn.q_norm.weight"\nshape = ["head_dim"]\n'
        'target = "model.layers.{layer}.attention.q_norm.weight"\n'
    )
    tables = load_tables([path])
    entry = tables.family("mine")
    config = tiny_config(entry)
    names = [rule.target for rule in resolve(entry, config, "mindformers-legacy", "qkv_concat").rules]
    assert "model.layers.2.attention.q_norm.weight" in names
    assert "model.layers.2.attention.w_qkv.weight" in names
    assert names[-1] == "lm_head.weight"


def test_a_users_table_goes_before_a_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN.replace('model_types = ["mine"]', 'model_types = ["llama"]\naliases = ["llama2"]'))
    tables = load_tables([path])
    assert tables.for_config({"model_type": "llama"}).name == "mine"
    assert tables.family("llama2").name == "mine"
    assert tables.family("llama").name == "llama"


def test_the_example_in_the_readme_of_the_tables_works(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "mappings" / "README.md").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.split("```toml\n")[1].split("```")[0])
    entry = load_tables([path]).family("mine")
    rules = resolve(entry, {"hidden_size": 2, "num_hidden_layers": 1}, "mindformers-legacy").rules
    assert [(rule.target, rule.expr.shape, rule.tp_unit) for rule in rules] == [
        ("model.layers.0.feed_forward.w_gate_hidden.weight", (16, 2), 2)
    ]

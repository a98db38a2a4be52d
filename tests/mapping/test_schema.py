"""One malformed table after another: each is refused, and the message says which file, which row and what.

Every case is the sound user's table below with one thing changed, so that nothing else can be the cause.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.errors import UsageError
from ckptkit.mapping.rules import resolve
from ckptkit.mapping.tables import Tables, load_tables
from tests.mapping.tiny_configs import tiny_config

CATALOGUE = """
family = "toy"
aliases = ["toys"]
model_types = ["toy"]
architectures = ["ToyForCausalLM"]
tied = { key = "tie_word_embeddings", default = false }

[dims]
hidden = "hidden_size"
layers = "num_hidden_layers"
heads = "num_attention_heads"
kv_heads = { key = "num_key_value_heads", default = "heads" }
experts = 3

[multiples]
heads = "kv_heads"

[flags]
biased = { key = "attention_bias", default = false }

[sets]
late = { start = 1, every = 1 }
early = { not = "late" }

[ranges]
layer = "layers"
expert = "experts"

[[tensor]]
hf = "embed.weight"
shape = ["hidden", 4]
stage = "first"

[[tensor]]
hf = "layers.{layer}.q.weight"
shape = ["heads*2", "hidden"]
bias = "biased"

[[tensor]]
hf = "layers.{layer}.k.weight"
shape = ["kv_heads*2", "hidden"]
bias = "biased"

[[tensor]]
hf = "layers.{layer}.experts.{expert}.w.weight"
shape = ["hidden", 6]

[[tensor]]
hf = "head.weight"
shape = ["hidden", 4]
tied_to = "embed.weight"

[[ignore]]
hf = "layers.{layer}.inv_freq"
why = "buffer"
"""

DIALECT = """
family = "toy"
dialect = "meta"

[[tensor]]
hf = "embed.weight"
target = "tok.weight"
stage = "first"

[[tensor]]
hf = ["layers.{layer}.q.weight", "layers.{layer}.k.weight"]
target = "blocks.{layer}.qk.weight"
ops = [{ op = "interleave", axis = 0, groups = "kv_heads" }]
tp = { axis = 0, unit = "kv_heads" }

[[tensor]]
hf = "layers.{layer}.experts.{expert}.w.weight"
target = "blocks.{layer}.w"
ops = [{ op = "stack", over = "expert" }, { op = "transpose", perm = [0, 2, 1] }]
ep = 0

[[tensor]]
hf = "head.weight"
target = "out.weight"

[[ignore]]
target = "*.seed"
why = "state"
"""

VARIANT = """
family = "toy"
dialect = "meta"
variant = "plain"

[[tensor]]
hf = ["layers.{layer}.q.weight", "layers.{layer}.k.weight"]
target = "blocks.{layer}.qk.weight"
ops = [{ op = "concat", axis = 0 }]
"""

CONFIG = {
    "model_type": "toy", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attention_bias": True,
}  # fmt: skip


def tables(folder: Path, *, hf: str = CATALOGUE, meta: str = DIALECT, plain: str = VARIANT) -> Tables:
    for name, text in (("hf/toy", hf), ("meta/toy", meta), ("meta/toy.plain", plain)):
        path = folder / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return Tables(folder)


def test_the_sound_tables_pass(tmp_path: Path) -> None:
    found = tables(tmp_path)
    assert found.check() == ("mappings/hf/toy.toml", "mappings/meta/toy.toml", "mappings/meta/toy.plain.toml")
    rules = resolve(found.family("toys"), CONFIG, "meta", "plain")
    shapes = {rule.target: rule.expr.shape for rule in rules.rules}
    assert shapes["blocks.1.qk.weight"] == (12, 8)
    assert shapes["blocks.1.qk.bias"] == (12,)
    assert shapes["blocks.0.w"] == (3, 6, 8)


CATALOGUE_FAULTS = [
    ('family = "toy"', "", "mappings/hf/toy.toml: `family` is missing"),
    ('family = "toy"', 'family = "other"', 'says `family = "other"`'),
    ('aliases = ["toys"]', "aliases = 3", "`aliases` must be a text or a list of texts, not 3"),
    ('aliases = ["toys"]', 'alias = ["toys"]', "unknown key `alias`\nhint: did you mean `aliases`?"),
    ("tied = {", "tied_x = {", "unknown key `tied_x`"),
    ('tied = { key = "tie_word_embeddings", default = false }', "", "`tied` does not say which config key decides"),
    ('"tie_word_embeddings", default = false', '"tie_word_embeddings"', "`default` must be true or false, not None"),
    ('hidden = "hidden_size"', "hidden = 2.5", "[dims]: `hidden` must be a whole number"),
    ('hidden = "hidden_size"', "hidden = true", "[dims]: `hidden` must be a whole number"),
    ('hidden = "hidden_size"', 'Hidden-1 = "hidden_size"', "`Hidden-1` is no name for a dim"),
    ('default = "heads"', 'default = "headz"', "[dims]: unknown dim `headz`"),
    ('default = "heads"', 'default = "heads^2"', "`default`: `heads^2` is not a product or sum"),
    ('default = "heads" }', 'default = "heads", min = 1 }', "[dims] [kv_heads]: unknown key `min`"),
    ('heads = "kv_heads"', 'heads = "experts_"', "[multiples]: unknown dim `experts_`"),
    ('not = "late"', 'not = "later"', "[sets]: unknown layer set `later`"),
    ('not = "late"', 'not = "late", every = 2', "[sets] [early]: `not` stands alone"),
    ("start = 1, every = 1", 'start = "offset"', "[sets]: unknown dim `offset`"),
    ("start = 1, every = 1", 'needs = "nothing"', "[sets]: unknown dim `nothing`"),
    ("start = 1, every = 1", "offset = -1", "`offset` must be a whole number of 0 or more, not -1"),
    ('expert = "experts"\n', "", "hf/toy.toml row 4: unknown range `expert`"),
    ('expert = "experts"\n', 'expert = "expert"\n', "[ranges]: unknown dim `expert`"),
    ('hf = "embed.weight"\n', "", "hf/toy.toml row 1: `hf` is missing"),
    ('hf = "embed.weight"\n', 'hf = "embed..weight"\n', "row 1: `embed..weight` has an empty part"),
    ('hf = "layers.{layer}.q.weight"', 'hf = "layers{layer}.q.weight"', "row 2: `layers{layer}.q.weight` has"),
    ('hf = "layers.{layer}.q.weight"', 'hf = "l.{layer}.{layer}.weight"', "row 2: `l.{layer}.{layer}.weight` has a"),
    ('hf = "layers.{layer}.q.weight"', 'hf = "layers.{layer}.k.weight"', "row 3: `layers.{layer}.k.weight` is already"),
    ('hf = "layers.{layer}.q.weight"', 'hf = "layers.{layer}.q"', "row 2: `layers.{layer}.q` does not end in"),
    ('hf = "head.weight"', 'hf = "layers.{expert}.k.bias"', "row 5: `layers.{expert}.k.bias` is already a name"),
    ('shape = ["hidden", 4]\nstage', "stage", "row 1: `shape` is missing or empty"),
    ('shape = ["hidden", 4]\nstage', 'shape = ["hidden", "four"]\nstage', "row 1: unknown dim `four`"),
    ('shape = ["hidden", 4]\nstage', 'shape = ["hidden", true]\nstage', "row 1: `shape` must be a dim, a number"),
    ('shape = ["hidden", 4]\nstage', 'shape = "hidden"\nstage', "row 1: `shape` must be a list, not 'hidden'"),
    ('stage = "first"', 'stage = "start"', "row 1: `stage` is `start`, which is none of"),
    ('stage = "first"', 'stage = "layer"', "row 1: stage `layer` does not fit the hf `embed.weight`"),
    ('stage = "first"', 'layers = "late"', "row 1: `layers` is given, but `embed.weight` has no `{layer}`"),
    ('shape = ["hidden", 6]', 'shape = ["hidden", 6]\nlayers = "la"', "row 4: unknown layer set `la`"),
    ('bias = "biased"', 'bias = "bias"', "row 2: unknown flag `bias`"),
    ('bias = "biased"', "bias = 1", "row 2: `bias` must be true or the name of a flag, not 1"),
    ('tied_to = "embed.weight"', 'tied_to = "embed"', "row 5: unknown tensor `embed`"),
    ('tied_to = "embed.weight"', "tied_to = 1", "row 5: `tied_to` must be a text, not 1"),
    ('why = "buffer"', "", "ignore row 1: `why` is missing"),
    ('why = "buffer"', 'why = "buffer"\ntarget = "x"', "ignore row 1: needs either `hf` or `target`"),
    ("[[ignore]]", "[ignore]", "`ignore` must be a list"),
    ('why = "buffer"', 'why = "buffer"\n[[config]]\nkey = "x"\nwhy = "y"', "config row 1: `then` is missing"),
    ('why = "buffer"', 'why = "buffer"\n[[config]]\nkey = "x"\nwhy = "y"\nthen = "stop"', "`then` is `stop`"),
    ("[dims]", "[dims", "table `mappings/hf/toy.toml` is not valid TOML"),
    ('family = "toy"', 'family = "toy"\nextends = "nobody"', "`toy` extends `nobody`, which has no catalogue"),
    ('family = "toy"', 'family = "toy"\nextends = "toy"', "the catalogues of toy extend one another"),
]  # fmt: skip

OPS = 'ops = [{ op = "interleave", axis = 0, groups = "kv_heads" }]'
STACK = '{ op = "stack", over = "expert" }, '
DIALECT_FAULTS = [
    ('dialect = "meta"', 'dialect = "meta2"', "which does not fit its name"),
    ('target = "tok.weight"', "", "mappings/meta/toy.toml row 1: `target` is missing"),
    ('target = "tok.weight"', 'targets = "tok.weight"', "unknown key `targets`\nhint: did you mean `target`?"),
    ('target = "tok.weight"', 'target = "out.weight"', "row 4: `out.weight` is already a name of mappings/meta/toy"),
    ('target = "tok.weight"', 'target = "tok.{expert}.weight"', "row 1: `tok.{expert}.weight` has the placeholder"),
    ('hf = "embed.weight"', 'hf = "embeds.weight"', "row 1: `embeds.weight` is no tensor of mappings/hf/toy.toml"),
    ('hf = "embed.weight"', 'hf = "head.weight"', "row 4: `head.weight` is already covered by mappings/meta/toy"),
    ('[[tensor]]\nhf = "head.weight"\ntarget = "out.weight"\n', "", "has no row for 1 tensors of mappings/hf/toy"),
    (OPS, 'ops = [{ op = "weave", axis = 0 }]', "row 2 op 1: `op` is `weave`, which is none of concat"),
    (OPS, 'ops = [{ op = "interleave", axis = 0 }]', "row 2 op 1: `groups` is missing"),
    (OPS, 'ops = [{ op = "interleave", groups = "groups" }]', "row 2: unknown dim `groups`"),
    (OPS, 'ops = [{ op = "concat", groups = 2 }]', "row 2 op 1: unknown key `groups`"),
    (OPS, 'ops = [{ op = "concat", axis = 2 }]', "row 2: `concat` on axis 2 of a tensor with 2 axes"),
    (OPS, 'ops = [{ op = "concat", axis = 1 }]', "row 2: its tensors have biases, and `concat` on axis 1"),
    (OPS, 'ops = "concat"', "row 2: `ops` must be a list, not 'concat'"),
    (OPS, 'ops = ["concat"]', "row 2: `ops` must be written as [[ops]] rows"),
    (OPS, "", "row 2: 2 tensors in `hf` and one target, but no op joins them"),
    (OPS, OPS[:-1] + ', { op = "concat", axis = 0 }]', "row 2: `concat` joins tensors, but only one is left"),
    (OPS, OPS[:-1] + ', { op = "transpose", perm = [1, 0] }]', "and `transpose` on axis 0 does not carry over"),
    ('hf = ["layers.{layer}.q.weight", "layers.{layer}.k.weight"]', 'hf = "layers.{layer}.q.weight"', "row 2: `int"),
    ('"layers.{layer}.k.weight"]', '"layers.{layer}.q.weight"]', "row 2: `hf` holds a name twice"),
    ('"layers.{layer}.k.weight"]', '"layers.{layer}.experts.{expert}.w.weight"]', "row 2: `layers.{layer}.q.weight` "),
    ('target = "blocks.{layer}.qk.weight"', 'target = "blocks.{layer}.qk"', "but `blocks.{layer}.qk` does not end in"),
    ('target = "blocks.{layer}.qk.weight"', 'target = "blocks.qk.weight"', "`{layer}` is in `hf` and not in `blocks"),
    (STACK, "", "row 3: `perm` has 3 axes, but the tensor there has 2"),
    (STACK, '{ op = "stack" }, ', "row 3 op 1: `over` is missing"),
    (STACK, '{ op = "stack", over = "layer" }, ', "row 3: `stack` over `layer`, which is not left over"),
    (STACK, STACK + STACK, "row 3: `stack` over `expert`, which is not left over"),
    ("perm = [0, 2, 1]", "perm = [0, 2]", "row 3 op 2: `perm` must hold each axis once, not [0, 2]"),
    ("perm = [0, 2, 1]", 'perm = ["x"]', "row 3 op 2: `perm` must hold each axis once, not ['x']"),
    ("ep = 0", "ep = 3", "row 3: `ep` cuts axis 3, but `blocks.{layer}.w` has 3 axes"),
    ("ep = 0", "ep = -1", "row 3: `ep` must be a whole number of 0 or more, not -1"),
    ("ep = 0", 'ep = { axis = 0, unless = "vocab_emb_dp" }', "row 3 [ep]: unknown key `unless`"),
    ('tp = { axis = 0, unit = "kv_heads" }', 'tp = { unit = "kv_heads" }', "row 2 [tp]: `axis` is missing"),
    ('tp = { axis = 0, unit = "kv_heads" }', 'tp = { axis = 0, unit = "kv" }', "row 2: unknown dim `kv`"),
    ('tp = { axis = 0, unit = "kv_heads" }', 'tp = { axis = 0, unless = "x" }', "row 2 [tp]: `unless` is `x`, which"),
    ('target = "*.seed"', 'target = "*.{seed"', "ignore row 1: `*.{seed` has `{seed`"),
    ('dialect = "meta"', 'dialect = "meta"\n[[expect]]\nequal = ["hidden"]\nwhy = "x"', "`equal` must hold two"),
    ('dialect = "meta"', 'dialect = "meta"\n[[expect]]\nequal = ["hidden", "w"]\nwhy = "x"', "unknown dim `w`"),
    ('family = "toy"', 'family = "toy"\nextends = "toy"', "the meta tables of toy extend one another"),
    ('family = "toy"', 'family = "toy"\nextends = "llama"', "the llama family has no meta table"),
]  # fmt: skip

VARIANT_FAULTS = [
    ('variant = "plain"', 'variant = "other"', "variant `other`, which does not fit its name"),
    ('"layers.{layer}.q.weight", "layers.{layer}.k.weight"', '"layers.{layer}.z.weight"', "so it overrides nothing"),
    (', "layers.{layer}.k.weight"]', "]", "row 1: `concat` joins tensors, but only one is left to it"),
    ('axis = 0 }]\n', 'axis = 0 }]\n[[tensor]]\nhf = "embed.weight"\ntarget = "out.weight"', "is already a name of"),
]  # fmt: skip


def _changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(("old", "new", "said"), CATALOGUE_FAULTS)
def test_a_malformed_catalogue_is_refused_by_name(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        tables(tmp_path, hf=_changed(CATALOGUE, old, new)).check()
    assert said in str(caught.value)


@pytest.mark.parametrize(("old", "new", "said"), DIALECT_FAULTS)
def test_a_malformed_dialect_table_is_refused_by_name(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        tables(tmp_path, meta=_changed(DIALECT, old, new)).check()
    assert said in str(caught.value)


@pytest.mark.parametrize(("old", "new", "said"), VARIANT_FAULTS)
def test_a_malformed_variant_is_refused_by_name(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        tables(tmp_path, plain=_changed(VARIANT, old, new)).check()
    assert said in str(caught.value)


def test_sources_of_one_row_must_agree_about_their_bias(tmp_path: Path) -> None:
    hf = _changed(CATALOGUE, 'shape = ["kv_heads*2", "hidden"]\nbias = "biased"', 'shape = ["kv_heads*2", "hidden"]')
    with pytest.raises(UsageError, match=r"cannot be joined: they differ in bias, layers or optional"):
        tables(tmp_path, hf=hf).check()


def test_a_variant_that_leaves_a_tensor_out_is_refused(tmp_path: Path) -> None:
    plain = _changed(
        VARIANT, 'hf = ["layers.{layer}.q.weight", "layers.{layer}.k.weight"]', 'hf = "layers.{layer}.q.weight"'
    )
    plain = _changed(plain, 'ops = [{ op = "concat", axis = 0 }]', "")
    with pytest.raises(UsageError, match=r"has no row for 1 tensors") as caught:
        tables(tmp_path, plain=plain).check()
    assert caught.value.items == ("layers.{layer}.k.weight",)


@pytest.mark.parametrize(
    ("kept", "claim"),
    [
        ('aliases = ["toys"]', "toys"),
        ('model_types = ["toy"]', "toy"),
        ('architectures = ["ToyForCausalLM"]', "ToyForCausalLM"),
    ],
)
def test_what_two_families_claim_is_refused(tmp_path: Path, kept: str, claim: str) -> None:
    tables(tmp_path)
    twin = CATALOGUE.replace('family = "toy"', 'family = "twin"')
    for line in ('aliases = ["toys"]', 'model_types = ["toy"]', 'architectures = ["ToyForCausalLM"]'):
        twin = twin if line == kept else twin.replace(line, line.replace("oy", "win"))
    (tmp_path / "hf" / "twin.toml").write_text(twin)
    with pytest.raises(UsageError, match=f"`{claim}` is claimed by two families, toy and twin"):
        Tables(tmp_path).check()
    if claim == "toys":
        with pytest.raises(UsageError, match=r"`toys` is claimed by two families, toy and twin"):
            Tables(tmp_path).family("toys")


def test_an_optional_tensor_keeps_its_reason_and_marks_its_rules(tmp_path: Path) -> None:
    hf = _changed(CATALOGUE, 'shape = ["hidden", 6]', 'shape = ["hidden", 6]\noptional = "older files lack it"')
    found = tables(tmp_path, hf=hf)
    rules = resolve(found.family("toy"), CONFIG, "meta").rules
    assert {rule.target.split(".")[-1] for rule in rules if rule.optional} == {"w"}


def test_a_dialect_table_without_a_catalogue_is_found_by_the_check(tmp_path: Path) -> None:
    tables(tmp_path)
    (tmp_path / "meta" / "stray.toml").write_text(DIALECT.replace('"toy"', '"stray"'))
    with pytest.raises(UsageError, match=r"dialect tables for `stray`, but no `hf/stray.toml`"):
        Tables(tmp_path).check()


def test_a_file_of_neither_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text('family = "odd"\n')
    with pytest.raises(UsageError, match=r"is neither a catalogue nor a dialect table"):
        load_tables([path])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read table `.*gone.toml`: No such file"):
        load_tables([tmp_path / "gone.toml"])


def test_a_dialects_config_row_can_only_warn(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    row = '[[config]]\nkey = "x"\nthen = "{}"\nwhy = "the net cannot hold it"\n'
    base = Path("mappings/mindformers-legacy/llama.toml").read_text()
    file.write_text(base + row.format("warn"))
    table = load_tables([file]).family("llama").table("mindformers-legacy", "")
    assert [(config.key, config.then) for config in table.configs] == [("x", "warn")]
    file.write_text(base + row.format("refuse"))
    with pytest.raises(UsageError, match="`refuse` belongs in the catalogue"):
        load_tables([file])


def test_a_net_that_cannot_hold_a_config_is_said() -> None:
    family = load_tables().family("qwen3_moe")
    config = tiny_config(family)
    sound = config | {"mlp_only_layers": [], "decoder_sparse_step": 1, "attention_bias": False}
    assert resolve(family, sound, "mindformers-mcore").warnings == ()
    (warning,) = resolve(family, sound | {"mlp_only_layers": [0]}, "mindformers-mcore").warnings
    assert "`mlp_only_layers` is [0]" in warning

"""The contract: what an optimizer keeps for a weight goes wherever the weight goes, by the weight's own rule.

Every table is tested, with every prefix that MindSpore's and MindFormers' optimizers use; and these optimizers are
asked themselves what they call their state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_configs import forward, numbered_tensors, tiny_config

from ckptkit.errors import CoverageError
from ckptkit.formats.base import Checkpoint
from ckptkit.mapping import state
from ckptkit.mapping.expr import Leaf, Node, evaluate
from ckptkit.mapping.op import Array
from ckptkit.mapping.rules import RuleSet, resolve
from ckptkit.mapping.state import add_state, identity_rules
from ckptkit.mapping.state_names import PREFIXES, is_counter, is_state, parameter_of, state_of
from ckptkit.mapping.tables import HUB, load_tables
from ckptkit.plan.express import express
from ckptkit.plan.match import match
from ckptkit.types import Region, TensorInfo, TensorSpec

TABLES = load_tables()
SPOKES = [
    (family, dialect, variant)
    for family in TABLES.families()
    for dialect in (HUB, *TABLES.dialects(family))
    for variant in ("", *TABLES.variants(family, dialect))
]
COUNTERS = {"global_step": (1,), "learning_rate": (), "beta1_power": (), "loss_scale": ()}


def both(family: str, dialect: str, variant: str = "", **config: object) -> tuple[RuleSet, RuleSet]:
    entry = TABLES.family(family)
    values = tiny_config(entry, flags=True) | config
    return resolve(entry, values, HUB), resolve(entry, values, dialect, variant)


def infos(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, shape, "F32", Path("x"), ()) for name, shape in shapes.items()}


def stored_as(arrays: Mapping[str, Array]) -> dict[str, TensorInfo]:
    return infos({name: array.shape for name, array in arrays.items()})


def shapes_of(rules: RuleSet) -> dict[str, tuple[int, ...]]:
    return {rule.target: rule.expr.shape for rule in rules.rules}


def moved(source: RuleSet, target: RuleSet, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return `arrays`, named as `source` has them, as `target` has them; none of them may be left over."""
    source, target = add_state(source, target, stored_as(arrays))
    assert {rule.target for rule in source.rules} == arrays.keys()
    made = {}
    for rule, expr, lacking in express(source, target, ()):
        assert expr is not None, lacking
        made[rule.target] = evaluate(expr, Region.whole(expr.shape), lambda leaf, box: arrays[leaf.name][box.slices()])
    return made


def test_of_a_name_its_parameter_is_known() -> None:
    assert state_of("adam_m.model.layers.0.wq.weight") == ("adam_m.", "model.layers.0.wq.weight")
    assert state_of("exp_avg_sq.w") == ("exp_avg_sq.", "w")
    assert state_of("exp_avg_sq_w") == ("exp_avg_sq_", "w")
    assert state_of("exp_avg_sq_row_w.weight") == ("exp_avg_sq_row_", "w.weight")
    assert parameter_of("adam_v.w") == "w"
    assert parameter_of("exp_avg_sq_row_w") is None, "the layout of a matrix says nothing of a sum over its rows"
    weights = ("model.layers.0.wq.weight", "adam_m", "adam_m.", "adam_mm.w", "moment", "linear.weight", "exp_avg_sq_")
    for weight in weights:
        assert state_of(weight) is None
        assert parameter_of(weight) is None
        assert not is_state(weight)
    assert is_state("adam_m.w")
    assert is_state("global_step")
    assert not is_counter("model.global_step")
    assert is_counter("learning_rate_group_12")


@pytest.mark.parametrize(("family", "dialect", "variant"), SPOKES)
def test_state_of_every_prefix_survives_there_and_back(family: str, dialect: str, variant: str) -> None:
    hub, spoke = both(family, dialect, variant)
    weights = numbered_tensors(hub)
    there = forward(spoke, weights)
    arrays, wanted = dict(weights), dict(there)
    for number, prefix in enumerate(PREFIXES, start=1):
        arrays |= {prefix + name: array + 100_000 * number for name, array in weights.items()}
        wanted |= {prefix + name: array + 100_000 * number for name, array in there.items()}
    counters = {name: np.full(shape, 7, np.uint32) for name, shape in COUNTERS.items()}
    arrays |= counters
    wanted |= counters
    made = moved(hub, spoke, arrays)
    assert made.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(made[name], array, err_msg=name)
    back = moved(spoke, hub, made)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


def test_state_that_is_swapped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken control: a prefix put on the parts of a fused moment in the wrong order."""

    def crossed(expr: Leaf | Node, prefix: str) -> Leaf | Node:
        right = prefixed(expr, prefix)
        if isinstance(right, Node) and right.children[0].shape == right.children[-1].shape:
            return Node(right.op, right.children[::-1], right.shape)
        return right

    prefixed = state._prefixed
    monkeypatch.setattr(state, "_prefixed", crossed)
    with pytest.raises(AssertionError, match="adam_m.model.layers.0.feed_forward.w_gate_hidden.weight"):
        test_state_of_every_prefix_survives_there_and_back("llama", "mindformers-legacy", "qkv_concat")


@pytest.mark.parametrize(("family", "dialect", "variant"), SPOKES)
def test_rules_of_state_are_those_of_the_weight(family: str, dialect: str, variant: str) -> None:
    hub, spoke = both(family, dialect, variant)
    names = {leaf.name: leaf.shape for rule in hub.rules for leaf in rule.sources}
    _, more = add_state(hub, spoke, infos(names | {f"adam_m.{name}": shape for name, shape in names.items()}))
    assert len(more.rules) == 2 * len(spoke.rules)
    assert more.rules[: len(spoke.rules)] == spoke.rules, "weights come first, as they were"
    for weight, moment in zip(spoke.rules, more.rules[len(spoke.rules) :], strict=True):
        assert moment.target == f"adam_m.{weight.target}"
        assert (moment.layer, moment.stage, moment.origin) == (weight.layer, weight.stage, weight.origin)
        assert (moment.tp_axis, moment.tp_unit, moment.ep_axis) == (weight.tp_axis, weight.tp_unit, weight.ep_axis)
        assert moment.is_state
        assert not weight.is_state


def test_weights_alone_get_no_more_rules() -> None:
    hub, spoke = both("llama", "mindformers-legacy")
    assert add_state(hub, spoke, infos(shapes_of(hub))) == (hub, spoke)


def test_a_frozen_parameter_has_no_state_and_needs_none() -> None:
    hub, spoke = both("llama", "mindformers-legacy")
    shapes = shapes_of(hub)
    trained = {f"moment1.{name}": shape for name, shape in shapes.items() if "layers.1." in name}
    source, target = add_state(hub, spoke, infos(shapes | trained))
    assert {rule.target for rule in source.rules} - shapes.keys() == trained.keys()
    made = {rule.target for rule in target.rules} - shapes_of(spoke).keys()
    assert made == {f"moment1.{name}" for name in shapes_of(spoke) if "layers.1." in name}


def test_a_tied_head_that_is_not_stored_has_no_state() -> None:
    hub, spoke = both("llama", "mindformers-legacy", tie_word_embeddings=True)
    shapes = {name: shape for name, shape in shapes_of(hub).items() if name != "lm_head.weight"}
    stored = infos(shapes | {f"adam_v.{name}": shape for name, shape in shapes.items()})
    source, target = add_state(hub, spoke, stored)
    matched = match(checkpoint(stored), source)
    assert not matched.unmapped
    absent = [(rule.target, lacking) for rule, expr, lacking in express(source, target, matched.absent) if expr is None]
    assert absent == [("lm_head.weight", ("lm_head.weight",))]
    assert "adam_v.model.tok_embeddings.embedding_weight" in {rule.target for rule in target.rules}


def test_a_fused_moment_of_which_some_parts_are_stored_is_not_left_out() -> None:
    """The rule stands, so that the planner says what is missing."""
    hub, spoke = both("llama", "mindformers-legacy", "qkv_concat")
    shapes = shapes_of(hub)
    lost = "adam_m.model.layers.2.self_attn.k_proj.weight"
    stored = shapes | {f"adam_m.{name}": shape for name, shape in shapes.items()}
    del stored[lost]
    source, target = add_state(hub, spoke, infos(stored))
    lacking = {rule.target: names for rule, _, names in express(source, target, ()) if names}
    assert lacking == {"adam_m.model.layers.2.attention.w_qkv.weight": (lost,)}


def test_state_of_another_shape_than_its_parameter_is_refused() -> None:
    hub, spoke = both("llama", "mindformers-legacy")
    shapes = shapes_of(spoke)
    name = "model.norm_out.weight"
    (size,) = shapes[name]
    stored = infos(shapes | {f"adam_m.{name}": (size // 2,), f"adam_v.{name}": (size,)})
    with pytest.raises(CoverageError, match="1 tensor of state has another shape") as caught:
        add_state(spoke, hub, stored)
    assert caught.value.items == (f"adam_m.{name} ({size // 2},), {name} ({size},)",)


def test_state_as_wrong_as_its_parameter_is_refused_with_it() -> None:
    """Then it is config.json that is wrong, and `match` says so."""
    hub, spoke = both("llama", "mindformers-legacy")
    shapes = shapes_of(spoke)
    name = "model.norm_out.weight"
    stored = infos(shapes | {name: (3,), f"adam_m.{name}": (3,)})
    source, _ = add_state(spoke, hub, stored)
    with pytest.raises(CoverageError, match="2 tensors have another shape than config.json") as caught:
        match(checkpoint(stored), source)
    assert [item.split()[0] for item in caught.value.items] == [name, f"adam_m.{name}"]


@pytest.mark.parametrize(
    "name", ["adam_m.model.rotary.freqs", "exp_avg_sq_row_model.norm_out.weight", "linear.model.norm_out.weight"]
)
def test_state_without_a_rule_stays_unmapped(name: str) -> None:
    hub, spoke = both("llama", "mindformers-legacy")
    stored = infos(shapes_of(spoke) | {name: (4,)})
    source, _ = add_state(spoke, hub, stored)
    with pytest.raises(CoverageError, match="1 tensor of .* matches no row") as caught:
        match(checkpoint(stored), source)
    assert caught.value.items == (f"{name}  (4,)  F32",)


def test_counters_keep_name_and_shape_and_are_on_every_stage() -> None:
    hub, spoke = both("llama", "mindformers-legacy")
    for rules in add_state(spoke, hub, infos(shapes_of(spoke) | COUNTERS)):
        found = {rule.target: rule for rule in rules.rules if rule.is_state}
        assert {name: rule.expr for name, rule in found.items()} == {n: Leaf(n, s) for n, s in COUNTERS.items()}
        assert {(r.stage, r.layer, r.tp_axis, r.ep_axis) for r in found.values()} == {("all", None, None, None)}


def test_muons_placeholders_keep_their_names() -> None:
    """A parameter has Muon's moment or Adam's; MindFormers puts one element where it has not."""
    hub, spoke = both("qwen3", "mindformers-mcore")
    weights = numbered_tensors(hub)
    there = forward(spoke, weights)
    zero = np.zeros(1, np.uint32)
    stored = dict(there)
    for name, array in there.items():
        muon = array.ndim == 2
        stored |= {f"muon_m.{name}": array + 1 if muon else zero}
        stored |= {f"adam_{x}.{name}": zero if muon else array + 2 for x in "mv"}
    made = moved(spoke, hub, stored)
    assert made["adam_m.decoder.layers.0.self_attention.linear_qkv.weight"].shape == (1,)
    assert made["muon_m.model.layers.0.self_attn.q_proj.weight"].shape == (24, 10)
    back = moved(hub, spoke, made)
    assert back.keys() == stored.keys()
    for name, array in stored.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


def test_one_element_in_the_place_of_a_moment_is_else_refused() -> None:
    hub, spoke = both("qwen3", "mindformers-mcore")
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    shapes = shapes_of(spoke) | {f"muon_m.{name}": (1,), f"adam_m.{name}": (1,), f"adam_v.{name}": (1,)}
    with pytest.raises(CoverageError, match="3 tensors of state have another shape"):
        add_state(spoke, hub, infos(shapes))


def test_rules_without_a_table_leave_all_as_it_is() -> None:
    shapes = {"w": (2, 3), "adam_m.w": (2, 3), "accum.weight": (4,), "global_step": ()}
    rules = identity_rules(TensorSpec(name, shape, "F32") for name, shape in shapes.items())
    assert {rule.target: rule.expr for rule in rules.rules} == {name: Leaf(name, s) for name, s in shapes.items()}
    assert [rule.target for rule in rules.rules if rule.is_state] == ["adam_m.w", "global_step"]
    assert (rules.family, rules.dialect, rules.variant, rules.ties) == ("", "", "", ())
    assert match(checkpoint(infos(shapes)), rules).found.keys() == shapes.keys()


def checkpoint(stored: Mapping[str, TensorInfo]) -> Checkpoint:
    whole = {name: replace(info, file=Path("x.ckpt")) for name, info in stored.items()}
    return Checkpoint(Path("x.ckpt"), Path(), "ckpt", (Path("x.ckpt"),), whole)


# ---- what the optimizers themselves say ---------------------------------------------------------------------------


def unknown(names: Collection[str], weights: Collection[str]) -> list[str]:
    """Return the names that are no weight, no state of one of `weights` and no counter."""
    rest = [name for name in names if name not in weights and not is_counter(name)]
    return [name for name in rest if (found := state_of(name)) is None or found[1] not in weights]


@pytest.mark.frameworks
def test_mindspores_optimizers_use_these_names() -> None:
    os.environ.setdefault("GLOG_v", "4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mindspore as ms
        from mindspore import nn
        from mindspore.experimental import optim

        weights = ["model.layers.0.wq.weight", "model.norm.weight"]

        def net() -> list[ms.Parameter]:
            return [
                ms.Parameter(np.ones(shape, np.float32), name=n) for n, shape in zip(weights, [(4, 2), 3], strict=True)
            ]

        kinds = [
            nn.Adam,
            nn.AdamWeightDecay,
            nn.AdaMax,
            nn.LazyAdam,
            nn.Lamb,
            nn.Momentum,
            nn.SGD,
            nn.RMSProp,
            nn.Rprop,
        ]
        kinds += [nn.Adagrad, nn.Adadelta, nn.ProximalAdagrad, nn.AdamOffload, nn.AdaFactor]
        options = {nn.Momentum: (0.1, 0.9), nn.AdaFactor: ()}
        found = {k.__name__: [p.name for p in k(net(), *options.get(k, (0.1,))).get_parameters()] for k in kinds}
        kinds = [optim.Adam, optim.AdamW, optim.Adamax, optim.RAdam, optim.SGD, optim.RMSprop, optim.Rprop]
        kinds += [optim.Adagrad, optim.Adadelta]
        found |= {f"optim.{k.__name__}": [p.name for p in k(net(), 0.1).get_parameters()] for k in kinds}
        found["amsgrad"] = [p.name for p in nn.Adam(net(), use_amsgrad=True).get_parameters()]
        found["centered"] = [p.name for p in nn.RMSProp(net(), centered=True).get_parameters()]
    assert {kind: unknown(names, weights) for kind, names in found.items() if unknown(names, weights)} == {}
    assert sum(len(names) for names in found.values()) > 4 * len(found)
    used = {found[0] for names in found.values() for name in names if (found := state_of(name))}
    assert used >= {"adam_m.", "moment1.", "vhat.", "moments.", "mean_square.", "exp_avg.", "lamb_v.", "stat."}
    assert unknown(["linear.model.norm.weight", "adam_m.other.weight"], weights), "the control"


MINDFORMERS = """
import json, sys
import numpy as np
import mindspore as ms
from mindformers.core.optim import AdamW, Came, FusedAdamW, PmaAdamW
def net():
    return [ms.Parameter(np.ones((4, 2), np.float32), name="model.layers.0.wq.weight")]
made = {kind.__name__: kind(net(), 0.1) for kind in (AdamW, FusedAdamW, PmaAdamW, Came)}
names = {kind: [p.name for p in optimizer.get_parameters()] for kind, optimizer in made.items()}
json.dump(names, open(sys.argv[1], "w"))
"""


@pytest.mark.frameworks
def test_mindformers_optimizers_use_these_names(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    environment = {**os.environ, "GLOG_v": "4"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MINDFORMERS, str(report)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    weights = ["model.layers.0.wq.weight"]
    found = json.loads(report.read_text())
    assert {kind: unknown(names, weights) for kind, names in found.items() if unknown(names, weights)} == {}
    assert {"adam_m.", "exp_avg.", "pma_weight_ema.", "exp_avg_insta_row_"} <= {
        known[0] for names in found.values() for name in names if (known := state_of(name))
    }

"""Every table, found on disk: HF -> dialect -> HF gives the same bytes, and every element travels exactly once.

A new table is tested here without a line of Python. That a table is *right* is another question, which
`test_fused_layouts.py` and the tests against the real nets answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_configs import backward, forward, numbered_tensors, tiny_config, tiny_configs

from ckptkit.errors import UsageError
from ckptkit.mapping.expr import Leaf, evaluate, granules, leaves, pull, substitute
from ckptkit.mapping.op import Array
from ckptkit.mapping.rules import Rule, resolve
from ckptkit.mapping.tables import HUB, load_tables
from ckptkit.types import Region

MAPPINGS = Path(__file__).parents[2] / "mappings"
TABLES = load_tables()
SPOKES = [
    (family, dialect, variant)
    for family in TABLES.families()
    for dialect in (HUB, *TABLES.dialects(family))
    for variant in ("", *TABLES.variants(family, dialect))
]


def test_every_file_in_mappings_is_reached_and_sound() -> None:
    files = {f"mappings/{path.relative_to(MAPPINGS).as_posix()}" for path in MAPPINGS.rglob("*.toml")}
    assert set(TABLES.check()) == files
    assert len(SPOKES) >= len(files)


@pytest.mark.parametrize(("family", "dialect", "variant"), SPOKES)
def test_there_and_back_is_byte_equal(family: str, dialect: str, variant: str) -> None:
    entry = TABLES.family(family)
    for label, config in tiny_configs(entry):
        rules = resolve(entry, config, dialect, variant)
        hub = numbered_tensors(resolve(entry, config, HUB))
        made = forward(rules, hub)
        back = backward(rules, made)
        assert back.keys() == hub.keys(), label
        for name, array in hub.items():
            np.testing.assert_array_equal(back[name], array, err_msg=f"{label}: {name}")
        elements = np.sort(np.concatenate([a.ravel() for a in made.values()]))
        np.testing.assert_array_equal(elements, np.arange(elements.size), err_msg=label)
        assert len(made) == len(rules.rules)


@pytest.mark.parametrize(("family", "dialect", "variant"), SPOKES)
def test_every_parallel_cut_can_be_planned_from_its_boxes_alone(family: str, dialect: str, variant: str) -> None:
    entry = TABLES.family(family)
    config = tiny_config(entry, flags=True)
    rules = resolve(entry, config, dialect, variant)
    hub = numbered_tensors(resolve(entry, config, HUB))
    made = forward(rules, hub)
    for rule in rules.rules:
        for axis, unit in ((rule.tp_axis, rule.tp_unit), (rule.ep_axis, rule.ep_unit)):
            if axis is None:
                continue
            size = rule.expr.shape[axis]
            assert size % unit == 0
            assert unit % granules(rule.expr)[axis] == 0, f"{rule.target}: a unit cuts a group"
            for start in range(0, size, unit):
                region = Region.whole(rule.expr.shape).with_axis(axis, start, start + unit)
                got = _cut(rule, region, hub)
                np.testing.assert_array_equal(got, made[rule.target][region.slices()])


def _cut(rule: Rule, region: Region, hub: dict[str, Array]) -> Array:
    allowed = {(leaf.name, box) for leaf, box in pull(rule.expr, region)}

    def read(leaf: Leaf, box: Region) -> Array:
        assert (leaf.name, box) in allowed
        return hub[leaf.name][box.slices()]

    return evaluate(rule.expr, region, read)


@pytest.mark.parametrize("family", TABLES.families())
def test_any_two_spokes_compose_to_the_same_tensors(family: str) -> None:
    entry = TABLES.family(family)
    config = tiny_config(entry, flags=True)
    hub = numbered_tensors(resolve(entry, config, HUB))
    sets = [resolve(entry, config, d, v) for f, d, v in SPOKES if f == family]
    for source in sets:
        stored = forward(source, hub)
        middle = {leaf.name: back for r in source.rules for leaf, back in zip(r.sources, r.inverse, strict=True)}
        for target in sets:
            wanted = forward(target, hub)
            for rule in target.rules:
                expr = substitute(rule.expr, middle)
                assert {leaf.name for leaf in leaves(expr)} <= stored.keys()
                got = evaluate(expr, Region.whole(expr.shape), lambda leaf, box: stored[leaf.name][box.slices()])  # noqa: B023
                np.testing.assert_array_equal(got, wanted[rule.target])
                if source is target:
                    assert expr == Leaf(rule.target, rule.expr.shape), "a table composed with itself does nothing"


@pytest.mark.parametrize(("family", "dialect", "variant"), SPOKES)
def test_stages_layers_and_ties_are_consistent(family: str, dialect: str, variant: str) -> None:
    entry = TABLES.family(family)
    rules = resolve(entry, tiny_config(entry), dialect, variant)
    targets = {rule.target: rule for rule in rules.rules}
    assert len(targets) == len(rules.rules)
    for rule in rules.rules:
        assert (rule.stage == "layer") == (rule.layer is not None)
        assert rule.origin.startswith("mappings/")
    assert {rule.layer for rule in rules.rules if rule.layer is not None} == set(range(3))
    for tie in rules.ties:
        assert targets[tie.target].expr.shape == targets[tie.target_twin].expr.shape
        assert targets[tie.target].stage == "last"
        assert targets[tie.target_twin].stage == "first"


def test_a_scrambled_table_is_caught(tmp_path: Path) -> None:
    """The broken control: a copy of a table with one HF name moved to another row must not pass."""
    text = (MAPPINGS / "mindformers-legacy" / "llama.toml").read_text()
    scrambled = text.replace("self_attn.k_proj.weight", "self_attn.v_proj.weight")
    assert scrambled != text
    path = tmp_path / "scrambled.toml"
    path.write_text(scrambled)
    with pytest.raises(UsageError, match=r"row 5: `model.layers.\{layer\}.self_attn.v_proj.weight` is already"):
        load_tables([path]).family("llama").table("mindformers-legacy", "")


def test_a_wrong_inverse_is_caught_by_the_round_trip() -> None:
    """The broken control of the round trip itself: rules whose q and k ways back are exchanged."""
    entry = TABLES.family("llama")
    config = tiny_config(entry, kv_heads=4)
    rules = resolve(entry, config, "mindformers-legacy", "qkv_concat")
    hub = numbered_tensors(rules)
    made = forward(rules, hub)
    fused = next(rule for rule in rules.rules if len(rule.sources) == 3)
    swapped: list[Any] = [fused.inverse[1], fused.inverse[0]]
    arrays = [evaluate(e, Region.whole(e.shape), lambda leaf, box: made[leaf.name][box.slices()]) for e in swapped]
    assert not np.array_equal(arrays[0], hub[fused.sources[0].name])

"""A replay in numpy gives what transformers' own blocks give, from the weights of every dialect.

The bound: a block sums up to 96 products in float32 and norms them, which rounds to about 5e-7 of the largest output
at most (unit roundoff 6e-8; measured 8e-8 to 6e-7 here); 2e-6 leaves a factor of 3 for other processors. Positions
that are spread turn by angles that both sides round in float32 alike. What is wrong on purpose measures 1e-4 and more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tap_models import CONFIGS, NEAR, SPREAD, Checkpoint, Models, Planted, make_models, open_side

from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats.file_pool import FilePool
from ckptkit.verification.replay import Place, Setting, frequencies_at, given_at, replay
from ckptkit.verification.runners.facts import read_facts
from ckptkit.verification.runners.rope import inverse_frequencies

pytestmark = pytest.mark.frameworks

BOUND = 2e-6
LEGACY, MCORE = "mindformers-legacy", "mindformers-mcore"
VARIANTS = {LEGACY: ("", "qkv_concat", "qkv_concat-1.4"), MCORE: ("", "contiguous-qkv", "contiguous-mlp", "contiguous")}
WAYS = [("llama", LEGACY, variant) for variant in VARIANTS[LEGACY]]
WAYS += [("qwen2", LEGACY, variant) for variant in VARIANTS[LEGACY]]
WAYS += [("llama biases", LEGACY, "qkv_concat"), ("llama tied", LEGACY, ""), ("mistral", LEGACY, "qkv_concat")]
WAYS += [("qwen3", MCORE, variant) for variant in VARIANTS[MCORE]]
WAYS += [("qwen3_moe", MCORE, ""), ("qwen3_moe plain", MCORE, ""), ("qwen3_moe", "hf", "stacked")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.getbasetemp() / "tap-models")


@pytest.fixture(scope="module")
def pool() -> Iterator[FilePool]:
    with FilePool() as pool:
        yield pool


def places(layers: int) -> list[Place]:
    inner = [Place(part, layer) for layer in range(layers) for part in ("attention", "mlp")]
    return [Place("embedding"), *inner, Place("norm"), Place("logits")]


def distances(models: Models, model: str, side: Checkpoint, item: Any = NEAR, **facts: Any) -> dict[str, float]:
    """Return by part how far a replay is from what transformers gave, relative to the largest number there."""
    found, read = {}, replace(side.facts, **facts)
    tap = models.tap(model, item.name)
    spread = range(len(item.ids)) if item.positions is None else item.positions
    for place in places(side.facts.layers):
        given = given_at(place, tap, item.ids, item.positions, side.facts.layers)
        setting = Setting(read, side.weights.part(place.part, place.layer), frequencies_at(read, None, spread))
        out, expected = replay(place, setting, given), tap(place.tap)
        found[place.tap] = float(np.abs(out - expected).max() / np.abs(expected).max())
    return found


@pytest.mark.parametrize("model", CONFIGS)
def test_every_part_gives_what_transformers_gives(models: Models, pool: FilePool, model: str) -> None:
    side = open_side(models.folders[model], pool)
    for item in (NEAR, SPREAD):
        found = distances(models, model, side, item)
        assert max(found.values()) < BOUND, found
        assert found["embedding"] == 0


@pytest.mark.parametrize(("model", "dialect", "variant"), WAYS)
def test_every_dialect_has_the_same_weights_bit_for_bit(
    models: Models, pool: FilePool, tmp_path: Path, model: str, dialect: str, variant: str
) -> None:
    right = open_side(models.folders[model], pool)
    other = Planted(model, dialect, variant).make(models, tmp_path / "other", pool)
    for place in places(right.facts.layers):
        one, two = (side.weights.part(place.part, place.layer) for side in (right, other))
        assert one.keys() == two.keys()
        for field, values in one.items():
            assert np.array_equal(values.view(np.uint32), two[field].view(np.uint32)), field
            if place.part == "norm" and field != "norm":
                continue  # the last layer's
            alone = other.weights.field(place.part, place.layer, field)
            assert alone is not None and np.array_equal(values, alone), field


def test_a_fused_tensor_that_is_cut_in_another_order_has_not(models: Models, pool: FilePool, tmp_path: Path) -> None:
    Planted("llama", LEGACY, "qkv_concat").make(models, tmp_path / "other", pool)
    wrong = open_side(tmp_path / "other", pool, dialect=LEGACY, variant="qkv_concat-1.4")
    right = open_side(models.folders["llama"], pool)
    for part, field in (("attention", "k"), ("mlp", "gate")):
        assert not np.array_equal(wrong.weights.part(part, 1)[field], right.weights.part(part, 1)[field])
    found = distances(models, "llama", wrong)
    assert found["layers.1.attention"] > 0.1 and found["layers.1.mlp"] > 0.1


BASE = replace(read_facts(CONFIGS["qwen3"]).rope, base=9e3)
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "another eps": ("llama", {"norm_eps": 1e-6}, "layers.0.attention"),
    "no window": ("mistral", {"window": (None,) * 3}, "layers.1.attention"),
    "a window in a layer without": ("qwen2 window", {"window": (6,) * 3}, "layers.0.attention"),
    "another rotary base": ("qwen3", {"rope": BASE}, "layers.2.attention"),
    "no scaling": ("llama tied", {"rope": read_facts(CONFIGS["llama"]).rope}, "layers.0.attention"),
    "no sum of 1": ("qwen3_moe", {"norm_topk": False}, "layers.0.mlp"),
    "a sum of 1": ("qwen3_moe plain", {"norm_topk": True}, "layers.2.mlp"),
    "one expert more": ("qwen3_moe", {"experts_per_token": 3}, "layers.0.mlp"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_config_that_is_read_otherwise_shows(models: Models, pool: FilePool, wrong: str) -> None:
    model, facts, tap = WRONG[wrong]
    found = distances(models, model, open_side(models.folders[model], pool), **facts)
    assert found[tap] > 50 * BOUND


@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_the_first_tokens_alone_give_the_same(models: Models, pool: FilePool, part: str) -> None:
    """Bits may differ: a product of other sizes is summed in another order, in float64."""
    side, place = open_side(models.folders["qwen3_moe"], pool), Place(part, 1)
    given = given_at(place, models.tap("qwen3_moe"), NEAR.ids, None, 3)
    setting = Setting(side.facts, side.weights.part(part, 1), frequencies_at(side.facts, None, range(40)))
    assert np.allclose(replay(place, setting, given)[:9], replay(place, setting, given.first(9)), rtol=0, atol=1e-13)


def test_dynamic_frequencies_go_by_the_length_and_others_are_those_reported() -> None:
    plain = read_facts(CONFIGS["llama"])
    reported = np.arange(4, dtype=np.float32)
    assert np.array_equal(frequencies_at(plain, reported, range(9)), reported)
    dynamic = read_facts(CONFIGS["llama"] | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    assert np.array_equal(frequencies_at(dynamic, reported, range(9)), reported)
    longer = frequencies_at(dynamic, reported, (0, 500))
    assert np.array_equal(longer, inverse_frequencies(dynamic.rope, dynamic.head_dim, 501))


def test_what_is_no_part_and_a_tensor_that_is_not_there_are_refused(models: Models, pool: FilePool) -> None:
    with pytest.raises(UsageError, match="`atention` is no part"):
        Place("atention")
    side = open_side(models.folders["llama"], pool)
    del side.weights.tensors["model.layers.1.mlp.up_proj.weight"]  # type: ignore[attr-defined]
    assert side.weights.part("mlp", 0)
    with pytest.raises(CoverageError, match=r"`model\.layers\.1\.mlp\.up_proj\.weight` is not"):
        side.weights.part("mlp", 1)

"""The contract: a planted fault is found in its part and named, with A's weights at hand and without; nothing else is.

A's outputs are transformers' own. Faults are made in numpy, in the tensors of B's dialect and variant, or in what B's
config.json says. Every part of every checkpoint is asked, so each test is also a control of the parts without a fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted_faults import (
    ATTENTION,
    ENDS,
    EVERY,
    FAULTS,
    LEGACY,
    MCORE,
    MLP,
    W1,
    W2,
    W3,
    W_QKV,
    WK,
    WO,
    WQ,
    WV,
    Where,
    both,
    changed,
    interleaved,
    legacy,
    llama,
    mcore,
    qwen3,
    rows,
    swapped,
    transposed,
)
from tap_models import CONFIGS, NEAR, SPREAD, Checkpoint, Models, Planted, make_models, open_side

from ckptkit.formats.file_pool import FilePool
from ckptkit.verification.causes import ROUNDED, UNKNOWN, Cause, find_cause
from ckptkit.verification.causes_case import Evidence, facts_of
from ckptkit.verification.runners.facts import read_facts

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.getbasetemp() / "tap-models")


@pytest.fixture(scope="module")
def pool() -> Iterator[FilePool]:
    with FilePool() as pool:
        yield pool


def causes(
    models: Models, planted: Planted, b: Checkpoint, a: Checkpoint | None, item: Any = NEAR
) -> dict[Where, Cause]:
    """Ask about every part; return the causes found."""
    taps = models.taps[planted.model, item.name]
    facts = open_facts(models, planted.model)
    evidence = Evidence(
        tap=taps.__getitem__, ids=item.ids, positions=item.positions, facts_a=facts, weights_b=b.weights,
        weights_a=None if a is None else a.weights, frequencies_a=taps.frequencies,
    )  # fmt: skip
    found = {(part, layer): find_cause(part, layer, evidence) for part, layer in (*EVERY, *ENDS)}
    return {where: cause for where, cause in found.items() if cause is not None}


def open_facts(models: Models, model: str) -> Any:
    with FilePool() as pool:
        return open_side(models.folders[model], pool).facts


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_where_it_is_and_named(
    models: Models, pool: FilePool, tmp_path: Path, name: str
) -> None:
    fault = FAULTS[name]
    b = fault.planted.make(models, tmp_path / "b", pool)
    for a in (open_side(models.folders[fault.planted.model], pool), None):
        found = causes(models, fault.planted, b, a, fault.item)
        assert set(found) == {fault.where, *fault.also}
        cause = found[fault.where]
        if a is None and not fault.alone:
            assert cause.name == UNKNOWN, cause
            continue
        assert cause.name == fault.name, cause
        if a is not None or fault.name not in ("expert order", "bias missing"):
            assert set(cause.tensors) == set(fault.tensors)
        assert fault.hint in cause.hint
        assert cause.after < cause.before / 10
        assert {found[where].name for where in fault.also} <= {fault.name}


RIGHT = [("llama", LEGACY, "qkv_concat"), ("llama tied", "hf", ""), ("qwen2", LEGACY, "qkv_concat-1.4")]
RIGHT += [("qwen2 window", LEGACY, ""), ("qwen3", MCORE, "contiguous"), ("qwen3_moe", MCORE, "")]
RIGHT += [("qwen3_moe plain", "hf", "stacked"), ("llama biases", LEGACY, ""), ("llama square", LEGACY, "qkv_concat")]


@pytest.mark.parametrize(("model", "dialect", "variant"), RIGHT)
def test_a_right_checkpoint_has_no_cause_and_a_rounded_one_no_other(
    models: Models, pool: FilePool, tmp_path: Path, model: str, dialect: str, variant: str
) -> None:
    a = open_side(models.folders[model], pool)
    for dtype, items in (("F32", (NEAR, SPREAD)), ("BF16", (NEAR,)), ("F16", (NEAR,))):
        planted = Planted(model, dialect, variant, dtype=dtype)
        b = planted.make(models, tmp_path / dtype, pool)
        for side, item in product((a, None), items):
            names = {cause.name for cause in causes(models, planted, b, side, item).values()}
            assert names == ({ROUNDED} if dtype != "F32" else set())


@pytest.mark.parametrize("with_a", [True, False])
def test_a_fault_beside_rounding_is_still_named(models: Models, pool: FilePool, tmp_path: Path, with_a: bool) -> None:
    planted = Planted("qwen2", LEGACY, "", swapped(WK, WV), dtype="BF16")
    b = planted.make(models, tmp_path / "b", pool)
    found = causes(models, planted, b, open_side(models.folders["qwen2"], pool) if with_a else None)
    assert found.pop(ATTENTION).name == "k and v exchanged"
    assert {cause.name for cause in found.values()} == {ROUNDED}


TWO: dict[str, tuple[Planted, Where, set[str]]] = {
    "k and v, and rotary q": (
        llama(both(swapped(WK, WV), rows(WQ, interleaved(4)))), ATTENTION, {"k and v exchanged", "rotary permutation"}
    ),
    "norms, and gate and up": (
        llama(both(swapped(legacy("attention_norm.weight"), legacy("ffn_norm.weight")), swapped(W1, W3))), MLP,
        {"norms exchanged", "gate and up exchanged"},
    ),
    "an order, and a transposed matrix": (
        llama(both(rows(W_QKV, lambda n: np.arange(n).reshape(8, 3, -1).swapaxes(0, 1).reshape(-1)), transposed(WO)),
              "qkv_concat", "llama square"),
        ATTENTION, {"order of the fused QKV", "transposed"},
    ),
    "eps, and transposed": (
        Planted("llama square", LEGACY, "", transposed(W2), {"rms_norm_eps": 1e-6}), MLP, {"norm eps", "transposed"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("with_a", [True, False])
@pytest.mark.parametrize("name", TWO)
def test_two_faults_in_one_part_are_both_named(
    models: Models, pool: FilePool, tmp_path: Path, name: str, with_a: bool
) -> None:
    planted, where, names = TWO[name]
    b = planted.make(models, tmp_path / "b", pool)
    found = causes(models, planted, b, open_side(models.folders[planted.model], pool) if with_a else None)
    assert set(found[where].name.split(" and ")) == set(" and ".join(names).split(" and ")), found[where]


@pytest.mark.parametrize("with_a", [True, False])
def test_two_faults_in_two_parts_do_not_disturb_each_other(
    models: Models, pool: FilePool, tmp_path: Path, with_a: bool
) -> None:
    planted = llama(both(swapped(WK, WV), swapped(W1, W3)))
    b = planted.make(models, tmp_path / "b", pool)
    found = causes(models, planted, b, open_side(models.folders["llama"], pool) if with_a else None)
    assert {where: cause.name for where, cause in found.items()} == {
        ATTENTION: "k and v exchanged", MLP: "gate and up exchanged",
    }  # fmt: skip


def random_like(values: np.ndarray) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(values.shape) / np.sqrt(values.shape[-1])


OTHERS: dict[str, tuple[Planted, Where, str]] = {
    "wk": (llama(changed(WK, random_like)), ATTENTION, WK),
    "w2": (llama(changed(W2, random_like)), MLP, W2),
    "a head": (llama(changed("lm_head.weight", random_like)), ("logits", 0), "lm_head.weight"),
    "a router": (
        qwen3(changed(mcore("mlp.router.weight"), random_like), model="qwen3_moe"), MLP, mcore("mlp.router.weight"),
    ),
    "one row of an embedding": (
        llama(changed(
            "model.tok_embeddings.embedding_weight", lambda v: v * (np.arange(len(v)) != NEAR.ids[3])[:, None])),
        ("embedding", 0), "model.tok_embeddings.embedding_weight",
    ),
    "a weight that is no number": (
        llama(changed(WV, lambda v: np.where(np.arange(v.size).reshape(v.shape) == 7, np.nan, v))), ATTENTION, WV
    ),
    "one column of w3": (llama(changed(W3, lambda v: v * (np.arange(v.shape[1]) != 5))), MLP, W3),
}  # fmt: skip


@pytest.mark.parametrize("with_a", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_what_no_hypothesis_explains_is_unknown_and_the_tensor_is_named_if_it_can_be(
    models: Models, pool: FilePool, tmp_path: Path, name: str, with_a: bool
) -> None:
    planted, where, tensor = OTHERS[name]
    b = planted.make(models, tmp_path / "b", pool)
    found = causes(models, planted, b, open_side(models.folders[planted.model], pool) if with_a else None)
    assert set(found) == {where}
    cause = found[where]
    assert cause.name == UNKNOWN and tensor in cause.tensors
    if with_a:
        assert cause.tensors == (tensor,) and len(cause.differs) == 1
    assert f"{cause.before:.1e} off" in cause.text and cause.after <= cause.before


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_few_tokens_are_not_enough_for_a_constant(models: Models, pool: FilePool, tmp_path: Path, tokens: int) -> None:
    """What is off for one token is a constant, whatever the cause; the first tokens do not depend on the rest."""
    planted = llama(changed(WO, random_like))
    b, taps = planted.make(models, tmp_path / "b", pool), models.taps["llama", "near"]
    evidence = Evidence(
        tap=lambda name: taps[name][:tokens],
        ids=NEAR.ids[:tokens],
        positions=None,
        facts_a=b.facts,
        weights_b=b.weights,
    )
    cause = find_cause("attention", 1, evidence)
    assert cause is not None and cause.name == UNKNOWN


def test_two_hypotheses_that_fit_equally_well_are_both_named(models: Models, pool: FilePool, tmp_path: Path) -> None:
    """In heads of four, to bring pairs to halves and halves to pairs is the same."""
    planted = FAULTS["k alone in pairs"].planted
    found = causes(models, planted, planted.make(models, tmp_path / "b", pool), None)[ATTENTION]
    assert "or, which fits as well" in found.text and found.text.count("interleaved pairs") == 2


def test_a_difference_that_the_caller_takes_for_rounding_is_no_cause(
    models: Models, pool: FilePool, tmp_path: Path
) -> None:
    planted = llama(swapped(W1, W3))
    b, taps = planted.make(models, tmp_path / "b", pool), models.taps["llama", "near"]
    evidence = Evidence(tap=taps.__getitem__, ids=NEAR.ids, positions=None, facts_a=b.facts, weights_b=b.weights)
    cause = find_cause("mlp", 1, evidence)
    assert cause is not None and cause.before > 0.1
    assert find_cause("mlp", 1, evidence, bound=cause.before * 1.01) is None


@pytest.mark.parametrize(("config", "name"), [({"rms_norm_eps": 1e-6}, "norm eps"), ({}, None)])
def test_a_reading_that_differs_is_named_where_rounding_has_room_for_its_effect(
    models: Models, pool: FilePool, tmp_path: Path, config: dict[str, Any], name: str | None
) -> None:
    """Small in one layer, it adds up in those that follow; the control reads the same config.json."""
    b = Planted("qwen3", MCORE, "", None, config).make(models, tmp_path / "b", pool)
    evidence = Evidence(
        tap=models.taps["qwen3", NEAR.name].__getitem__, ids=NEAR.ids, positions=NEAR.positions,
        facts_a=open_facts(models, "qwen3"), weights_b=b.weights,
    )  # fmt: skip
    cause = find_cause("attention", 0, evidence, bound=1.0)
    assert (cause.name if cause else None) == name


def test_the_facts_of_a_dump_are_those_of_its_config() -> None:
    for config in CONFIGS.values():
        facts = read_facts(config)
        assert facts_of(json.loads(json.dumps(facts.reading()))) == replace(facts, notes=(), unknown=())


def test_the_models_are_of_four_families_and_the_faults_of_all() -> None:
    assert {CONFIGS[fault.planted.model]["model_type"] for fault in FAULTS.values()} >= {
        "llama", "qwen2", "qwen3", "qwen3_moe", "mistral",
    }  # fmt: skip

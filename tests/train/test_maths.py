"""The contract: a run goes on only with the settings that its numbers depend on, and others may change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_config import small

from ckptkit.train.config import TrainConfig
from ckptkit.train.config_errors import known_keys
from ckptkit.train.maths import NOT_MATHS, changed_maths, config_hash, is_free, maths_of


def test_every_setting_is_among_the_maths_or_has_a_reason_not_to_be(tmp_path: Path) -> None:
    """A setting that is added and forgotten would be in neither; and a reason for no setting is stale."""
    keys = set(known_keys(TrainConfig))
    counted = set(maths_of(small(tmp_path, "precision.compute=fp16")))
    free = {key for key in keys if is_free(key)}
    assert counted | free == keys
    assert not counted & free
    assert {name for name in NOT_MATHS if not any(key == name or key.startswith(f"{name}.") for key in keys)} == set()
    assert not is_free("optimizer.lr"), "the control: this one counts"


@pytest.mark.parametrize(
    "typed",
    ["optimizer.lr=2e-3", "schedule.total_steps=21", "training.micro_batch=4", "training.seed=1", "data.seq_length=8",
     "data.seed=1", "training.dropout=0.1", "optimizer.freeze=[a]", "precision.compute=fp16", "precision.ce_chunk=8",
     "training.adaptive.enabled=true", "training.device=ascend", "optimizer.clip_norm="],
)  # fmt: skip
def test_a_setting_that_alters_the_maths_changes_the_hash_and_is_named(tmp_path: Path, typed: str) -> None:
    old, new = maths_of(small(tmp_path)), maths_of(small(tmp_path, typed))
    assert config_hash(old) != config_hash(new)
    assert typed.partition("=")[0] in [key for key, _, _ in changed_maths(old, new)]


@pytest.mark.parametrize(
    "typed",
    ["training.stop_at_step=3", "checkpoint.every=1", "recompute.layers=all", "log.every=5", "model.path=elsewhere",
     "data.path=moved.jsonl", "training.threads=1", "training.adaptive.limit=1GB", "eval={path: e, every: 2}"],
)  # fmt: skip
def test_a_setting_that_does_not_alter_the_maths_may_change(tmp_path: Path, typed: str) -> None:
    old, new = maths_of(small(tmp_path)), maths_of(small(tmp_path, typed))
    assert config_hash(old) == config_hash(new)
    assert changed_maths(old, new) == []


def test_the_loss_scale_counts_with_fp16_alone_and_its_growth_with_a_dynamic_one(tmp_path: Path) -> None:
    def keys(*sets: str) -> set[str]:
        return {key for key in maths_of(small(tmp_path, *sets)) if "scale" in key or "growth" in key}

    assert keys() == set()
    assert keys("precision={compute: fp16, loss_scale: 8}") == {"precision.loss_scale"}
    assert len(keys("precision.compute=fp16")) == 3


def test_changed_maths_tells_values_that_python_calls_equal_apart() -> None:
    assert changed_maths({"a": 1, "b": None}, {"a": True}) == [("a", 1, True)]
    assert changed_maths({"a": 0.1}, {"a": 0.1}) == []
    assert config_hash({"a": 1, "b": 2}) == config_hash({"b": 2, "a": 1})


def test_the_maths_read_back_from_json_are_the_same(tmp_path: Path) -> None:
    maths = maths_of(small(tmp_path, "optimizer.freeze=[a]", "recompute.layers=[1,2]"))
    back = json.loads(json.dumps(maths))
    assert changed_maths(maths, back) == []
    assert config_hash(maths) == config_hash(back)

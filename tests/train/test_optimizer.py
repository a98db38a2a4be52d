"""The contract of AdamW: what is trained, what decays, and how a gradient is clipped; that it is torch's is in
test_step.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ckptkit.errors import UsageError
from ckptkit.train.optimizer import AdamW, decays, trained_names

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.10.self_attn.q_proj.weight",
    "model.norm.weight",
)


def test_patterns_freeze_what_they_match_and_the_order_stays() -> None:
    assert trained_names(NAMES, ()) == NAMES
    assert trained_names(NAMES, ("model.layers.0.*", "*embed*")) == (NAMES[3], NAMES[4])
    assert trained_names(NAMES, ("model.layers.1?.*",)) == (*NAMES[:3], NAMES[4])


def test_a_pattern_that_matches_nothing_is_named_and_the_others_are_not() -> None:
    with pytest.raises(UsageError) as caught:
        trained_names(NAMES, ("*embed*", "layers.0.*"))
    assert caught.value.items == ("layers.0.*",)


def test_nothing_left_to_train_is_refused() -> None:
    with pytest.raises(UsageError, match="leaves no parameter to train"):
        trained_names(NAMES, ("*",))


@pytest.mark.parametrize(("shape", "does"), [((8, 4), True), ((8,), False)])
def test_matrices_decay_and_norms_and_biases_do_not(shape: tuple[int, ...], does: bool) -> None:
    assert decays(shape) is does


@pytest.mark.parametrize(
    ("most", "norm", "factor"), [(None, 100.0, 1.0), (1.0, 0.5, 1.0), (1.0, 4.0, 0.25), (2.0, 4.0, 0.5)]
)
def test_a_gradient_is_clipped_to_the_largest_norm_and_a_smaller_one_stays(
    most: float | None, norm: float, factor: float
) -> None:
    optimizer = object.__new__(AdamW)  # clipping needs the settings alone
    optimizer._settings = SimpleNamespace(clip_norm=most)
    assert optimizer.clip_factor(norm) == pytest.approx(factor, rel=1e-6)  # torch adds 1e-6 to the norm

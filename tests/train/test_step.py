"""The contract of an update: slots, overflow, errors, AdamW; the same as torch's, and the same after a restart."""

from __future__ import annotations

from typing import Any

import pytest
from arithmetic import run_check

pytestmark = pytest.mark.frameworks

SCRIPT = "step_client.py"
Found = dict[str, Any]
ROUNDING = 2e-6  # float32 sums of a few dozen numbers in another order


@pytest.fixture(scope="module")
def checks() -> Found:
    found: Found = run_check(SCRIPT, "together")
    return found


def test_slots_of_any_size_make_the_same_update_but_for_rounding(checks: Found) -> None:
    """Tokens fall unevenly on the slots; the control, a mean of the slots' means, is another number."""
    found = checks["accumulation"]
    assert max(found["losses"] + found["norms"] + found["gradients"]) < ROUNDING
    assert found["evaluation"] < ROUNDING
    assert found["mean of means"] > 1000 * ROUNDING


def test_another_trainer_with_the_state_goes_on_with_the_same_bits(checks: Found) -> None:
    found = checks["resumed"]
    assert found == {"same": True, "without moments": False}


@pytest.mark.parametrize(("compute", "scale"), [("fp32", "dynamic"), ("fp16", "dynamic"), ("fp16", "1024")])
def test_the_loss_falls(checks: Found, compute: str, scale: str) -> None:
    one = checks["training"][f"{compute} {scale}"]
    assert one["losses"][-1] < one["losses"][0] - 0.1
    assert (len(set(one["scales"])) > 1) == (compute == "fp16" and scale == "dynamic")


def test_two_processes_have_the_same_bits(checks: Found) -> None:
    assert run_check(SCRIPT, "training", "fp16", "dynamic") == checks["training"]["fp16 dynamic"]


def test_an_update_that_overflows_is_tried_again_and_is_the_one_at_the_lower_scale(checks: Found) -> None:
    found = checks["overflow"]
    assert found["overflows"] > 0 and found["same"] and found["nothing changed"]
    assert found["scale"] == 2.0 ** (24 - found["overflows"])
    assert found["scaler"] == {"scale": found["scale"], "counter": 1, "skipped": found["overflows"]}
    assert "at the static loss scale" in found["static"]
    assert "even at the loss scale 1" in found["floor"]


def test_a_number_that_is_none_is_told_with_its_place(checks: Found) -> None:
    found = checks["not_finite"]
    for name, layer in {
        "model.layers.1.mlp.down_proj.weight": "layer 1",
        "model.layers.0.self_attn.v_proj.weight": "layer 0",
        "model.norm.weight": "the final norm",
    }.items():
        assert "is not finite at step 7" in found[name]
        assert f"the output of {layer}" in found[name] and f"the parameter `{name}`" in found[name]
    assert "the output of layer 1" in found["infinite"] and "the parameter" not in found["infinite"]
    assert "the gradient of `model.layers.1.mlp.gate_proj.weight`" in found["gradient"]
    assert found["fine"] == "no error"


def test_what_cannot_be_is_refused_in_words(checks: Found) -> None:
    found = checks["refusals"]
    assert "no token of step 5 counts" in found["no token"]
    assert "a micro-batch of 3 rows does not divide a batch of 8" in found["slots"]
    assert "*.wq" in found["idle glob"] and "layers.0" not in found["idle glob"].partition("hint")[0]
    assert "leaves no parameter to train" in found["all"]


def test_frozen_parameters_stay_and_have_no_moments(checks: Found) -> None:
    found = checks["frozen"]
    trained = [
        name for name in found["names"] if "embed" not in name and ".1." not in name and name != "model.norm.weight"
    ]
    assert found["changed"] == sorted(trained)
    assert found["moments"] == sorted(f"exp_avg.{name}" for name in trained)


def test_rows_without_weight_alter_nothing(checks: Found) -> None:
    assert checks["empty_slots"] == {"close": True}


def test_adamw_is_torchs(checks: Found) -> None:
    """Twenty updates, in learning rates: an update is about one, and float32 rounds a weight near 4 by 2 ** -22."""
    found = checks["adamw"][""]
    assert found["weights"] < 1e-3 and found["squares"] < ROUNDING and found["norms"] < ROUNDING


@pytest.mark.parametrize("fault", ["no bias correction", "decays norms", "no clipping"])
def test_another_optimizer_is_not(checks: Found, fault: str) -> None:
    assert checks["adamw"][fault]["weights"] > 1e-2

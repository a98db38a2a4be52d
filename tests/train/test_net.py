"""The contract: the network that is trained is transformers' and the verifier's, and its gradient is torch's.

Differences are shares of the largest value. Float32 adds the same numbers in another order: some ten units of 2 ** -24
a sum, and a tiny network has a few dozen sums behind one another, so `ROUNDING`; what is wrong is off by far more.
"""

from __future__ import annotations

from typing import Any

import pytest
from arithmetic import run_check

pytestmark = pytest.mark.frameworks

SCRIPT = "net_client.py"
Found = dict[str, Any]
ROUNDING = 2e-5
HALF = 2.0**-10  # float16 keeps 11 bits


@pytest.fixture(scope="module")
def checks() -> Found:
    found: Found = run_check(SCRIPT, "together")
    return found


@pytest.fixture(scope="module")
def families(checks: Found) -> Found:
    found: Found = checks["families"]
    return found


def test_logits_and_gradients_are_transformers_and_torchs(families: Found) -> None:
    assert len(families) == 17
    for name, row in families.items():
        assert row["logits"] < ROUNDING, name
        assert row["gradients"] < ROUNDING, name
    controls = [row for row in families.values() if "wrong logits" in row]
    assert len(controls) == 3
    assert all(row["wrong logits"] > 5 * ROUNDING and row["wrong gradients"] > 5 * ROUNDING for row in controls)  # eps


def test_logits_are_those_of_the_network_that_verify_uses(families: Found) -> None:
    assert max(row["decoder"] for row in families.values()) < ROUNDING


def test_recompute_gives_the_same_bits(families: Found) -> None:
    assert all(row["recomputed"] for row in families.values())
    assert all(row["losses are equal"] for row in families.values())


def test_packed_rows_are_the_documents_alone(checks: Found) -> None:
    """The control mixes the documents of a row: one segment for all."""
    found = checks["packed"]
    for name in ("llama", "qwen2 window", "qwen3_moe"):
        assert found[f"{name} loss"] < ROUNDING and found[f"{name} gradients"] < ROUNDING
        assert found[f"{name} mixed"] > 0.01
        assert found[f"{name} padding"], "what lies in the fill alters no bit"


def test_dropout_depends_on_rows_and_on_nothing_else(checks: Found) -> None:
    found = checks["dropout"]
    assert all(found.values()), found


def test_another_process_gives_the_same_bits_whatever_its_threads() -> None:
    digests = {run_check(SCRIPT, "bits", threads) for threads in ("1", "2")}
    assert len(digests) == 1


def test_recompute_takes_less_memory() -> None:
    assert run_check(SCRIPT, "memory", "all") < 0.7 * run_check(SCRIPT, "memory", "none")


def test_float16_is_near_and_its_recompute_is_the_same(checks: Found) -> None:
    found = checks["half"]
    for name in ("llama biases", "qwen3", "qwen3_moe"):
        assert 0 < found[f"{name} loss"] < 10 * HALF
        assert 0 < found[f"{name} gradients"] < 50 * HALF
        assert found[f"{name} recomputed"] == 0


def test_frozen_parameters_have_no_gradient_and_others_keep_theirs(checks: Found) -> None:
    found = checks["frozen"]
    assert all(found.values()), found


def test_what_cannot_be_is_refused_in_words(checks: Found) -> None:
    found = checks["refusals"]
    assert "does not train on a CPU" in found["bf16"] and "hint" in found["bf16"]
    assert "dynamic" in found["dynamic"]
    assert "is (32,), not (3,)" in found["shape"]

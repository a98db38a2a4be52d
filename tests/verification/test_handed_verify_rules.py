"""Rules about verification that people learned from real failures, and that no other file here states.

V01 and V13 (permuted rows), V02 (a tensor that is not loaded), V07 (rope scaling), V09 (norm eps): test_forward.py,
test_verify_command.py, test_weights.py; V04 (dropout) and V14 (soft-capping): test_torch_runner.py, test_facts.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_jobs import config_of, make_folder

from ckptkit import UsageError, convert, verify
from ckptkit.verification.inputs import make_inputs
from ckptkit.verification.logits import distance
from ckptkit.verification.runners.facts import read_facts


def test_a_position_that_is_no_number_is_counted_and_the_others_are_compared() -> None:
    """V06: a fully masked row gave NaN, and NaN was left out of the comparison."""
    a_TV = np.arange(12, dtype=np.float32).reshape(3, 4)
    b_TV = a_TV.copy()
    b_TV[0, 1] = np.nan
    found = distance(a_TV, b_TV)
    assert (found.not_finite, found.relative) == (1, float("inf"))
    assert distance(a_TV, a_TV).relative == 0


@pytest.mark.parametrize("key", ["layer_norm_epsilon", "layer_norm_eps", "norm_eps"])
def test_a_norm_eps_under_another_name_is_refused_at_convert_time_and_by_the_networks(tmp_path: Path, key: str) -> None:
    """V10: a field of another name was missing in silence, and a default took its place."""
    config = config_of("llama", rms_norm_eps=None) | {key: 1e-6}
    hf = make_folder(tmp_path / "hf", config)
    with pytest.raises(UsageError) as caught:
        convert(hf, tmp_path / "ms", to_dialect="mindformers")
    assert "rms_norm_eps" in str(caught.value)
    with pytest.raises(UsageError, match="rms_norm_eps|" + key):
        read_facts(config)


WINDOW: dict[str, Any] = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}


def test_every_gate_of_a_sliding_window_is_read_and_both_of_its_sides_are_tried() -> None:
    """V11: two gates and their defaults decided whether a window had any effect."""
    config = config_of("qwen2", **WINDOW)
    assert read_facts(config).reading()["window"] == [None, 4]
    assert read_facts(config | {"use_sliding_window": False}).reading()["window"] == [None, None]
    assert read_facts(config | {"max_window_layers": 0}).reading()["window"] == [4, 4]
    inputs, _ = make_inputs(config, None, windows=[4])
    assert {3, 4, 5, 64} <= {len(item.ids) for item in inputs}


def test_the_output_keeps_all_fields_about_a_window(tmp_path: Path) -> None:
    """V11: an output config without one of the gates means another window."""
    hf = make_folder(tmp_path / "hf", config_of("qwen2", **WINDOW))
    convert(hf, tmp_path / "ms", to_dialect="mindformers")
    convert(tmp_path / "ms", tmp_path / "back", to_dialect="hf")
    assert WINDOW.items() <= json.loads((tmp_path / "back" / "config.json").read_text()).items()


def test_a_linear_factor_is_read_from_the_config_whatever_its_spelling() -> None:
    """V15: the factor was lost where settings came from somewhere else."""
    for word in ("type", "rope_type"):
        facts = read_facts(config_of("llama", rope_scaling={word: "linear", "factor": 4.0}))
        assert facts.reading()["rope"] == {"type": "linear", "factor": 4.0}
    newer = config_of("llama", rope_theta=None)
    newer["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    assert read_facts(newer).reading()["rope"] == {"type": "linear", "factor": 4.0}
    assert read_facts(newer).reading()["rope_base"] == 5000.0


def test_a_vocabulary_that_was_resized_is_compared_with_the_file(tmp_path: Path) -> None:
    """V17: rows that were resized got random values after loading. `altered` in the runners' report is this rule;
    a head of another number of rows than config.json says is a shape that level files names."""
    hf = make_folder(tmp_path / "hf", config_of("llama", vocab_size=40))
    config = json.loads((hf / "config.json").read_text()) | {"vocab_size": 32}
    (hf / "config.json").write_text(json.dumps(config))
    report = verify(hf, hf, level="files")
    assert report.exit_code == 1
    assert "lm_head.weight is (40, 32), by config.json (32, 32)" in report.to_text()

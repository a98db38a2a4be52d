"""What MindFormers' networks would leave out is told from config.json, before any framework is imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from runner_jobs import LLAMA3, config_of

from ckptkit.verification.runners.expressible import why_not

LEGACY, MCORE = "mindformers-legacy", "mindformers-mcore"
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
IN_5S_WORDS = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("config", "dialect", "variant", "device"),
    [
        (config_of("llama", attention_bias=True, tie_word_embeddings=True), LEGACY, "", "cpu"),
        (config_of("llama"), LEGACY, "qkv_concat", "ascend:1"),
        (config_of("llama", head_dim=8), LEGACY, "", "cuda"),
        (config_of("llama", rope_scaling=LLAMA3), LEGACY, "", "cpu"),
        (config_of("llama", rope_scaling=YARN), LEGACY, "", "cpu"),
        (config_of("llama", **IN_5S_WORDS), LEGACY, "", "cpu"),
        (config_of("mistral", sliding_window=None), LEGACY, "", "cpu"),
        (config_of("qwen2", use_sliding_window=False, sliding_window=4), LEGACY, "qkv_concat", "cpu"),
        (config_of("qwen3"), MCORE, "contiguous", "ascend"),
        (config_of("qwen3_moe"), MCORE, "", "npu:3"),
    ],
)  # fmt: skip
def test_there_is_no_reason_against_what_it_can_run(
    config: dict[str, Any], dialect: str, variant: str, device: str
) -> None:
    assert why_not(config, dialect, variant, device) is None


@pytest.mark.parametrize(
    ("config", "dialect", "variant", "says"),
    [
        (config_of("mistral", sliding_window=4), LEGACY, "", "no sliding window"),
        (config_of("qwen2", **WINDOW), LEGACY, "", "no sliding window"),
        (config_of("llama", head_dim=12), LEGACY, "", "head_dim"),
        (config_of("llama", mlp_bias=True), LEGACY, "", "mlp_bias"),
        (config_of("llama", rope_scaling={"type": "linear", "factor": 2.0}), LEGACY, "", "linear"),
        (config_of("llama", rope_scaling={"type": "dynamic", "factor": 2.0}), LEGACY, "", "dynamic"),
        (config_of("llama", rope_scaling={**YARN, "truncate": False}), LEGACY, "", "truncate"),
        (config_of("llama", rope_scaling={**YARN, "factor": 1.0, "attention_factor": 2.0}), LEGACY, "", "attention"),
        (config_of("llama", rope_scaling={**LLAMA3, "factor": 0.5}), LEGACY, "", "below 1"),
        (config_of("llama", rope_scaling={**YARN, "beta_slow": 64.0}), LEGACY, "", "beta_fast"),
        (config_of("llama", hidden_act="gelu"), LEGACY, "", "hidden_act"),
        (config_of("llama", model_type="gpt2"), LEGACY, "", "gpt2"),
        (config_of("llama"), LEGACY, "qkv_concat-1.4", "another order"),
        (config_of("llama"), MCORE, "", "no network of llama"),
        (config_of("qwen3"), LEGACY, "", "no network of qwen3"),
        (config_of("qwen3"), "hf", "", "no network of qwen3"),
        (config_of("qwen3", attention_bias=True), MCORE, "", "attention_bias"),
        (config_of("qwen3", rope_scaling=YARN), MCORE, "", "yarn"),
        (config_of("qwen3_moe", mlp_only_layers=[0]), MCORE, "", "mlp_only_layers"),
        (config_of("qwen3_moe", **WINDOW), MCORE, "", "no sliding window"),
    ],
)  # fmt: skip
def test_what_it_would_leave_out_is_the_reason(config: dict[str, Any], dialect: str, variant: str, says: str) -> None:
    reason = why_not(config, dialect, variant, "ascend")
    assert reason is not None and says in reason


@pytest.mark.parametrize("device", ["cpu", "cuda", "gpu:1"])
def test_mcore_networks_run_on_ascend_only(device: str) -> None:
    reason = why_not(config_of("qwen3"), MCORE, "", device)
    assert reason is not None and "Ascend" in reason


@pytest.mark.parametrize(
    ("module", "comes"), [("expressible", False), ("torch", False), ("mindformers", False), ("job", True)]
)
def test_no_framework_comes_with_a_runner_until_it_builds_a_network(module: str, comes: bool) -> None:
    """The last one is the control: numpy, which comes with a job, is seen."""
    watched = {"numpy"} if comes else {"mindformers", "mindspore", "torch", "transformers"}
    code = f"import sys, ckptkit.verification.runners.{module}\nprint(sorted({watched} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(sorted(watched) if comes else [])

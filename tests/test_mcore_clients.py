"""A checkpoint that was converted to MindFormers' mcore naming is one that MindFormers' own network loads and runs.

What holds: every name and shape of the checkpoint is the network's and none is left over on either side, and the
fp32 logits are those of transformers. Both compute the same sums in fp32 in another order; over two layers the
differences measure 2e-6 of the largest logit, and 1e-5 is asked for. Weights in another order, which have the very
same names and shapes, miss that by orders of magnitude. The network takes stand-ins for Ascend's primitives: see
clients/mcore_standins.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients.run import relative_difference, run_jobs
from safetensors.numpy import load_file, save_file

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, EXPERT_WIDTH = 2, 32, 4, 2, 12, 12, 10
DIMS: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
}
MOE_DIMS = {"moe_intermediate_size": EXPERT_WIDTH, "num_experts": EXPERTS, "num_experts_per_tok": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Qwen3", {**DIMS, "tie_word_embeddings": True}),
    "untied": ("Qwen3", {**DIMS, "tie_word_embeddings": False}),
    "moe": ("Qwen3Moe", {**DIMS, **MOE_DIMS, "norm_topk_prob": True}),
}
Arrays = dict[str, np.ndarray]


def plain_qkv(arrays: Arrays) -> None:
    """Put all of Q before all of K before all of V, where each KV group's q, k, v belong together."""
    for name in [name for name in arrays if name.endswith("linear_qkv.weight")]:
        groups = arrays[name].reshape(KV_HEADS, HEADS // KV_HEADS + 2, HEAD_DIM, HIDDEN)
        parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
        arrays[name] = np.concatenate([part.reshape(-1, HIDDEN) for part in parts])


def plain_gate_up(arrays: Arrays) -> None:
    """Put all rows of gate before all rows of up, where they belong interleaved."""
    for name in [name for name in arrays if name.endswith("linear_fc1.weight")]:
        arrays[name] = np.concatenate([arrays[name][0::2], arrays[name][1::2]])


def interleaved_experts(arrays: Arrays) -> None:
    """Interleave the columns of gate and up in each expert, where the halves belong one after another."""
    for name in [name for name in arrays if name.endswith("experts.weight1")]:
        halves = arrays[name].reshape(EXPERTS, HIDDEN, 2, EXPERT_WIDTH)
        arrays[name] = halves.swapaxes(2, 3).reshape(arrays[name].shape)


def experts_in_text_order(arrays: Arrays) -> None:
    """Put expert 10 before expert 2, as sorted names do."""
    order = sorted(range(EXPERTS), key=str)
    for name in [name for name in arrays if ".experts.weight" in name]:
        arrays[name] = arrays[name].reshape(EXPERTS, -1)[order].reshape(arrays[name].shape)


def lose_final_norm(arrays: Arrays) -> None:
    """Lose one weight and gain another."""
    arrays["decoder.another.weight"] = arrays.pop("decoder.final_layernorm.weight")


# Model, options of `ckptkit convert`, settings of the network.
CONVERSIONS: dict[str, tuple[str, tuple[str, ...], dict[str, bool]]] = {
    "tied": ("tied", (), {}),
    "untied": ("untied", (), {}),
    "moe": ("moe", (), {}),
    "ckpt": ("tied", ("--format", "ckpt"), {}),
    "contiguous": (
        "untied",
        ("--variant", "contiguous"),
        {"use_contiguous_weight_layout_attention": True, "use_interleaved_weight_layout_mlp": False},
    ),
}
SCRAMBLES: dict[str, tuple[str, Callable[[Arrays], None]]] = {
    "plain-qkv": ("tied", plain_qkv),
    "plain-gate-up": ("tied", plain_gate_up),
    "interleaved-experts": ("moe", interleaved_experts),
    "experts-in-text-order": ("moe", experts_in_text_order),
}


def make_hf(name: str, folder: Path) -> None:
    """Save a tiny random model with norms that are not 1; the untied one in bf16."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, dims = MODELS[name]
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**dims))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    dtype = torch.bfloat16 if name == "untied" else torch.float32
    model.to(dtype).save_pretrained(folder)


def convert(source: Path, result: Path, *options: str) -> None:
    command = [sys.executable, "-m", "ckptkit", "convert", source, result, "--to", "mindformers-mcore", *options]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, timeout=120)


def scramble(source: Path, result: Path, change: Callable[[Arrays], None]) -> None:
    arrays = load_file(source / "part0.safetensors")
    change(arrays)
    result.mkdir()
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, result / "part0.safetensors")


class Runs:
    """What both frameworks made of the tiny models: a Result by run, and the model of each run."""

    def __init__(self, folder: Path) -> None:
        ids = np.random.default_rng(3).integers(0, DIMS["vocab_size"], (2, 11)).tolist()
        for name in MODELS:
            make_hf(name, folder / f"{name}-hf")
        for name, (model, options, _) in CONVERSIONS.items():
            convert(folder / f"{model}-hf", folder / name, *options)
        for name, (model, change) in {**SCRAMBLES, "lost-norm": ("moe", lose_final_norm)}.items():
            scramble(folder / model, folder / name, change)
        self.model_of = {name: model for name, (model, *_) in {**CONVERSIONS, **SCRAMBLES}.items()}
        self.model_of["lost-norm"] = "moe"
        hf_jobs = [{"name": name, "folder": folder / f"{name}-hf", "ids": ids} for name in MODELS]
        ms_jobs = [
            {
                "name": name,
                "checkpoint": next((folder / name).glob("*.ckpt"), folder / name),
                "config": folder / f"{model}-hf",
                "ids": ids,
                "settings": CONVERSIONS[name][2] if name in CONVERSIONS else {},
            }
            for name, model in self.model_of.items()
        ]
        self.hf = run_jobs("hf_logits", hf_jobs, timeout=300)
        self.ms = run_jobs("mindformers_mcore_logits", ms_jobs, timeout=300)

    def difference(self, name: str) -> float:
        return relative_difference(self.ms[name].logits, self.hf[self.model_of[name]].logits)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("mcore"))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_every_name_and_shape_is_the_networks_own_and_none_is_left_over(runs: Runs, name: str) -> None:
    report, model = runs.ms[name].report, runs.model_of[name]
    assert report["not_loaded"] == report["unused"] == report["mismatched"] == []
    expected = LAYERS * (9 if model == "moe" else 8) + (2 if model == "tied" else 3)
    assert len(report["parameters"]) - len(report["not_loaded_benign"]) == expected


@pytest.mark.parametrize("name", CONVERSIONS)
def test_mindformers_computes_the_logits_of_transformers(runs: Runs, name: str) -> None:
    assert runs.difference(name) < 1e-5


@pytest.mark.parametrize("name", SCRAMBLES)
def test_another_order_of_the_weights_has_the_same_names_and_other_logits(runs: Runs, name: str) -> None:
    report = runs.ms[name].report
    assert report["not_loaded"] == report["unused"] == report["mismatched"] == []
    assert 0.1 < runs.difference(name) < float("inf")


def test_a_weight_that_is_not_loaded_is_reported_and_leaves_no_finite_logit(runs: Runs) -> None:
    report = runs.ms["lost-norm"].report
    assert report["not_loaded"] == ["decoder.final_layernorm.weight"]
    assert report["unused"] == ["decoder.another.weight"]
    assert np.isnan(runs.ms["lost-norm"].logits).all()

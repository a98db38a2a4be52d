"""The mindformers runner is MindFormers' own network, configured for plain float32, and says what it did.

What holds: its logits are those of transformers, for checkpoints that `convert` made and for each order of fused
tensors that it reads; what it cannot load is named, and nothing is run. Both compute the same sums in float32 in
another order: over two layers of width 32 the differences measure 3e-7 to 9e-7 of the largest logit (float32's unit
roundoff is 6e-8), and 5e-6 is asked for. Weights in another order, of the same names and shapes, measure above 0.1.
Mcore networks run here with the stand-ins of `clients/mcore_standins.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients.run import relative_difference
from runner_jobs import SHORT_LLAMA3, Ran, config_of, ids_of, job_of, make_folder, run_jobs

from ckptkit.commands.convert import convert
from ckptkit.verification.runners.facts import read_facts
from ckptkit.verification.runners.job import Input, Job

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]

BOUND = 5e-6
CLEARLY_WRONG = 0.1
LEGACY, MCORE = "mindformers-legacy", "mindformers-mcore"
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.5}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": config_of("llama"),
    "llama tied, biases": config_of("llama", tie_word_embeddings=True, attention_bias=True),
    "llama3": config_of("llama", rope_scaling=SHORT_LLAMA3),
    "yarn": config_of("llama", rope_scaling=YARN, rms_norm_eps=1e-3),
    "mistral": config_of("mistral"),
    "qwen2": config_of("qwen2", num_key_value_heads=1),
    "qwen3": config_of("qwen3"),
    "qwen3_moe": config_of("qwen3_moe"),
}
# Model and variant of each run.
LEGACY_RUNS = {
    "plain": ("llama", ""),
    "fused": ("llama tied, biases", "qkv_concat"),
    "llama3": ("llama3", "qkv_concat"),
    "yarn": ("yarn", ""),
    "mistral": ("mistral", "qkv_concat"),
    "qwen2": ("qwen2", ""),
}
MCORE_RUNS = {"qwen3": ("qwen3", ""), "contiguous": ("qwen3", "contiguous"), "moe": ("qwen3_moe", "")}
RUNS = {**LEGACY_RUNS, **MCORE_RUNS}
INPUTS = (
    Input("short", ids_of(9)),
    Input("long", ids_of(24, seed=1)),  # the others are padded to it
    Input("zeros", (0, 5, 0, 0, 7, 0, 9)),  # id 0 is padding to MindFormers unless told otherwise
    Input("far", ids_of(4), (0, 1, 50, 51)),
)


class Runs:
    """What both frameworks made of the tiny models."""

    def __init__(self, folder: Path) -> None:
        hf = {name: make_folder(folder / f"{name}-hf", config) for name, config in CONFIGS.items()}
        plain = {name: job_of(hf[name], *INPUTS) for name in hf}

        def job(model: str, dialect: str, made: str, *, said: str | None = None, **changed: Any) -> Job:
            """Return a job on the variant `made` of a model, which is said to be of the variant `said`."""
            result = folder / f"{model}-{made}"
            if not result.exists():
                convert(hf[model], result, to_dialect=dialect, variant=made or None)
            variant = made if said is None else said
            return job_of(result, *INPUTS, dialect=dialect, variant=variant, **changed)

        jobs = {name: job(model, LEGACY, variant) for name, (model, variant) in LEGACY_RUNS.items()}
        jobs["plain"] = replace(jobs["plain"], sensitivity=True)
        jobs["zero is padding"] = jobs["plain"]
        jobs["order of 1.4"] = job("llama", LEGACY, "qkv_concat-1.4", said="qkv_concat")
        jobs["refused order"] = job("llama", LEGACY, "qkv_concat-1.4")
        jobs["mcore on a CPU"] = job("qwen3", MCORE, "")
        tensors = {tensor.name: tensor for tensor in jobs["plain"].tensors}
        jobs["other head"] = replace(jobs["fused"], tensors=[*jobs["fused"].tensors, tensors.pop("lm_head.weight")])
        lost = [tensor for name, tensor in tensors.items() if "layers.1.ffn_norm" not in name]
        jobs["lost"] = replace(jobs["plain"], tensors=lost)
        changes = {"zero is padding": "pad_with_zero"}
        mcore = {name: job(model, MCORE, variant) for name, (model, variant) in MCORE_RUNS.items()}
        mcore["gate and up in turns"] = job("qwen3", MCORE, "contiguous-mlp", said="")
        self.torch = run_jobs("torch", plain, folder / "torch")
        self.of = run_jobs("mindformers", jobs, folder / "legacy", changes=changes, timeout=600)
        self.of |= run_jobs("mindformers", mcore, folder / "mcore", "--mcore-stand-ins", timeout=600)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("mindformers"))


def difference(runs: Runs, run: str, model: str, name: str) -> float:
    return relative_difference(runs.of[run].logits[name], runs.torch[model].logits[name])


@pytest.mark.parametrize("name", [item.name for item in INPUTS if item.positions is None])
@pytest.mark.parametrize("run", RUNS)
def test_logits_are_those_of_transformers(runs: Runs, run: str, name: str) -> None:
    assert difference(runs, run, RUNS[run][0], name) < BOUND


@pytest.mark.parametrize(
    ("run", "model", "name"),
    [
        ("order of 1.4", "llama", "short"),
        ("gate and up in turns", "qwen3", "short"),
        ("zero is padding", "llama", "zeros"),
        ("plain", "llama3", "long"),
        ("qwen2", "llama", "short"),
    ],
)
def test_a_wrong_order_or_network_gives_clearly_other_logits(runs: Runs, run: str, model: str, name: str) -> None:
    assert runs.of[run].report["parameters"] and difference(runs, run, model, name) > 1000 * BOUND


def test_weights_in_the_order_of_another_release_are_clearly_wrong(runs: Runs) -> None:
    assert difference(runs, "order of 1.4", "llama", "short") > CLEARLY_WRONG


@pytest.mark.parametrize("run", RUNS)
def test_every_parameter_is_loaded_and_every_run_repeats(runs: Runs, run: str) -> None:
    report = runs.of[run].report
    assert not any(report[key] for key in ("missing", "unexpected", "altered", "shapes"))
    rows = [row for row in report["inputs"] if not row["skipped"]]
    assert len(rows) == 3 and all(row["repeated"] and not row["not_finite"] for row in rows)


@pytest.mark.parametrize("run", RUNS)
def test_the_reading_is_that_of_config_json_and_of_transformers(runs: Runs, run: str) -> None:
    model = RUNS[run][0]
    reading = json.dumps(runs.of[run].report["reading"], sort_keys=True)
    assert reading == json.dumps(runs.torch[model].report["reading"], sort_keys=True)
    assert reading == json.dumps(read_facts(CONFIGS[model]).reading(), sort_keys=True)


def test_readings_of_two_models_are_not_the_same(runs: Runs) -> None:
    assert runs.of["plain"].report["reading"] != runs.of["yarn"].report["reading"]


@pytest.mark.parametrize("run", ["plain", "qwen2", "qwen3", "moe"])
def test_rotary_frequencies_are_those_of_transformers(runs: Runs, run: str) -> None:
    """Those of the legacy network are taken from its cosines and sines, to a unit in the last place or two."""
    (ours,), (theirs,) = (
        [np.array(values, np.float32) for values in ran.report["constants"].values()]
        for ran in (runs.of[run], runs.torch[RUNS[run][0]])
    )
    assert (np.abs(ours - theirs) <= 2 * np.spacing(theirs)).all()


def test_an_input_with_positions_is_skipped_with_the_reason(runs: Runs) -> None:
    row = runs.of["plain"].report["inputs"][3]
    assert row["skipped"] == "mindformers takes no position ids" and not row["file"]


def test_the_weights_of_a_compiled_network_can_be_moved(runs: Runs) -> None:
    measured = [row["sensitivity"] for row in runs.of["plain"].report["inputs"] if not row["skipped"]]
    assert all(1e-8 < sensitivity < 1e-5 for sensitivity in measured)


def test_counters_of_a_router_need_no_tensor_and_the_reason_is_given(runs: Runs) -> None:
    benign = runs.of["moe"].report["benign"]
    assert benign and all(".router." in name and "while training" in reason for name, reason in benign)
    assert not runs.of["plain"].report["benign"]


@pytest.mark.parametrize(
    ("job", "listed", "names"),
    [
        ("lost", "missing", ["model.layers.1.ffn_norm.weight", "lm_head.weight"]),
        ("other head", "altered", ["lm_head.weight"]),
    ],
)
def test_a_tensor_that_is_not_the_networks_is_named_and_nothing_is_run(
    runs: Runs, job: str, listed: str, names: list[str]
) -> None:
    report = runs.of[job].report
    assert report[listed] == names and not report["inputs"]


@pytest.mark.parametrize(("job", "says"), [("refused order", "qkv_concat-1.4"), ("mcore on a CPU", "on Ascend only")])
def test_what_mindformers_cannot_run_is_refused_with_the_other_runner_named(runs: Runs, job: str, says: str) -> None:
    ran: Ran = runs.of[job]
    assert ran.code == 2 and says in ran.error["what"] and "--runner builtin" in ran.error["hint"]

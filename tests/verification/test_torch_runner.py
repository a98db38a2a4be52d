"""The torch runner is transformers in plain float32, loaded tensor by tensor, and says what it did.

What holds: its logits are those of `from_pretrained(..., attn_implementation="eager")` in float32 to the bit; a tensor
that is missing, left over, of another shape or not what the network holds in the end is named, and nothing is run; and
the reading is what the built network does.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients.run import run_jobs as run_clients
from runner_jobs import LLAMA3, Ran, config_of, ids_of, in_5s_words, job_of, make_folder, run_jobs

from ckptkit.errors import UsageError
from ckptkit.verification.runners.facts import read_facts
from ckptkit.verification.runners.frameworks import framework
from ckptkit.verification.runners.job import Input, Job
from ckptkit.verification.runners.torch import split_experts

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": config_of("llama"),
    "llama tied": config_of("llama", tie_word_embeddings=True, num_key_value_heads=1),
    "llama biases": config_of("llama", attention_bias=True, mlp_bias=True, head_dim=12),
    "llama3": config_of("llama", rope_scaling=LLAMA3),
    "llama linear": config_of("llama", rope_scaling={"type": "linear", "factor": 2.0}),
    "llama yarn": config_of("llama", rope_scaling=YARN, sliding_window=3),
    "mistral": config_of("mistral", sliding_window=4, pad_token_id=3),
    "qwen2": config_of("qwen2"),
    "qwen2 window": config_of("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3 tied": config_of("qwen3", tie_word_embeddings=True),
    "qwen3 biases": config_of("qwen3", attention_bias=True, rms_norm_eps=1e-3),
    "qwen3_moe": config_of("qwen3_moe", mlp_only_layers=[0], num_hidden_layers=3),
    "qwen3_moe window": config_of("qwen3_moe", norm_topk_prob=False, use_sliding_window=True, sliding_window=4),
}
DYNAMIC = config_of("llama", rope_scaling={"type": "dynamic", "factor": 4.0}, max_position_embeddings=16)
OTHER_BASE = config_of("llama", rope_theta=6000.0)
IDS = Input("ids", ids_of(9))


def without_type(scaling: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in scaling.items() if key not in ("type", "rope_type")}


class Runs:
    """What the runner and transformers made of the tiny models."""

    def __init__(self, folder: Path) -> None:
        folders = {
            name: make_folder(folder / name, config)
            for name, config in {**MODELS, "other base": OTHER_BASE, "dynamic": DYNAMIC}.items()
        }
        # a tiny model, then the wide one, before all others: the peak of a process only grows
        jobs = {"llama": job_of(folders["llama"], IDS), "wide": wide_job(folder / "wide")}
        jobs |= {name: job_of(folders[name], IDS) for name in MODELS}
        self.wide_bytes = sum(4 * prod(tensor.shape) for tensor in jobs["wide"].tensors)
        for name in ("llama", "llama3"):
            folders[f"{name} in 5's words"] = make_folder(
                folder / f"{name} 5", MODELS[name], said=in_5s_words(MODELS[name])
            )
            jobs[f"{name} in 5's words"] = job_of(folders[f"{name} in 5's words"], IDS)
        odd = {"attention_dropout": 0.5, "pad_token_id": 67}  # an id that the vocabulary does not have
        dropout = make_folder(folder / "dropout", MODELS["llama"], said={**MODELS["llama"], **odd})
        jobs |= {name: job_of(dropout, IDS, sensitivity=True) for name in ("dropout", "dropout in training")}
        jumps = (*range(5), *range(60, 65))
        far = [Input(f"first id {n}", (n, *ids_of(9)), jumps) for n in (3, 4)]
        jobs |= {name: job_of(folders["llama"], *far) for name in ("jump", "jump without a mask")}
        long_first = [Input("long", ids_of(40)), Input("short", ids_of(20))]
        jobs |= {name: job_of(folders["dynamic"], *long_first) for name in ("long first", "long remembered")}
        jobs["short alone"] = job_of(folders["dynamic"], *long_first[1:])
        jobs["half frequencies"] = job_of(folders["llama"], IDS)
        changes = {
            "dropout in training": "train", "jump without a mask": "lose_mask", "half frequencies": "halve_frequencies",
            "long remembered": "remember_inputs",
        }  # fmt: skip
        jobs |= broken_jobs(folder / "broken", folders["llama"])
        jobs |= refused_jobs(folders["llama"], folders["qwen3_moe"])
        jobs["long remembered"] = jobs.pop("long remembered")  # last: the change stays in the process
        references = [
            {"name": name, "folder": str(folders[name]), "ids": [IDS.ids]}
            for name in (*MODELS, "other base", "llama in 5's words")
        ]
        self.of = run_jobs("torch", jobs, folder / "runs", changes=changes)
        self.references = {
            name: result.logits[0] for name, result in run_clients("hf_logits", references, timeout=300).items()
        }


def broken_jobs(folder: Path, good: Path) -> dict[str, Job]:
    """Return jobs whose tensors are not those of the network."""
    with_more = job_of(make_folder(folder / "more", MODELS["llama"], extra=["model.another.weight"]))
    other_head = job_of(make_folder(folder / "head", MODELS["llama tied"], extra=["lm_head.weight"]))
    whole = job_of(good)
    lost = [tensor for tensor in whole.tensors if "layers.1.mlp.up_proj" not in tensor.name]
    wider = make_folder(folder / "wider", {**MODELS["llama"], "intermediate_size": 41})
    return {
        "lost": replace(whole, tensors=lost),
        "left over": with_more,
        "other head": other_head,
        "other shapes": replace(whole, tensors=job_of(wider).tensors),
    }


def refused_jobs(folder: Path, moe: Path) -> dict[str, Job]:
    """Return jobs that no network may be built for."""

    whole = job_of(folder)

    def said(**changed: Any) -> Job:
        return replace(whole, config={**whole.config, **changed})

    two = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    return {
        "remote code": said(auto_map={"AutoModelForCausalLM": "modeling.Net"}),
        "quantized": said(quantization_config={"quant_method": "gptq"}),
        "another family": said(model_type="gpt2"),
        "another device": replace(whole, device="tpu"),
        "no such device": replace(whole, device="cuda:99"),
        "another naming": replace(whole, dialect="mindformers-legacy"),
        "half rotated": said(partial_rotary_factor=0.5),
        "longrope": said(rope_scaling={"type": "longrope", "factor": 2.0, **two}),
        "no factor": said(rope_scaling={"type": "linear"}),
        "no number": said(hidden_size="32"),
        "no window": said(model_type="qwen2", layer_types=["sliding_attention", "full_attention"]),
        "stacked": job_of(moe, variant="stacked"),
    }


def wide_job(folder: Path) -> Job:
    """Return a job of a model of 130 MB."""
    wide = config_of("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=8, vocab_size=1000)
    return job_of(make_folder(folder, wide), Input("ids", ids_of(4)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("torch"))


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype == np.float32 and np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_from_pretrained_to_the_bit(runs: Runs, model: str) -> None:
    ran = runs.of[model]
    assert same_bits(ran.logits["ids"], runs.references[model])
    assert ran.report["inputs"][0]["repeated"] and not ran.report["inputs"][0]["not_finite"]


def test_logits_of_another_rotary_base_are_not_the_same(runs: Runs) -> None:
    assert not same_bits(runs.of["llama"].logits["ids"], runs.references["other base"])


@pytest.mark.parametrize("model", MODELS)
def test_the_reading_of_the_network_is_that_of_config_json(runs: Runs, model: str) -> None:
    expected = read_facts(MODELS[model]).reading()
    assert json.dumps(runs.of[model].report["reading"], sort_keys=True) == json.dumps(expected, sort_keys=True)


def test_the_reading_shows_what_the_network_does(runs: Runs) -> None:
    def read(model: str, *keys: str) -> list[Any]:
        return [runs.of[model].report["reading"][key] for key in keys]

    assert read("qwen2 window", "window", "qkv_bias", "o_bias") == [[None, 4], True, False]
    assert read("mistral", "window", "head_dim", "rope") == [[4, 4], 8, {"type": "default"}]
    assert read("llama yarn", "window") == [[None, None]]  # a key that llama does not read
    assert read("qwen3_moe", "sparse_layers", "experts", "ffn", "moe_ffn") == [[False, True, True], 6, 40, 10]
    assert read("qwen3 biases", "norm_eps", "qk_norm", "o_bias") == [1e-3, True, True]
    assert read("llama3", "rope_base", "rope") == [5000.0, {"type": "llama3", **without_type(LLAMA3)}]
    assert read("llama", "tied") == [False] and read("llama tied", "tied", "kv_heads") == [True, 1]


@pytest.mark.parametrize("model", ["llama", "llama3"])
def test_a_config_in_the_words_of_transformers_5_runs_alike(runs: Runs, model: str) -> None:
    ran = runs.of[f"{model} in 5's words"]
    assert same_bits(ran.logits["ids"], runs.of[model].logits["ids"])
    assert ran.report["reading"] == runs.of[model].report["reading"]
    if ran.report["versions"]["transformers"].startswith("4."):
        assert any("rope_theta = 5000.0" in note for note in ran.report["notes"])


def test_transformers_4_itself_misreads_the_words_of_transformers_5(runs: Runs) -> None:
    alike = same_bits(runs.references["llama in 5's words"], runs.references["llama"])
    assert alike == runs.of["llama"].report["versions"]["transformers"].startswith("5.")


def test_dropout_in_config_json_drops_nothing(runs: Runs) -> None:
    assert runs.of["dropout"].report["inputs"][0]["repeated"]
    assert same_bits(runs.of["dropout"].logits["ids"], runs.of["llama"].logits["ids"])
    assert 0 < runs.of["dropout"].report["inputs"][0]["sensitivity"] < 1e-5


def test_a_network_in_training_is_seen_not_to_repeat(runs: Runs) -> None:
    assert not runs.of["dropout in training"].report["inputs"][0]["repeated"]


@pytest.mark.parametrize(("job", "reaches"), [("jump", True), ("jump without a mask", False)])
def test_a_jump_in_positions_cuts_no_sequence_in_two(runs: Runs, job: str, reaches: bool) -> None:
    """Without a mask, transformers takes it for the next of several sequences: then the first id has no effect."""
    three, four = runs.of[job].logits["first id 3"], runs.of[job].logits["first id 4"]
    assert same_bits(three[5:], four[5:]) != reaches


def test_an_input_has_the_logits_that_it_has_alone(runs: Runs) -> None:
    alone = runs.of["short alone"].logits["short"]
    assert same_bits(runs.of["long first"].logits["short"], alone)
    assert not same_bits(runs.of["long remembered"].logits["short"], alone)


def test_rotary_frequencies_can_be_put(runs: Runs) -> None:
    """Half of each is exactly what linear scaling by 2 makes of them."""
    half = runs.of["half frequencies"].logits["ids"]
    assert same_bits(half, runs.of["llama linear"].logits["ids"])
    assert not same_bits(half, runs.of["llama"].logits["ids"])


@pytest.mark.parametrize(
    ("job", "listed", "names"),
    [
        ("lost", "missing", ["model.layers.1.mlp.up_proj.weight"]),
        ("left over", "unexpected", ["model.another.weight"]),
        ("other head", "altered", ["lm_head.weight"]),
    ],
)
def test_a_tensor_that_is_not_the_networks_is_named_and_nothing_is_run(
    runs: Runs, job: str, listed: str, names: list[str]
) -> None:
    report = runs.of[job].report
    assert report[listed] == names and not report["inputs"]
    assert not any(report[key] for key in ("missing", "unexpected", "altered", "shapes") if key != listed)


def test_tensors_of_other_shapes_are_named_and_nothing_is_run(runs: Runs) -> None:
    report = runs.of["other shapes"].report
    rows = {name: (ours, its) for name, ours, its in report["shapes"]}
    assert len(rows) == 6 and rows["model.layers.0.mlp.up_proj.weight"] == ([40, 32], [41, 32])
    assert not report["inputs"]


def test_a_whole_checkpoint_lists_nothing(runs: Runs) -> None:
    for model in MODELS:
        report = runs.of[model].report
        assert not any(report[key] for key in ("missing", "unexpected", "altered", "shapes", "benign")), model


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ("remote code", "auto_map"),
        ("quantized", "quantization_config"),
        ("another family", "gpt2"),
        ("another device", "`--device tpu` is no device"),
        ("no such device", "cuda:99"),
        ("another naming", "mindformers-legacy"),
        ("half rotated", "partial_rotary_factor"),
        ("longrope", "longrope"),
        ("no factor", "makes no network"),
        ("no number", "makes no network"),
        ("no window", "sliding attention"),
    ],
)
def test_what_cannot_be_run_is_refused_in_words(runs: Runs, job: str, says: str) -> None:
    assert runs.of[job].code == 2 and says in runs.of[job].error["what"]


def test_stacked_experts_are_refused_by_a_release_that_has_separate_ones(runs: Runs) -> None:
    """A release that stacks them runs such a checkpoint; this one has other tensors, so there they are unexpected."""
    ran: Ran = runs.of["stacked"]
    if runs.of["llama"].report["versions"]["transformers"].startswith("4."):
        assert ran.code == 2 and "stacked" in ran.error["what"] and "convert" in ran.error["hint"]
    else:
        assert ran.report["unexpected"] and not ran.report["inputs"]


def test_stacked_experts_have_views_under_the_names_of_separate_ones() -> None:
    both = np.arange(2 * 6 * 4).reshape(2, 6, 4)
    down = np.arange(2 * 4 * 3).reshape(2, 4, 3)
    views = split_experts({"l.experts.gate_up_proj": both, "l.experts.down_proj": down, "l.mlp.down_proj": down[0]})
    assert list(views) == [
        *(f"l.experts.{expert}.{part}_proj.weight" for expert in (0, 1) for part in ("gate", "up")),
        *(f"l.experts.{expert}.down_proj.weight" for expert in (0, 1)),
        "l.mlp.down_proj",
    ]
    views["l.experts.1.up_proj.weight"][:] = -1
    views["l.experts.0.down_proj.weight"][:] = -2
    assert (both[1, 3:] == -1).all() and (both[:1] >= 0).all() and (both[1, :3] >= 0).all()
    assert (down[0] == -2).all() and (down[1] >= 0).all()


def test_a_missing_framework_is_an_error_with_what_to_install() -> None:
    with pytest.raises(UsageError, match="cannot be imported") as caught:
        framework("no_such_framework")
    assert caught.value.hint == 'pip install "ckptkit-mindspore[verify]"'
    assert framework("json").loads("1") == 1


def test_one_copy_of_the_model_is_in_memory(runs: Runs) -> None:
    """Over the peak of a run of tiny models: the model, and the largest tensor a few times to read and compare it."""
    wide = runs.of["wide"].report
    over = wide["peak_bytes"] - runs.of["llama"].report["peak_bytes"]
    assert 0.8 * runs.wide_bytes < over < 1.5 * runs.wide_bytes

"""Tiny HuggingFace folders of every family, jobs made of them, and runs of a runner in a child process.

Shapes are written down once more here, from config.json alone. Values come from `tiny_models`, so a tensor's follow
from the seed and its name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import carry, values, write_safetensors

from ckptkit.formats.registry import open_checkpoint
from ckptkit.types import Region
from ckptkit.verification.runners.job import REPORT, Input, Job, Piece, Stored

Config = dict[str, Any]
Shape = tuple[int, ...]
CLIENT = Path(__file__).with_name("runner_client.py")
REPOSITORY = CLIENT.parents[2]
VOCAB = 67
LLAMA3: Config = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR: Config = {"type": "linear", "factor": 2.5}
DYNAMIC: Config = {"rope_type": "dynamic", "factor": 4.0}
YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
FINE_YARN: Config = {
    **YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5,
}  # fmt: skip
WINDOW: Config = {"use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": 3}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
SHORT_LLAMA3: Config = {**LLAMA3, "original_max_position_embeddings": 16}


def config_of(family: str, **changed: Any) -> Config:
    """Return a tiny config.json in transformers 4's words; a value of None takes the key away."""
    config: Config = {
        "architectures": ["AnyForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 40,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
    }
    if family == "mistral":
        config["sliding_window"] = None
    if family.startswith("qwen3"):
        config |= {"head_dim": 12, "attention_bias": False}
    if family == "qwen3_moe":
        config |= {"moe_intermediate_size": 10, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config |= changed
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


# every kind of attention, positions, feed-forward, head, bias and expert that a config.json may ask for
EVERY_KIND: dict[str, Config] = {
    "llama": config_of("llama"),
    "llama tied": config_of("llama", tie_word_embeddings=True, num_key_value_heads=1),
    "llama biases": config_of("llama", attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama wide heads": config_of("llama", head_dim=12, num_attention_heads=6, num_key_value_heads=3),
    "llama linear": config_of("llama", rope_scaling=LINEAR),
    "llama dynamic": config_of("llama", rope_scaling=DYNAMIC),
    "llama3": config_of("llama", rope_scaling=LLAMA3, tie_word_embeddings=True),
    "llama yarn": config_of("llama", rope_scaling=YARN),
    "llama fine yarn": config_of("llama", rope_scaling=FINE_YARN),
    "mistral": config_of("mistral", head_dim=6),
    "mistral window": config_of("mistral", sliding_window=5),
    "mistral window as long": config_of("mistral", sliding_window=13),
    "qwen2": config_of("qwen2"),
    "qwen2 tied": config_of("qwen2", tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2 window": config_of("qwen2", **WINDOW, max_window_layers=1),
    "qwen2 window off": config_of("qwen2", sliding_window=4, max_window_layers=0),
    "qwen2 types": config_of("qwen2", **WINDOW, layer_types=TYPES),
    "qwen3": config_of("qwen3"),
    "qwen3 tied": config_of("qwen3", tie_word_embeddings=True, rope_scaling=YARN),
    "qwen3 biases": config_of("qwen3", attention_bias=True, num_key_value_heads=1),
    "qwen3 window": config_of("qwen3", **WINDOW, max_window_layers=2),
    "qwen3 long window": config_of("qwen3", use_sliding_window=True, sliding_window=40, max_window_layers=0),
    "qwen3_moe": config_of("qwen3_moe"),
    "qwen3_moe not normed": config_of("qwen3_moe", norm_topk_prob=False, tie_word_embeddings=True),
    "qwen3_moe dense layer": config_of("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1]),
    "qwen3_moe biases": config_of("qwen3_moe", attention_bias=True, num_experts=12, num_experts_per_tok=3),
    "qwen3_moe window": config_of("qwen3_moe", **WINDOW),
}


def in_5s_words(config: Mapping[str, Any]) -> Config:
    """Return config.json as transformers 5 spells it."""
    spelled = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    return spelled | {"rope_parameters": {**scaling, "rope_theta": config["rope_theta"]}}


def wrong_table(folder: Path) -> Path:
    """Write a table of legacy llama that is wrong and invertible: the target names of k and v are exchanged."""
    text = (REPOSITORY / "mappings/mindformers-legacy/llama.toml").read_text()
    file = folder / "wrong.toml"
    file.write_text(text.replace(".wk.", ".w?.").replace(".wv.", ".wk.").replace(".w?.", ".wv."))
    return file


def shapes_of(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of each tensor under its HuggingFace name."""
    family, hidden = config["model_type"], config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    bias, is_qwen2 = bool(config.get("attention_bias")), family == "qwen2"
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}

    def linear(name: str, rows: int, columns: int, *, biased: bool = False) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if biased:
            shapes[f"{name}.bias"] = (rows,)

    def mlp(name: str, wide: int) -> None:
        for part, rows, columns in (("gate", wide, hidden), ("up", wide, hidden), ("down", hidden, wide)):
            linear(f"{name}.{part}_proj", rows, columns, biased=bool(config.get("mlp_bias")))

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for part, rows in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            linear(f"{prefix}.self_attn.{part}_proj", rows, hidden, biased=bias or is_qwen2)
        linear(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim, biased=bias)
        if family.startswith("qwen3"):
            shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
        if family == "qwen3_moe" and layer not in config.get("mlp_only_layers", ()):
            linear(f"{prefix}.mlp.gate", config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                mlp(f"{prefix}.mlp.experts.{expert}", config["moe_intermediate_size"])
        else:
            mlp(f"{prefix}.mlp", config["intermediate_size"])
        shapes |= {f"{prefix}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def make_folder(
    folder: Path, config: Mapping[str, Any], *, said: Mapping[str, Any] | None = None, extra: Iterable[str] = ()
) -> Path:
    """Write the model of `config`; `said` is another config.json to write, `extra` are tensors of a head's shape."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(said if said is not None else config))
    shapes = shapes_of(config) | dict.fromkeys(extra, (config["vocab_size"], config["hidden_size"]))
    tensors = {name: carry(values(0, name, shape), "F32") for name, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", tensors, "F32")
    return folder


def ids_of(length: int, *, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCAB, length).tolist())


def job_of(folder: Path, *inputs: Input, **changed: Any) -> Job:
    """Return the job of running a checkpoint whole, with the config.json in its folder."""
    tensors = tuple(
        Stored(info.name, info.shape, info.dtype, (Piece(info, Region.whole(info.shape), (0,) * len(info.shape)),))
        for info in open_checkpoint(folder).tensors.values()
    )
    config = json.loads((folder / "config.json").read_text())
    whole: dict[str, Any] = {"dialect": "hf", "variant": "", "device": "cpu", "sensitivity": False, **changed}
    return Job(config=config, tensors=tensors, inputs=inputs or (Input("ids", ids_of(9)),), **whole)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a runner left behind: its exit code, report.json or error.json, logits (T, V) by input, and
    what was kept of the inside."""

    code: int
    report: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    logits: dict[str, np.ndarray] = field(default_factory=dict)
    taps: dict[str, np.ndarray] = field(default_factory=dict)
    stdout: str = ""
    stderr: str = ""


def run_jobs(
    runner: str,
    jobs: Mapping[str, Job],
    folder: Path,
    *options: str,
    changes: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> dict[str, Ran]:
    """Run `jobs` in one child process, in a folder of its own; `changes` by job are names of the client's CHANGES."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    specs, outs = [], {}
    for number, (name, job) in enumerate(jobs.items()):
        place, outs[name] = folder / f"job-{number}", folder / f"out-{number}"
        place.mkdir()
        outs[name].mkdir()
        job.write(place)
        specs.append({"job": str(place), "out": str(outs[name]), "change": (changes or {}).get(name, "")})
    (folder / "specs.json").write_text(json.dumps(specs))
    done = start([str(CLIENT), runner, str(folder / "specs.json"), *options], scratch, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    codes = json.loads((scratch / "codes.json").read_text())
    return {name: read_ran(out, code, done) for (name, out), code in zip(outs.items(), codes, strict=True)}


def start(command: Sequence[str], scratch: Path, *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run Python in `scratch`, with this ckptkit and no output of its own in the way."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "LOCAL_DEFAULT_PATH": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=scratch, capture_output=True, text=True, timeout=timeout,
        stdin=subprocess.DEVNULL, env=environment,
    )  # fmt: skip


def read_ran(out: Path, code: int, done: subprocess.CompletedProcess[str]) -> Ran:
    """Read a result folder."""
    if (out / "error.json").exists():
        return Ran(code, error=json.loads((out / "error.json").read_text()), stdout=done.stdout, stderr=done.stderr)
    assert (out / REPORT).exists(), done.stderr[-4000:]
    report = json.loads((out / REPORT).read_text())
    logits = {row["name"]: np.load(out / row["file"]) for row in report["inputs"] if row["file"]}
    taps = {row["name"]: np.load(out / row["file"]) for row in report["taps"]}
    return Ran(code, report, logits=logits, taps=taps, stdout=done.stdout, stderr=done.stderr)

"""Load MindSpore checkpoints into MindFormers' own Llama network on the CPU, in fp32, and write its logits.

    python mindformers_logits.py CHECKPOINT CONFIG IDS.json OUT.npz [--loader L] [--qkv-concat] [--graph] ...
    python mindformers_logits.py --jobs JOBS.json [--report FILE]

CHECKPOINT is a `.ckpt` or `.safetensors` file, or a folder of them. CONFIG is the Hugging Face folder that the
weights came from: its config.json configures the network. Every parameter is NaN before the checkpoint is loaded,
so that one which is not loaded cannot go unnoticed. The loaders are the frameworks' own:

    mindspore    `load_checkpoint` for each file, `load_param_into_net`
    unified      `load_distributed_checkpoint` of a folder of safetensors files and param_name_map.json
    mindformers  what its trainer calls for `load_ckpt_format: safetensors`

Importing mindformers makes a folder `output` in the working folder and logs to stdout: run this in a folder of its
own. Shapes: B sequences, T tokens, V the vocabulary.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
from pathlib import Path

# Both loggers are configured at import.
os.environ.setdefault("GLOG_v", "3")
os.environ.setdefault("LOG_MF_PATH", str(Path.cwd() / "log"))

import mindspore as ms
import numpy as np
from command import Job, run
from mindformers.models.llama import LlamaConfig, LlamaForCausalLM
from mindformers.tools.register import MindFormerConfig
from mindformers.utils.load_checkpoint_utils import load_checkpoint_with_safetensors

# In nets, never in checkpoints: random states and counters.
BENIGN = ("*_dropout.seed", "*_dropout.offset", "*.router.expert_load", "*.router.fi_accu")


def run_job(job: Job) -> Job:
    """Run one job and return its part of the report."""
    began = time.monotonic()
    ms.set_context(mode=ms.GRAPH_MODE if job.get("graph") else ms.PYNATIVE_MODE, device_target="CPU")
    ids_BT = np.array(json.loads(Path(job["ids"]).read_text()), np.int32)
    config = json.loads((Path(job["config"]) / "config.json").read_text())
    num_new = job.get("generate") or 0
    batch, length = ids_BT.shape[0], ids_BT.shape[1] + num_new
    net = build(config, batch=batch, length=length, qkv_concat=bool(job.get("qkv_concat")))
    poison(net)
    in_files = load(net, Path(job["checkpoint"]), job.get("loader") or "mindspore", bool(job.get("qkv_concat")))
    report = compare_names(net, in_files)
    arrays = run_net(net, ids_BT, num_new, config["vocab_size"])
    np.savez(job["out"], **arrays)
    return {**report, "seconds": round(time.monotonic() - began, 2)}


def build(config: dict, *, batch: int, length: int, qkv_concat: bool) -> LlamaForCausalLM:
    """Return the network for a transformers config of a llama-like model; refuse what it cannot express."""
    is_qwen2 = config["model_type"] == "qwen2"
    heads = config["num_attention_heads"]
    inexpressible = {
        "model_type": config["model_type"] not in ("llama", "mistral", "qwen2"),
        "sliding_window": config["model_type"] == "mistral" and config.get("sliding_window") is not None,
        "head_dim": (config.get("head_dim") or config["hidden_size"] // heads) * heads != config["hidden_size"],
        "rope_scaling": config.get("rope_scaling") is not None,
        "rope_parameters": "rope_parameters" in config,
        "mlp_bias": bool(config.get("mlp_bias")),
        "hidden_act": config["hidden_act"] != "silu",
    }
    if any(inexpressible.values()):
        raise SystemExit(f"config.json cannot be expressed: {[key for key, bad in inexpressible.items() if bad]}")
    fp32 = ("compute_dtype", "param_init_type", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype")
    return LlamaForCausalLM(
        LlamaConfig(
            batch_size=batch,
            seq_length=length,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            n_kv_heads=config["num_key_value_heads"],
            rms_norm_eps=config["rms_norm_eps"],
            theta=config["rope_theta"],
            tie_word_embeddings=config["tie_word_embeddings"],
            qkv_has_bias=is_qwen2 or bool(config.get("attention_bias")),
            attn_proj_has_bias=not is_qwen2 and bool(config.get("attention_bias")),
            qkv_concat=qkv_concat,
            pad_token_id=config["vocab_size"],  # no id that occurs: the network masks its pad token
            use_past=False,
            use_flash_attention=False,  # these three are what the CPU can do
            fused_rms_norm=False,
            use_rope_slice=True,
            **dict.fromkeys(fp32, "float32"),
        )
    ).set_train(False)


def poison(net: ms.nn.Cell) -> None:
    """Make every floating-point parameter NaN."""
    for parameter in net.get_parameters():
        if parameter.dtype in (ms.float32, ms.float16, ms.bfloat16):
            parameter.set_data(ms.Tensor(np.full(parameter.shape, np.nan, np.float32), parameter.dtype))


def load(net: ms.nn.Cell, checkpoint: Path, loader: str, qkv_concat: bool) -> set[str]:
    """Load `checkpoint` into `net` and return the names that its files hold."""
    suffix = checkpoint.suffix.lstrip(".")
    if checkpoint.is_dir():
        suffix = "ckpt" if any(checkpoint.glob("*.ckpt")) else "safetensors"
    files = sorted(checkpoint.glob(f"*.{suffix}")) if checkpoint.is_dir() else [checkpoint]
    if not files:
        raise SystemExit(f"no checkpoint in {checkpoint}")
    arrays = {}
    for file in files:
        arrays.update(ms.load_checkpoint(str(file), format=suffix))
    if loader == "mindspore":
        ms.load_param_into_net(net, arrays)
    elif loader == "unified":
        ms.load_distributed_checkpoint(network=net, format=suffix, unified_safetensors_dir=str(checkpoint))
    elif loader == "mindformers":
        load_checkpoint_with_safetensors(
            trainer_config(checkpoint, suffix, qkv_concat), None, net, None, do_predict=True
        )
    return set(arrays)


def trainer_config(checkpoint: Path, suffix: str, qkv_concat: bool) -> MindFormerConfig:
    """Return the part of a MindFormers run file that says what to load."""
    return MindFormerConfig(
        checkpoint={"load_path": str(checkpoint)},
        load_ckpt_format=suffix,
        load_ckpt_async=False,
        use_parallel=False,
        auto_trans_ckpt=False,
        parallel={"parallel_mode": "STAND_ALONE"},
        model={"model_config": {"qkv_concat": qkv_concat}},
        output_dir="output",
    )


def compare_names(net: ms.nn.Cell, in_files: set[str]) -> Job:
    """Return what the files and the network hold that the other does not, and what is still NaN."""
    in_net = {parameter.name: parameter for parameter in net.get_parameters()}
    nan = {name for name, parameter in in_net.items() if np.isnan(parameter.asnumpy()).any()}
    missing = set(in_net) - in_files
    benign = {name for name in missing if any(fnmatch.fnmatch(name, pattern) for pattern in BENIGN)}
    return {
        "parameters": len(in_net),
        "not_loaded": sorted((missing | nan) - benign),
        "not_loaded_benign": sorted(benign),
        "unused": sorted(in_files - set(in_net)),
    }


def run_net(net: ms.nn.Cell, ids_BT: np.ndarray, num_new: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Return logits (B, T, V) and, when num_new > 0, the greedy continuation (B, num_new).

    The network takes one length only: the place of tokens to come holds zeros, which causality hides.
    """
    num_given = ids_BT.shape[1]
    whole_BT = np.pad(ids_BT, ((0, 0), (0, num_new)))
    logits_BTV = net(ms.Tensor(whole_BT))[0].asnumpy().reshape(*whole_BT.shape, vocabulary)
    arrays = {"logits": logits_BTV[:, :num_given]}
    for place in range(num_given, num_given + num_new):
        whole_BT[:, place] = logits_BTV[:, place - 1].argmax(-1)
        if place + 1 < num_given + num_new:
            logits_BTV = net(ms.Tensor(whole_BT))[0].asnumpy().reshape(*whole_BT.shape, vocabulary)
    if num_new:
        arrays["generated"] = whole_BT[:, num_given:].astype(np.int64)
    return arrays


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Write the logits of MindSpore checkpoints in MindFormers.")
    options.add_argument("checkpoint", nargs="?")
    options.add_argument("config", nargs="?")
    options.add_argument("--loader", choices=("mindspore", "unified", "mindformers"))
    options.add_argument("--qkv-concat", action="store_true")
    options.add_argument("--graph", action="store_true")
    sys.exit(run(run_job, options))

"""Load checkpoints into MindFormers' own mcore Qwen3 networks on the CPU, in fp32, and write their logits.

    python mindformers_mcore_logits.py CHECKPOINT CONFIG IDS.json OUT.npz [--names-only] [--report FILE]
    python mindformers_mcore_logits.py --jobs JOBS.json [--report FILE]

CHECKPOINT is a `.ckpt` or `.safetensors` file, or a folder of part*.safetensors. CONFIG is the Hugging Face folder
that the weights came from: its config.json (model_type qwen3 or qwen3_moe) configures the network. A job may carry
`settings` too, MindFormers' own configuration keys (say `use_interleaved_weight_layout_mlp`). Jobs of one
configuration and one shape of ids share a compiled graph.

MindFormers runs these networks on Ascend; `mcore_standins` holds what takes the place of Ascend's primitives. Every
weight is NaN before the checkpoint is loaded, with MindSpore's own loader, so that one which is not loaded cannot go
unnoticed. The report's entry for a job:

    parameters         the shape of each parameter of the network
    not_loaded         names of the network that the checkpoint lacks
    not_loaded_benign  the same, of random states and counters
    unused             names of the checkpoint that the network lacks
    mismatched         names whose shapes differ: name, in the network, in the checkpoint; then nothing is run

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
from typing import Any

# Both loggers are configured at import.
os.environ.setdefault("GLOG_v", "3")
os.environ.setdefault("LOG_MF_PATH", str(Path.cwd() / "log"))

import mcore_standins
import mindspore as ms
import numpy as np
from command import Job, run

mcore_standins.install()  # before mindformers binds the primitives' names

from mindformers import build_context  # noqa: E402
from mindformers.models import qwen3, qwen3_moe  # noqa: E402

MODELS = {
    "qwen3": (qwen3.Qwen3Config, qwen3.Qwen3ForCausalLM),
    "qwen3_moe": (qwen3_moe.Qwen3MoeConfig, qwen3_moe.Qwen3MoeForCausalLM),
}
NOT_A_SETTING = {"architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version"}
DTYPE_SETTINGS = (
    "compute_dtype",
    "layernorm_compute_dtype",
    "moe_router_dtype",
    "params_dtype",
    "rotary_dtype",
    "softmax_compute_dtype",
)
# In nets, never in checkpoints: random states and counters.
BENIGN = ("*_dropout.seed", "*_dropout.offset", "*.router.expert_load", "*.router.fi_accu")


def run_job(job: Job, nets: dict[str, ms.nn.Cell]) -> Job:
    """Run one job and return its part of the report; `nets` keeps the networks, one a configuration and shape."""
    began = time.monotonic()
    ids_BT = np.array(json.loads(Path(job["ids"]).read_text()), np.int32)
    settings = job.get("settings") or {}
    key = json.dumps([job["config"], ids_BT.shape, settings], sort_keys=True)
    if key not in nets:
        nets[key] = build(Path(job["config"]), batch=ids_BT.shape[0], length=ids_BT.shape[1], settings=settings)
    net = nets[key]
    poison(net)
    report = load(net, read(Path(job["checkpoint"])))
    if not job.get("names_only") and not report["mismatched"]:
        logits_BTV = net(ms.Tensor(ids_BT)).asnumpy().reshape(*ids_BT.shape, -1)
        np.savez(job["out"], logits=logits_BTV)
    return {**report, "seconds": round(time.monotonic() - began, 2)}


def build(folder: Path, *, batch: int, length: int, settings: dict[str, Any]) -> ms.nn.Cell:
    """Return the network for a transformers config, for ids of shape (batch, length), ready to run forward."""
    config = json.loads((folder / "config.json").read_text())
    refuse_inexpressible(config)
    make_config, make_net = MODELS[config["model_type"]]
    own: dict[str, Any] = {
        "batch_size": batch,
        "seq_length": length,
        "hidden_dropout": 0.0,
        "pad_token_id": config["vocab_size"],  # no id that occurs: the network masks its pad token
        "position_embedding_type": "rope",
        **dict.fromkeys(DTYPE_SETTINGS, "float32"),
    }
    if config["model_type"] == "qwen3_moe":
        # Grouped GEMM is all that MindFormers has; without a factor its router multiplies by None.
        own |= {"moe_grouped_gemm": True, "moe_router_topk_scaling_factor": 1.0}
    kept = {key: value for key, value in config.items() if key not in NOT_A_SETTING}
    net = make_net(make_config(**{**kept, **own, **settings}))
    mcore_standins.keep_attention_in_float32(net)
    return net.set_train(False)


def refuse_inexpressible(config: dict[str, Any]) -> None:
    """Stop at a configuration that the network would read as another one."""
    inexpressible = {
        "model_type": config["model_type"] not in MODELS,
        "rope_scaling": config.get("rope_scaling") is not None,
        "rope_parameters": "rope_parameters" in config,
        "attention_bias": bool(config.get("attention_bias")),  # it has no bias of o_proj
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "mlp_only_layers": bool(config.get("mlp_only_layers")),  # it makes every layer sparse
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
    }
    if any(inexpressible.values()):
        raise SystemExit(f"config.json cannot be expressed: {[key for key, bad in inexpressible.items() if bad]}")


def poison(net: ms.nn.Cell) -> None:
    """Make every weight NaN."""
    for parameter in net.get_parameters():
        if not is_benign(parameter.name):
            parameter.set_data(ms.Tensor(np.full(parameter.shape, np.nan, np.float32)))


def is_benign(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in BENIGN)


def read(checkpoint: Path) -> dict[str, Any]:
    """Read a file, or every part in a folder, with MindSpore's own loader."""
    files = sorted(checkpoint.glob("part*.safetensors")) if checkpoint.is_dir() else [checkpoint]
    if not files:
        raise SystemExit(f"no part*.safetensors in {checkpoint}")
    arrays: dict[str, Any] = {}
    for file in files:
        arrays.update(ms.load_checkpoint(str(file), format=file.suffix.lstrip(".")))
    return arrays


def load(net: ms.nn.Cell, arrays: dict[str, Any]) -> Job:
    """Load `arrays` into `net` unless a shape differs, and report on the names and shapes of both."""
    shapes = {parameter.name: list(parameter.shape) for parameter in net.get_parameters()}
    given = {name: list(array.shape) for name, array in arrays.items()}
    mismatched = [[n, s, given[n]] for n, s in shapes.items() if given.get(n, s) != s]
    if not mismatched:
        ms.load_param_into_net(net, arrays)
    missing = sorted(shapes.keys() - given.keys())
    return {
        "parameters": shapes,
        "not_loaded": [name for name in missing if not is_benign(name)],
        "not_loaded_benign": [name for name in missing if is_benign(name)],
        "unused": sorted(given.keys() - shapes.keys()),
        "mismatched": mismatched,
    }


def main() -> int:
    options = argparse.ArgumentParser(description="Write the logits of MindSpore checkpoints in MindFormers mcore.")
    options.add_argument("checkpoint", nargs="?")
    options.add_argument("config", nargs="?")
    options.add_argument("--names-only", action="store_true", help="compare names and shapes, run nothing")
    graph_mode = {"mode": ms.GRAPH_MODE, "device_target": "CPU"}
    build_context(
        {"use_legacy": False, "run_mode": "train", "use_parallel": False, "context": graph_mode, "parallel": {}}
    )
    nets: dict[str, ms.nn.Cell] = {}
    return run(lambda job: run_job(job, nets), options)


if __name__ == "__main__":
    sys.exit(main())

"""Tiny checkpoints to cut: HuggingFace folders without any framework, and MindSpore ones with training state.

Elements are 32-bit words. Those of a weight are its own, and those of its moments are random, so that whatever lands
in the wrong place is seen.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ckptkit.commands.convert import convert
from ckptkit.mapping.rules import resolve
from ckptkit.mapping.tables import HUB, load_tables
from tests.mapping.tiny_configs import numbered_tensors, tiny_config
from tests.rank_results import Tensors, random_tensors, read_whole, write_whole
from tests.tiny_models import make_hf_plain, write_safetensors

COUNTERS = {"global_step": (1,), "beta1_power": (), "loss_scale": (1,), "learning_rate": ()}


def make_llama(folder: Path, **shape: Any) -> Path:
    """Write a llama of many heads and even sizes, which tp 2, 3 and 4 divide; return `folder`."""
    sizes = {"layers": 3, "hidden": 24, "heads": 24, "kv_heads": 12, "head_dim": 2, "intermediate": 24, "vocab": 48}
    return make_hf_plain(folder, **(sizes | shape))


def make_qwen3_moe(folder: Path, **changed: Any) -> Path:
    """Write a Qwen3 MoE with 12 experts, each element of all its tensors with a number of its own; return `folder`."""
    family = load_tables().family("qwen3_moe")
    sizes = {"hidden": 12, "heads": 8, "kv_heads": 4, "head_dim": 2, "moe_ffn": 2, "ffn": 8, "vocab": 24}
    config = tiny_config(family, **(sizes | {"sparse_step": 1} | changed)) | {"mlp_only_layers": []}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", numbered_tensors(resolve(family, config, HUB)), "F32")
    return folder


def make_trained(hf: Path, folder: Path, *, prefixes: tuple[str, ...] = ("adam_m.", "adam_v."), **options: Any) -> Path:
    """Write the MindSpore checkpoint of a HuggingFace folder with moments and counters beside; return `folder`."""
    convert(hf, folder, **options)
    weights = read_whole(folder)
    shutil.rmtree(folder)
    write_whole(folder / "model.safetensors", weights | state_of(weights, prefixes))
    shutil.copy(hf / "config.json", folder)
    return folder


def state_of(weights: Tensors, prefixes: tuple[str, ...]) -> Tensors:
    """Return random moments of every weight, and the counters of a run."""
    shapes = {prefix + name: array.shape for prefix in prefixes for name, array in weights.items()}
    return random_tensors(shapes | COUNTERS, seed=1)


def weights_of(tensors: Tensors) -> Tensors:
    """Return what is no training state."""
    heads = ("adam_m.", "adam_v.", *COUNTERS)
    return {name: array for name, array in tensors.items() if not name.startswith(heads)}

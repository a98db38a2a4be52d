"""Tiny models, what transformers' own blocks give for them, and checkpoints in every dialect, for tests of replays.

The outputs come from one child process for all models (`tap_client.py`). Embeddings are as small as trained ones are,
so that a norm's eps shows; the other values are those of `tiny_models`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from runner_jobs import config_of, ids_of, job_of, make_folder, start
from tiny_models import carry, write_safetensors

from ckptkit import convert
from ckptkit.formats.file_pool import FilePool
from ckptkit.verification.layer_weights import SideWeights
from ckptkit.verification.replay import Tap
from ckptkit.verification.runners.dialects import find_dialect
from ckptkit.verification.runners.facts import Facts, read_facts
from ckptkit.verification.runners.job import Floats, Input, Job, Stored
from tests.rank_results import read_file, weight_files

CLIENT = Path(__file__).with_name("tap_client.py")
SIZES = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}
SQUARE = {"num_key_value_heads": 8, "hidden_size": 48, "intermediate_size": 48}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
NEAR = Input("near", ids_of(40))
SPREAD = Input("spread", ids_of(12, seed=1), (0, 1, 6, 31, 64, 90, 91, 300, 999, 1000, 2500, 4000))


def sized(family: str, **changed: Any) -> dict[str, Any]:
    return config_of(family, **{**SIZES, **changed})


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": sized("llama"),
    "llama square": sized("llama", **SQUARE),
    "llama biases": sized("llama", attention_bias=True, mlp_bias=True),
    "llama tied": sized("llama", tie_word_embeddings=True, rope_scaling=YARN),
    "mistral": sized("mistral", sliding_window=7),
    "qwen2": sized("qwen2"),
    "qwen2 window": sized("qwen2", **WINDOW),
    "qwen3": sized("qwen3"),
    "qwen3_moe": sized("qwen3_moe", num_experts=8),
    "qwen3_moe plain": sized("qwen3_moe", norm_topk_prob=False, mlp_only_layers=[1]),
}


@dataclass(frozen=True, slots=True)
class Taps:
    """What transformers' network gave for one input, by the names of the parts; `frequencies` are its rotary ones."""

    arrays: Mapping[str, Floats]
    frequencies: Floats

    def __getitem__(self, name: str) -> Floats:
        return self.arrays[name]


@dataclass(frozen=True, slots=True)
class Models:
    """The folders of all models in HuggingFace naming, and their taps by model and input."""

    folders: Mapping[str, Path]
    taps: Mapping[tuple[str, str], Taps]

    def tap(self, model: str, name: str = "near") -> Tap:
        return self.taps[model, name].__getitem__


def make_models(room: Path) -> Models:
    """Write every model and run it once with each input; what another test file left in `room` is taken as it is."""
    folders = {name: room / f"hf-{number}" for number, name in enumerate(CONFIGS)}
    if not (room / "specs.json").exists():
        _run(room, folders)
    found = {}
    for number, name in enumerate(folders):
        for item in (NEAR, SPREAD):
            with np.load(room / f"taps-{number}-{item.name}.npz") as arrays:
                every = dict(arrays)
            found[name, item.name] = Taps(every, every.pop("frequencies"))
    return Models(folders, found)


def _run(room: Path, folders: Mapping[str, Path]) -> None:
    specs = []
    for number, (name, folder) in enumerate(folders.items()):
        _made(folder, CONFIGS[name])
        (room / f"job-{number}").mkdir()
        job_of(folder, NEAR, SPREAD).write(room / f"job-{number}")
        specs.append([str(room / f"job-{number}"), str(room / f"taps-{number}")])
    (room / "scratch").mkdir()
    (room / "specs.part").write_text(json.dumps(specs))
    done = start([str(CLIENT), str(room / "specs.part")], room / "scratch", timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    (room / "specs.part").rename(room / "specs.json")


def _made(folder: Path, config: dict[str, Any]) -> Path:
    make_folder(folder, config)
    tensors = floats_of(folder)
    tensors["model.embed_tokens.weight"] *= np.float32(0.05)
    rewrite(folder, tensors)
    return folder


Arrays = dict[str, Floats]


def floats_of(folder: Path) -> Arrays:
    """Return every tensor of a folder of float32 weights, as numbers."""
    return {
        name: array.view(np.float32).copy() for file in weight_files(folder) for name, array in read_file(file).items()
    }


def rewrite(folder: Path, tensors: Arrays, dtype: str = "F32") -> None:
    """Write other tensors in the place of those of a folder, which has one file of them."""
    (file,) = weight_files(folder)
    write_safetensors(file, {name: carry(np.ascontiguousarray(array), dtype) for name, array in tensors.items()}, dtype)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as a side of a comparison reads it."""

    facts: Facts
    weights: SideWeights


def open_side(folder: Path, pool: FilePool, *, changed: Mapping[str, Any] | None = None, **job: Any) -> Checkpoint:
    """Open a folder in a dialect's naming; `changed` are keys of config.json that this side reads otherwise."""
    found: Job = job_of(folder, **job)
    config = {key: value for key, value in {**found.config, **(changed or {})}.items() if value is not None}
    facts = read_facts(config)
    tensors: dict[str, Stored] = {tensor.name: tensor for tensor in found.tensors}
    return Checkpoint(facts, SideWeights(tensors, pool, facts, find_dialect(found.dialect, found.variant, facts)))


@dataclass(frozen=True, slots=True)
class Planted:
    """A model in a dialect with a fault: `plant` changes its tensors, `config` what its config.json says."""

    model: str
    dialect: str = "hf"
    variant: str = ""
    plant: Callable[[Arrays], None] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "F32"

    def make(self, models: Models, folder: Path, pool: FilePool) -> Checkpoint:
        """Write the checkpoint, with the fault, and open it."""
        to = {"mindformers-legacy": "mindformers", "mindformers-mcore": "mindformers-mcore"}.get(self.dialect, "hf")
        convert(models.folders[self.model], folder, to_dialect=to, variant=self.variant or None)
        tensors = floats_of(folder)
        if self.plant is not None:
            self.plant(tensors)
        rewrite(folder, tensors, self.dtype)
        return open_side(folder, pool, changed=self.config, dialect=self.dialect, variant=self.variant)

"""Checkpoints that were converted to MindFormers' legacy naming are ones that MindFormers itself loads and runs.

What holds: its own LlamaForCausalLM takes every tensor of the checkpoint and has no parameter left over, and its
fp32 logits are those of transformers. Every parameter is NaN before loading.

The bound: the two frameworks compute the same sums in fp32, in another order. The difference measures 4e-7 to 1e-6 of
the largest logit over two or three layers of width 32 to 48, and 2e-6 to 6e-6 over the 30 layers of width 576 of
SmolLM2 (fp32's unit roundoff is 6e-8). 1e-4 leaves a factor of 16 for other processors and thread counts. The
controls, weights in a wrong order of equal shapes, measure 0.4 to 1.2.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients.run import Result, relative_difference, run_jobs, smollm2_folder
from tiny_models import make_hf_plain

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1500)]

BOUND = 1e-4
CLEARLY_WRONG = 0.1
REPOSITORY = Path(__file__).resolve().parent.parent
TABLES = REPOSITORY / "mappings" / "mindformers-legacy"

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tied": True, "dtype": "BF16", "shards": 3},
    "llama biases": {"bias": True, "dtype": "F16"},
    "llama uneven": {"layers": 3, "hidden": 48, "heads": 6, "kv_heads": 3, "intermediate": 44, "dtype": "BF16"},
    "llama no groups": {"kv_heads": 4},
    "qwen2": {"family": "qwen2", "kv_heads": 1, "dtype": "BF16"},
    "qwen2 tied": {"family": "qwen2", "tied": True, "shards": 2},
    "mistral": {"family": "mistral", "dtype": "BF16"},
}
# Real text: two prompts of SmolLM2's tokenizer, equally long.
SMOLLM2_IDS = [[504, 3575, 282, 4649, 314], [12615, 36411, 418, 582, 3822]]
TINY_IDS = np.random.default_rng(0).integers(3, 67, (3, 9)).tolist()


@dataclass(frozen=True, slots=True)
class Way:
    """One way from a Hugging Face folder into MindFormers: options of `ckptkit convert`, and who loads."""

    options: tuple[str, ...] = ()
    loader: str = "mindspore"
    qkv_concat: bool = False


QKV = ("--variant", "qkv_concat")
WAYS = {
    "ckpt": Way(("--format", "ckpt")),
    "safetensors": Way(loader="unified"),
    "safetensors parts": Way(("--max-shard-size", "20KB"), "mindformers"),
    "qkv ckpt": Way((*QKV, "--format", "ckpt"), qkv_concat=True),
    "qkv safetensors": Way(QKV, "mindformers", qkv_concat=True),
}
IN_EVERY_WAY = ("llama", "qwen2")
GOOD = [
    f"{model} / {way}" for model in MODELS for way in (WAYS if model in IN_EVERY_WAY else ("ckpt", "qkv safetensors"))
]
SMOLLM2 = [f"smollm2 / {way}" for way in ("ckpt", "safetensors", "qkv safetensors")]


def scrambled(table: str, *pairs: tuple[str, str]) -> str:
    """Return the text of a table in which the two names of each pair have changed places."""
    for one, other in pairs:
        table = table.replace(one, "\0").replace(other, one).replace("\0", other)
    return table


LLAMA_TABLE = (TABLES / "llama.toml").read_text()
# Tables that give a checkpoint of the right names and shapes, and wrong weights.
WRONG_ORDERS = {
    "wk and wv change places": (Way(("--format", "ckpt")), scrambled(LLAMA_TABLE, (".wk.", ".wv."))),
    "gate and up change places": (Way(), scrambled(LLAMA_TABLE, (".w1.", ".w3."))),
    "norms change places": (Way(), scrambled(LLAMA_TABLE, (".attention_norm.", ".ffn_norm."))),
    "gate and up one after another": (
        Way(QKV, qkv_concat=True),
        (TABLES / "llama.qkv_concat.toml")
        .read_text()
        .replace('{ op = "interleave", axis = 0, groups = "ffn" }', '{ op = "concat", axis = 0 }'),
    ),
    "the order of releases up to 1.4": (Way(("--variant", "qkv_concat-1.4"), qkv_concat=True), ""),
}
RENAMED = "a row has another name"
WRONG_NAME = (Way(), LLAMA_TABLE.replace("model.norm_out.", "model.norm_in."))


def convert(source: Path, target: Path, *options: str) -> None:
    """Run `ckptkit convert` as a user does."""
    command = [sys.executable, "-m", "ckptkit", "convert", str(source), str(target), "--to", "mindformers", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


class Jobs:
    """The jobs for one child process of each framework."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hf: list[dict[str, Any]] = []
        self.mindformers: list[dict[str, Any]] = []

    def add_source(self, name: str, source: Path, ids: list[list[int]], generate: int = 0) -> None:
        self.hf.append({"name": name, "folder": source, "ids": ids, "generate": generate})

    def add(self, name: str, source: str, way: Way, *options: str, **more: Any) -> None:
        """Convert the source of that name in one way, and have the result loaded and run."""
        (hf,) = (job for job in self.hf if job["name"] == source)
        target = self.folder / str(len(self.mindformers))
        convert(hf["folder"], target, *way.options, *options)
        job = {"name": name, "checkpoint": target, "config": target, "ids": hf["ids"]}
        self.mindformers.append({**job, "loader": way.loader, "qkv_concat": way.qkv_concat, **more})


@dataclass(frozen=True, slots=True)
class Runs:
    """What came of all jobs, by name; `smollm2` is False when that model cannot be had."""

    hf: dict[str, Result]
    mindformers: dict[str, Result]
    smollm2: bool

    def difference(self, name: str, source: str) -> float:
        return relative_difference(self.mindformers[name].logits, self.hf[source].logits)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Make, convert, load and run everything: two child processes, since importing takes longer than running."""
    folder = tmp_path_factory.mktemp("clients")
    jobs = Jobs(folder)
    for name, shape in MODELS.items():
        jobs.add_source(name, make_hf_plain(folder / name.replace(" ", "-"), **shape), TINY_IDS)
    for name in GOOD:
        model, way = name.split(" / ")
        jobs.add(name, model, WAYS[way])
    jobs.add("in graph mode", "llama", WAYS["ckpt"], graph=True)
    for number, (name, (way, table)) in enumerate({**WRONG_ORDERS, RENAMED: WRONG_NAME}.items()):
        file = folder / f"{number}.toml"
        file.write_text(table)
        jobs.add(name, "llama", way, *(("--table", str(file)) if table else ()))
    real = smollm2_folder()
    if real:
        jobs.add_source("smollm2", real, SMOLLM2_IDS, generate=2)
        for name in SMOLLM2:
            more = {"generate": 2} if name == SMOLLM2[0] else {}
            jobs.add(name, "smollm2", WAYS[name.split(" / ")[1]], **more)
    hf = run_jobs("hf_logits", jobs.hf, timeout=300)
    return Runs(hf, run_jobs("mindformers_logits", jobs.mindformers, timeout=600), bool(real))


def assert_same(runs: Runs, name: str, source: str) -> None:
    """Every parameter loaded, every tensor used, and transformers' logits."""
    report = runs.mindformers[name].report
    assert report["not_loaded"] == []
    assert report["unused"] == []
    assert report["not_loaded_benign"] == []
    assert np.abs(runs.hf[source].logits).max() > 1
    assert runs.difference(name, source) < BOUND


@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_the_source_and_nothing_is_left_over(runs: Runs, model: str) -> None:
    report = runs.hf[model].report
    assert report["not_loaded"] == report["unused"] == report["mismatched"] == []


@pytest.mark.parametrize("name", GOOD)
def test_mindformers_loads_a_converted_model_and_gives_the_logits_of_transformers(runs: Runs, name: str) -> None:
    assert_same(runs, name, name.split(" / ")[0])


def test_a_compiled_graph_gives_the_logits_of_transformers(runs: Runs) -> None:
    assert_same(runs, "in graph mode", "llama")


@pytest.mark.parametrize("name", SMOLLM2)
def test_mindformers_loads_smollm2_and_gives_the_logits_of_transformers(runs: Runs, name: str) -> None:
    if not runs.smollm2:
        pytest.skip("the package that holds SmolLM2 cannot be had here")
    assert_same(runs, name, "smollm2")
    assert runs.mindformers[name].report["parameters"] == (182 if "qkv" in name else 272)


def test_both_frameworks_continue_a_text_with_the_same_tokens(runs: Runs) -> None:
    if not runs.smollm2:
        pytest.skip("the package that holds SmolLM2 cannot be had here")
    expected = runs.hf["smollm2"].generated
    assert expected is not None
    assert expected[0, 0] == 7042  # " Paris"
    assert np.array_equal(runs.mindformers[SMOLLM2[0]].generated, expected)


@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_weights_in_a_wrong_order_load_and_then_miss_the_logits(runs: Runs, name: str) -> None:
    report = runs.mindformers[name].report
    assert report["not_loaded"] == report["unused"] == []
    assert runs.difference(name, "llama") > CLEARLY_WRONG


def test_a_parameter_that_is_not_loaded_is_seen_and_so_is_a_tensor_that_is_not_used(runs: Runs) -> None:
    report = runs.mindformers[RENAMED].report
    assert report["not_loaded"] == ["model.norm_out.weight"]
    assert report["unused"] == ["model.norm_in.weight"]
    assert np.isnan(runs.mindformers[RENAMED].logits).all()
    assert runs.difference(RENAMED, "llama") == float("inf")

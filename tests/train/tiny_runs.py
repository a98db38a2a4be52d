"""Tiny models, corpora and configs to train, and the command in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file

VOCAB = 264
EOS = 256
WORDS = ("the", "a", "small", "large", "model", "weight", "tensor", "moves", "reads", "writes", "exact", "quiet", "and")


def make_tokenizer(file: Path) -> None:
    """Write a tokenizer of bytes, and one token that ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(file))


def make_model(folder: Path, *, seed: int = 0, **changed: Any) -> Path:
    """Write a seeded llama of HuggingFace's form with a tokenizer; `changed` are keys of config.json."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
        "bos_token_id": None,
        "eos_token_id": EOS,
        **changed,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    make_tokenizer(folder / "tokenizer.json")
    random = np.random.default_rng(seed)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        shapes |= {f"{at}.self_attn.{part}_proj.weight": (rows, hidden)
                   for part, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden))}  # fmt: skip
        shapes |= {f"{at}.mlp.{part}_proj.weight": (wide, hidden) for part in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, wide)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    tensors = {
        name: np.ones(shape, np.float32) if "norm" in name else (random.standard_normal(shape) * 0.05).astype("f4")
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_corpus(file: Path, *, documents: int = 60, seed: int = 0) -> Path:
    """Write JSON lines of sentences that a small model can learn something of."""
    random = np.random.default_rng(seed)
    with open(file, "w") as stream:
        for _ in range(documents):
            text = " ".join(random.choice(WORDS, random.integers(3, 9)))
            stream.write(json.dumps({"text": text}) + "\n")
    return file


def make_config(folder: Path, model_folder: Path, corpus: Path, **sections: Mapping[str, Any]) -> Path:
    """Write a config; `sections` are added to, key by key."""
    config: dict[str, dict[str, Any]] = {
        "model": {"path": str(model_folder)},
        "data": {"path": str(corpus), "seq_length": 32},
        "optimizer": {"lr": 0.003, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup_steps": 3, "total_steps": 24},
        "training": {"batch_size": 4, "micro_batch": 4},
        "checkpoint": {"folder": str(folder / "run"), "every": 4},
        "log": {"sample_ids": True},
    }
    for section, keys in sections.items():
        config[section] = config.get(section, {}) | dict(keys)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def command(config: Path, *words: str | Path) -> list[str]:
    return [sys.executable, "-m", "ckptkit", "resume-train", str(config), *map(str, words)]


def train(config: Path, *words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    done = subprocess.run(command(config, *words), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def log_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, in their order; those of steps that were run again come twice."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def by_step(lines: Sequence[Mapping[str, Any]], *keys: str) -> dict[int, tuple[Any, ...]]:
    """Return some keys of each step's last line, floats as hex."""
    shown = {}
    for line in lines:
        values = [line.get(key) for key in keys]
        shown[line["step"]] = tuple(v.hex() if isinstance(v, float) else v for v in values)
    return shown

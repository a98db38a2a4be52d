"""Tiny seeded llama, mistral and qwen2 models as Hugging Face folders.

`make_hf` lets transformers write the folder, `make_hf_plain` writes the same tensors with numpy and nothing else,
for tests that must not import torch. A model is a `TinyModel`: every value follows from it, the names of its tensors
included. Elements are kept in unsigned integers of their width, bit for bit.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from math import ceil, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np

Carriers = dict[str, np.ndarray]
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """The shape of a model. `bias` is for llama (q, k, v, o); qwen2 always has biases of q, k and v, mistral none.

    `head_dim` None means hidden / heads, and is then left out of config.json.
    """

    family: str = "llama"
    tied: bool = False
    bias: bool = False
    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    intermediate: int = 40
    vocab: int = 67
    dtype: str = "F32"
    seed: int = 0
    shards: int = 1


def make_hf_plain(folder: Path, **shape: Any) -> Path:
    """Write the model of `shape` (fields of TinyModel) to `folder` without any framework; return `folder`."""
    model = TinyModel(**shape)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(model), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}) + "\n")
    tensors = tensors_of(model)
    names = list(tensors)
    step = ceil(len(names) / model.shards)
    parts = [names[first : first + step] for first in range(0, len(names), step)]
    if len(parts) == 1:
        write_safetensors(folder / "model.safetensors", tensors, model.dtype)
        return folder
    files = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    for file, part in zip(files, parts, strict=True):
        write_safetensors(folder / file, {name: tensors[name] for name in part}, model.dtype)
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in tensors.values())},
        "weight_map": {name: file for file, part in zip(files, parts, strict=True) for name in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def make_hf(folder: Path, **shape: Any) -> Path:
    """Write the model of `shape` to `folder` with transformers' own `save_pretrained`; return `folder`.

    transformers cuts by size: of `shards` files one more or one less may come of it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = TinyModel(**shape)
    dtype = getattr(torch, DTYPE_NAMES[model.dtype])
    signed = {2: np.int16, 4: np.int32}
    tensors = {
        name: torch.from_numpy(array.view(signed[array.itemsize])).view(dtype)
        for name, array in tensors_of(model).items()
    }
    config = AutoConfig.for_model(**config_of(model))
    net = AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing = net.load_state_dict(tensors, strict=False)
    allowed = {"lm_head.weight"} if model.tied else set()
    if missing.unexpected_keys or set(missing.missing_keys) - allowed:
        raise ValueError(f"transformers has other names: {missing}")
    net.tie_weights()
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    net.save_pretrained(folder, max_shard_size=ceil(total_bytes / model.shards) + 1)
    return folder


def config_of(model: TinyModel) -> dict[str, Any]:
    """Return config.json as transformers 4 spells it."""
    config: dict[str, Any] = {
        "architectures": [f"{model.family.capitalize()}ForCausalLM"],
        "model_type": model.family,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "initializer_range": 0.02,
        "intermediate_size": model.intermediate,
        "max_position_embeddings": 128,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_theta": 5000.0,
        "tie_word_embeddings": model.tied,
        "torch_dtype": DTYPE_NAMES[model.dtype],
        "use_cache": True,
        "vocab_size": model.vocab,
    }
    if model.family == "llama":
        config |= {"attention_bias": model.bias, "mlp_bias": False, "rope_scaling": None}
    if model.family == "mistral":
        config["sliding_window"] = None
    if model.head_dim is not None:
        config["head_dim"] = model.head_dim
    return config


def shapes_of(model: TinyModel) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor under its Hugging Face name, in a model's usual order."""
    head_dim = model.head_dim or model.hidden // model.heads
    hidden, wide = model.hidden, model.intermediate
    rows_q, rows_kv = model.heads * head_dim, model.kv_heads * head_dim
    qkv_bias, o_bias = model.bias or model.family == "qwen2", model.bias and model.family == "llama"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab, hidden)}
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", rows_q, hidden, qkv_bias),
            ("self_attn.k_proj", rows_kv, hidden, qkv_bias),
            ("self_attn.v_proj", rows_kv, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, rows_q, o_bias),
            ("mlp.gate_proj", wide, hidden, False),
            ("mlp.up_proj", wide, hidden, False),
            ("mlp.down_proj", hidden, wide, False),
        ):
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab, hidden)
    return shapes


def tensors_of(model: TinyModel) -> Carriers:
    """Return every tensor, its elements as unsigned integers of their width.

    A tensor's values follow from the seed and its name alone. They are large enough for every one to show in the
    logits: norms near 1, biases near 0.3, rows of weights of length near 1.
    """
    return {name: carry(values(model.seed, name, shape), model.dtype) for name, shape in shapes_of(model).items()}


def values(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the float32 values of one tensor."""
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.2) * noise
    if name.endswith(".bias"):
        return np.float32(0.3) * noise
    return noise if "embed_tokens" in name else noise / np.float32(sqrt(shape[-1]))


def carry(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 values rounded to `dtype`, half to even, as unsigned integers."""
    if dtype == "F32":
        return array.view(np.uint32)
    if dtype == "F16":
        return array.astype(np.float16).view(np.uint16)
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(file: Path, tensors: Carriers, dtype: str) -> None:
    """Write one safetensors file: eight bytes of length, a JSON header padded to eight bytes, the elements."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        size = prod(array.shape) * array.itemsize
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *(a.tobytes() for a in tensors.values())]))

"""A checkpoint of Qwen3-235B-A22B's shape: 36,945 tensors in 118 files, all holes, so that it takes no room."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

from bench_models import ELEMENT_BYTES, Shape, split

NUM_FILES = 118
HIDDEN, EXPERT, HEAD_DIM = 4096, 1536, 128
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": 12288,
    "moe_intermediate_size": EXPERT,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": HEAD_DIM,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def tensors() -> Iterator[tuple[str, Shape]]:
    """Yield the name and shape of each tensor."""
    yield "model.embed_tokens.weight", (151936, HIDDEN)
    for layer in range(94):
        place = f"model.layers.{layer}."
        yield place + "input_layernorm.weight", (HIDDEN,)
        yield place + "post_attention_layernorm.weight", (HIDDEN,)
        for name, rows in (("q", 64), ("k", 4), ("v", 4)):
            yield place + f"self_attn.{name}_proj.weight", (rows * HEAD_DIM, HIDDEN)
        yield place + "self_attn.o_proj.weight", (HIDDEN, 64 * HEAD_DIM)
        yield place + "self_attn.q_norm.weight", (HEAD_DIM,)
        yield place + "self_attn.k_norm.weight", (HEAD_DIM,)
        yield place + "mlp.gate.weight", (128, HIDDEN)
        for expert in range(128):
            yield place + f"mlp.experts.{expert}.gate_proj.weight", (EXPERT, HIDDEN)
            yield place + f"mlp.experts.{expert}.up_proj.weight", (EXPERT, HIDDEN)
            yield place + f"mlp.experts.{expert}.down_proj.weight", (HIDDEN, EXPERT)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (151936, HIDDEN)


def write(folder: Path) -> None:
    """Write the checkpoint: true headers, an index, and files whose data is one hole."""
    shards = split(list(tensors()), NUM_FILES)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_holes(folder / name, shard)
        weight_map.update({tensor: name for tensor, _ in shard})
    total = ELEMENT_BYTES * sum(prod(shape) for _, shape in tensors())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def _write_holes(file: Path, shard: Sequence[tuple[str, Shape]]) -> None:
    header, end = {}, 0
    for name, shape in shard:
        size = ELEMENT_BYTES * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        out.truncate(8 + len(raw) + end)

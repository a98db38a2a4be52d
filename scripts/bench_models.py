"""The inputs of the benchmarks: Llama checkpoints of any size, the same bytes on every machine, made without torch.

Each is a folder in the cache, named by its content and this file's `RECIPE`; one made earlier is used again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

RECIPE = 1  # raise it when the content changes: folders of another recipe are made anew
LAYERS = 24  # 9 tensors each, and 3 more: 219
VOCAB = 32_000
HEAD_DIM = 64
ELEMENT_BYTES = 2
CHUNK_ELEMENTS = 1 << 22
SIGN_EXPONENT_MANTISSA = 0x80FF  # which bits are random: the sign, the lowest of the exponent, the mantissa
BASE = 0x3C00  # with them, values between 2**-7 and 2**-5 in size, as weights have; no NaN, no denormal

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Llama:
    """The sizes of a Llama model."""

    hidden: int
    intermediate: int
    layers: int = LAYERS
    vocab: int = VOCAB
    head_dim: int = HEAD_DIM

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    @property
    def kv_heads(self) -> int:
        return max(1, self.heads // 4)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield the name and shape of each tensor, in the order of the model."""
        hidden, wide, kv = self.hidden, self.intermediate, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, hidden)
        for layer in range(self.layers):
            place = f"model.layers.{layer}."
            yield place + "input_layernorm.weight", (hidden,)
            yield place + "mlp.down_proj.weight", (hidden, wide)
            yield place + "mlp.gate_proj.weight", (wide, hidden)
            yield place + "mlp.up_proj.weight", (wide, hidden)
            yield place + "post_attention_layernorm.weight", (hidden,)
            yield place + "self_attn.k_proj.weight", (kv, hidden)
            yield place + "self_attn.o_proj.weight", (hidden, hidden)
            yield place + "self_attn.q_proj.weight", (hidden, hidden)
            yield place + "self_attn.v_proj.weight", (kv, hidden)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab, hidden)

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 2048,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
        }

    @property
    def num_tensors(self) -> int:
        return sum(1 for _ in self.tensors())

    @property
    def num_bytes(self) -> int:
        return ELEMENT_BYTES * sum(prod(shape) for _, shape in self.tensors())


def of_size(num_bytes: int) -> Llama:
    """Return the 219-tensor Llama that comes nearest to `num_bytes`, its width and its MLP in proportion."""
    for hidden in (4096, 2048, 1024, 512, 256):
        rest = num_bytes - Llama(hidden, 0).num_bytes
        intermediate = rest // (ELEMENT_BYTES * 3 * LAYERS * hidden) // 64 * 64
        if intermediate >= 2 * hidden:
            return Llama(hidden, intermediate)
    raise ValueError(f"{num_bytes} bytes are too few for a Llama of {LAYERS} layers and {VOCAB} words")


def of_size_for_12(num_bytes: int) -> Llama:
    """Return a 219-tensor Llama of about `num_bytes` whose heads, KV heads, MLP and vocabulary 3 and 4 both divide."""
    vocab = 32_256
    for hidden, head_dim in ((1536, 32), (768, 16)):  # 48 heads, 12 KV heads
        rest = num_bytes - Llama(hidden, 0, vocab=vocab, head_dim=head_dim).num_bytes
        intermediate = rest // (ELEMENT_BYTES * 3 * LAYERS * hidden) // 192 * 192
        if intermediate > 0:
            return Llama(hidden, intermediate, vocab=vocab, head_dim=head_dim)
    raise ValueError(f"{num_bytes} bytes are too few for a Llama of {LAYERS} layers and {vocab} words")


def tiny_for_12() -> Llama:
    """Return a Llama of a few MB that 3 and 4 both divide."""
    return Llama(hidden=384, intermediate=768, layers=2, vocab=768, head_dim=8)


def tiny() -> Llama:
    """Return a Llama of a few hundred KB, on which any tool takes its start-up time and no more."""
    return Llama(hidden=128, intermediate=256, layers=2, vocab=256)


def many_small(num_tensors: int) -> Llama:
    """Return a Llama of about `num_tensors` tensors, most of them of a few KB."""
    return Llama(hidden=64, intermediate=128, layers=max(1, (num_tensors - 3) // 9), vocab=256, head_dim=16)


def ensure(cache: Path, name: str, model: Llama, *, shards: int = 3) -> Path:
    """Return the folder of `model` in bfloat16 safetensors inside `cache`; make it when it is not there."""
    return _ensure(cache / f"{name}-r{RECIPE}", lambda folder: _write(folder, model, shards))


def ensure_bin(cache: Path, source: Path, to_bin: Callable[[Path, Path], None]) -> Path:
    """Return `source` as `pytorch_model.bin`, which `to_bin(source, target)` makes when it is not there."""
    return _ensure(cache / f"{source.name}-bin", lambda folder: to_bin(source, folder))


def ensure_made(cache: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder that `make(folder)` fills, inside `cache`; make it when it is not there."""
    return _ensure(cache / f"{name}-r{RECIPE}", make)


def _ensure(folder: Path, make: Callable[[Path], None]) -> Path:
    if not folder.is_dir():
        making = folder.with_name(folder.name + ".making")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        make(making)
        making.rename(folder)
    return folder


def _write(folder: Path, model: Llama, num_shards: int) -> None:
    shards = split(list(model.tensors()), num_shards)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        write_safetensors(folder / name, shard, seed=number)
        weight_map.update({tensor: name for tensor, _ in shard})
    if len(shards) > 1:
        index = {"metadata": {"total_size": model.num_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(model.config(), indent=2) + "\n")
    generation = {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def split(tensors: Sequence[tuple[str, Shape]], num_shards: int) -> list[list[tuple[str, Shape]]]:
    """Return the tensors in `num_shards` runs of about equal bytes."""
    total = sum(prod(shape) for _, shape in tensors)
    shards: list[list[tuple[str, Shape]]] = [[] for _ in range(num_shards)]
    done = 0
    for name, shape in tensors:
        shards[min(num_shards - 1, done * num_shards // total)].append((name, shape))
        done += prod(shape)
    return [shard for shard in shards if shard]


def write_safetensors(file: Path, tensors: Sequence[tuple[str, Shape]], *, seed: int) -> None:
    """Write bfloat16 tensors whose values depend on `seed` and on nothing else."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in tensors:
        end = position + ELEMENT_BYTES * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for values in bfloat16_values(position // ELEMENT_BYTES, seed):
            stream.write(memoryview(values).cast("B"))


def bfloat16_values(count: int, seed: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint16]]]:
    """Yield `count` values as bit patterns, some millions at a time."""
    source = np.random.PCG64(seed)
    for start in range(0, count, CHUNK_ELEMENTS):
        size = min(CHUNK_ELEMENTS, count - start)
        bits = source.random_raw((size + 3) // 4).astype("<u8").view("<u2")[:size]
        yield bits & np.uint16(SIGN_EXPONENT_MANTISSA) | np.uint16(BASE)

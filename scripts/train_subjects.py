"""One subject of `scripts/bench train`, in a process of its own: `train_subjects.py NAME SIZE STEPS`; prints JSON.

    ours, ours-recompute     this driver's network and optimizer on MindSpore
    torch                    transformers' Llama, torch's AdamW and clipping, eager attention

All train the same model from the same seeded numbers on the same rows: fp32, AdamW with decay, the norm clipped, 8 rows
of 128 tokens. Figures leave out the first 20 updates: MindSpore compiles, then tries a graph's ten next runs on one
thread. `cpu` and `wall` are seconds an update.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from ckptkit.memory import peak_bytes

ROWS, TOKENS, WARM_UP = 8, 128, 20
SIZES: dict[str, dict[str, int]] = {
    "1M": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
           "intermediate_size": 344, "vocab_size": 512},
    "20M": {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
            "intermediate_size": 1024, "vocab_size": 8192},
}  # fmt: skip
LR, DECAY, CLIP = 1e-3, 0.1, 1.0


def config_of(size: str) -> dict[str, Any]:
    """Return a config.json."""
    return {
        "model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True, **SIZES[size],
    }  # fmt: skip


def weights_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return seeded weights by name: the same for every subject."""
    found = {}
    for name in sorted(shapes):
        random = np.random.default_rng(zlib.crc32(name.encode()))
        values = random.standard_normal(shapes[name], dtype=np.float32) * np.float32(0.02)
        found[name] = np.ones(shapes[name], np.float32) if "norm" in name else values
    return found


def ids_of(size: str) -> Any:
    return np.random.default_rng(0).integers(0, SIZES[size]["vocab_size"], (ROWS, TOKENS)).astype(np.int32)


def ours(size: str, *, recompute: bool) -> Callable[[int], float]:
    """Return a function that makes one update and returns its loss."""
    import mindspore

    from ckptkit.train.batches import StepData
    from ckptkit.train.net import TrainNet, prepare
    from ckptkit.train.step import Trainer
    from ckptkit.verification.runners.facts import read_facts

    prepare(mindspore, "cpu")
    net = TrainNet(mindspore, read_facts(config_of(size)))
    for name, values in weights_of(dict(net.shapes)).items():
        net.put(name, values)
    settings = SimpleNamespace(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=DECAY, clip_norm=CLIP, freeze=())
    trainer = Trainer(net, settings)
    layers = frozenset(range(SIZES[size]["num_hidden_layers"])) if recompute else frozenset()
    ids_RT = ids_of(size)
    targets_RT = np.zeros_like(ids_RT)
    targets_RT[:, :-1] = ids_RT[:, 1:]
    weights_RT = np.ones(ids_RT.shape, np.float32)
    weights_RT[:, -1] = 0
    positions_RT = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), ids_RT.shape).copy()
    segments_RT = np.ones_like(ids_RT)
    tokens = int(weights_RT.sum())

    def update(step: int) -> float:
        data = StepData(
            step, 0, step * ROWS, tuple(range(ROWS)), ids_RT, targets_RT, weights_RT, positions_RT, segments_RT, tokens
        )
        return trainer.step(data, lr=LR, micro_batch=ROWS, recompute=layers).loss

    return update


def of_torch(size: str) -> Callable[[int], float]:
    """Return the same of torch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**config_of(size), attn_implementation="eager", use_cache=False)
    model = LlamaForCausalLM(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, values in weights_of(shapes).items():
            model.get_parameter(name).copy_(torch.from_numpy(values))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    ids = torch.from_numpy(ids_of(size)).long()

    def update(step: int) -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return float(loss.detach())

    return update


def main() -> None:
    name, size, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    update = of_torch(size) if name == "torch" else ours(size, recompute=name == "ours-recompute")
    base = peak_bytes()
    losses, wall, cpu = [], [], []
    for step in range(steps + WARM_UP):
        started, used = time.perf_counter(), time.process_time()
        losses.append(update(step))
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    peak = peak_bytes()
    found = {
        "first": wall[0], "wall": wall[WARM_UP:], "cpu": cpu[WARM_UP:], "losses": losses,
        "step_bytes": peak - base,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()

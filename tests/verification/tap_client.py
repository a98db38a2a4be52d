"""Run transformers' networks and keep what each of their blocks gives.

    python tap_client.py SPECS.json

SPECS is a list of [job folder, OUT]; each input of a job goes to OUT-NAME.npz: `embedding`, `layers.N.attention`,
`layers.N.mlp`, `layers.N`, `norm`, `logits`, as float32 of shape (tokens, ...), and the rotary `frequencies`.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.formats.file_pool import FilePool
from ckptkit.verification.runners.job import Job
from ckptkit.verification.runners.torch import INV_FREQ, build


def loaded(job: Job) -> Any:
    net: Any = build(job)
    with FilePool() as pool:
        for tensor in job.tensors:
            if net.twin(tensor.name) is None:
                net.put(tensor.name, tensor.read(pool))
    return net


def keep_outputs(net: Any, kept: dict[str, np.ndarray]) -> None:
    """Let every block note its output under its name."""
    model = net._model.model
    blocks = {"embedding": model.embed_tokens, "norm": model.norm, "logits": net._model.lm_head}
    for number, layer in enumerate(model.layers):
        blocks |= {f"layers.{number}.attention": layer.self_attn, f"layers.{number}.mlp": layer.mlp}
        blocks[f"layers.{number}"] = layer

    for name, block in blocks.items():

        def note(_block: Any, _given: Any, out: Any, name: str = name) -> None:
            out = out[0] if isinstance(out, tuple) else out
            kept[name] = out.detach().numpy().reshape(-1, out.shape[-1]).copy()

        block.register_forward_hook(note)


def main(specs: str) -> None:
    for folder, out in json.loads(Path(specs).read_text()):
        job = Job.read(Path(folder))
        net = loaded(job)
        kept: dict[str, np.ndarray] = {}
        keep_outputs(net, kept)
        for item in job.inputs:
            deque(net.walk(item.ids, item.positions, None), maxlen=0)
            np.savez(f"{out}-{item.name}.npz", frequencies=net.get(INV_FREQ), **kept)


if __name__ == "__main__":
    main(sys.argv[1])

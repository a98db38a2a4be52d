"""Write the rotary frequencies that transformers makes of config.json contents.

    python rope_client.py JOBS.json OUT.npz

JOBS is a list of {"config": ..., "positions": number or null}; OUT has for each, by its number, `frequencies-N` and
`factor-N`. A number of positions goes in as a tensor, as a forward run of `dynamic` passes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging


def main(jobs: str, out: str) -> None:
    arrays = {}
    for number, job in enumerate(json.loads(Path(jobs).read_text())):
        config = LlamaConfig(**job["config"])
        kind = config.rope_scaling["rope_type"] if config.rope_scaling else "default"
        positions = None if job["positions"] is None else torch.tensor(job["positions"])
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=positions)
        arrays |= {f"frequencies-{number}": frequencies.numpy(), f"factor-{number}": np.float64(factor)}
    np.savez(out, **arrays)


if __name__ == "__main__":
    logging.set_verbosity_error()
    main(*sys.argv[1:])

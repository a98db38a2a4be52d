"""Run Hugging Face folders in transformers, in fp32 on the CPU, and write their logits.

    python hf_logits.py FOLDER IDS.json OUT.npz [--generate N] [--report FILE]
    python hf_logits.py --jobs JOBS.json [--report FILE]

Shapes: B sequences, T tokens, V the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"

import numpy as np
import torch
from command import Job, run
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def run_job(job: Job) -> Job:
    """Run one job and return its part of the report."""
    began = time.monotonic()
    model, info = AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model.eval()
    ids_BT = torch.tensor(json.loads(Path(job["ids"]).read_text()))
    arrays = {"logits": forward(model, ids_BT).numpy()}
    if job.get("generate"):
        arrays["generated"] = continue_greedily(model, ids_BT, job["generate"]).numpy()
    np.savez(job["out"], **arrays)
    return {
        "not_loaded": sorted(info["missing_keys"]),
        "unused": sorted(info["unexpected_keys"]),
        "mismatched": sorted(str(key) for key in info["mismatched_keys"]),
        "seconds": round(time.monotonic() - began, 2),
    }


def forward(model: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, T, V)."""
    with torch.no_grad():
        return model(ids_BT, use_cache=False).logits


def continue_greedily(model: torch.nn.Module, ids_BT: torch.Tensor, num_new: int) -> torch.Tensor:
    """Return (B, num_new): each time the likeliest token, whatever it is."""
    whole_BT = ids_BT
    for _ in range(num_new):
        likeliest_B1 = forward(model, whole_BT)[:, -1:].argmax(-1)
        whole_BT = torch.cat([whole_BT, likeliest_B1], 1)
    return whole_BT[:, ids_BT.shape[1] :]


if __name__ == "__main__":
    logging.set_verbosity_error()
    options = argparse.ArgumentParser(description="Write the logits of Hugging Face folders.")
    options.add_argument("folder", nargs="?")
    sys.exit(run(run_job, options))

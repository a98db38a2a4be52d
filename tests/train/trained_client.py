"""Compare the driver's logits with transformers' for a step's folder, the only argument; see `arithmetic.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from arithmetic import far, rows_of, slot_of


def compare(folder: Path) -> dict[str, float]:
    """Return how far the checkpoint's logits are from transformers', and those of a network with a wrong weight."""
    import mindspore
    import torch
    from transformers import AutoModelForCausalLM

    from ckptkit.train.net import TrainNet, prepare
    from ckptkit.train.step_folders import StepFolder
    from ckptkit.train.step_read import open_step, tensors_in
    from ckptkit.verification.runners.facts import read_facts

    facts = read_facts(json.loads((folder / "config.json").read_text()))
    prepare(mindspore, "cpu")
    net = TrainNet(mindspore, facts)
    content = open_step(StepFolder(int(folder.name.rpartition("-")[2]), folder))
    for name, values in tensors_in(content, moments=False):
        net.put(name, values)
    rows = rows_of(facts.vocab, rows=2, tokens=24)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor(rows["ids_RT"]).long()).logits.numpy().reshape(-1, facts.vocab)
    found = far(net.logits(slot_of(rows)), wanted)
    name = net.names[-2]
    net.put(name, net.get(name) * np.float32(1.001))
    return {"logits": found, "control": far(net.logits(slot_of(rows)), wanted)}


if __name__ == "__main__":
    print(json.dumps(compare(Path(sys.argv[1]))))
